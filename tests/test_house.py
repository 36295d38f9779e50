"""The rules of the house: imports go one way, nothing is unpickled, every room and every public name has a docstring.

`make shape` prints the sizes that are only guides.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import shape
from shape import PACKAGES, ROOT

ENGINE = (
    "files",
    "kernels",
    "families",
    "checkpoint",
    "decoder",
    "passes",
    "transformers_models",
    "adapted",
    "onnx",
    "expert_cache",
    "generation",
    "batching",
    "replies",
    "server",
    "bench",
)
COMPRESS = (
    "options",
    "rounding",
    "plans",
    "training",
    "report",
    "run",
    "tasks",
    "comparison",
    "cost",
    "methods",
    "refit",
    "fitting",
    "dense",
    "distillation",
    "classifiers",
    "export",
)
"""The rooms from bottom to top. A room imports from the rooms before it, and never from those after it."""
LOWEST = {"engine/errors.py", "engine/options.py", "engine/progress.py"}
"""Files beside the rooms of engine that every room may import. They import no room."""
TABLES = {
    "compress/methods/__init__.py",
    "compress/distillation/recipes.py",
    "compress/classifiers/recipes.py",
    "compress/plans/selection.py",
    "compress/report/figures.py",
}
"""Tables of names and plain data that options are declared from. Every room of compress may import them."""
ORDER = {
    **{f"engine/{room}": place for place, room in enumerate(ENGINE)},
    **{f"compress/{room}": place for place, room in enumerate(COMPRESS, start=len(ENGINE) + 2)},
    # parts of rooms, which have the rules for their files
    "engine/families/gguf": ENGINE.index("families"),
    "engine/checkpoint/gguf": ENGINE.index("checkpoint"),
    **{
        f"engine/kernels/{part}": ENGINE.index("kernels")
        for part in ("attention", "compiler", "gpu", "recurrences", "step", "stored")
    },
    "engine/decoder/gpu": ENGINE.index("decoder"),
    "engine/decoder/step": ENGINE.index("decoder"),
    **{f"engine/server/{part}": ENGINE.index("server") for part in ("connections", "interfaces", "reading")},
    "compress/commands": 98,
}
BESIDE_ENGINE, CALIBRATE, TABLE = len(ENGINE), len(ENGINE) + 1, len(ENGINE) + 1.5
BESIDE_COMPRESS, COMMAND_LINE = 97, 99
FAMILIES = re.compile(
    r"mixtral|qwen|olmoe|llama|mistral|deepseek|kimi|\bglm|granite|phi_?moe|gpt.?oss|ernie|minimax|switch_?transformer|\bt5",
    re.IGNORECASE,
)
FAMILY_ROOMS = {"engine/families", "engine/families/gguf", "engine/replies"}
PROGRAMS = re.compile(r"llama\.cpp|llama-quantize")
"""Programs with the name of a family."""
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
LOADERS = {"torch.load", "yaml.load"}
"""Functions that may unpickle."""
NOT_DECLARED = {"llvmlite"}
"""Packages that need no declaration: numba needs exactly one version of llvmlite."""


def height(path: Path) -> float:
    """Return the height of a file. Files import only from their own height or below."""
    name, room = path.relative_to(ROOT).as_posix(), shape.room_of(path)
    if name in LOWEST:
        return -1
    if name in TABLES:
        return TABLE
    beside = {"engine": BESIDE_ENGINE, "calibrate": CALIBRATE, "compress": BESIDE_COMPRESS, "cli.py": COMMAND_LINE}
    return beside[room] if room in beside else ORDER[room]


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_every_room_has_a_place_and_a_docstring() -> None:
    rooms = {room for path in shape.source_files() if "/" in (room := shape.room_of(path))}
    assert rooms == set(ORDER)
    for room in (*sorted(rooms), "compress", "calibrate", "engine"):
        docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")))
        words = " ".join((docstring or "").split())
        assert docstring, f"{room}/__init__.py says what lives there"
        if room in rooms:
            assert "Start with `" in words or "tart reading in `" in words, f"{room}/__init__.py says where to start"


def test_nothing_is_imported_upwards() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in shape.source_files()
        if path.name != "__init__.py" or shape.room_of(path) != "engine"  # engine/__init__.py offers `Engine` to users
        for module in shape.imported_modules(path)
        if height(file_of(module)) > height(path)
    ]
    assert not wrong


def test_imports_go_one_way() -> None:
    order = (*PACKAGES, "cli")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in shape.source_files()
        for name in shape.imported_names(path)
        if (top := name.split(".")[0]) in order and order.index(top) > order.index(shape.module_name(path).split(".")[0])
    ]
    assert not wrong


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return one cycle of a graph {node: set of nodes} as a list of nodes, or None."""
    finished: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in finished:
            return None
        found = next(filter(None, (visit(after, [*trail, node]) for after in sorted(graph[node]))), None)
        finished.add(node)
        return found

    return next(filter(None, (visit(node, []) for node in sorted(graph))), None)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycle_inside_a_package(package: str) -> None:
    paths = {shape.module_name(path): path for path in (ROOT / package).rglob("*.py")}
    graph = {module: (shape.imported_modules(path) & set(paths)) - {module} for module, path in paths.items()}
    assert find_cycle(graph) is None


def test_cycles_are_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_is_told_from_its_room(package: str) -> None:
    assert shape.module_name(ROOT / package / "__init__.py") == package
    assert shape.room_of(ROOT / package / "__init__.py") == package


def test_imports_are_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("import click\ndef f():\n    from engine.files import json_file\n    import engine.errors\n")
    assert shape.imported_modules(file) == {"engine.files.json_file", "engine.errors"}


def test_relative_imports_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("__init__.py", "c.py"):
        (tmp_path / "a" / "b" / name).write_text("from . import x\nfrom .y import z\nfrom .. import v\n")
        assert set(shape.imported_names(tmp_path / "a" / "b" / name)) == {"a.b", "a.b.x", "a.b.y", "a.b.y.z", "a", "a.v"}


def test_only_the_rooms_of_families_and_replies_name_families() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in shape.source_files()
        if shape.room_of(path) not in FAMILY_ROOMS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if FAMILIES.search(PROGRAMS.sub("", line)) and "arXiv" not in line  # a paper may be cited by its name
    ]
    assert not named


def unpickling(path: Path) -> Iterator[str]:
    """Yield what a file has that may unpickle."""
    for name in shape.imported_names(path):
        if name.split(".")[0] in UNPICKLERS or name == "torch.load":
            yield name
    for node in ast.walk(shape.parsed(path)):
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) in LOADERS:
            yield ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"


def test_nothing_is_unpickled() -> None:
    scripts = [path for folder in ("tests", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    found = {f"{path.relative_to(ROOT)}: {name}" for path in (*shape.source_files(), *scripts) for name in unpickling(path)}
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
def test_unpickling_is_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(code)
    assert list(unpickling(tmp_path / "a.py"))


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(each for extra in extras for each in extra)]
    declared = {canonical(re.split(r"[^\w.-]", each)[0]) for each in requirements}
    imported = {name.split(".")[0] for path in shape.source_files() for name in shape.imported_names(path)}
    third_party = imported - sys.stdlib_module_names - {*PACKAGES, "cli"}
    distributions = importlib.metadata.packages_distributions()
    missing = {
        name
        for name in third_party
        if name in distributions and not declared & {canonical(each) for each in distributions[name]}
    }
    assert missing <= NOT_DECLARED


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_public_names_have_docstrings() -> None:
    assert not shape.without_docstring()
