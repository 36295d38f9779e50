"""Models that were made to harm their users: every entry refuses them in one line, or is not harmed.

Each file of tests/attacks/directories and tests/attacks/gguf is one attack: `plant(path)` damages a copy of a good artifact
(with OF = "export" of an exported one, with OF = "model.gguf" of a GGUF file), and may damage `plan.json`, `statistics`,
`work` and `text.txt` beside it. Then entries are run (entries_for_tests.py). Those that REFUSED_BY names must refuse with
one line that contains SAYS. All others must refuse or give their result without the attack (any result, with
RESULT_MAY_DIFFER = True). None may end by a signal, hang, show a traceback, change anything outside its output, or leave a
file named `pwned`.

Here an attack is tried on the entries of REFUSED_BY and ENTRIES or, if it names none, on a few that read a directory in
different ways. The script runs the named attacks, or all of them; with --all on every entry, which takes minutes:

    python tests/engine/server/test_attacks.py [--all] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pytest
from attacks_for_tests import attack_files, load_attack
from entries_for_tests import ENTRIES, NEEDS_A_NETWORK, OF_EXPORTS, OF_GGUF, make_place, run_entry

from engine.checkpoint.artifact import FILE_NAME
from engine.files.json_file import load_json, write_json
from engine.files.sha256 import file_sha256

ROOT = Path(__file__).resolve().parents[3]
FILES = {path.stem: path for folder in ("directories", "gguf") for path in attack_files(folder)}
NAMES = list(FILES)
FEW = ("inspect --checksums", "generate", "bench --backend transformers", "prune", "export")
"""Entries that read a directory in different ways: checksums, the engine, transformers, a copy of files, another writer."""
POSSIBLE = {"artifact": tuple(ENTRIES), "export": OF_EXPORTS, "model.gguf": OF_GGUF}
"""Entries that take a model of each kind."""
CHOSEN = {"artifact": FEW, "export": ("inspect --checksums", "generate"), "model.gguf": ("inspect", "generate", "prune")}


def whole_attack(name: str) -> Any:
    """Return the module of an attack, with defaults for its missing names."""
    attack = load_attack(FILES[name])
    for constant, value in (("OF", "artifact"), ("ENTRIES", ()), ("RESULT_MAY_DIFFER", False), ("SIGNED", False)):
        if not hasattr(attack, constant):
            setattr(attack, constant, value)
    return attack


def possible_entries(attack: Any) -> tuple[str, ...]:
    """Return the entries that take a directory of this kind."""
    return POSSIBLE[attack.OF]


def refusing_entries(attack: Any) -> tuple[str, ...]:
    """Return the entries that must refuse."""
    return possible_entries(attack) if attack.REFUSED_BY in ("every", ("every",)) else tuple(attack.REFUSED_BY)


def chosen_entries(attack: Any) -> tuple[str, ...]:
    """Return the entries that the tests try."""
    named = () if attack.REFUSED_BY in ("every", ("every",)) else tuple(attack.REFUSED_BY)
    return tuple(dict.fromkeys((*named, *attack.ENTRIES))) or CHOSEN[attack.OF]


def sign(directory: Path) -> None:
    """Rewrite compression.json so that it lists the present files, as an attacker who knows the format can."""
    values = load_json(directory / FILE_NAME, "provenance")
    values["files"] = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != FILE_NAME
    }
    write_json(directory / FILE_NAME, values)


class Range:
    """The place where attacks are tried: a good place, and the results of its entries."""

    def __init__(self, folder: Path) -> None:
        self._good, self._folder = folder / "good", folder
        make_place(self._good)
        self._results: dict[tuple[str, str], Any] = {}

    def result(self, entry: str, of: str) -> Any:
        """Return the result of an entry without an attack."""
        if (entry, of) not in self._results:
            outcome = run_entry(entry, ENTRIES[entry], self._good, self._good / of)
            assert outcome.kind == "done", outcome
            self._results[entry, of] = outcome.result
        return self._results[entry, of]

    def open_all_entries(self) -> None:
        """Raise AssertionError for an entry that does not accept good files."""
        for of, entries in POSSIBLE.items():
            for entry in entries:
                if entry not in NEEDS_A_NETWORK:
                    self.result(entry, of)

    def problems(self, name: str, entries: Sequence[str] = ()) -> Iterator[str]:
        """Yield the problems of entries (by default those of the tests) with an attack."""
        attack = whole_attack(name)
        entries, refusing, possible = entries or chosen_entries(attack), refusing_entries(attack), possible_entries(attack)
        place = self._folder / "attacked"
        shutil.copytree(self._good, place, symlinks=True)
        attack.plant(place / attack.OF)
        if attack.SIGNED:
            sign(place / attack.OF)
        for entry in entries:
            assert entry in ENTRIES, f"{name} names an entry {entry!r}; there are {', '.join(ENTRIES)}"
            if entry not in possible or (entry in NEEDS_A_NETWORK and entry not in refusing):
                continue
            outcome = run_entry(entry, ENTRIES[entry], place, place / attack.OF)
            if outcome.kind not in ("refused", "done"):
                yield str(outcome)
            elif entry in refusing and (outcome.kind == "done" or attack.SAYS not in outcome.stderr):
                yield f"{outcome} (it must be refused, and {attack.SAYS!r} be said)"
            elif outcome.kind == "done" and outcome.result != self.result(entry, attack.OF) and not attack.RESULT_MAY_DIFFER:
                yield f"{outcome} (another result than {self.result(entry, attack.OF)})"
        shutil.rmtree(place)


@pytest.mark.parametrize("names", [NAMES[::150], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["one in many", "all"])
def test_directory_attacks(names: list[str]) -> None:
    """Attacks run from a process of their own, because entries are forked and a process that runs tests has threads."""
    result = subprocess.run(
        [sys.executable, __file__, *names],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    assert result.stdout.count(": harmless\n") == len(names)


def main() -> int:
    """Run attacks by name, or all of them, on their own entries or on all entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="every entry, and not only those that may differ")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tried = Range(Path(folder))
        tried.open_all_entries()
        for name in options.names or NAMES:
            problems = list(tried.problems(name, tuple(ENTRIES) if options.all else ()))
            print(f"{name}: {'; '.join(problems) or 'harmless'}", flush=True)
            failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
