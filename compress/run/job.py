"""The start of every job that makes a smaller model: `JobOptions`, checked inputs (`Prepared`), and both as one `Run`.

Shape suffixes: S sequences, L positions.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from calibrate.batches import calibration_texts
from calibrate.collect import collect
from calibrate.options import CalibrationOptions
from calibrate.statistics import Statistics, load_statistics
from calibrate.windows import Windows
from compress.options.job import JobOptions
from compress.plans.plan import Plan
from compress.report.pictures import Picture
from compress.rounding.quantizer import Quantiser
from compress.run.perplexity import losses, routed_counts
from compress.run.work_directory import WorkDirectory
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import DataError, OptionError
from engine.passes import processes
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.progress import Progress, no_progress


@dataclass
class Prepared:
    """Inputs that have passed all checks before any work begins."""

    checkpoint: Checkpoint
    calibration: CalibrationOptions
    tokens_SL: Tensor
    held_out: Windows | None
    statistics: Statistics | None
    dtype: torch.dtype

    @property
    def texts(self) -> dict[str, Tensor]:
        """Return every text that the result depends on, by name."""
        return {"tokens": self.tokens_SL}

    @property
    def models(self) -> dict[str, str]:
        """Return the fingerprints of all models that the result is made from, and the states of their files, by name."""
        return self.checkpoint.identity()


class Identified(Protocol):
    """A model on disk of any kind."""

    def identity(self) -> dict[str, str]:
        """Return the fingerprint of the model and the state of its files."""


def teacher_identity(teacher: Identified | None) -> dict[str, str]:
    """Return the identity of a teacher under keys of its own; empty without a teacher."""
    found = {} if teacher is None else teacher.identity()
    return {f"teacher_{name}": value for name, value in found.items()}


OptionsT = TypeVar("OptionsT", covariant=True)
PreparedT = TypeVar("PreparedT", covariant=True)


@dataclass(frozen=True)
class Run(Generic[OptionsT, PreparedT]):
    """One run of a job after its inputs were checked; every step of a job takes it as its first argument."""

    options: OptionsT
    prepared: PreparedT
    work: WorkDirectory
    """Stores the state from which an interrupted run resumes."""
    progress: Progress = no_progress
    started: float = field(default_factory=time.monotonic)
    """Start of the run by time.monotonic(); `seconds` of the figures count from it."""
    memory_budget: MemoryBudget = UNLIMITED
    """Limits the memory of every pass of the run."""

    def bar(self, label: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
        """Return a progress bar with a fixed label, for functions that take an unlabeled one."""
        return lambda items: self.progress(items, label)


AnyRun = Run[JobOptions, Prepared]
"""A run of any job on a decoder."""


class HeldOut(TypedDict):
    """Results on the held-out text, as JSON; None without such a text."""

    losses: list[float] | None
    """Summed negative log-likelihood of each window, in nats."""
    routed: dict[str, list[int]] | None
    """Number of tokens routed to each expert, by decoder layer index."""


@dataclass(frozen=True)
class Made:
    """A command's decisions about a model, ready to be written."""

    plan: Plan
    method: str
    """Name of the method in the artifact's provenance."""
    trained: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the result that training has changed, by name."""
    figures: Mapping[str, object] = field(default_factory=dict)
    """The command's own figures, beside those of every artifact."""
    title: str | None = None
    """Title of the model card; None for the number of removed experts."""
    card: tuple[str, ...] = ()
    """Lines of the model card that are particular to the command."""
    add_files: Callable[[Path], None] = lambda directory: None
    """Writes the command's own files into the artifact's directory."""
    draw: Callable[[Path], Sequence[Picture]] = lambda directory: ()
    """Draws the command's own pictures into the artifact's directory."""
    quantiser: Quantiser | None = None
    """Rounds the result's weights to low-bit weights; None keeps their dtype."""
    include: tuple[str, ...] = ()
    """Kinds of FFNs beside the routed experts whose hidden units the figures count (DecoderConfig.ffn_widths)."""


