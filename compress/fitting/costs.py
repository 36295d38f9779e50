"""The table of `compress fit`: what every option of every item costs, and how large it is.

An item is a routed expert, or the other matrices of one kind: the query projections of all layers, say, the down projections
of shared experts, or the embedding. The last item, with a single option, is everything that is never rounded. An option of
an expert says how many of its hidden units stay, and the bits of its two parts. Its cost is the sum of

- the costs of the hidden units that go, each when it was removed and all others made up for it (unit_obs.py);
- the cost of rounding each part of the expert (rounding_costs.py).

The cost of rounding the other matrices of a kind is measured (divergence.py). All costs are nats per token, and predict the
KL divergence between the predictions of the model and of the result. Interactions are left out; `Corrections` make up for
them after a first result was measured.

Shape suffixes: I items, G groups of items, O options, F expert width, B widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from compress.fitting.choices import Limit, choose
from compress.fitting.rounding_costs import DOWN, PARTS, READERS
from compress.fitting.sizes import Sizes, kept_levels
from compress.rounding.mixed_widths import kinds_of_others
from engine.errors import OptionError
from engine.kernels.stored.scheme import PLAIN_BITS

MOST_LEVELS = 16
"""Most numbers of hidden units that an expert may keep, beside none."""


OTHERS = -1
"""Stands for the layer of the other matrices."""
READ = "bytes read for a token"
"""Words for the second limited quantity."""
LOWERED_TIMES = 16
"""Most times that its limit is halved in an interval."""
NEAR = 0.002
"""Share of a limit of what is read that a choice may leave over."""


class Option(NamedTuple):
    """One way of storing an item. For other matrices, only `readers` counts."""

    units: int
    """Hidden units that stay; 0 for an expert that goes."""
    readers: int = PLAIN_BITS
    """Bits of the matrices that read the layer's input."""
    down: int = PLAIN_BITS
    """Bits of the down projection."""


class Divergence(NamedTuple):
    """A divergence in two parts, in nats per token."""

    removal: float = 0.0
    """The part of removing hidden units and experts."""
    rounding: float = 0.0


class Factors(NamedTuple):
    """Ratios of a layer's measured divergences to the predicted ones."""

    removal: float = 1.0
    rounding: float = 1.0


Corrections = Mapping[int, Factors]
"""Factors by layer, or OTHERS. Layers that are not named have factors of 1."""
NO_FACTORS = Factors()
NOT_CORRECTED: Corrections = {}


@dataclass(frozen=True)
class Item:
    """The options of one expert, or of other matrices (layer OTHERS), with their costs and sizes."""

    layer: int
    number: int
    """Number of the expert in its layer, or of the kind of other matrices; what is never rounded comes after all kinds."""
    options: list[Option]
    removal: list[float]
    """Cost of the hidden units that go, by option."""
    rounding: list[float]
    """Cost of rounding, by option."""
    bytes: list[int]
    read: list[float]
    """Bytes that a token reads, on average, by option. Tokens of an expert that goes read others, at least as many."""
    share: float = 1.0
    """Share of the tokens that choose the expert; 1 for other matrices."""
    rows: int = 0
    """Bytes of the expert's rows of the router: they count in `bytes` and `read`, and every token reads them."""

    def keeping_all(self) -> Item:
        """Return the item with the options that have the most hidden units."""
        most = max(option.units for option in self.options)
        places = [place for place, option in enumerate(self.options) if option.units == most]
        columns = (self.options, self.removal, self.rounding, self.bytes, self.read)
        kept = ([column[place] for place in places] for column in columns)
        return Item(self.layer, self.number, *kept, self.share, self.rows)  # type: ignore[call-arg,arg-type]


