"""Worker processes of the benchmarks, seen from the worker and from its parent.

Each worker loads one model, so that the operating system's figure for the worker's memory belongs to that model.
Requests are lines of words, and replies are lines of JSON. A waiting worker sleeps on its standard input.
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
    """Specification of a worker: one model on one backend."""

    model: str
    backend: str = "torch"
    device: str = OpenOptions.device
    dtype: str = OpenOptions.dtype
    threads: int | None = OpenOptions.threads
    batch: int = 1
    seed: int = 0


Own = TypeVar("Own", bound=Spec)


def python_module(module: str) -> list[str]:
    """Return the command that runs a module of this package in a child process, without the working directory (-P)."""
    return [sys.executable, "-P", "-m", module]


def package_path() -> dict[str, str]:
    """Return the environment variable by which a child process finds this package, wherever it was started."""
    own = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))}


class Worker(Generic[Own]):
    """The parent's side of one worker process."""

    def __init__(self, spec: Own, module: str) -> None:
        """spec: the specification that the `main` of `module` receives as JSON."""
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
        self._process.kill()  # the worker has nothing to save
        self._process.communicate()
        self._log.close()

    def ask(self, request: str) -> dict[str, Any]:
        """Send a line and wait for its reply. The worker's error is raised again in this process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; the missing reply leads to the reason
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
    """Run a worker: load the model, describe it in a first reply, and answer requests until standard input ends."""
    # Libraries may print, but only replies may reach standard output.
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
