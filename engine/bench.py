"""Speed and memory of several models side by side, with the tests and columns that GGUF runtimes made customary.

Tests: `pp512` reads 512 tokens, `tg128` generates 128 one by one, both after `depth` tokens that are not timed. Each
has a warm-up, then repetitions; mean and standard deviation of tokens per second are reported.

Each (model, backend) lives in a process of its own, so that its memory is the operating system's figure for it alone.
The workers stay alive and take turns in every repetition, so that what else the machine does falls on all of them
alike; a worker that waits for its turn sleeps on its standard input. `python -m engine.bench SPEC` is such a worker:
requests are lines of words (`warm pp 512 0`, `run tg 128 0`, `memory`), replies lines of JSON.
"""

from __future__ import annotations

import csv
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from engine import errors, remote_code
from engine.checkpoint import Checkpoint, resolve
from engine.errors import CompressError, OptionError
from engine.generate import Engine, resolve_device, resolve_dtype, set_threads
from engine.kv_cache import KeyValueCache
from engine.linear import SHAPES_KEPT
from engine.onnx_runtime import backend_of
from engine.report import memory_split, peak_memory_bytes

FORMATS = ("md", "csv", "json", "jsonl")
HEAD = ("model", "size", "params", "backend", "threads", "test", "t/s", "peak memory", "skipped")
"""Of the table that people read."""
KINDS = ("pp", "tg")
Cells = Callable[[dict[str, Any]], list[str]]


@dataclass(frozen=True)
class BenchCase:
    """One test: `tokens` to read at once (pp) or to generate one by one (tg), after `depth` tokens."""

    kind: str
    tokens: int
    depth: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.tokens < 1 or self.depth < 0:
            raise OptionError(
                f"test {self.kind!r} of {self.tokens} tokens at depth {self.depth} cannot be run; "
                "tests are pp or tg, of at least 1 token, at depth 0 or more"
            )

    @property
    def name(self) -> str:
        """As in the table: `pp512`, or `tg128 @ d1024` after 1,024 tokens."""
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class BenchSpec:
    """One model on one backend. Raises OptionError for what no backend honours."""

    model: str
    backend: str = "torch"
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    batch: int = 1
    skip_threshold: float = 0.0
    skip_min_experts: int = 1
    seed: int = 0
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise OptionError(f"backend {self.backend!r} is not known; choose {', '.join(BACKENDS)}")
        if self.batch < 1:
            raise OptionError(f"batch is {self.batch}; it must be at least 1")
        if self.backend != "torch" and self.kv_cache_dtype != "auto":
            raise OptionError(f"backend {self.backend!r} has a KV cache of its own; leave --kv-cache-dtype at auto for it")
        if self.backend != "torch" and self.skip_threshold != 0:
            raise OptionError(f"backend {self.backend!r} cannot skip experts; leave the skip threshold at 0 for it")


def cases_for(prompt_tokens: int = 512, generated_tokens: int = 128, depth: int = 0) -> list[BenchCase]:
    """The tests that `-p`, `-n` and `-d` ask for; 0 tokens leaves a test out. Raises OptionError where none is left."""
    asked = [(kind, tokens) for kind, tokens in zip(KINDS, (prompt_tokens, generated_tokens), strict=True) if tokens]
    if not asked:
        raise OptionError("both tests are turned off; ask for prompt tokens, generated tokens, or both")
    return [BenchCase(kind, tokens, depth) for kind, tokens in asked]


def bench(
    specs: Sequence[BenchSpec],
    cases: Sequence[BenchCase],
    repetitions: int = 5,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[dict[str, Any]]:
    """Run every case on every spec; one row for each pair, in that order.

    `progress` wraps the list of rounds, the warm-up among them. Raises whatever error of input a worker met, in its
    words; OptionError for fewer than one repetition.
    """
    if repetitions < 1:
        raise OptionError(f"repetitions is {repetitions}; it must be at least 1")
    for spec in specs:
        resolve(spec.model)  # a download is shown, and a wrong name refused, before any worker starts
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(spec)) for spec in specs]
        pairs = [(case, worker) for case in cases for worker in workers]
        seconds: dict[tuple[BenchCase, Worker], list[float]] = {pair: [] for pair in pairs}
        warm: dict[tuple[BenchCase, Worker], dict[str, Any]] = {}
        for round_number in progress(range(repetitions + 1)):
            for case, worker in pairs:
                request = f"{case.kind} {case.tokens} {case.depth}"
                if round_number == 0:
                    warm[case, worker] = worker.ask(f"warm {request}")
                else:
                    seconds[case, worker].append(worker.ask(f"run {request}")["seconds"])
        memory = {worker: worker.ask("memory") for worker in workers}
        return [
            _row(worker, case, seconds[case, worker], warm[case, worker], memory[worker])
            for worker in workers
            for case in cases
        ]