@dataclass(frozen=True)
class Table:
    """All items."""

    items: list[Item]
    by_layer: bool = False
    """Whether the experts of a layer all get the same one of their options, of which they have equally many."""

    def costs(self, corrections: Corrections = NOT_CORRECTED) -> Tensor:
        """Return the cost of each option, [I, O] float64; infinity where an item has fewer options."""
        rows = []
        for item in self.items:
            factors, pairs = corrections.get(item.layer, NO_FACTORS), zip(item.removal, item.rounding, strict=True)
            rows.append([factors.removal * removal + factors.rounding * rounding for removal, rounding in pairs])
        return _padded(rows, torch.inf)

    def chosen(self, size: float | None, read: float | None, corrections: Corrections = NOT_CORRECTED) -> list[Option]:
        """Return the option of each item within the limits, in bytes. Raises OptionError for an impossible limit.

        Sums over items leave out where the tokens of experts that go are read instead (`read_bytes`). A choice that reads
        too much with them is made anew with lower limits of the sum, by bisection, and of those that keep the limit the one
        with the highest limit is taken: of all options or, where none keeps it, of those that remove nothing.
        """
        options = self._chosen(size, read, corrections)
        if read is None or self.read_bytes(options) <= read:
            return options
        found, low, high = None, self._least_read(), read
        for _ in range(LOWERED_TIMES):
            middle = (low + high) / 2
            try:
                options = self._chosen(size, middle, corrections)
            except OptionError:  # the limit of the size leaves no choice that reads so little
                low = middle
                continue
            if (reads := self.read_bytes(options)) <= read:
                found, low = options, middle
            else:
                high = middle
            if found is not None and reads >= (1 - NEAR) * read and reads <= read:
                return found
        if found is None:
            found = self.without_removal()._chosen(size, read, corrections)  # here the sums leave nothing out
        return found

    def _least_read(self) -> float:
        """Return the smallest sum over the items of bytes that a token reads."""
        return sum(min(item.read) for item in self.items)

    def _chosen(self, size: float | None, read: float | None, corrections: Corrections) -> list[Option]:
        """Return the option of each item within limits of sums over the items."""
        groups_I = self._groups

        def summed(values_IO: Tensor) -> Tensor:
            """Return the sums over the items of each group, [G, O]."""
            return values_IO.new_zeros(int(groups_I.max()) + 1, values_IO.shape[1]).index_add_(0, groups_I, values_IO)

        costs_GO, limits = summed(self.costs(corrections)), list[Limit]()
        if size is not None:
            limits.append(Limit(summed(_padded([item.bytes for item in self.items], 0.0)), size, "bytes"))
        if read is not None:
            limits.append(Limit(summed(_padded([item.read for item in self.items], 0.0)), read, READ))
        choice_G = choose(costs_GO, limits).tolist()
        return [item.options[choice_G[group]] for item, group in zip(self.items, groups_I.tolist(), strict=True)]

    @property
    def _groups(self) -> Tensor:
        """Return the group of each item, int64 [I]: items of a group get the same option."""
        own = [item.layer if self.by_layer and item.layer != OTHERS else (item.layer, item.number) for item in self.items]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(own))}
        return torch.tensor([numbers[group] for group in own])

    def without_removal(self) -> Table:
        """Return a table of the options that keep all hidden units."""
        return Table([item.keeping_all() for item in self.items], self.by_layer)

    def unchanged(self) -> list[Option] | None:
        """Return the choice of the model as it is; None where matrices may not stay as they are."""
        whole = [Option(max(own.units for own in item.options)) for item in self.items]
        return whole if all(own in item.options for item, own in zip(self.items, whole, strict=True)) else None

    def predicted(self, options: Sequence[Option]) -> dict[int, Divergence]:
        """Return the predicted divergences of removing hidden units and of rounding, by layer, without corrections."""
        found: dict[int, Divergence] = {}
        for item, place in self._places(options):
            removal, rounding = found.get(item.layer, Divergence())
            found[item.layer] = Divergence(removal + item.removal[place], rounding + item.rounding[place])
        return found

    def predicted_total(self, options: Sequence[Option], corrections: Corrections) -> float:
        """Return the predicted divergence of a choice."""
        pairs = ((own, corrections.get(layer, NO_FACTORS)) for layer, own in self.predicted(options).items())
        return sum(own.removal * factors.removal + own.rounding * factors.rounding for own, factors in pairs)

    def total_bytes(self, options: Sequence[Option]) -> int:
        """Return the bytes of a choice."""
        return sum(item.bytes[place] for item, place in self._places(options))

    def least_and_most(self) -> tuple[int, int]:
        """Return the smallest and the largest total bytes of any choice."""
        return sum(min(item.bytes) for item in self.items), sum(max(item.bytes) for item in self.items)

    def read_bytes(self, options: Sequence[Option]) -> float:
        """Return the bytes that a token reads of a choice, on average.

        A token reads as many experts of a layer as before, or all that stay. Those that chose an expert that goes are
        taken to choose the others in proportion to their shares.
        """
        found, layers = 0.0, dict[int, list[_Reading]]()
        for item, place in self._places(options):
            if item.layer == OTHERS:
                found += item.read[place]
                continue
            staying = bool(item.bytes[place])
            found += staying * item.rows
            own = item.bytes[place] - item.rows, item.read[place] - item.rows
            layers.setdefault(item.layer, []).append(_Reading(item.share, *own) if staying else _Reading(item.share, 0, 0.0))
        return found + sum(map(_read_of_layer, layers.values()))

    def _places(self, options: Sequence[Option]) -> Iterator[tuple[Item, int]]:
        """Yield each item with the place of its option."""
        for item, option in zip(self.items, options, strict=True):
            yield item, item.options.index(option)


