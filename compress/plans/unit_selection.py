"""Selection of the hidden units that stay, from a score for each unit of each expert.

All units of one width cost the same bytes, so the budget is a share of units. Units leave in blocks of `multiple`, the
cheapest of an expert first, so that every width that stays is a multiple. Scope "global" ranks the blocks of all layers
together by their mean score, "layer" those of each layer, and "uniform" keeps the same number of units in every expert:
a plain checkpoint.

Shape suffixes: F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import TYPE_CHECKING, NamedTuple

from compress.plans.plan import Plan, PlannedExpert, kept_expert, narrowed_expert
from compress.plans.selection import LARGEST_MULTIPLE
from engine.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

LEAST_BLOCKS = 8
"""Number of blocks of an expert, at least, with the multiple that is the default."""

Widths = Mapping[int, Sequence[int]]
"""Width of each expert by decoder layer index."""


class Block(NamedTuple):
    """Some units of an expert that stay or leave together."""

    score: float
    """Mean score of the units."""
    layer: int
    expert: int
    size: int


def default_multiple(widths: Widths) -> int:
    """Return the largest power of two, up to LARGEST_MULTIPLE, with which every expert has LEAST_BLOCKS blocks or more."""
    narrowest = min(width for own in widths.values() for width in own)
    powers = takewhile(lambda power: power <= min(LARGEST_MULTIPLE, narrowest / LEAST_BLOCKS), (2**n for n in count()))
    return max(powers, default=1)


def check_units(sparsity: float, scope: str, multiple: int, widths: Widths, min_experts: int | None = None) -> None:
    """Raise OptionError unless the experts can be cut to this share of their units.

    min_experts: fewest experts that a layer keeps where whole experts may leave; None where every expert stays.
    """
    if multiple < 1:
        raise OptionError(f"unit-multiple is {multiple}; it must be at least 1")
    narrowest = min(width for own in widths.values() for width in own)
    if multiple > narrowest:
        raise OptionError(f"unit-multiple is {multiple}, and the narrowest expert has {narrowest} hidden units; lower it")
    if scope == "uniform":
        _check_uniform(sparsity, multiple, widths)
        return
    parts = [widths] if scope == "global" else [{layer: own} for layer, own in widths.items()]
    for part in parts:
        units = sum(map(sum, part.values()))
        experts = sum(len(own) if min_experts is None else min(min_experts, len(own)) for own in part.values())
        if units - sparsity * units < experts * multiple:
            where = "" if scope == "global" else f"layer {next(iter(part))}: "
            raise OptionError(
                f"{where}a sparsity of {sparsity} would keep {units - round(sparsity * units)} hidden units, and {experts} "
                f"experts of at least {multiple} need {experts * multiple}; lower the sparsity or --unit-multiple"
            )


def _check_uniform(sparsity: float, multiple: int, widths: Widths) -> None:
    kept, found = uniform_width(sparsity, multiple, widths), {width for own in widths.values() for width in own}
    if not kept:
        raise OptionError(
            f"a sparsity of {sparsity} would keep less than one multiple of {multiple} hidden units in each expert of "
            f"{max(found)}; lower the sparsity or --unit-multiple"
        )
    if kept > min(found) or kept >= max(found):
        raise OptionError(
            f"a uniform result would keep {kept} hidden units in each expert, and the narrowest has {min(found)}; raise the "
            "sparsity, lower --unit-multiple, or leave out --uniform"
        )


def uniform_width(sparsity: float, multiple: int, widths: Widths) -> int:
    """Return the width of every expert of a uniform result: the multiple that is nearest to the share of the mean width."""
    every = [width for own in widths.values() for width in own]
    return multiple * round((1.0 - sparsity) * sum(every) / len(every) / multiple)


def select_units(
    scores: Mapping[int, Sequence[Tensor]], sparsity: float, scope: str, multiple: int, min_experts: int | None = None
) -> dict[int, list[list[int]]]:
    """Return the units of each expert that stay, ascending, by decoder layer index; an expert that leaves has none.

    scores: [F] for each expert of a layer; units with higher scores are kept. sparsity: share of all units to remove. It is
    reached to within one block. scope: "global", "layer" or "uniform". min_experts: fewest experts that a layer keeps where
    whole experts may leave; None where every expert keeps one block at least.

    Raises OptionError where the budget does not fit.
    """
    widths = {layer: [len(own) for own in experts] for layer, experts in scores.items()}
    check_units(sparsity, scope, multiple, widths, min_experts)
    if scope == "uniform":
        width = uniform_width(sparsity, multiple, widths)
        kept = {layer: [width] * len(own) for layer, own in widths.items()}
    elif scope == "layer":
        kept = {}
        for layer, experts in scores.items():
            kept |= _kept_widths({layer: experts}, sparsity, multiple, min_experts)
    else:
        kept = _kept_widths(scores, sparsity, multiple, min_experts)
    return {
        layer: [_best(own, width) for own, width in zip(experts, kept[layer], strict=True)]
        for layer, experts in scores.items()
    }


def _best(scores_F: Tensor, width: int) -> list[int]:
    return sorted(scores_F.argsort(descending=True, stable=True)[:width].tolist())


def _kept_widths(
    scores: Mapping[int, Sequence[Tensor]], sparsity: float, multiple: int, min_experts: int | None
) -> dict[int, list[int]]:
    """Return the width of each expert, after the blocks with the lowest mean scores have left.

    Where scores are equal, blocks of earlier layers and of experts with lower numbers stay.
    """
    kept = {layer: [len(own) for own in experts] for layer, experts in scores.items()}
    left = round(sparsity * sum(map(sum, kept.values())))
    blocks = [block for layer, experts in scores.items() for block in _blocks(layer, experts, multiple)]
    remaining = {layer: len(own) for layer, own in kept.items()}
    for block in sorted(blocks, key=lambda block: (block.score, -block.layer, -block.expert)):
        if block.size > left:
            break
        is_last = kept[block.layer][block.expert] == block.size
        if is_last and (min_experts is None or remaining[block.layer] <= min_experts):
            continue
        remaining[block.layer] -= is_last
        kept[block.layer][block.expert] -= block.size
        left -= block.size
    return kept


def _blocks(layer: int, experts: Sequence[Tensor], multiple: int) -> list[Block]:
    """Return the blocks of every expert, in the order in which they leave.

    The first has the units beyond the largest multiple, or `multiple` units where there are none.
    """
    found = []
    for expert, scores_F in enumerate(experts):
        ascending_F = scores_F.double().sort().values
        first = len(scores_F) % multiple
        sizes = [first] * bool(first) + [multiple] * (len(scores_F) // multiple)
        found += [Block(float(own.mean()), layer, expert, len(own)) for own in ascending_F.split(sizes)]
    return found


def units_plan(kept: Mapping[int, Sequence[Sequence[int]]], widths: Widths) -> Plan:
    """Return the plan that keeps these units of each expert. Experts without units leave, and whole experts stay copies."""

    def planned(expert: int, units: Sequence[int], width: int) -> PlannedExpert:
        return kept_expert(expert) if len(units) == width else narrowed_expert(expert, units)

    return Plan(
        {
            layer: tuple(planned(index, own, widths[layer][index]) for index, own in enumerate(units) if own)
            for layer, units in kept.items()
        }
    )