def bench_models(
    models: Sequence[str],
    backends: Sequence[str] = (),
    *,
    prompt_tokens: int = 512,
    generated_tokens: int = 128,
    depth: int = 0,
    repetitions: int = 5,
    skip_threshold: float = 0.0,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    **options: Any,
) -> list[dict[str, Any]]:
    """`bench` of each model on each backend; `options` are the other fields of BenchSpec.

    With no backend named each model has its own: onnx where it was exported, otherwise torch. Where backends are compared,
    only `torch` skips experts, as the rows' `skip_threshold` says; asking for skipping with no backend that can is refused.
    """
    pairs = [(model, name) for model in models for name in backends or [backend_of(resolve(model), "auto")]]
    can_skip = any(name == "torch" for _, name in pairs)
    skips = {name: skip_threshold if name == "torch" or not can_skip else 0.0 for _, name in pairs}
    specs = [BenchSpec(model, name, skip_threshold=skips[name], **options) for model, name in pairs]
    return bench(specs, cases_for(prompt_tokens, generated_tokens, depth), repetitions, progress)


def _row(
    worker: Worker, case: BenchCase, seconds: list[float], warm: dict[str, Any], memory: dict[str, int]
) -> dict[str, Any]:
    spec, about = worker.spec, worker.about
    rates = [case.tokens * spec.batch / each for each in seconds]
    return {
        "model": spec.model,
        "backend": spec.backend,
        "test": case.name,
        "tokens_per_second_mean": statistics.mean(rates),
        "tokens_per_second_sd": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "peak_memory_bytes": memory["peak_memory_bytes"],
        "weights_bytes": about["weights_bytes"],
        "kv_cache_bytes": warm["kv_cache_bytes"],
        "experts_skipped_share": warm["experts_skipped_share"],
        "weights_read_bytes_per_token": warm["weights_read_bytes_per_token"],
        "tokens_per_second_median": statistics.median(rates),
        "parameters": about["parameters"],
        "threads": about["threads"],
        "batch": spec.batch,
        "dtype": about["dtype"],
        "weight_bits": about["weight_bits"],
        "device": about["device"],
        "skip_threshold": spec.skip_threshold,
        "load_seconds": about["load_seconds"],
        "resident_memory_bytes": memory["resident_memory_bytes"],
        "weights_resident_bytes": memory["weights_resident_bytes"],
        "other_memory_bytes": memory["other_memory_bytes"],
        "kv_cache_dtype": spec.kv_cache_dtype,
    }


