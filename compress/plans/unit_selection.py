"""Selection of the hidden units that stay, from a score for each unit of each FFN: the routed experts of a layer and, where
it is included, the FFN that every token uses (DecoderConfig.ffn_widths).

All units of one width cost the same bytes, so the budget is a share of units. Units leave in blocks of `multiple`, the
cheapest of an FFN first, so that every width that stays is a multiple. Scope "global" ranks the blocks of all layers
together by their mean score, "layer" those of each layer, and "uniform" keeps the same number of units in every expert, in
every shared expert and in every dense FFN: a plain checkpoint, unless the family's config cannot say that width. Where the
experts of a layer must have one width (`even`), a block of each leaves together with those of the same rank in the layer's
other experts.

Shape suffixes: F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import TYPE_CHECKING, NamedTuple

from compress.plans.plan import Plan, PlannedExpert, kept_expert, narrowed_expert
from compress.plans.selection import INCLUDED, LARGEST_MULTIPLE
from engine.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.families.config import DecoderConfig

LEAST_BLOCKS = 8
"""Number of blocks of an FFN, at least, with the multiple that is the default."""

Widths = Mapping[int, Sequence[int]]
"""Width of each FFN by decoder layer index."""
Routed = Mapping[int, int]
"""Number of routed experts by decoder layer index. An FFN after them is one that every token uses, and never leaves."""


class Block(NamedTuple):
    """Some units of an FFN that stay or leave together."""

    score: float
    """Mean score of the units."""
    layer: int
    number: int
    """Number of the FFN within its layer."""
    size: int


def default_multiple(widths: Widths, fits: Callable[[int], bool] = lambda multiple: True) -> int:
    """Return the largest power of two, up to LARGEST_MULTIPLE, with which every FFN has LEAST_BLOCKS blocks or more.

    fits: whether the weights of an FFN can be stored with a number of hidden units. The result is the next number that fits,
    where one up to the narrowest FFN does.
    """
    narrowest = min(width for own in widths.values() for width in own)
    powers = takewhile(lambda power: power <= min(LARGEST_MULTIPLE, narrowest / LEAST_BLOCKS), (2**n for n in count()))
    usual = max(powers, default=1)
    return next(filter(fits, range(usual, narrowest + 1)), usual)


def fitting_multiple(
    asked: int | None, widths: Widths, fits: Callable[[int], bool], other: str = "another --group-size"
) -> int:
    """Return the multiple of hidden units that FFNs keep, by default `default_multiple`.

    other: an option that helps too, for the error. Raises OptionError where rounded weights of so many units do not fit.
    """
    usual = default_multiple(widths, fits)
    multiple = usual if asked is None else asked
    if multiple >= 1 and not fits(multiple):
        raise OptionError(
            f"unit-multiple is {multiple}, and rounded weights of {multiple} hidden units do not fill whole groups; take "
            f"--unit-multiple {usual}, or {other}"
        )
    return multiple


def check_units(
    sparsity: float, scope: str, multiple: int, widths: Widths, min_experts: int | None = None, routed: Routed | None = None
) -> None:
    """Raise OptionError unless the FFNs can be cut to this share of their units.

    min_experts: fewest experts that a layer keeps where whole experts may leave; None where every expert stays. routed: None
    where all FFNs are routed experts.
    """
    if multiple < 1:
        raise OptionError(f"unit-multiple is {multiple}; it must be at least 1")
    narrowest = min(width for own in widths.values() for width in own)
    if multiple > narrowest:
        raise OptionError(f"unit-multiple is {multiple}, and the narrowest expert has {narrowest} hidden units; lower it")
    if scope == "uniform":
        for part in _kinds(widths, routed):
            _check_uniform(sparsity, multiple, part)
        return
    parts = [widths] if scope == "global" else [{layer: own} for layer, own in widths.items()]
    for part in parts:
        units = sum(map(sum, part.values()))
        experts = sum(_least_staying(layer, len(own), min_experts, routed) for layer, own in part.items())
        if units - sparsity * units < experts * multiple:
            where = "" if scope == "global" else f"layer {next(iter(part))}: "
            raise OptionError(
                f"{where}a sparsity of {sparsity} would keep {units - round(sparsity * units)} hidden units, and {experts} "
                f"experts of at least {multiple} need {experts * multiple}; lower the sparsity or --unit-multiple"
            )


def _kinds(widths: Widths, routed: Routed | None) -> Iterator[Widths]:
    """Yield the widths of routed experts, of shared experts and of dense FFNs, of those that there are."""
    if routed is None:
        yield widths
        return
    experts = {layer: own[: routed[layer]] for layer, own in widths.items() if layer in routed}
    shared = {layer: own[routed[layer] :] for layer, own in widths.items() if len(own) > routed.get(layer, len(own))}
    dense = {layer: own for layer, own in widths.items() if layer not in routed}
    yield from (kind for kind in (experts, shared, dense) if kind)


def _least_staying(layer: int, networks: int, min_experts: int | None, routed: Routed | None) -> int:
    """Return the fewest FFNs of a layer that stay."""
    if min_experts is None:
        return networks
    experts = networks if routed is None else routed.get(layer, 0)
    return min(min_experts, experts) + networks - experts


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
    scores: Mapping[int, Sequence[Tensor]],
    sparsity: float,
    scope: str,
    multiple: int,
    min_experts: int | None = None,
    routed: Routed | None = None,
    *,
    even: bool = False,
) -> dict[int, list[list[int]]]:
    """Return the units of each FFN that stay, ascending, by decoder layer index; an expert that leaves has none.

    scores: [F] for each FFN of a layer; units with higher scores are kept. sparsity: share of all units to remove. It is
    reached to within one block. scope: "global", "layer" or "uniform". min_experts: fewest experts that a layer keeps where
    whole experts may leave; None where every expert keeps one block at least. routed: None where all FFNs are routed
    experts. even: whether the FFNs of a layer, which have one width, keep one width.

    Raises OptionError where the budget does not fit.
    """
    widths = {layer: [len(own) for own in experts] for layer, experts in scores.items()}
    check_units(sparsity, scope, multiple, widths, min_experts, routed)
    kept: dict[int, list[int]] = {layer: [] for layer in widths}

    def ranked(part: Mapping[int, Sequence[Tensor]]) -> dict[int, list[int]]:
        return (
            _even_widths(part, sparsity, multiple) if even else _kept_widths(part, sparsity, multiple, min_experts, routed)
        )

    if scope == "uniform":
        for part in _kinds(widths, routed):  # the FFN that every token uses follows the experts, as in `scores`
            for layer, own in part.items():
                kept[layer] += [uniform_width(sparsity, multiple, part)] * len(own)
    elif scope == "layer":
        for layer, own_scores in scores.items():
            kept |= ranked({layer: own_scores})
    else:
        kept = ranked(scores)
    return {
        layer: [_best(own, width) for own, width in zip(own_scores, kept[layer], strict=True)]
        for layer, own_scores in scores.items()
    }


def _best(scores_F: Tensor, width: int) -> list[int]:
    return sorted(scores_F.argsort(descending=True, stable=True)[:width].tolist())


def _even_widths(scores: Mapping[int, Sequence[Tensor]], sparsity: float, multiple: int) -> dict[int, list[int]]:
    """Return the width of each FFN, where those of a layer keep one width.

    A layer counts as one FFN, whose worst unit has the mean score of the worst units of all of them, and so on.
    """
    counts = {layer: len(networks) for layer, networks in scores.items()}
    means = {layer: [sum(own.double().sort().values for own in each) / len(each)] for layer, each in scores.items()}
    kept = _kept_widths(means, sparsity, multiple, None, None, counts)  # type: ignore[arg-type]
    return {layer: own * counts[layer] for layer, own in kept.items()}


def _kept_widths(
    scores: Mapping[int, Sequence[Tensor]],
    sparsity: float,
    multiple: int,
    min_experts: int | None,
    routed: Routed | None,
    alike: Mapping[int, int] | None = None,
) -> dict[int, list[int]]:
    """Return the width of each FFN, after the blocks with the lowest mean scores have left.

    Where scores are equal, blocks of earlier layers and of FFNs with lower numbers stay. alike: the number of FFNs that one
    of a layer stands for, if it is not one.
    """
    kept = {layer: [len(own) for own in networks] for layer, networks in scores.items()}
    each = dict.fromkeys(kept, 1) if alike is None else alike
    left = round(sparsity * sum(each[layer] * sum(own) for layer, own in kept.items()))
    blocks = [block for layer, networks in scores.items() for block in _blocks(layer, networks, multiple)]
    remaining = {layer: len(own) if routed is None else routed.get(layer, 0) for layer, own in kept.items()}
    routed = dict(remaining)
    for block in sorted(blocks, key=lambda block: (block.score, -block.layer, -block.number)):
        if block.size * each[block.layer] > left:
            break
        is_last, stays = kept[block.layer][block.number] == block.size, block.number >= routed[block.layer]
        if is_last and (stays or min_experts is None or remaining[block.layer] <= min_experts):
            continue
        remaining[block.layer] -= is_last
        kept[block.layer][block.number] -= block.size
        left -= block.size * each[block.layer]
    return kept


def _blocks(layer: int, networks: Sequence[Tensor], multiple: int) -> list[Block]:
    """Return the blocks of every FFN, in the order in which they leave.

    The first has the units beyond the largest multiple, or `multiple` units where there are none.
    """
    found = []
    for number, scores_F in enumerate(networks):
        ascending_F = scores_F.double().sort().values
        first = len(scores_F) % multiple
        sizes = [first] * bool(first) + [multiple] * (len(scores_F) // multiple)
        found += [Block(float(own.mean()), layer, number, len(own)) for own in ascending_F.split(sizes)]
    return found


def included(plan: Plan, config: DecoderConfig) -> tuple[str, ...]:
    """Return the kinds of FFNs beside the routed experts that lose units by a plan, in the order of INCLUDED."""
    kinds = {"shared" if layer in config.moe_layers else "dense" for layer in plan.common}
    return tuple(kind for kind in INCLUDED if kind in kinds)


def units_plan(kept: Mapping[int, Sequence[Sequence[int]]], widths: Widths, common: Mapping[int, int] | None = None) -> Plan:
    """Return the plan that keeps these units of each FFN. Experts without units leave, and whole FFNs stay as they are.

    widths: those of the routed experts. common: those of the FFNs that every token uses, which follow in `kept` where they
    are included.
    """

    def planned(expert: int, units: Sequence[int], width: int) -> PlannedExpert:
        return kept_expert(expert) if len(units) == width else narrowed_expert(expert, units)

    layers = {
        layer: tuple(
            planned(expert, units, width)
            for expert, (units, width) in enumerate(zip(kept[layer], own, strict=False))  # a common FFN may follow
            if units
        )
        for layer, own in widths.items()
    }
    others = {layer: own[-1] for layer, own in kept.items() if len(own) > len(widths.get(layer, ()))}
    return Plan(layers, common={layer: tuple(own) for layer, own in others.items() if common and len(own) < common[layer]})
