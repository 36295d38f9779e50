"""The shape of the source: modules by room, the longest files and functions, parameters, names, docstrings.

    python tests/support/shape.py           (make shape)

Sizes are guides and not limits. CONTRIBUTING.md lists the files and functions beyond them, with reasons. The rules are
tested by tests/test_house.py, which uses the functions of this file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "calibrate", "compress")
MOST_MODULES, MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 15, 400, 60, 8
"""The guides for a room, a file and a function."""


class Function(NamedTuple):
    """One function or method of the source."""

    path: Path
    name: str
    lines: int
    parameters: int


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax of a file, which is parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def source_files() -> list[Path]:
    """Return every file of the packages and cli.py, in order."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))] + [ROOT / "cli.py"]


def module_name(path: Path) -> str:
    """Return the dotted name of a file; for an __init__.py, the folder's."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    """Return the folder of a file below the root, such as `engine/kernels`."""
    folder = path.relative_to(ROOT).parent.as_posix()
    return "cli.py" if folder == "." else folder


@cache
def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Return each module that a file imports, at its top or inside a function, with the names that are taken from it."""
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            found.append((".".join([*above, *filter(None, [node.module])]), [alias.name for alias in node.names]))
    return found


def imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted names of everything that a file imports; `from a import b` gives both a and a.b."""
    for module, names in imports(path):
        yield from (module, *(f"{module}.{name}" for name in names))


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names of this project's modules that a file imports; `from a import b` gives a.b if b is one."""
    found: set[str] = set()
    for module, names in imports(path):
        found |= {f"{module}.{name}" for name in names} & modules() or {module}
    return found & modules()


@cache
def modules() -> set[str]:
    """Return the dotted names of this project's modules."""
    return {module_name(file) for file in source_files()}


def functions() -> Iterator[Function]:
    """Yield all functions of the source, including nested ones."""
    for path in source_files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                named = [each for each in arguments if each.arg not in ("self", "cls")]
                yield Function(path, node.name, (node.end_lineno or 0) - node.lineno + 1, len(named))


def public_definitions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield functions and classes at the top of a file whose names do not begin with an underscore."""
    for path in source_files():
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield path, node


def names_defined_twice() -> dict[str, list[str]]:
    """Return the public classes and functions whose name is defined in several files, with those files."""
    places: dict[str, list[str]] = {}
    for path, node in public_definitions():
        places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def without_docstring() -> list[str]:
    """Return the public functions and classes that have no docstring, as `file: name`."""
    return [f"{path.relative_to(ROOT)}: {node.name}" for path, node in public_definitions() if not ast.get_docstring(node)]


def main() -> None:
    """Print the shape."""
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()}
    rooms: dict[str, list[int]] = {}
    for path, lines in sizes.items():
        if path.name != "__init__.py":
            rooms.setdefault(room_of(path), []).append(lines)
    print("room                            modules   lines  longest")
    for room, own in sorted(rooms.items()):
        print(f"{room:30} {len(own):8} {sum(own):7} {max(own):8}" + ("  *" if len(own) > MOST_MODULES else ""))
    print(f"\nfiles above {MOST_LINES} lines")
    for path, lines in sorted(sizes.items(), key=lambda item: -item[1]):
        if lines > MOST_LINES:
            print(f"{lines:6} {path.relative_to(ROOT)}")
    found = list(functions())
    print(f"\nfunctions above {MOST_FUNCTION_LINES} lines")
    for each in sorted(found, key=lambda each: -each.lines):
        if each.lines > MOST_FUNCTION_LINES:
            print(f"{each.lines:6} {each.path.relative_to(ROOT)}: {each.name}")
    print(f"\nfunctions above {MOST_PARAMETERS} parameters")
    for each in sorted(found, key=lambda each: -each.parameters):
        if each.parameters > MOST_PARAMETERS:
            print(f"{each.parameters:6} {each.path.relative_to(ROOT)}: {each.name}")
    print("\nnames that are public in several files")
    for name, places in names_defined_twice().items():
        print(f"  {name}: {', '.join(places)}")
    print("\npublic names without a docstring")
    for line in without_docstring() or ["none"]:
        print(f"  {line}")


if __name__ == "__main__":
    main()
