"""Speed and memory of classifiers: examples per second at a batch size, each model in a separate process.

The method is that of side_by_side.py: a warm-up, then repetitions in which the models take turns. One repetition has as
many batches as take half a second, according to the warm-up. `python -m engine.bench.classifiers SPEC` is the worker.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from engine.bench.options import BenchOptions
from engine.bench.side_by_side import about_model, gib
from engine.checkpoint.model_directory import resolve
from engine.errors import OptionError
from engine.generation.checks import DTYPES
from engine.generation.report import peak_memory_bytes
from engine.generation.worker import Answer, Spec, Worker, serve_requests
from engine.kernels.devices import set_threads
from engine.onnx.classifier import open_classifier
from engine.onnx.runtime import backend_of
from engine.transformers_models.classifier import Classifier
from engine.transformers_models.classifier_inputs import SMALL_SIZE, image_inputs

SECONDS = 0.5
"""Approximate duration of one repetition, in seconds."""
HEAD = ("model", "size", "params", "backend", "threads", "test", "examples/s", "peak memory")


@dataclass(frozen=True)
class ClassifierSpec(Spec):
    """One classifier on one backend. Raises OptionError for options that the backend does not support."""

    tokens: int = 128
    """Length of each text in tokens."""

    def __post_init__(self) -> None:
        if self.backend not in ("torch", "onnx"):
            raise OptionError(f"backend {self.backend!r} runs no classifiers here; choose torch or onnx")
        if self.batch < 1 or self.tokens < 1:
            raise OptionError(f"batch is {self.batch} and texts have {self.tokens} tokens; both must be at least 1")


def bench_classifiers(
    models: Sequence[str],
    backends: Sequence[str] = (),
    *,
    repetitions: int = BenchOptions.repetitions,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return one row for each model and backend; `options` are the other fields of ClassifierSpec.

    If no backend is named, each model uses its own: onnx for an exported model, otherwise torch.
    """
    if repetitions < 1:
        raise OptionError(f"repetitions is {repetitions}; it must be at least 1")
    specs = [
        ClassifierSpec(model, name, **options)
        for model in models
        for name in backends or [backend_of(resolve(model), "auto")]
    ]
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(spec, "engine.bench.classifiers")) for spec in specs]
        rates: dict[Worker[ClassifierSpec], list[float]] = {worker: [] for worker in workers}
        for round_number in progress(range(repetitions + 1)):
            for worker in workers:
                found = worker.ask("run" if round_number else "warm")
                rates[worker] += [found["examples_per_second"]] if round_number else []
        return [_row(worker, rates[worker], worker.ask("memory")["peak_memory_bytes"]) for worker in workers]


def _row(worker: Worker[ClassifierSpec], rates: list[float], peak_bytes: int) -> dict[str, Any]:
    spec, about = worker.spec, worker.about
    return {
        "model": spec.model,
        "backend": spec.backend,
        "test": about["test"],
        "examples_per_second_mean": statistics.mean(rates),
        "examples_per_second_sd": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "examples_per_second_median": statistics.median(rates),
        "examples_per_second_rounds": rates,
        "peak_memory_bytes": peak_bytes,
        **{name: about[name] for name in ("weights_bytes", "parameters", "experts", "threads", "dtype", "device")},
        "batch": spec.batch,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row in the Markdown table."""
    rate = f"{row['examples_per_second_mean']:.1f} ± {row['examples_per_second_sd']:.1f}"
    return [*about_model(row), rate, gib(row["peak_memory_bytes"])]


class ClassifierBench:
    """A worker's model and the batch that it classifies repeatedly."""

    def __init__(self, spec: ClassifierSpec) -> None:
        set_threads(spec.threads)
        dtype = None if spec.dtype == "auto" else DTYPES[spec.dtype]
        directory = resolve(spec.model)
        opened = open_classifier(directory, spec.backend, spec.device, dtype, spec.threads)
        self.described, self.classify, self.device = opened
        generator = torch.Generator().manual_seed(spec.seed)
        if self.described.what == "images":
            inputs = image_inputs(directory, self.described.config)
            shape = (spec.batch, inputs.channels, *(inputs.size or SMALL_SIZE))
            given = inputs(torch.randint(256, shape, generator=generator, dtype=torch.uint8))
            self.test = f"images {shape[2]}×{shape[3]}, batch {spec.batch}"
        else:
            ids = torch.randint(self.described.config.vocab_size, (spec.batch, spec.tokens), generator=generator)
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            self.test = f"texts of {spec.tokens} tokens, batch {spec.batch}"
        self.given = {name: value.to(self.device) for name, value in given.items()}
        self.batch, self.batches = spec.batch, 1

    def about(self) -> dict[str, Any]:
        """Return the description that the worker sends first."""
        dtype = self.classify.head.weight.dtype if isinstance(self.classify, Classifier) else torch.float32
        return {
            "test": self.test,
            "parameters": self.described.parameters,
            "weights_bytes": self.described.bytes,
            "experts": self.described.experts,
            "threads": torch.get_num_threads(),
            "dtype": str(dtype).removeprefix("torch."),
            "device": self.device.type,
        }

    @torch.inference_mode()
    def answer(self, request: str) -> dict[str, Any]:
        """Return the reply to one request line."""
        if request.strip() == "memory":
            return {"peak_memory_bytes": peak_memory_bytes()}
        if request.strip() == "warm":
            self._seconds(1)
            self.batches = max(1, round(SECONDS / self._seconds(1)))
        return {"examples_per_second": self.batch * self.batches / self._seconds(self.batches)}

    def _seconds(self, batches: int) -> float:
        started = time.perf_counter()
        for _ in range(batches):
            self.classify(**self.given).argmax(dim=-1).cpu()  # wait for the predictions
        return time.perf_counter() - started


def main(arguments: Sequence[str]) -> int:
    """Run the worker of one ClassifierSpec."""

    def start() -> tuple[dict[str, Any], Answer]:
        bench = ClassifierBench(ClassifierSpec(**json.loads(arguments[0])))
        return bench.about(), bench.answer

    return serve_requests(start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
