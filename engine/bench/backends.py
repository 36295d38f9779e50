"""Backends of the benchmarks, and the test cases that run on them.

`python -m engine.bench.backends SPEC` is a worker (engine/generation/worker.py). Its requests are lines such as
`warm pp 512 0`, `run tg 128 0` and `memory`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.adapted.adapted_decoder import cached_tensors
from engine.bench.options import BACKEND_NAMES
from engine.checkpoint.model_directory import resolve
from engine.errors import OptionError
from engine.expert_cache.cache import ExpertCache
from engine.expert_cache.figures import totals
from engine.generation.batch import Cache
from engine.generation.checks import resolve_dtype
from engine.generation.generate import Engine
from engine.generation.options import MEMORY, OpenOptions
from engine.generation.report import memory_split, peak_memory_bytes
from engine.generation.worker import Answer, Spec, serve_requests
from engine.kernels.devices import SHAPES_KEPT, resolve_device, set_threads
from engine.onnx.runtime import backend_of
from engine.transformers_models.transformers_model import load_decoder

KINDS = ("pp", "tg")
COMPILED = "compiled "
EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", f"{COMPILED}batched_mm", f"{COMPILED}grouped_mm")
"""How transformers can compute experts, also with each layer compiled by torch.compile."""
GRAPHS_PER_LAYER = 8
"""Graphs of one compiled layer, at most: for prompts and steps, for each implementation and size of batch."""


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
        """Name in the table: `pp512`, or `tg128 @ d1024` after 1,024 tokens."""
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class BenchSpec(Spec):
    """One language model on one backend. Raises OptionError for options that the backend does not support."""

    skip_threshold: float = OpenOptions.skip_threshold
    skip_min_experts: int = OpenOptions.skip_min_experts
    skip_rule: str = OpenOptions.skip_rule
    kv_cache_dtype: str = OpenOptions.kv_cache_dtype
    memory_limit: int | None = OpenOptions.memory_limit
    miss_threshold: float = OpenOptions.miss_threshold
    load_mode: str = MEMORY
    experts_implementation: str | None = None
    """For transformers: one of EXPERTS_IMPLEMENTATIONS; None for its own choice."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise OptionError(f"backend {self.backend!r} is not known; choose {', '.join(BACKENDS)}")
        if self.batch < 1:
            raise OptionError(f"batch is {self.batch}; it must be at least 1")
        if self.backend != "torch" and self.kv_cache_dtype != "auto":
            raise OptionError(f"backend {self.backend!r} has its own KV cache; leave --kv-cache-dtype at auto for it")
        if self.backend != "torch" and self.memory_limit is not None:
            raise OptionError(f"backend {self.backend!r} reads the whole model; leave out --memory-limit for it")
        if self.backend != "torch" and self.skip_threshold != 0:
            raise OptionError(f"backend {self.backend!r} cannot skip experts; leave the skip threshold at 0 for it")
        if self.experts_implementation not in (None, *EXPERTS_IMPLEMENTATIONS):
            known = ", ".join(EXPERTS_IMPLEMENTATIONS)
            raise OptionError(f"experts implementation {self.experts_implementation!r} is not known; choose {known}")
        if self.experts_implementation is not None and self.backend != "transformers":
            raise OptionError(f"backend {self.backend!r} has its own experts; an implementation is for transformers only")


