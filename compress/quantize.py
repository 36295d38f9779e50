"""`compress quantize`: weights rounded to low-bit integers layer by layer, optionally with activation-aware scales."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import cast

import torch

from compress.options.quantize import AWQ, GPTQ, NEAREST, QuantizeOptions
from compress.plans.apply import check_rounded
from compress.plans.plan import same_plan
from compress.report.figures import QuantizeFigures
from compress.rounding.activation_scales import Rescaling, activation_scales, load_rescaling
from compress.rounding.feedback_pass import FeedbackRounding, round_layers
from compress.rounding.memory import rounding_bytes
from compress.rounding.quantizer import Quantiser
from compress.run.claims import claims_output
from compress.run.job import Made, Prepared, Run, check_plain, check_weights, prepare
from compress.run.result import carry_out, check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES
from engine.decoder.skip_tables import load_skip_tables
from engine.errors import OptionError
from engine.passes import processes
from engine.passes.memory_need import MemoryDemand, budget_for
from engine.progress import Progress, no_progress

QuantizeRun = Run[QuantizeOptions, Prepared]
NEED_OWN_DECODER = {
    AWQ: "scales norms and the matrices that read them",
    GPTQ: "rounds each matrix for its own inputs",
}
"""Ways of rounding that our own decoder is needed for, with what they do."""


@claims_output
def quantize(options: QuantizeOptions, progress: Progress = no_progress) -> QuantizeFigures:
    """Run the job; return the figures of the result, with the keys of `compress quantize --json`."""
    started = time.monotonic()
    work = WorkDirectory(options.output)
    if (figures := finished_before(options, work)) is not None:
        return cast(QuantizeFigures, figures)
    check_outputs(options)
    prepared = prepare_quantizing(options)
    memory = budget_for(options.memory_limit, prepared.checkpoint, _memory_demand(options, prepared))
    check_weights(prepared.checkpoint, progress)
    run = Run(options, prepared, work, progress, started, memory)
    return cast(QuantizeFigures, carry_out(run, lambda: _make(run)))


def prepare_quantizing(options: QuantizeOptions) -> Prepared:
    """Open and check every input of the run, and write nothing. Raises a CompressError for invalid input."""
    checkpoint = open_mixture_checkpoint(resolve(options.model))
    check_plain(checkpoint)
    if isinstance(checkpoint, AdaptedCheckpoint) and options.way in NEED_OWN_DECODER:
        raise OptionError(
            f"--rounding {options.way} {NEED_OWN_DECODER[options.way]}, and which these are is not known of a model of the "
            f"family {checkpoint.model_type}, which transformers runs; take --rounding {NEAREST}"
        )
    if isinstance(checkpoint, AdaptedCheckpoint) and options.quantiser.embedding_bits is not None:
        raise OptionError(
            f"transformers runs the family {checkpoint.model_type}, and reads plain embeddings; leave out --embedding-bits"
        )
    check_rounded(options.quantiser, checkpoint)
    if options.reads_text:
        return prepare(options, checkpoint)
    calibration = options.calibration.filled(checkpoint)
    nothing = torch.empty(0, calibration.sequence_length or 0, dtype=torch.long)
    return Prepared(checkpoint, calibration, nothing, None, None, options.dtype or checkpoint.model_dtype)


def _memory_demand(options: QuantizeOptions, prepared: Prepared) -> MemoryDemand:
    """Return the memory that the run needs."""
    texts = [prepared.tokens_SL, *([] if prepared.held_out is None else [prepared.held_out.tokens_SL])]
    length = max(1, prepared.tokens_SL.shape[1])
    checkpoint = prepared.checkpoint
    if isinstance(checkpoint, AdaptedCheckpoint):  # of stacked experts, one of the matrices
        matrices = {name: shape[-2:] for name, (_, shape) in checkpoint.stored_shapes.items() if len(shape) > 1}
    else:
        matrices = {name: checkpoint.shapes[name] for name in options.quantiser.names(checkpoint.config)}
    needed = rounding_bytes(matrices, options.quantiser, options.way)
    return MemoryDemand(prepared.dtype, length, other_bytes=needed, tokens=max(text.numel() for text in texts))


def _make(run: QuantizeRun) -> Made:
    options, source = run.options, run.prepared.checkpoint

    def keep_tables(directory: Path) -> None:
        if not options.reads_text and (source.directory / SKIP_TABLES).is_file():
            load_skip_tables(source.directory, source.config)  # raises an error for tables of another model
            shutil.copyfile(source.directory / SKIP_TABLES, directory / SKIP_TABLES)

    return Made(
        same_plan(source.config.experts_by_layer),
        options.method,
        quantiser=Quantiser(options.quantiser, _rescaling(run), _feedback(run), options.way),
        title=f"{options.model}, weights of {options.quantiser.bits} bits",
        add_files=keep_tables,
    )


def _rescaling(run: QuantizeRun) -> Rescaling | None:
    """Return the scales, saved before an interruption or computed now; None without activation-aware scaling."""
    options, prepared = run.options, run.prepared
    if options.way != AWQ:
        return None
    saved = run.work.path / "activation_scales.safetensors"
    if processes.told(saved.is_file()):
        return load_rescaling(saved)
    found = activation_scales(
        prepared.checkpoint,
        prepared.tokens_SL,
        options.quantiser.scheme,
        experts_only=options.quantiser.experts_only,
        dtype=prepared.dtype,
        device=options.device,
        seed=options.calibration.seed,
        budget=run.memory_budget,
        progress=run.bar("scales (layers)"),
    )
    if processes.is_first():
        found.save(saved)
    return found


def _feedback(run: QuantizeRun) -> FeedbackRounding | None:
    """Return the matrices rounded with error feedback, before an interruption or now; None for other ways of rounding."""
    options, prepared = run.options, run.prepared
    if options.way != GPTQ:
        return None
    return round_layers(
        prepared.checkpoint,
        prepared.tokens_SL,
        run.work.path / "rounded",
        options.quantiser,
        dtype=prepared.dtype,
        device=options.device,
        budget=run.memory_budget,
        progress=run.bar("rounding (layers)"),
    )
