"""The rules of the house: rooms have doors, imports between them go one way, and every public name has a docstring.

`make shape` prints the sizes that are only guides.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import shape
from shape import ROOT

ENGINE = (
    "files",
    "kernels",
    "families",
    "checkpoint",
    "decoder",
    "passes",
    "transformers_models",
    "onnx",
    "generation",
    "batching",
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
    "cost",
    "methods",
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
    "compress/commands": 98,
}
BESIDE_ENGINE, CALIBRATE, TABLE = len(ENGINE), len(ENGINE) + 1, len(ENGINE) + 1.5
BESIDE_COMPRESS, COMMAND_LINE = 97, 99


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


def test_every_room_has_a_place_and_a_door() -> None:
    rooms = {room for path in shape.source_files() if "/" in (room := shape.room_of(path))}
    assert rooms == set(ORDER)
    for room in (*sorted(rooms), "compress", "calibrate", "engine"):
        door = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")))
        words = " ".join((door or "").split())
        assert door, f"{room}/__init__.py says what lives there"
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


@pytest.mark.parametrize("package", ["engine", "calibrate", "compress"])
def test_a_file_is_told_from_its_room(package: str) -> None:
    assert shape.module_name(ROOT / package / "__init__.py") == package
    assert shape.room_of(ROOT / package / "__init__.py") == package


def test_imports_are_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("import click\ndef f():\n    from engine.files import json_file\n    import engine.errors\n")
    assert shape.imported_modules(file) == {"engine.files.json_file", "engine.errors"}


def test_public_names_have_docstrings() -> None:
    assert not shape.without_docstring()
