"""A choice carried out: its plan, its bits by name, and the models on disk that it makes.

The hidden units leave first, with the refit of the down projections (compress/refit). The matrices of that smaller model are
then rounded for the inputs that they have in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from torch import Tensor

from compress.fitting.costs import OTHERS, Item, Option
from compress.methods.inputs import MethodRun
from compress.options.quantize import EMBEDDING, GPTQ, HEAD
from compress.plans.apply import apply
from compress.plans.plan import Plan, same_plan
from compress.plans.unit_selection import units_plan
from compress.refit.closed_form import Refitted, refitted
from compress.rounding.feedback_pass import FeedbackRounding, round_layers
from compress.rounding.mixed_widths import MixedWidths, kinds_of_others
from compress.rounding.quantizer import Quantiser
from engine.checkpoint.checkpoint import Checkpoint
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN
from engine.families.tensor_names import expert_tensor, ffn_parts
from engine.kernels.stored.scheme import PLAIN_BITS

SMALLER, RESULT = "smaller", "result"
"""Directories of a candidate's models in the work directory: before it is rounded, and after."""


@dataclass(frozen=True)
class Choice:
    """The fate of every expert, and of the other matrices."""

    plan: Plan
    bits: dict[str, int]
    """Bits of each matrix of the result that is rounded, by name."""
    others: frozenset[str]
    """Names of the matrices outside of the routed experts."""
    removes: bool
    """Whether hidden units or experts go."""


def choice_of(
    items: Sequence[Item], options: Sequence[Option], scores: Mapping[int, Sequence[Tensor]], config: DecoderConfig
) -> Choice:
    """Return the choice that gives each item its option.

    scores: by which hidden units stay, [F] for each expert, by layer.
    """
    kept: dict[int, list[list[int]]] = {layer: [[] for _ in own] for layer, own in scores.items()}
    kinds, bits = [*kinds_of_others(config).values(), []], dict[str, int]()  # the last item is never rounded
    staying = dict.fromkeys(kept, 0)
    for item, option in zip(items, options, strict=True):
        if item.layer == OTHERS:
            bits |= dict.fromkeys(kinds[item.number], option.readers)
        elif option.units:
            order_F = scores[item.layer][item.number].argsort(descending=True, stable=True)
            kept[item.layer][item.number] = sorted(order_F[: option.units].tolist())
            place = staying[item.layer]  # the experts of the result are numbered anew
            staying[item.layer] += 1
            for part in ffn_parts(config.architecture):
                name = expert_tensor(config.architecture, item.layer, place, part)
                bits[name] = option.down if part == DOWN else option.readers
    plan = units_plan(kept, config.ffn_widths(), config.common_widths)
    rounded = {name: own for name, own in bits.items() if own != PLAIN_BITS}
    removes = plan != same_plan(config.experts_by_layer)
    if removes or rounded:
        plan = replace(plan, prediction=None)  # Sizes leaves layers for multi-token prediction out
    return Choice(plan, rounded, frozenset(chain.from_iterable(kinds)), removes)


@dataclass(frozen=True)
class Candidate:
    """A choice with everything that `apply` needs."""

    choice: Choice
    refit: Refitted
    quantiser: Quantiser | None


def carried_out(run: MethodRun, choice: Choice, group_size: int) -> Candidate:
    """Refit and round the result of a choice. Interrupted work is continued in the run's work directory."""
    source, refit = run.prepared.checkpoint, refitted(run, choice.plan)
    if not choice.bits:
        return Candidate(choice, refit, None)
    widths, directory = rounding_of(choice, group_size), run.work.path / "rounded"
    rounded = FeedbackRounding(directory, widths.scheme_of)
    if not rounded.is_complete(len(source.config.layers)):
        rounded = round_layers(
            *(_smaller(choice, refit, run), run.prepared.tokens_SL, directory, widths),
            dtype=run.prepared.dtype,
            device=run.options.device,
            budget=run.memory_budget,
            progress=run.bar("rounding (layers)"),
        )
    return Candidate(choice, refit, Quantiser(widths, None, rounded, GPTQ))


def _smaller(choice: Choice, refit: Refitted, run: MethodRun) -> Checkpoint:
    """Return the model of a choice before it is rounded. One on disk is written once over interruptions."""
    source, directory = run.prepared.checkpoint, run.work.path / SMALLER
    if not choice.removes:
        return source
    run.work.once(SMALLER, lambda: _written(Candidate(choice, refit, None), source, directory).bytes)
    return Checkpoint(directory)


def rounding_of(choice: Choice, group_size: int) -> MixedWidths:
    """Return the options that round the matrices of a choice, of which some have low bits."""
    bits = choice.bits
    has_others = not bits.keys().isdisjoint(choice.others - {EMBEDDING, HEAD})
    return MixedWidths(
        *(min(bits.values()), group_size),
        experts_only=not has_others,
        quantize_head=HEAD in bits,
        embedding_bits=bits.get(EMBEDDING),
        by_name=bits,
    )


def _written(candidate: Candidate, source: Checkpoint, directory: Path) -> Checkpoint:
    """Write the result of a candidate without a card or figures, and open it."""
    shutil.rmtree(directory, ignore_errors=True)
    apply(*(candidate.choice.plan, source, directory), replaced=candidate.refit.tensors, quantiser=candidate.quantiser)
    return Checkpoint(directory)


def written(candidate: Candidate, run: MethodRun) -> Checkpoint:
    """Return the result of a candidate, written into the run's work directory."""
    return _written(candidate, run.prepared.checkpoint, run.work.path / RESULT)


def remove_models(run: MethodRun) -> None:
    """Remove the models of a candidate that was measured; what writes its result stays."""
    for name in (SMALLER, RESULT):
        shutil.rmtree(run.work.path / name, ignore_errors=True)


def smaller_of(candidate: Candidate, run: MethodRun) -> Checkpoint | None:
    """Return the model before it is rounded; None for a candidate that is not rounded, or that loses nothing."""
    is_both = candidate.quantiser is not None and candidate.choice.removes
    return Checkpoint(run.work.path / SMALLER) if is_both else None
