"""`compress fit`: the best model within a size: which hidden units and experts go, and how many bits the others get.

1. A pass with gradients and one with moments score the hidden units (compress/methods/unit_obs.py), and one pass rounds
   every expert to every width (compress/fitting/rounding_costs.py). The cost of rounding the other matrices is measured.
2. The options are chosen by a knapsack (compress/fitting/choices.py).
3. A choice is carried out, and its divergence from the model is measured: without and with rounding, of all layers and of a
   few at a time (compress/fitting/measured.py). That corrects the costs for the next one. The first choice removes nothing,
   so that rounding is measured alone, and two more may remove hidden units and experts.
4. The choice with the smallest measured divergence is written.

Candidates are measured on text that is neither calibrated on nor held out for the perplexities of the result.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from calibrate.batches import training_text
from compress.fitting.candidate import Candidate, Choice, choice_of
from compress.fitting.choices import check_possible
from compress.fitting.costs import READ, Corrections, Factors, Option, Table, least_bytes, least_read
from compress.fitting.measured import Measuring, corrections_of, weight_file_bytes
from compress.fitting.sizes import START_BYTES, Sizes
from compress.fitting.statistics import FitRun, memory_demand, table_of, unit_costs
from compress.methods.inputs import Prunable
from compress.options.fit import FitOptions
from compress.plans.selection import Budget, least_experts
from compress.plans.unit_selection import fitting_multiple
from compress.prune import Shared
from compress.report.columns import size as in_bytes
from compress.report.figures import FitFigures, FrontierPoint
from compress.report.pictures import Picture, draw_frontier
from compress.rounding.mixed_widths import everything_rounded
from compress.run.claims import claims_output
from compress.run.job import Made, Run, check_plain, check_weights, open_mixture, prepare
from compress.run.result import carry_out, check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_mixture_checkpoint
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.kv_cache import position_bytes, state_bytes
from engine.errors import OptionError
from engine.families.tensor_names import ffn_parts
from engine.files.safetensors_writer import DEFAULT_SHARD_BYTES
from engine.kernels.stored.scheme import PLAIN_BITS, Scheme
from engine.passes.memory_budget import free_memory_bytes
from engine.passes.memory_need import budget_for
from engine.progress import Progress, no_progress

FIRST_FACTORS = Factors(removal=8.0)
"""Factors of the costs before any choice is measured. Removal costs more on text from which the costs were not computed."""
ENGINE_BYTES = 500_000_000
"""Memory that the engine takes beside weights and KV cache, for --fit-to auto."""


@claims_output
def fit(options: FitOptions, progress: Progress = no_progress, shared: Shared | None = None) -> FitFigures:
    """Run the job; return the figures of the result, with the keys of `compress fit --json`.

    shared: what the runs of a sweep over sizes share (fit_sweep.py).
    """
    started = time.monotonic()
    work = WorkDirectory(options.output, shared=None if shared is None else shared.work)
    if (figures := finished_before(options, work)) is not None:
        return cast(FitFigures, figures)
    check_outputs(options)
    prepared = prepare_fitting(options) if shared is None else shared.prepared
    memory = budget_for(options.memory_limit, prepared.checkpoint, memory_demand(options, prepared))
    if shared is None:
        check_weights(prepared.checkpoint, progress)
    run = Run(options, prepared, work, progress, started, memory)
    mapped = len(prepared.checkpoint.companions)
    try:
        return cast(FitFigures, carry_out(run, lambda: _make(run)))
    finally:  # files of this run, which the checkpoint of a sweep would keep
        del prepared.checkpoint.companions[mapped:]


def prepare_fitting(options: FitOptions) -> Prunable:
    """Open and check every input of the run, and write nothing. Raises a CompressError for invalid input."""
    options.check()
    options.refit.check()
    checkpoint = open_mixture(options.model, open_mixture_checkpoint)
    if isinstance(checkpoint, AdaptedCheckpoint):
        raise checkpoint.refusal()
    check_plain(checkpoint)
    multiple = _multiple(options, checkpoint)
    least = least_experts(options.min_experts, checkpoint.config, checkpoint.config.experts_per_token)
    _check_possible(options, checkpoint, multiple, least, options.target_size)
    prepared = prepare(options, checkpoint)
    calibration = prepared.calibration
    # Calibration usually reads the documents of validation too; here the two texts have none in common.
    tokens_SL, validation_VL = training_text(
        calibration, load_tokenizer(checkpoint), calibration.samples, options.validation_samples
    )
    text = {"tokens_SL": tokens_SL, "training_SL": tokens_SL[:0], "validation_VL": validation_VL}
    # The sparsity is that of no result: the knapsack decides how many units go.
    budget = Budget(sparsity=0.5, granularity="both", unit_multiple=multiple, min_experts=least)
    return Prunable(**vars(prepared) | text, plan=None, budget=budget)


def _check_possible(options: FitOptions, checkpoint: Checkpoint, multiple: int, least: int, size: int | None) -> None:
    """Raise OptionError for targets that no choice reaches. Costs play no part in that: it is known before any pass."""
    sizes, units = Sizes(checkpoint, options.group_size), multiple if options.removes else None
    if size is not None and not (PLAIN_BITS in options.bits and stored_bytes(checkpoint) <= size):
        check_possible(least_bytes(sizes, options.bits, multiple=units, least_experts=least), size, "bytes")
    if options.target_active is not None:
        found = least_read(sizes, options.bits, multiple=units, least_experts=least)
        check_possible(found, options.target_active, READ)


def _multiple(options: FitOptions, checkpoint: Checkpoint) -> int:
    """Return the multiple of hidden units. Raises OptionError where it, or groups, do not fit the matrices."""
    config = checkpoint.config
    widest, fewest = config.widest_ffn(), min(config.experts_by_layer.values())
    if options.unit_multiple is not None and options.unit_multiple > widest:
        raise OptionError(
            f"unit-multiple is {options.unit_multiple}, and experts have {widest} hidden units; give a smaller one"
        )
    if options.min_experts > fewest:
        raise OptionError(f"min-experts is {options.min_experts}, and a layer has {fewest} experts; give a smaller number")
    for bits in options.low_bits:
        everything_rounded(config, bits, options.group_size).check(config)

    def fits(inputs: int) -> bool:
        return all(Scheme(bits, options.group_size).fits(inputs) for bits in options.low_bits)

    return fitting_multiple(options.unit_multiple, config.ffn_widths(), fits)


def _make(run: FitRun) -> Made:
    """Make the best candidate, and return it with the figures of all."""
    checkpoint = run.prepared.checkpoint
    size, read, budget = target_size(run), run.options.target_active, run.prepared.budget
    assert budget is not None and budget.unit_multiple is not None
    _check_possible(run.options, checkpoint, budget.unit_multiple, budget.min_experts, size)
    scores = unit_costs(run)
    table = table_of(run, scores)
    unchanged = _unchanged(table, checkpoint, size, read)
    if unchanged is None:
        table.chosen(size, read)  # an impossible combination ends the run here
    measuring = Measuring(run, table)
    found, seen = list[tuple[dict[str, Any], Candidate]](), list[list[Option]]()
    corrections: Corrections = dict.fromkeys({item.layer for item in table.items}, FIRST_FACTORS)
    for own in (table.without_removal(), table, table):
        try:
            options = unchanged or own.chosen(size, read, corrections)
        except OptionError:  # widths alone do not reach the target
            continue
        if options in seen:
            continue
        seen.append(options)
        choice = choice_of(table.items, options, scores, checkpoint.config)
        found.append(measuring.measured(len(found), choice, options, corrections))
        has_clean = any(not before.choice.removes for _, before in found[:-1])
        corrections = corrections_of(found[-1][0], table.predicted(options), corrections, keeps_rounding=has_clean)
    points = [point for point, _ in found]
    point, candidate = min(found, key=lambda pair: float(pair[0]["measured_kl"]))
    figures: dict[str, Any] = {
        "granularity": "unit" if candidate.choice.removes else "expert",
        "refit": candidate.refit.figures,
        "target_bytes": size,
        "target_active_bytes": read,
        "active_bytes": point["active_bytes"],
        "weight_file_bytes": point["bytes"],
        "kl": point["measured_kl"],
        "matrices_by_bits": _by_bits(candidate.choice, checkpoint),
        "factors": {str(layer): list(own) for layer, own in sorted(corrections.items())},
        "frontier": [*points, *measuring.predictions(corrections)],
    }
    return Made(
        *(candidate.choice.plan, run.options.method, candidate.refit.tensors, figures),
        title=f"{run.options.model}, fitted to {_in_words(size, read)}",
        quantiser=candidate.quantiser,
        draw=lambda directory: [_frontier(directory, run.options, figures["frontier"], size)],
    )


def _unchanged(table: Table, checkpoint: Checkpoint, size: int | None, read: int | None) -> list[Option] | None:
    """Return the choice of the model as it is if that keeps the targets; None if it does not.

    Packed floats count with the bytes that they have in the model's files, which any other choice widens to 16 bits.
    """
    options = table.unchanged()
    if options is None or (size is not None and stored_bytes(checkpoint) > size):
        return None
    return options if read is None or table.read_bytes(options) <= read else None


def stored_bytes(checkpoint: Checkpoint) -> float:
    """Return the most bytes of the weight files of a copy of a model; infinity for a GGUF file, which no result is."""
    if checkpoint.gguf is not None:
        return math.inf
    return weight_file_bytes(checkpoint.directory) + START_BYTES * (1 + checkpoint.bytes // DEFAULT_SHARD_BYTES)


def _frontier(directory: Path, options: FitOptions, points: Sequence[FrontierPoint], size: int | None) -> Picture:
    """Draw the choices that a run predicted and measured."""
    carried_out = [(point["bytes"], kl) for point in points if (kl := point["measured_kl"]) is not None]
    predicted = [(point["bytes"], point["predicted_kl"]) for point in points if point["measured_kl"] is None]
    return draw_frontier(directory, options.output.name, predicted, carried_out, size)


def target_size(run: FitRun) -> int | None:
    """Return the most bytes of the result's weights; None for no limit.

    Raises OptionError where the free memory does not hold the KV cache.
    """
    if run.options.fit_to is None:
        return run.options.target_size
    config, dtype = run.prepared.checkpoint.config, run.prepared.checkpoint.model_dtype
    cache = config.max_positions * position_bytes(config, dtype) + state_bytes(config, dtype)
    free = int(run.work.once("free-memory", free_memory_bytes))
    if free - cache - ENGINE_BYTES <= 0:
        raise OptionError(
            f"{free / 1e9:.1f}GB of memory are free, and the KV cache of {config.max_positions} positions needs "
            f"{cache / 1e9:.1f}GB beside {ENGINE_BYTES / 1e9:.1f}GB of the engine; free some, or give --target-size"
        )
    return free - cache - ENGINE_BYTES


def _by_bits(choice: Choice, checkpoint: Checkpoint) -> dict[str, int]:
    """Return the number of matrices of the result with each width."""
    config = checkpoint.config
    experts = sum(len(own) for own in choice.plan.layers.values()) * len(ffn_parts(config.architecture))
    counts = Counter(choice.bits.values())
    counts[PLAIN_BITS] = experts + len(choice.others) - len(choice.bits)
    return {str(bits): count for bits, count in sorted(counts.items()) if count}


def _in_words(size: int | None, read: int | None) -> str:
    """Return the targets for a title."""
    words = [] if size is None else [in_bytes(size)]
    if read is not None:
        words.append(f"{in_bytes(read)} read for a token")
    return " and ".join(words)
