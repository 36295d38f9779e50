"""The files of tests/attacks, each loaded as a module of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ATTACKS = Path(__file__).resolve().parents[1] / "attacks"


def attack_files(folder: str) -> list[Path]:
    """Return the attacks of a folder, sorted by name."""
    return sorted((ATTACKS / folder).glob("*.py"))


def load_attack(path: Path) -> ModuleType:
    """Return the module of one attack."""
    specification = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
