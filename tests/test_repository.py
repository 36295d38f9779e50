"""Rules for the repository as a whole: import direction, frozen flags, the command reference, documents and their links.

`python tests/test_repository.py --freeze` records the current options of the commands in frozen_flags.json. It
refuses to drop a recorded option, because users' scripts rely on it.
"""

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
FROZEN_FLAGS = ROOT / "tests" / "frozen_flags.json"
FOLDERS = ("engine", "calibrate", "compress")
FORBIDDEN_IMPORTS = {
    "engine": {"calibrate", "compress", "cli"},
    "calibrate": {"compress", "cli"},
    "compress": {"cli"},
}
FAMILIES = re.compile(
    r"mixtral|qwen|olmoe|llama|mistral|deepseek|kimi|\bglm|granite|phi_?moe|gpt.?oss|ernie|minimax|switch_?transformer|\bt5",
    re.IGNORECASE,
)
NOT_DECLARED = {"llvmlite"}
"""Packages that need no declaration: numba needs exactly one version of llvmlite."""
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}

# Options that are promised to users' scripts, on every command and on single ones.
EVERYWHERE = ["--json", "--device", "--dtype", "--seed", "--threads", "-v", "--debug"]
PROMISED = {
    "prune": (
        "-o --output --overwrite --resume --sparsity --experts --method --scope --uniform --min-experts --merge "
        "--relaxation --epochs --learning-rate --reconstruction-weight --batch-size --statistics"
    ),
    "merge": "-o --output --overwrite --resume --experts --method --data --samples --sequence-length --statistics",
    "densify": (
        "-o --output --overwrite --resume --ffns --select --distill-steps --finetune-steps --data --samples "
        "--sequence-length --statistics"
    ),
    "quantize": "-o --output --overwrite --resume --bits --group-size --experts-only --activation-aware --data --samples",
    "plan-run": "--method --sparsity --samples --sequence-length --epochs --relaxation",
    "calibrate": "-o --output --overwrite --data --samples --sequence-length",
    "inspect": "",
    "evaluate": "--data --metric --tasks",
    "generate": "-p -n --temperature --top-p --top-k --stop --skip-threshold",
    "bench": "-p -n -r -d -b -o --skip-threshold --backend --server --concurrency --num-prompts --max-concurrency",
    "serve": "--host --port --api-key --max-queue --max-model-len --kv-cache-memory --max-batch-size --skip-threshold",
    "export": "-o --output --overwrite --format --precision --experts --skip-threshold",
    "push": "--private --overwrite",
    "compare": "-o --output --overwrite --data --samples --tasks -p -n -r --skip-threshold",
}


# Imports


