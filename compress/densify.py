"""`compress densify`: a dense checkpoint of the sibling family from a mixture of experts (Cruz Salinas et al.)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from calibrate.batches import training_text
from calibrate.statistics import Statistics, effective_experts, usage_shares
from compress.dense.block_error import BlockError, block_errors, shared_gates
from compress.dense.dense_plan import Chosen, check_ffns, choose, dense_plan
from compress.dense.dense_student import learned_scales, saved_tensors
from compress.dense.dense_training import train_dense
from compress.options.densify import SELECTIONS, DensifyOptions
from compress.plans.apply import check_fits, check_nothing_is_lost
from compress.plans.plan import SHARED_EXPERT, Plan, concatenation_plan, plan_from_json, plan_to_json
from compress.report.card import training_lines
from compress.report.figures import DecoderChoiceFigures, DensifyFigures
from compress.report.pictures import draw_training, draw_usage
from compress.run.claims import claims_output
from compress.run.job import Made, Prepared, Run, check_weights, open_mixture, prepare, statistics_of
from compress.run.result import carry_out, check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from compress.training.training import Trained
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.errors import OptionError
from engine.families.architecture import Architecture
from engine.families.table import ARCHITECTURES
from engine.passes import processes
from engine.progress import Progress, no_progress

ERROR_SEQUENCES = 16
"""Number of sequences on which shared experts' gates and the error of each layer are measured."""


@dataclass
class Trainable(Prepared):
    """Inputs that have passed all checks, with the training text, which is empty where nothing is trained."""

    training_SL: Tensor
    validation_VL: Tensor

    @property
    def texts(self) -> dict[str, Tensor]:
        """Return every text that the result depends on, the training text included."""
        return super().texts | {"training_text": self.training_SL, "validation_text": self.validation_VL}


DensifyRun = Run[DensifyOptions, Trainable]


@claims_output
def densify(options: DensifyOptions, progress: Progress = no_progress) -> DensifyFigures:
    """Run the job; return the figures of the result, with the keys of `compress densify --json`.

    Several processes (engine/passes/processes.py) share calibration, training and evaluation.
    """
    started = time.monotonic()
    work = WorkDirectory(options.output)
    if options.training.shard:
        processes.check_several()
    if (figures := finished_before(options, work)) is not None:
        return cast(DensifyFigures, figures)
    check_outputs(options)
    prepared = prepare_dense(options)
    check_weights(prepared.checkpoint, progress)
    run = Run(options, prepared, work, progress, started)
    return cast(DensifyFigures, carry_out(run, lambda: _make(run)))


def prepare_dense(options: DensifyOptions) -> Trainable:
    """Open and check every input of the run, and write nothing. Raises a CompressError for invalid input."""
    options.training.check()
    if options.training.distill_layers is not None:
        raise OptionError("--distill-layers is for encoder-decoders; a decoder's MoE layers are distilled")
    prepared = prepare(options, checked_mixture(options))
    nothing = prepared.tokens_SL[:0]
    texts = (nothing, nothing)
    if steps := options.training.steps:
        sequences = steps * options.training.batch_size * processes.count()
        validation = options.training.validation_samples
        texts = training_text(prepared.calibration, load_tokenizer(prepared.checkpoint), sequences, validation)
    return Trainable(**vars(prepared), training_SL=texts[0], validation_VL=texts[1])


def ffns_of(options: DensifyOptions, checkpoint: Checkpoint) -> int:
    """Return K, the number of FFNs."""
    return checkpoint.config.experts_per_token if options.ffns is None else options.ffns


def checked_mixture(options: DensifyOptions) -> Checkpoint:
    """Open the model. Raises a CompressError where it cannot become dense as requested, before any work."""
    if options.select not in SELECTIONS:
        raise OptionError(f"select is {options.select!r}; it must be one of {', '.join(SELECTIONS)}")
    checkpoint = open_mixture(options.model)
    ffns = ffns_of(options, checkpoint)
    check_ffns(ffns, checkpoint.config.experts_by_layer)
    layers = {index: checkpoint.config.layers[index].moe for index in checkpoint.config.moe_layers}
    shared = {index: [(SHARED_EXPERT, 1.0)] if moe is not None and moe.shared_width else [] for index, moe in layers.items()}
    trial = concatenation_plan({index: [*((0, 1.0),) * ffns, *own] for index, own in shared.items()})
    check_fits(trial, checkpoint)
    check_nothing_is_lost(trial, checkpoint)
    return checkpoint