def format_rows(rows: Sequence[dict[str, Any]], form: str, head: Sequence[str] = HEAD, cells: Cells | None = None) -> str:
    """Rows as a Markdown table, CSV with a header, one JSON object, or a JSON object on each line."""
    if form == "json":
        return json.dumps({"rows": list(rows)}, indent=2)
    if form == "jsonl":
        return "\n".join(map(json.dumps, rows))
    if form == "csv":
        return _csv(rows)
    if form == "md":
        return _markdown(rows, head, cells or _cells)
    raise OptionError(f"format {form!r} is not known; choose {', '.join(FORMATS)}")


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _markdown(rows: Sequence[dict[str, Any]], head: Sequence[str], cells: Cells) -> str:
    table = [list(head), *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    sides = ["<" if name in ("model", "backend", "test") else ">" for name in head]
    columns = list(zip(widths, sides, strict=True))
    lines = [[f"{cell:{side}{width}}" for cell, (width, side) in zip(line, columns, strict=True)] for line in table]
    rule = ["-" * (width - 1) + (":" if side == ">" else "-") for width, side in columns]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def about_model(row: dict[str, Any]) -> list[str]:
    """The cells before what was measured."""
    return [
        row["model"].replace("|", "\\|") + (f" ({row['weight_bits']} bits)" if row.get("weight_bits") else ""),
        f"{row['weights_bytes'] / 2**20:.2f} MiB" if row["weights_bytes"] < 2**30 else gib(row["weights_bytes"]),
        f"{row['parameters'] / 1e6:.2f} M" if row["parameters"] < 1e9 else f"{row['parameters'] / 1e9:.2f} B",
        row["backend"],
        str(row["threads"]),
        row["test"],
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        *about_model(row),
        f"{row['tokens_per_second_mean']:.2f} ± {row['tokens_per_second_sd']:.2f}",
        gib(row["peak_memory_bytes"]),
        f"{100 * row['experts_skipped_share']:.1f} %",
    ]


def gib(size: int) -> str:
    """For people."""
    return f"{size / 2**30:.2f} GiB"


class Worker:
    """The process of one spec, from this side."""

    def __init__(self, spec: Any, module: str = "engine.bench") -> None:
        """spec: a dataclass with `model` and `backend`, for the module's `main`."""
        self.spec, self.module = spec, module

    def __enter__(self) -> Self:
        # The worker finds this package wherever it was started, and (-P) no folder of the same name in the way.
        package_parent = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self.module, json.dumps(asdict(self.spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
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


class Backend(Protocol):
    """What a worker drives: something that reads tokens and gives the most probable next ones."""

    checkpoint: Any
    """A ModelDirectory."""
    device: torch.device
    dtype: torch.dtype
    weights_bytes: int
    load_seconds: float

    @property
    def weights_resident_bytes(self) -> int:
        """Of the weights, what is in memory."""

    @property
    def kv_cache_bytes(self) -> int:
        """Of the case run last."""

    @property
    def experts_skipped_share(self) -> float:
        """Since the last `count_skips(True)`."""

    @property
    def bytes_read_per_token(self) -> float | None:
        """Of weights, by a token that is decoded alone; None where only the runtime knows."""

    def count_skips(self, counting: bool) -> None:
        """Start counting from zero, or stop: counting is not part of what is timed."""

    def start(self, batch: int, capacity: int) -> None:
        """Forget what was read; up to `capacity` tokens will follow."""

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Read tokens, after those before; the most probable next ones, [B, 1]."""


class TorchBackend:
    """This engine."""

    def __init__(self, spec: BenchSpec) -> None:
        self._engine = Engine.open(
            spec.model,
            device=spec.device,
            dtype=spec.dtype,
            threads=spec.threads,
            skip_threshold=spec.skip_threshold,
            skip_min_experts=spec.skip_min_experts,
            kv_cache_dtype=spec.kv_cache_dtype,
        )
        self.load_seconds = self._engine.load_seconds
        self.checkpoint, self.device, self.dtype = self._engine.checkpoint, self._engine.device, self._engine.dtype
        self.weights_bytes = self._engine.weights_bytes
        self._cache: KeyValueCache | None = None

    @property
    def kv_cache_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.bytes

    @property
    def weights_resident_bytes(self) -> int:
        return self._engine.weights_resident_bytes

    @property
    def experts_skipped_share(self) -> float:
        counter = self._engine.skip_counter
        return 0.0 if counter is None else counter.share

    @property
    def bytes_read_per_token(self) -> float | None:
        return self._engine.bytes_read_per_token

    def count_skips(self, counting: bool) -> None:
        counter = self._engine.skip_counter
        if counter is not None and counting:
            counter.reset()
            counter.attach()
        elif counter is not None:
            counter.detach()

    def start(self, batch: int, capacity: int) -> None:
        self._cache = self._engine.new_cache(batch, capacity)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        assert self._cache is not None, "forward before start"
        if tokens_BL.shape[1] == 1:
            return self._engine.step(tokens_BL[:, 0], None, self._cache).argmax(dim=-1, keepdim=True)
        return self._engine.prefill(tokens_BL, None, self._cache).argmax(dim=-1, keepdim=True)


class TransformersBackend:
    """transformers as it comes, and as its own `generate` drives it: cached, with the last position's logits only."""

    experts_skipped_share = 0.0
    bytes_read_per_token = None

    def __init__(self, spec: BenchSpec) -> None:
        for name in SHAPES_KEPT:
            os.environ.pop(name, None)
        set_threads(spec.threads)
        started = time.perf_counter()
        self.checkpoint = Checkpoint(resolve(spec.model))
        self.device = resolve_device(spec.device)
        self.dtype = resolve_dtype(spec.dtype, self.checkpoint)
        own_code = remote_code.is_needed(self.checkpoint.directory, self.checkpoint.raw_config)
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            self.checkpoint.directory, dtype=self.dtype, trust_remote_code=own_code, local_files_only=True
        )
        self._model = model.to(self.device).eval()
        self.weights_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        self.weights_resident_bytes = self.weights_bytes if self.device.type == "cpu" else 0
        self.load_seconds = time.perf_counter() - started
        self._past: Any = None

    @property
    def kv_cache_bytes(self) -> int:
        layers = () if self._past is None else self._past.layers
        return sum(part.numel() * part.element_size() for layer in layers for part in (layer.keys, layer.values))

    def count_skips(self, counting: bool) -> None:
        pass

    def start(self, batch: int, capacity: int) -> None:
        self._past = None

    def forward(self, tokens_BL: Tensor) -> Tensor:
        with torch.inference_mode():
            output = self._model(tokens_BL, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past = output.past_key_values
        next_B1: Tensor = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        return next_B1


class OnnxBackend(TorchBackend):
    """An exported model in onnxruntime, driven as this engine drives it."""

    def __init__(self, spec: BenchSpec) -> None:
        backend_of(resolve(spec.model), "onnx")
        super().__init__(spec)


BACKENDS: dict[str, Callable[[BenchSpec], Backend]] = {
    "torch": TorchBackend,
    "transformers": TransformersBackend,
    "onnx": OnnxBackend,
}


def run_case(backend: Backend, case: BenchCase, tokens_BL: Tensor) -> float:
    """Seconds of one case. tokens_BL: at least depth + tokens (pp) or depth + 1 (tg) of them."""
    backend.start(tokens_BL.shape[0], case.depth + case.tokens)
    if case.depth:
        backend.forward(tokens_BL[:, : case.depth])
    prompt_BL = tokens_BL[:, case.depth : case.depth + (case.tokens if case.kind == "pp" else 1)]
    _wait(backend.device)
    started = time.perf_counter()
    next_B1 = backend.forward(prompt_BL)
    for _ in range(case.tokens - prompt_BL.shape[1]):
        next_B1 = backend.forward(next_B1)
    _wait(backend.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _answer(backend: Backend, spec: BenchSpec, request: str) -> dict[str, Any]:
    """The reply to one request line."""
    verb, *words = request.split()
    if verb == "memory":
        return {"peak_memory_bytes": peak_memory_bytes()} | memory_split(
            backend.weights_resident_bytes, backend.kv_cache_bytes
        )
    case = BenchCase(words[0], int(words[1]), int(words[2]))
    positions, available = case.depth + case.tokens, backend.checkpoint.config.max_positions
    if positions > available:
        raise OptionError(
            f"{spec.model}: test {case.name} needs {positions} positions and the model has {available}; "
            "ask for fewer tokens with -p, -n or -d"
        )
    generator = torch.Generator().manual_seed(spec.seed)
    shape = (spec.batch, positions)
    tokens_BL = torch.randint(backend.checkpoint.config.vocabulary_size, shape, generator=generator).to(backend.device)
    backend.count_skips(verb == "warm")
    seconds = run_case(backend, case, tokens_BL)
    share = backend.experts_skipped_share
    return {
        "seconds": seconds,
        "kv_cache_bytes": backend.kv_cache_bytes,
        "experts_skipped_share": share,
        "weights_read_bytes_per_token": backend.bytes_read_per_token,
    }


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


def main(arguments: Sequence[str]) -> int:
    """A worker of one BenchSpec."""

    def start() -> tuple[dict[str, Any], Answer]:
        spec = BenchSpec(**json.loads(arguments[0]))
        backend = BACKENDS[spec.backend](spec)
        scheme = backend.checkpoint.fewest_bits
        about = {"parameters": backend.checkpoint.parameters, "weights_bytes": backend.weights_bytes}
        about["weight_bits"] = None if scheme is None else scheme.bits
        about["load_seconds"] = backend.load_seconds
        machine = {"threads": torch.get_num_threads(), "device": backend.device.type}
        dtype = {"dtype": str(backend.dtype).removeprefix("torch.")}
        return about | machine | dtype, lambda request: _answer(backend, spec, request)

    return serve_requests(start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
