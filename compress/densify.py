"""MoE→dense: an ordinary dense checkpoint of the sibling family out of a mixture of experts (seed 003)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.statistics import Statistics, effective_experts, usage_shares
from compress.apply import check_fits, check_nothing_is_lost
from compress.block_error import BlockError, block_errors, shared_gates
from compress.dense_plan import SELECTIONS, Chosen, check_ffns, choose, dense_plan
from compress.job import JobOptions, Made, Prepared, open_mixture, prepare, statistics_of
from compress.plan import SHARED_EXPERT, Plan, concatenation_plan, plan_from_json, plan_to_json
from compress.result import carry_out, check_outputs, finished_before
from compress.work_directory import WorkDirectory
from engine.architectures import Architecture
from engine.checkpoint import Checkpoint
from engine.errors import OptionError
from engine.progress import Progress, no_progress

ERROR_SEQUENCES = 16
"""Sequences on which shared experts' gates and the error of each layer are measured."""


@dataclass(frozen=True, kw_only=True)
class DensifyOptions(JobOptions):
    """One run of `compress densify`."""

    method: str = "densify"
    ffns: int | None = None
    """K; None for as many as the model's tokens use."""
    select: str = "usage"


def densify(options: DensifyOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Run the job; the figures of the result, with the keys of `compress densify --json`."""
    started = time.monotonic()
    work = WorkDirectory(options.output)
    if (figures := finished_before(options, work)) is not None:
        return figures
    check_outputs(options)
    checkpoint = checked_mixture(options)
    prepared = prepare(options, checkpoint)
    checkpoint.check_finite(lambda names: progress(names, "checking weights"))
    return carry_out(options, prepared, work, lambda: _make(options, prepared, work, progress), progress, started)


def ffns_of(options: DensifyOptions, checkpoint: Checkpoint) -> int:
    """K."""
    return checkpoint.config.experts_per_token if options.ffns is None else options.ffns


def checked_mixture(options: DensifyOptions) -> Checkpoint:
    """The model. Raises a CompressError where it cannot become dense as asked, before any work."""
    if options.select not in SELECTIONS:
        raise OptionError(f"select is {options.select!r}; it must be one of {', '.join(SELECTIONS)}")
    checkpoint = open_mixture(options.model)
    ffns = ffns_of(options, checkpoint)
    check_ffns(ffns, checkpoint.config.experts_by_layer)
    shared = [(SHARED_EXPERT, 1.0)] if checkpoint.config.architecture.shared_expert else []
    trial = concatenation_plan({layer: [*((0, 1.0),) * ffns, *shared] for layer in checkpoint.config.moe_layers})
    check_fits(trial, checkpoint)
    check_nothing_is_lost(trial, checkpoint)
    return checkpoint


def _make(options: DensifyOptions, prepared: Prepared, work: WorkDirectory, progress: Progress) -> Made:
    checkpoint, sample = prepared.checkpoint, prepared.tokens_SL[:ERROR_SEQUENCES]
    dtype, device = prepared.dtype, options.device
    statistics = statistics_of(options, prepared, work, progress)
    chosen = choose(options.select, statistics, ffns_of(options, checkpoint), options.calibration.seed)

    def planned() -> dict[str, Any]:
        gates = shared_gates(
            checkpoint, sample, dtype=dtype, device=device, progress=lambda layers: progress(layers, "gates (layers)")
        )
        plan = dense_plan(
            chosen,
            statistics,
            gates,
            checkpoint,
            device=device,
            progress=lambda layers: progress(layers, "choosing (layers)"),
        )
        return plan_to_json(plan)

    plan = plan_from_json(work.once("plan", planned))
    errors = block_errors(
        plan,
        checkpoint,
        sample,
        dtype=dtype,
        device=device,
        progress=lambda layers: progress(layers, "error of each layer (layers)"),
    )
    own = _figures(options, checkpoint, chosen, errors, statistics)
    title = f"{options.model}, dense: {own['ffns']} experts of each layer as one FFN"
    return Made(plan, "densify", {}, own, title, tuple(_card(own, plan)))


def _figures(
    options: DensifyOptions,
    checkpoint: Checkpoint,
    chosen: Mapping[int, Chosen],
    errors: Mapping[int, BlockError],
    statistics: Statistics,
) -> dict[str, Any]:
    layers = checkpoint.config.moe_layers
    row = checkpoint.config.architecture
    return {
        "ffns": ffns_of(options, checkpoint),
        "select": options.select,
        "selected_experts": {str(layer): chosen[layer].experts for layer in layers},
        "family": row.dense_sibling or row.model_type,
        "family_note": _family_note(row),
        "block_error_per_layer": [errors[layer].whole for layer in layers],
        "shared_gate_error_per_layer": [errors[layer].shared_gate for layer in layers] if row.shared_expert else None,
        "top_expert_share_per_layer": [float(usage_shares(statistics.layers[layer]).max()) for layer in layers],
        "effective_experts_per_layer": [effective_experts(statistics.layers[layer]) for layer in layers],
    }


def _family_note(row: Architecture) -> str:
    if row.dense_sibling is None:
        return (
            f"{row.model_type} has no dense sibling: the result is a {row.model_type} with one expert in each layer, which "
            "every token uses with weight 1"
        )
    return f"an ordinary {row.dense_sibling}"


def _card(own: Mapping[str, Any], plan: Plan) -> list[str]:
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
    ]


def _gate_lines(own: Mapping[str, Any]) -> list[str]:
    if own["shared_gate_error_per_layer"] is None:
        return []
    largest = max(own["shared_gate_error_per_layer"])
    return [
        "The gate of the shared expert depends on the input; here it is its mean. That alone is an error of at most "
        f"{largest:.1%} in a layer's output.",
        "",
    ]