def _make(run: DensifyRun) -> Made:
    options, prepared, checkpoint = run.options, run.prepared, run.prepared.checkpoint
    statistics = statistics_of(run)
    chosen = choose(options.select, statistics, ffns_of(options, checkpoint), options.calibration.seed)
    plan = plan_from_json(run.work.once("plan", lambda: plan_to_json(_planned(run, chosen, statistics))))
    errors = block_errors(
        plan,
        checkpoint,
        prepared.tokens_SL[:ERROR_SEQUENCES],
        dtype=prepared.dtype,
        device=options.device,
        progress=run.bar("error of each layer (layers)"),
    )
    trained = _trained(run, plan)
    own = _figures(run, chosen, errors, statistics, trained, plan)
    experts = {layer: best.experts for layer, best in chosen.items()}
    return Made(
        plan,
        "densify",
        saved_tensors(trained.tensors, plan, checkpoint) if trained.tensors else {},
        own,
        f"{options.model}, dense: {own['ffns']} experts of each layer as one FFN",
        tuple(_card(own, plan)),
        draw=lambda directory: [
            draw_usage(directory, Path(options.model).name, statistics, experts),
            *draw_training(directory, options.output.name, trained.histories),
        ],
    )


def _planned(run: DensifyRun, chosen: Mapping[int, Chosen], statistics: Statistics) -> Plan:
    """Return the plan of the selected experts with their initial weights; averaged experts are aligned."""
    options, prepared = run.options, run.prepared
    gates = shared_gates(
        prepared.checkpoint,
        prepared.tokens_SL[:ERROR_SEQUENCES],
        dtype=prepared.dtype,
        device=options.device,
        progress=run.bar("gates (layers)"),
    )
    return dense_plan(
        chosen,
        statistics,
        gates,
        prepared.checkpoint,
        device=options.device,
        progress=run.bar("choosing (layers)"),
    )


def _trained(run: DensifyRun, plan: Plan) -> Trained:
    """Return the trained tensors of the plan's model; empty where training was not requested."""
    options, prepared = run.options, run.prepared
    if not options.training.steps:
        return Trained()
    return train_dense(
        plan,
        prepared.checkpoint,
        prepared.training_SL,
        prepared.validation_VL,
        options.training,
        dtype=prepared.dtype,
        device=options.device,
        directory=run.work.path,
        resume=options.resume,
        progress=run.progress,
    )


def _figures(
    run: DensifyRun,
    chosen: Mapping[int, Chosen],
    errors: Mapping[int, BlockError],
    statistics: Statistics,
    trained: Trained,
    plan: Plan,
) -> DecoderChoiceFigures:
    options, config = run.options, run.prepared.checkpoint.config
    layers, row = config.moe_layers, config.architecture
    return {
        "ffns": ffns_of(options, run.prepared.checkpoint),
        "select": options.select,
        "selected_experts": {str(layer): chosen[layer].experts for layer in layers},
        "family": row.dense_sibling or row.model_type,
        "family_note": _family_note(row),
        "block_error_per_layer": [errors[layer].whole for layer in layers],
        "shared_gate_error_per_layer": [errors[layer].shared_gate for layer in layers] if row.has_shared_gate else None,
        "top_expert_share_per_layer": [float(usage_shares(statistics.layers[layer]).max()) for layer in layers],
        "effective_experts_per_layer": [effective_experts(statistics.layers[layer]) for layer in layers],
        "training": trained.parts,
        "scales_per_layer": list(learned_scales(trained.tensors, plan).values()) if trained.tensors else None,
    }


def _family_note(row: Architecture) -> str:
    if row.dense_sibling is None:
        return (
            f"{row.model_type} has no dense sibling: the result is a {row.model_type} with one expert in each layer, which "
            "every token uses with weight 1"
        )
    if ARCHITECTURES[row.dense_sibling].has_experts:
        return f"a {row.dense_sibling} whose layers are all dense"
    return f"an ordinary {row.dense_sibling}"


def _card(own: DecoderChoiceFigures, plan: Plan) -> list[str]:
    rows = [
        f"| {layer} | {' '.join(map(str, own['selected_experts'][str(layer)]))} | {error:.0%} |"
        for layer, error in zip(sorted(plan.layers), own["block_error_per_layer"], strict=True)
    ]
    return [
        f"It is {own['family_note']}.",
        f"Experts were chosen by `{own['select']}`; which, and how far the layer's output then was from the MoE block's",
        "(mean over tokens of the length of the difference, relative to the output's), before any training:",
        "",
        "| layer | experts | error |",
        "| ---: | --- | ---: |",
        *rows,
        "",
        *_gate_lines(own),
        *training_lines(own["training"]),
    ]


def _gate_lines(own: DecoderChoiceFigures) -> list[str]:
    if own["shared_gate_error_per_layer"] is None:
        return []
    largest = max(own["shared_gate_error_per_layer"])
    return [
        "The gate of the shared expert depends on the input; here it is its mean. That alone is an error of at most "
        f"{largest:.1%} in a layer's output.",
        "",
    ]
