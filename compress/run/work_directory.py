"""The state that an interrupted or killed run leaves beside its output, from which `--resume` continues.

A run to OUTPUT keeps its state in the hidden directory `.OUTPUT.work`, in the same parent directory: calibration
statistics, the state of a search or training, and every value computed once (`once`). The directory is removed when the
run succeeds or its input is invalid. After an interruption, a kill or a diverged training it stays.

Several processes call these functions together. Only the first process writes and removes.
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
    """Read a value of `write_value`. Raises DataError where the digest differs: the run would resume to another result."""
    known = load_json(path, what)
    if "value" not in known or known.get("sha256") != _digest(known["value"]):
        raise DataError(f"{path}: is not what the interrupted run wrote (its digest differs); leave out --resume")
    return known["value"]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class WorkDirectory:
    """The directory of one run, or of the state that several runs on one model and text share."""

    def __init__(self, output: Path, kind: str = "work", shared: WorkDirectory | None = None) -> None:
        """Create the object; nothing is read or written before `begin`.

        shared: the directory of the sweep that the run is part of, or of the run that this directory is a part of.
        """
        self.path = output.absolute().parent / f".{output.name}.{kind}"
        self.shared: Path = self.path if shared is None else shared.shared
        self.search_state = self.shared / "diep.safetensors"
        self.statistics = self.shared / "statistics.safetensors"
        self._resumed = False

    def begin(self, wanted: dict[str, Any], resume: bool) -> None:
        """Start anew, or continue from the existing state. wanted: everything that decides the result, as JSON.

        Raises OptionError where the existing state belongs to another run.
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
        """Return a JSON value that is computed once and stored over interruptions.

        shared: whether all runs on this model and text share the value.
        """
        path = (self.shared if shared else self.path) / f"{name}.json"
        known = processes.told({"value": read_value(path, name)} if processes.is_first() and path.is_file() else None)
        if known is not None:
            return known["value"]
        value = processes.told(compute())
        if processes.is_first():
            write_value(path, value)
        return value

    def forget(self, directory: Path) -> None:
        """Remove the state of passes that are complete, once no process needs it."""
        processes.wait()
        if processes.is_first():
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def until_whole(self, place: Path) -> Iterator[None]:
        """Surround a run: its state is removed at the end and after invalid input, and kept after an interruption.

        place: the path that disk errors name.
        """
        try:
            yield
        except TrainingError:
            raise  # the last finite state stays, to be resumed
        except CompressError:
            self._abandon()
            raise
        except OSError as error:
            self._abandon()
            raise OutputError(f"{place}: {error.strerror or error}; make space or give another --output") from error
        self.remove()

    def _abandon(self) -> None:
        """Remove the state after an error, unless an earlier, interrupted run had left it."""
        if self._resumed or not processes.is_first():
            return
        self.remove()

    def remove(self) -> None:
        """Remove the directory after the result is complete."""
        if processes.is_first():
            shutil.rmtree(self.path, ignore_errors=True)