class _Reading(NamedTuple):
    """Reads of an expert, without its rows of the router."""

    share: float
    """Share of the tokens that chose it."""
    bytes: int
    """Bytes of one that stays; 0 for one that goes."""
    read: float
    """Bytes that a token reads on average, while the others stay too."""


def _read_of_layer(experts: Sequence[_Reading]) -> float:
    """Return the bytes that a token reads of a layer's experts, without the router."""
    staying = [own for own in experts if own.bytes]
    chosen, known = (sum(each.share for each in own) for own in (experts, staying))
    if not known:  # no token of the text chose any that stays
        return chosen * sum(own.bytes for own in staying) / max(len(staying), 1)
    return min(chosen, len(staying)) / known * sum(own.read for own in staying)


def _padded(rows: Sequence[Sequence[float]], value: float) -> Tensor:
    most = max(map(len, rows))
    return torch.tensor([[*map(float, row), *[value] * (most - len(row))] for row in rows], dtype=torch.float64)


def table(
    sizes: Sizes,
    widths: Sequence[int],
    scores: Mapping[int, Sequence[Tensor]],
    rounding: Mapping[int, Mapping[str, Tensor]],
    shares: Mapping[int, Sequence[float]],
    others: Mapping[str, Mapping[int, float]],
    *,
    multiple: int | None,
    least_experts: int,
    keeps_plain: bool,
    by_layer: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Table:
    """Return the table.

    widths: the bits to choose from, below 16, in the order of `rounding`. scores: of hidden units, in nats per token, [F]
    for each expert, by layer. rounding: costs [N, B] of each part, by layer. shares: of the tokens that each expert gets.
    others: cost of rounding the other matrices of each kind, by bits. multiple: of hidden units that stay; None where none
    may go. least_experts: how many experts of a layer stay at least; those whose removal costs most cannot go. keeps_plain:
    whether matrices may stay as they are. by_layer: see `Table`; no units may go then.
    """
    plain, items = {PLAIN_BITS: 0.0} if keeps_plain else {}, []
    for layer in progress(list(scores)):
        own_scores = scores[layer]
        whole = torch.tensor([float(own.sum()) for own in own_scores])
        staying = set(whole.argsort(descending=True, stable=True)[:least_experts].tolist())
        for number, score_F in enumerate(own_scores):
            costs = {part: plain | _by_bits(widths, rounding[layer][part][number]) for part in PARTS}
            may_go = multiple is not None and number not in staying
            items.append(_expert(sizes, layer, number, score_F, costs, shares[layer][number], multiple, may_go=may_go))
    for number, (kind, own) in enumerate(others.items()):
        known = plain | dict(own)
        items.append(
            Item(
                *(OTHERS, number, [Option(0, bits) for bits in known], [0.0] * len(known), [*known.values()]),
                [sizes.others(kind, bits) for bits in known],
                [sizes.read.read_of_others(kind, bits) for bits in known],
            )
        )
    fixed, read = sizes.never_rounded(), float(sizes.read.never_rounded())
    items.append(Item(OTHERS, len(others), [Option(0)], [0.0], [0.0], [fixed], [read]))
    return Table(items, by_layer)


def least_bytes(sizes: Sizes, bits: Sequence[int], *, multiple: int | None, least_experts: int) -> int:
    """Return the bytes of the smallest choice, or fewer where costs decide which experts of different sizes stay.

    bits: the widths to choose from, with PLAIN_BITS if matrices may stay as they are. The others are those of `table`.
    """
    config = sizes.checkpoint.config
    kinds = kinds_of_others(config)
    found = sizes.never_rounded() + sum(min(sizes.others(kind, own) for own in bits) for kind in kinds)
    for layer, experts in _smallest_experts(sizes, bits, multiple).items():
        staying = least_experts if multiple is not None else len(experts)
        found += sum(experts[:staying]) + staying * sizes.rows(layer)
    return found


def least_read(sizes: Sizes, bits: Sequence[int], *, multiple: int | None, least_experts: int) -> float:
    """Return bytes that a token reads at least, whatever is chosen; see `least_bytes` for the arguments."""
    config, sizes = sizes.checkpoint.config, sizes.read
    kinds = kinds_of_others(config)
    found = sizes.never_rounded() + sum(min(sizes.read_of_others(kind, own) for own in bits) for kind in kinds)
    for layer, experts in _smallest_experts(sizes, bits, multiple).items():
        moe = config.layers[layer].moe
        assert moe is not None
        staying = least_experts if multiple is not None else len(experts)
        found += sum(experts[: min(moe.experts_per_token, staying)]) + staying * sizes.rows(layer)
    return found


def _smallest_experts(sizes: Sizes, bits: Sequence[int], multiple: int | None) -> dict[int, list[int]]:
    """Return the least bytes of each expert that stays, without its rows of the router, ascending, by layer."""
    found = {}
    for layer, widths in sizes.checkpoint.config.ffn_widths().items():
        units = [width if multiple is None else kept_levels(width, multiple, MOST_LEVELS)[-1] for width in widths]
        found[layer] = sorted(
            min(sizes.expert(layer, number, own, *pair) for pair in product(bits, bits)) for number, own in enumerate(units)
        )
    return found


def _by_bits(widths: Sequence[int], cost_B: Tensor) -> dict[int, float]:
    return dict(zip(widths, cost_B.tolist(), strict=True))


def _expert(
    sizes: Sizes,
    layer: int,
    number: int,
    score_F: Tensor,
    rounding: Mapping[str, Mapping[int, float]],
    share: float,
    multiple: int | None,
    *,
    may_go: bool,
) -> Item:
    """Return the item of one expert. rounding: the cost of each part by bits."""
    lost_F = torch.cat([torch.zeros(1, dtype=torch.float64), score_F.double().sort().values.cumsum(0)]).tolist()
    options = [
        Option(units, *bits)
        for units in ([len(score_F)] if multiple is None else kept_levels(len(score_F), multiple, MOST_LEVELS))
        for bits in product(rounding[READERS], rounding[DOWN])
    ]
    options += [Option(0)] * may_go
    rows, size = sizes.rows(layer), [sizes.expert(layer, number, *option) for option in options]
    read = [sizes.read.expert(layer, number, *option) for option in options]
    least = min(own for own in read if own)
    return Item(
        *(layer, number, options),
        [lost_F[len(score_F) - option.units] for option in options],
        [_rounding_cost(option, rounding) for option in options],
        [own + rows if own else 0 for own in size],
        [share * own + rows if own else share * least for own in read],
        share,
        rows,
    )


def _rounding_cost(option: Option, rounding: Mapping[str, Mapping[int, float]]) -> float:
    """Return the cost of rounding an expert that stays, and 0 for one that goes."""
    return rounding[READERS][option.readers] + rounding[DOWN][option.down] if option.units else 0.0