class Backend(Protocol):
    """Interface of a backend: it reads tokens and returns the most probable next ones."""

    checkpoint: Any
    """A ModelDirectory."""
    device: torch.device
    dtype: torch.dtype
    weights_bytes: int
    load_seconds: float

    @property
    def weights_resident_bytes(self) -> int:
        """Bytes of the weights in memory."""

    @property
    def kv_cache_bytes(self) -> int:
        """Size of the KV cache of the last case, in bytes."""

    @property
    def experts_skipped_share(self) -> float:
        """Share of skipped experts since the last `count_skips(True)`."""

    @property
    def expert_cache(self) -> ExpertCache | None:
        """Cache of the experts of a model that is read within a memory limit."""

    @property
    def bytes_read_per_token(self) -> float | None:
        """Bytes of weights read per token when decoding one sequence; None if only the runtime knows."""

    def count_skips(self, counting: bool) -> None:
        """Start counting from zero, or stop. Timed runs do not count."""

    def start(self, batch: int, capacity: int) -> None:
        """Reset the context; up to `capacity` tokens will follow."""

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Read tokens after the previous ones and return the most probable next ones, [B, 1]."""


class TorchBackend:
    """Backend of this engine."""

    def __init__(self, spec: BenchSpec) -> None:
        self._engine = Engine.open(
            spec.model,
            device=spec.device,
            dtype=spec.dtype,
            threads=spec.threads,
            skip_threshold=spec.skip_threshold,
            skip_min_experts=spec.skip_min_experts,
            skip_rule=spec.skip_rule,
            kv_cache_dtype=spec.kv_cache_dtype,
            memory_limit=spec.memory_limit,
            miss_threshold=spec.miss_threshold,
            load_mode=spec.load_mode,
        )
        self._engine.prepare()
        self.load_seconds = self._engine.load_seconds
        self.checkpoint, self.device, self.dtype = self._engine.checkpoint, self._engine.device, self._engine.dtype
        self.weights_bytes = self._engine.weights_bytes
        self._cache: Cache | None = None

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
    def expert_cache(self) -> ExpertCache | None:
        return self._engine.expert_cache

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


def _allow_recompiling(graphs: int) -> None:
    """Let torch.compile make so many graphs of one function; beyond its own limit of 8, further layers are not compiled.

    The cache of transformers has a flag for each layer, so layers do not share a graph.
    """
    dynamo: Any = importlib.import_module("torch._dynamo").config
    dynamo.recompile_limit = max(dynamo.recompile_limit, graphs)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, graphs)


class TransformersBackend:
    """Backend of unmodified transformers, used as by its own `generate`: cached, with the last logits only."""

    experts_skipped_share = 0.0
    expert_cache = None
    bytes_read_per_token = None

    def __init__(self, spec: BenchSpec) -> None:
        for name in SHAPES_KEPT:
            os.environ.pop(name, None)
        set_threads(spec.threads)
        started = time.perf_counter()
        self.checkpoint = open_mixture_checkpoint(resolve(spec.model))
        self.device = resolve_device(spec.device)
        self.dtype = resolve_dtype(spec.dtype, self.checkpoint)
        own = None
        if isinstance(self.checkpoint, AdaptedCheckpoint):
            own = self.checkpoint.model_class
            self.checkpoint.check_not_low_bit("leave out --backend transformers")
        model = load_decoder(self.checkpoint.directory, self.checkpoint.raw_config, self.dtype, own)
        self._model: Any = model.to(self.device)
        self.use_experts(spec.experts_implementation)
        self.weights_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        self.weights_resident_bytes = self.weights_bytes if self.device.type == "cpu" else 0
        self.load_seconds = time.perf_counter() - started
        self._past: Any = None

    def use_experts(self, implementation: str | None) -> None:
        """Compute experts by one of EXPERTS_IMPLEMENTATIONS from now on; None leaves transformers' own choice."""
        if implementation is not None:
            self._model.set_experts_implementation(implementation.removeprefix(COMPILED))
        if implementation is not None and implementation.startswith(COMPILED):
            layers = self._model.model.layers
            _allow_recompiling(GRAPHS_PER_LAYER * len(layers))
            for layer in layers:  # one by one: a whole model would be unrolled
                if layer._compiled_call_impl is None:
                    layer.compile()

    @property
    def kv_cache_bytes(self) -> int:
        return sum(part.nbytes for part in cached_tensors(self._past))

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
    """Backend of an exported model in onnxruntime, used as by this engine."""

    def __init__(self, spec: BenchSpec) -> None:
        backend_of(resolve(spec.model), "onnx")
        super().__init__(spec)


BACKENDS: dict[str, Callable[[BenchSpec], Backend]] = {
    "torch": TorchBackend,
    "transformers": TransformersBackend,
    "onnx": OnnxBackend,
}
assert tuple(BACKENDS) == BACKEND_NAMES


def run_case(backend: Backend, case: BenchCase, tokens_BL: Tensor) -> float:
    """Return the duration of one case in seconds. tokens_BL: at least depth + tokens (pp) or depth + 1 (tg) tokens."""
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
    """Return the reply to one request line."""
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
    cache = backend.expert_cache
    if cache is not None:
        cache.count_anew()
    seconds = run_case(backend, case, tokens_BL)
    share, found = backend.experts_skipped_share, None if cache is None else totals(cache.figures.values())
    return {
        "seconds": seconds,
        "kv_cache_bytes": backend.kv_cache_bytes,
        "experts_skipped_share": share,
        "weights_read_bytes_per_token": backend.bytes_read_per_token,
        "expert_hit_rate": None if found is None else found.hit_rate,
        "expert_bytes_read_per_token": None if found is None else found.read_bytes / tokens_BL.numel(),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the worker of one BenchSpec."""

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
