"""A process that answers requests, from both sides. Each lives alone, so that its memory is what the system says of it.

Requests are lines of words, replies lines of JSON; a worker that waits for its turn sleeps on its standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from engine import errors
from engine.errors import CompressError
from engine.generation.options import OpenOptions


@dataclass(frozen=True)
class Spec:
    """What a worker runs: one model on one backend."""

    model: str
    backend: str = "torch"
    device: str = OpenOptions.device
    dtype: str = OpenOptions.dtype
    threads: int | None = OpenOptions.threads
    batch: int = 1
    seed: int = 0


Own = TypeVar("Own", bound=Spec)


def python_module(module: str) -> list[str]:
    """The command of a child process that runs a module of this package, and (-P) none of the working directory."""
    return [sys.executable, "-P", "-m", module]


def package_path() -> dict[str, str]:
    """The variable by which such a child finds this package wherever it was started."""
    own = str(Path(__file__).resolve().parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))}


class Worker(Generic[Own]):
    """The process of one spec, from this side."""

    def __init__(self, spec: Own, module: str) -> None:
        """spec: for the `main` of this module, as JSON."""
        self.spec, self.module = spec, module

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*python_module(self.module), json.dumps(asdict(self.spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | package_path(),
        )
        try:
            self.about = self._reply()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()  # it has nothing to save
        self._process.communicate()
        self._log.close()

    def ask(self, request: str) -> dict[str, Any]:
        """Send a line and wait for its reply. Raises the worker's error as this process's own."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and the missing reply tells how
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._explain_end()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise getattr(errors, reply["error"], CompressError)(reply["message"])
        return reply

    def _explain_end(self) -> None:
        code = self._process.wait()
        if code < 0:
            raise CompressError(
                f"{self.spec.model}: the benchmark on {self.spec.backend} was ended by signal {-code}, as happens when "
                "memory runs out; try fewer models at a time or a smaller dtype"
            )
        self._log.seek(0)
        raise RuntimeError(f"benchmark worker ended with {code}:\n{self._log.read().decode(errors='replace')[-4000:]}")


Answer = Callable[[str], dict[str, Any]]


def serve_requests(start: Callable[[], tuple[dict[str, Any], Answer]]) -> int:
    """A worker: loads, says what it has, and answers requests until its standard input ends."""
    # Libraries may print; only replies reach the standard output.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    try:
        about, answer = start()
        reply(about)
        for request in sys.stdin:
            reply(answer(request))
    except CompressError as error:
        reply({"error": type(error).__name__, "message": str(error)})
        return 1
    return 0
