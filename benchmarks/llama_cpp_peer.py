"""A process with llama.cpp beside a benchmark. Its Python needs llama-cpp-python and numpy only, and may be another one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

NAME = "llama.cpp"
FLOAT32 = 0
"""Type of the cache of keys and values in llama.cpp."""


class LlamaCpp:
    """A process that holds a GGUF file in llama.cpp."""

    def __init__(self, python: str, model: Path, threads: int, context: int, **options: Any) -> None:
        """python: the program that runs it. context: the most tokens of a test. options: of `llama_cpp.Llama`."""
        sizes = {"n_ctx": context, "n_batch": context, "n_ubatch": context}
        given = {"model_path": str(model), "n_threads": threads, "n_threads_batch": threads, **sizes, **options}
        command = [python, __file__, json.dumps(given)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def about(self) -> dict[str, Any]:
        """The package, its version and how llama.cpp was built."""
        return {"package": "llama-cpp-python", **self._ask("about")}

    def rate(self, kind: str, tokens: int) -> float:
        """Return tokens per second of reading tokens at once (pp) or one by one (tg), after no others."""
        return float(self._ask(kind, tokens))

    def logits(self, tokens: list[int], to: Path) -> Any:
        """Return the logits [tokens, vocabulary]; `to` is a file for them."""
        self._ask("logits", tokens, str(to))
        return np.load(to)

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"answer"'):
                return json.loads(line)["answer"]
        raise RuntimeError(f"{self._process.args}: ended without an answer")


def build_of(python: str) -> str:
    """Return the instructions that llama.cpp was built with."""
    script = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout


def answers(given: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return what the process answers."""
    import llama_cpp

    model = llama_cpp.Llama(verbose=False, **given)

    def timed(pieces: Callable[[list[int]], list[list[int]]]) -> Callable[[int], float]:
        def rate(count: int) -> float:
            tokens = np.random.default_rng(0).integers(0, model.n_vocab(), count).tolist()
            model.reset()
            started = time.perf_counter()
            for piece in pieces(tokens):
                model.eval(piece)
            return count / (time.perf_counter() - started)

        return rate

    def logits(tokens: list[int], to: str) -> None:
        model.reset()
        model.eval(tokens)
        np.save(to, model.scores[: len(tokens)])

    def about() -> dict[str, str]:
        build = llama_cpp.llama_print_system_info().decode().strip()
        return {"version": llama_cpp.__version__, "build": build}

    return {
        "pp": timed(lambda tokens: [tokens]),
        "tg": timed(lambda tokens: [[token] for token in tokens]),
        "logits": logits,
        "about": about,
    }


def main() -> None:
    """Answer requests from stdin."""
    found = answers(json.loads(sys.argv[1]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps({"answer": found[name](*arguments)}), flush=True)


if __name__ == "__main__":
    main()