def open_mixture(model: str, opened: Callable[[Path], Checkpoint] = Checkpoint) -> Checkpoint:
    """Open the checkpoint of a mixture of experts. Raises a CompressError for any other model.

    opened: opens a directory; `open_mixture_checkpoint` also takes families that only transformers runs.
    """
    checkpoint = opened(resolve(model))
    if not checkpoint.config.moe_layers:
        raise OptionError(
            f"{model}: is not a mixture of experts ({checkpoint.config.architecture.model_type}), so it has no experts to "
            "spare"
        )
    return checkpoint


def check_plain(checkpoint: Checkpoint) -> None:
    """Raise OptionError for low-bit weights, which cannot be trained, mixed or rounded again."""
    if checkpoint.schemes_used:
        bits = " and ".join(map(str, sorted({scheme.bits for scheme in checkpoint.schemes_used})))
        raise OptionError(
            f"{checkpoint.directory}: has weights of {bits} bits; take the model that it was quantized from, and "
            "`compress quantize` the result (`compress fit` rounds it)"
        )


def check_weights(checkpoint: Checkpoint, progress: Progress) -> None:
    """Raise CheckpointError for NaN or infinity among the weights. Several processes each read a part."""
    checkpoint.check_finite(lambda names: progress(processes.share(list(names)), "checking weights"))


def prepare(options: JobOptions, checkpoint: Checkpoint) -> Prepared:
    """Check every input that a run needs, and write nothing. Raises a CompressError for invalid input."""
    calibration = options.calibration.filled(checkpoint)
    statistics = None
    if options.statistics is not None:
        statistics = load_statistics(options.statistics, checkpoint.config)
        if statistics.header.get("model") != checkpoint.fingerprint():
            raise DataError(f"{options.statistics}: statistics of another model than {options.model}; calibrate again")
    tokenizer = load_tokenizer(checkpoint)
    tokens, held_out = calibration_texts(calibration, tokenizer, checkpoint.config.vocabulary_size)
    dtype = options.dtype or checkpoint.model_dtype
    return Prepared(checkpoint, calibration, tokens, held_out, statistics, dtype)


def fingerprints(prepared: Prepared) -> dict[str, str]:
    """Return the identity of model and text, as JSON."""
    digests = {name: hashlib.sha256(text_SL.numpy().tobytes()).hexdigest() for name, text_SL in prepared.texts.items()}
    return prepared.models | digests | {"processes": str(processes.count())}


def statistics_of(run: AnyRun) -> Statistics:
    """Return the statistics: from the given file, from before an interruption, or by calibrating now."""
    options, prepared, work = run.options, run.prepared, run.work
    if prepared.statistics is not None:
        return prepared.statistics
    saved, directory = work.statistics, work.shared / "calibration"
    if processes.told(saved.is_file()):
        return load_statistics(saved, prepared.checkpoint.config)
    statistics = collect(
        prepared.checkpoint,
        prepared.tokens_SL,
        dtype=prepared.dtype,
        device=options.device,
        seed=options.calibration.seed,
        budget=run.memory_budget,
        directory=directory,
        progress=run.bar("calibrating (layers)"),
    )
    if processes.is_first():
        statistics.save(saved)
    work.forget(directory)
    return statistics


def held_out(run: AnyRun, checkpoint: Checkpoint, when: str, directory: Path | None = None) -> HeldOut:
    """Evaluate the source or the result on the held-out text; both values are None where there is no such text.

    when: "before" or "after", for the progress bar. directory: passed to `losses`.
    """
    prepared = run.prepared
    if prepared.held_out is None:
        return {"losses": None, "routed": None}
    counts: dict[int, list[int]] = {}
    found = losses(
        checkpoint,
        prepared.held_out.tokens_SL,
        dtype=prepared.dtype,
        device=run.options.device,
        visit=routed_counts(counts, directory),
        budget=run.memory_budget,
        directory=directory,
        progress=run.bar(f"perplexity {when} (layers)"),
    )
    return {
        "losses": found.summed_S.tolist(),
        "routed": {str(layer): own for layer, own in sorted(counts.items())},
    }
