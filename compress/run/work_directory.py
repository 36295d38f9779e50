"""What an interrupted run leaves beside its output, so that `--resume` need not begin again.

Several processes call everything here together. The first one alone writes and removes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import CompressError, DataError, OptionError, OutputError, TrainingError
from engine.files.json_file import load_json, write_json
from engine.passes import processes


def write_value(path: Path, value: Any) -> None:
    """Write a JSON value with its digest."""
    write_json(path, {"value": value, "sha256": _digest(json.loads(json.dumps(value)))})


def read_value(path: Path, what: str) -> Any:
    """The inverse. Raises DataError for a file that is not what was written: a run would go on to another result."""
    known = load_json(path, what)
    if "value" not in known or known.get("sha256") != _digest(known["value"]):
        raise DataError(f"{path}: is not what the interrupted run wrote (its digest differs); leave out --resume")
    return known["value"]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class WorkDirectory:
    """A directory of one run, or of several runs on one model and text for what all of them can use."""

    def __init__(self, output: Path, kind: str = "work", shared: WorkDirectory | None = None) -> None:
        """Nothing is read or written before `begin`. `shared`: that of the runs that this one is among."""
        self.path = output.absolute().parent / f".{output.name}.{kind}"
        self.shared = self.path if shared is None else shared.path
        self.search_state = self.shared / "diep.safetensors"
        self.statistics = self.shared / "statistics.safetensors"
        self._resumed = False

    def begin(self, wanted: dict[str, Any], resume: bool) -> None:
        """Start afresh, or go on with what is there. wanted: what decides the result, as JSON.

        Raises OptionError where what is there was begun for something else.
        """
        if processes.is_first():
            self._begin(wanted, resume)
        processes.wait()

    def _begin(self, wanted: dict[str, Any], resume: bool) -> None:
        found = self.path / "options.json"
        self._resumed = resume and found.is_file()
        if not self._resumed:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
            write_json(found, wanted)
        elif load_json(found, "interrupted run") != wanted:
            raise OptionError(
                f"{self.path}: was begun with other options, model or text; repeat those, or leave out --resume"
            )

    def once(self, name: str, compute: Callable[[], Any], *, shared: bool = False) -> Any:
        """A JSON value computed once and remembered over interruptions; `shared`: by all runs on this model and text."""
        path = (self.shared if shared else self.path) / f"{name}.json"
        known = processes.told({"value": read_value(path, name)} if processes.is_first() and path.is_file() else None)
        if known is not None:
            return known["value"]
        value = processes.told(compute())
        if processes.is_first():
            write_value(path, value)
        return value

    def forget(self, directory: Path) -> None:
        """Remove what was kept for passes that are done, once no process needs it."""
        processes.wait()
        if processes.is_first():
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def until_whole(self, place: Path) -> Iterator[None]:
        """Around a run: what is left to go on with is removed at the end and after bad input, not after an interruption.

        place: what an error of the disk names.
        """
        try:
            yield
        except TrainingError:
            raise  # and its last good state stays
        except CompressError:
            self._abandon()
            raise
        except OSError as error:
            self._abandon()
            raise OutputError(f"{place}: {error.strerror or error}; make space or give another --output") from error
        self.remove()

    def _abandon(self) -> None:
        """After an error leave nothing behind, except what an earlier, interrupted run had left already."""
        if self._resumed or not processes.is_first():
            return
        self.remove()

    def remove(self) -> None:
        """The result is there: nothing is left to resume."""
        if processes.is_first():
            shutil.rmtree(self.path, ignore_errors=True)
