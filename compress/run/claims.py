"""Locks on outputs: a command holds the locks of all its outputs from its first check to its end.

Several processes call these functions together. Only the first process holds locks; if a lock is refused, it ends the
other processes, as after any invalid input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from engine.files.gguf_file import is_gguf
from engine.files.output_lock import claimed
from engine.passes import processes


class Writes(Protocol):
    """Options of a command that writes a directory and, optionally, its plan to a file (`plan_output`)."""

    @property
    def output(self) -> Path | None:
        """The output directory; None for a run without one."""


P = ParamSpec("P")
Options = TypeVar("Options", bound=Writes)
Result = TypeVar("Result")


@contextmanager
def claiming(directory: Path | None = None, *files: Path | None) -> Iterator[None]:
    """Hold the locks of an output directory and of output files, of those that are given, inside `with`.

    Raises OutputError as `claimed` does.
    """
    with ExitStack() as held:
        if directory is not None and processes.is_first():
            held.enter_context(claimed(directory))
        for file in files if processes.is_first() else ():
            if file is not None:
                held.enter_context(claimed(file, is_directory=False))
        yield


def claims_output(run: Callable[Concatenate[Options, P], Result]) -> Callable[Concatenate[Options, P], Result]:
    """Decorate a function that executes a command by its options: it holds the locks of the options' outputs."""

    @functools.wraps(run)
    def alone(options: Options, /, *rest: P.args, **named: P.kwargs) -> Result:
        is_file = options.output is not None and is_gguf(options.output)
        outputs = (None, options.output) if is_file else (options.output,)
        with claiming(*outputs, getattr(options, "plan_output", None)):
            return run(options, *rest, **named)

    return alone