def package_files():
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))] + [ROOT / "cli.py"]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path):
    """Return every module that a file imports, at its top or inside a function; `from a import b` gives both a and a.b."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                base = f"{above}.{base}".rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder):
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imported_names(path)
        if name.split(".")[0] in FORBIDDEN_IMPORTS[folder]
    }
    assert not wrong


def find_cycle(graph):
    """Return one cycle of a graph {node: set of nodes} as a list of nodes, or None."""
    finished = set()

    def visit(node, trail):
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in finished:
            return None
        found = next(filter(None, (visit(after, [*trail, node]) for after in sorted(graph[node]))), None)
        finished.add(node)
        return found

    return next(filter(None, (visit(node, []) for node in sorted(graph))), None)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_cycle_inside_a_folder(folder):
    paths = {module_name(path): path for path in (ROOT / folder).rglob("*.py")}
    graph = {}
    for module, path in paths.items():
        names = set(imported_names(path)) & set(paths)
        # `from engine import errors` names the package too, but needs only the module.
        graph[module] = {name for name in names if not any(other.startswith(f"{name}.") for other in names)} - {module}
    assert find_cycle(graph) is None


def test_cycles_are_found():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"c"}, "b": {"c"}, "c": set()}) is None


# Code


def test_only_the_room_of_families_names_families():
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in package_files()
        if path.parent != ROOT / "engine" / "families"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if FAMILIES.search(line) and "arXiv" not in line  # a paper may be cited by its name
    ]
    assert not named


def unpickling(path):
    for name in imported_names(path):
        if name.split(".")[0] in UNPICKLERS or name == "torch.load":
            yield name
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr)
            in {
                ("torch", "load"),
                ("yaml", "load"),
            }
        ):
            yield f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"


def test_nothing_is_unpickled():
    scripts = [path for folder in ("tests", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    found = {f"{path.relative_to(ROOT)}: {name}" for path in [*package_files(), *scripts] for name in unpickling(path)}
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "from torch import load",
        "x = torch.load('a')",
        "import numpy\nnumpy.load('a', allow_pickle=True)",
        "import yaml\nyaml.load('a')",
    ],
)
def test_unpickling_is_found(code, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(code)
    assert list(unpickling(tmp_path / "a.py"))


# Dependencies


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(each for extra in extras for each in extra)]
    declared = {canonical(re.match(r"[\w.-]+", each)[0]) for each in requirements}
    imported = {name.split(".")[0] for path in package_files() for name in imported_names(path)}
    third_party = imported - sys.stdlib_module_names - {"", *FOLDERS, "cli"}
    distributions = importlib.metadata.packages_distributions()
    missing = {
        name
        for name in third_party
        if name in distributions and not declared & {canonical(each) for each in distributions[name]}
    }
    assert missing <= NOT_DECLARED


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


# Commands


def options_by_command():
    import cli

    return {
        name: sorted(
            flag
            for parameter in command.params
            if isinstance(parameter, click.Option)
            for flag in (*parameter.opts, *parameter.secondary_opts)
        )
        for name, command in sorted(cli.main.commands.items())
    }


@pytest.mark.parametrize("command", PROMISED)
def test_promised_options_exist(command):
    promised = {*PROMISED[command].split(), *EVERYWHERE}
    assert promised <= set(options_by_command()[command])
    assert promised <= set(json.loads(FROZEN_FLAGS.read_text(encoding="utf-8"))[command])


def test_options_are_the_frozen_ones():
    frozen = json.loads(FROZEN_FLAGS.read_text(encoding="utf-8"))
    assert options_by_command() == frozen, "record new options with: python tests/test_repository.py --freeze"


def freeze():
    options = options_by_command()
    frozen = json.loads(FROZEN_FLAGS.read_text(encoding="utf-8")) if FROZEN_FLAGS.exists() else {}
    dropped = [
        f"{command} {flag}" for command, flags in frozen.items() for flag in flags if flag not in options.get(command, [])
    ]
    if dropped:
        sys.exit(f"not frozen: {', '.join(dropped)} would be dropped, and others may script against them")
    FROZEN_FLAGS.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")


# Documents


def test_command_reference_is_current():
    path = ROOT / "docs" / "generate_cli_reference.py"
    specification = importlib.util.spec_from_file_location("generate_cli_reference", path)
    generator = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generator)
    assert generator.REFERENCE.read_text(encoding="utf-8") == generator.render(), (
        "write it with: python docs/generate_cli_reference.py"
    )


README_LINES = 120
TOP_FOLDERS = ("benchmarks", "calibrate", "compress", "docs", "engine", "examples", "tests")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOP_FOLDERS)})/[\w./*-]*[\w*/]")


def documents():
    places = ("docs", "examples", "engine")
    return sorted([*ROOT.glob("*.md"), *(path for place in places for path in (ROOT / place).rglob("*.md"))])


def anchors(page):
    """Return the names under which GitHub shows a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path):
    """Return the relative links of a document to files or headings that do not exist."""
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path if not name else path.parent / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            yield target


def missing_paths(page):
    """Return the paths between backticks, alone or in a command, that do not exist; `*` stands for any name."""
    code = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE))
    for name in (name for own in code for name in NAMED_PATH.findall(own)):
        if not (any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists()):
            yield name


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_of_documents_exist(path):
    assert not [*broken_links(path), *missing_paths(path.read_text(encoding="utf-8"))]


def test_broken_links_and_paths_are_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# One (1) `x`\n[a](#one-1-x) [b](#two) [c](a.md#one-1-x) [d](b.md) [e](https://example.org)")
    assert list(broken_links(page)) == ["#two", "b.md"]
    shown = "`engine/errors.py` `python tests/gone.py` `tests/test_*.py` `docs/none_*.md` `.engine/x` `path/engine/y`"
    assert list(missing_paths(shown)) == ["tests/gone.py", "docs/none_*.md"]


def test_readme_is_short_and_has_each_folder():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES
    ignored = re.findall(r"^/?([\w*.-]+)/$", (ROOT / ".gitignore").read_text(encoding="utf-8"), re.MULTILINE)
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not any(path.match(own) for own in ignored)
    }
    assert folders == set(TOP_FOLDERS)
    assert {folder for folder in folders if any(line.startswith(f"- `{folder}/`") for line in lines)} == folders


def test_each_room_has_a_door_and_is_on_the_map():
    folders = {path.parent for top in ("engine", "compress") for path in (ROOT / top).rglob("*.py")}
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = {folder.relative_to(ROOT).as_posix() for folder in folders}
    without_door = {
        room
        for room in rooms
        if ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))) is None
    }
    assert not without_door
    assert not {room for room in rooms if f"`{room}`" not in page and f"`{room}/`" not in page}


def test_index_lists_each_page_and_its_question():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name not in ("README.md", "cli.md"):
            title = path.read_text(encoding="utf-8").splitlines()[0]
            assert title.startswith("# ") and title.endswith("?"), f"the title of {path.name} is no question"
            assert f"| [{path.name}]({path.name}) | {title[2:]} |" in index, f"{path.name} is not listed with its title"


if __name__ == "__main__":
    if sys.argv[1:] != ["--freeze"]:
        sys.exit("usage: python tests/test_repository.py --freeze")
    freeze()
