"""One run at a time for each output: a command holds the locks of all that it writes, from its first check to its end.

Several processes call everything here together. The first one alone holds locks; where it is refused, it ends the others as
it does after any bad input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from engine.files.output_lock import claimed
from engine.passes import processes


class Writes(Protocol):
    """Options of a command that writes a directory, and perhaps its plan to a file of its own (`plan_output`)."""

    @property
    def output(self) -> Path | None:
        """Where the result goes, if there is to be one."""


P = ParamSpec("P")
Options = TypeVar("Options", bound=Writes)
Result = TypeVar("Result")


@contextmanager
def claiming(directory: Path | None = None, file: Path | None = None) -> Iterator[None]:
    """Hold the locks of an output directory, an output file, or both, for the body. Raises OutputError as `claimed` does."""
    with ExitStack() as held:
        if directory is not None and processes.is_first():
            held.enter_context(claimed(directory))
        if file is not None and processes.is_first():
            held.enter_context(claimed(file, is_directory=False))
        yield


def claims_output(run: Callable[Concatenate[Options, P], Result]) -> Callable[Concatenate[Options, P], Result]:
    """A decorator for a function that carries out a command by its options: it holds the locks of their outputs."""

    @functools.wraps(run)
    def alone(options: Options, /, *rest: P.args, **named: P.kwargs) -> Result:
        with claiming(options.output, getattr(options, "plan_output", None)):
            return run(options, *rest, **named)

    return alone
