"""Policies of an expert cache: which expert in memory is evicted when another one is read.

A key is (layer, expert). A cache tells its policy when a layer's step begins (`visit`), which experts the step uses (`use`,
in memory or not), which enter and leave memory (`add`, `remove`), and what a layer loses by an absent expert (`price`);
`victim` returns the expert to evict. The experts of one step are needed together, so none of them is evicted for another:
they are pinned.

`Worth` is the default. It estimates how likely each expert is to be used the next time its layer runs. `Recency` and
`Frequency` are the usual LRU and LFU. `Hindsight` knows the future of a recorded trace, and is the bound that the others are
compared with (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).

Shape suffixes: L layers, R some of them, N experts.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

Key = tuple[int, int]
"""(decoder layer, expert)."""
Step = tuple[int, Sequence[int]]
"""(decoder layer, the experts that one token, or the tokens of one batch, chose there)."""
Trace = Sequence[Step]
"""Steps in the order in which they ran: all layers of one token, then those of the next."""
NOTHING: Container[Key] = frozenset()
EQUAL = 1e-9
"""Difference up to which two estimates may be equal."""
MOST_RANKED = 16
"""Experts that `Worth` ranks at once."""
_RESIDENT_FOR_ONE_RANKED = 32
"""Experts in memory for each ranked one, so that evicting the ranked ones hardly changes the estimates."""


class Policy(Protocol):
    """The order in which experts leave memory. Calls take O(log n) time of n experts, unless a class says otherwise."""

    def visit(self, layer: int) -> None:
        """Begin a step of one layer; the uses that follow belong to it."""

    def use(self, key: Key) -> None:
        """Record that the running step uses an expert, whether or not it is in memory."""

    def add(self, key: Key) -> None:
        """Record that an expert is in memory now."""

    def remove(self, key: Key) -> None:
        """Record that an expert has left memory. Raises KeyError if it was not there."""

    def price(self, layer: int, factor: float) -> None:
        """Say how much time a layer loses by an absent expert, relative to the least that any layer loses."""

    def victim(self, pinned: Container[Key] = NOTHING) -> Key | None:
        """Return the expert in memory to evict next, or None if all are pinned. It stays until `remove`."""


class _AllLayersAlike:
    """A policy to which steps and prices of layers mean nothing."""

    def visit(self, layer: int) -> None:
        """Begin a step, which changes nothing here."""

    def price(self, layer: int, factor: float) -> None:
        """Change nothing."""


class Recency(_AllLayersAlike):
    """LRU: the expert that was used least recently is evicted. Pinned experts are passed over one by one."""

    def __init__(self) -> None:
        self._resident: OrderedDict[Key, None] = OrderedDict()

    def use(self, key: Key) -> None:
        """Make the expert the last one, if it is in memory."""
        if key in self._resident:
            self._resident.move_to_end(key)

    def add(self, key: Key) -> None:
        """Make the expert the last one."""
        self._resident[key] = None
        self._resident.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forget the expert."""
        del self._resident[key]

    def victim(self, pinned: Container[Key] = NOTHING) -> Key | None:
        """Return the first expert that is not pinned."""
        return next((key for key in self._resident if key not in pinned), None)


class _Ranking:
    """Experts by a rank, the lowest first. An entry whose rank has changed since stays in the heap until it is on top."""

    def __init__(self) -> None:
        self.ranks: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def set(self, key: Key, rank: float) -> None:
        """Add an expert, or give it another rank."""
        if self.ranks.get(key) == rank:
            return
        self.ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 2 * len(self.ranks):
            self._heap = [(rank, key) for key, rank in self.ranks.items()]
            heapq.heapify(self._heap)

    def first(self, pinned: Container[Key]) -> tuple[Key | None, bool]:
        """Return (the expert with the lowest rank that is not pinned, whether a pinned one was passed over)."""
        passed: list[tuple[float, Key]] = []
        found = None
        while self._heap and found is None:
            rank, key = self._heap[0]
            if self.ranks.get(key) != rank:
                heapq.heappop(self._heap)
            elif key in pinned:
                passed.append(heapq.heappop(self._heap))
            else:
                found = key
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found, bool(passed)


class Frequency(_AllLayersAlike):
    """LFU with dynamic aging: rank = uses while in memory + the rank of the last expert that was evicted.

    Experts that were often used long ago are passed by new ones in the end (Arlitt et al., "Evaluating content management
    techniques for Web proxy caches", 2000).
    """

    def __init__(self) -> None:
        self._ranking, self._uses, self._age = _Ranking(), defaultdict[Key, int](int), 0.0

    def use(self, key: Key) -> None:
        """Count a use, if the expert is in memory. `add` counts the use for which an expert is read."""
        if key in self._ranking.ranks:
            self.add(key)

    def add(self, key: Key) -> None:
        """Count the use for which an expert is read."""
        self._uses[key] += 1
        self._ranking.set(key, self._uses[key] + self._age)

    def remove(self, key: Key) -> None:
        """Forget the expert and its uses; its rank is the age of those that come."""
        self._age = max(self._age, self._ranking.ranks.pop(key))
        del self._uses[key]

    def victim(self, pinned: Container[Key] = NOTHING) -> Key | None:
        """Return the expert with the lowest rank."""
        return self._ranking.first(pinned)[0]


class Worth:
    """Evict the expert whose absence will cost the least time when its layer runs next.

    The estimate for an expert is c · ((1 − r) · f + r · l). c is the price of its layer, 1 at first. f is its share of its
    layer's steps, with weights that halve every `half_life` steps, l is 1 if the last step of the layer used it and
    otherwise 0, and r is `recency`. Uses count whether the expert was in memory or not. Time is counted by layer: an expert
    is as old as its layer has run without it, so experts of layers whose turn comes next are not older than others. If
    estimates are equal in nine digits, the layer that has just run loses its expert, because its next turn is the furthest
    away.

    `victim` takes O(n) time, in a few operations on arrays, which are slow beside the kernels that empty the processor's
    caches. So a large cache ranks a few experts at once, and evicts one after the other, but for those that were used since.
    """

    def __init__(self, half_life: float = 32.0, recency: float = 0.3) -> None:
        self._recency, self._decay = recency, 2.0 ** (-1.0 / half_life)
        self._rows: dict[int, int] = {}
        """The row of each layer in the arrays."""
        self._layers: list[int] = []
        self._estimates_LN = np.zeros((0, 0))
        """Estimates of experts in memory, and infinity elsewhere, but for the rows in `_stale`."""
        self._stale: set[int] = set()
        self._ranked: list[tuple[int, int]] = []
        """Places of experts in the arrays, in the order in which they leave."""
        self._highest = 0.0
        """The highest estimate among them when they were ranked."""
        self._prices_L = np.ones(0)
        self._counts_LN = np.zeros((0, 0))
        """Σ 2^(−age/half-life) over the steps of the layer that used an expert. Ages are counted in steps of the layer."""
        self._is_last_LN, self._is_resident_LN = np.zeros((0, 0), bool), np.zeros((0, 0), bool)
        self._weights_L = np.ones(0)
        """Sums of these weights over all steps of each layer."""
        self._turns: list[int] = []
        """The number of each layer's last step among those of all layers."""
        self._turn = 0

    def visit(self, layer: int) -> None:
        """Begin a step of one layer: all of its experts are one step older."""
        row = self._place((layer, 0))[0]
        self._turn += 1
        self._turns[row] = self._turn
        self._counts_LN[row] *= self._decay
        self._weights_L[row] = self._weights_L[row] * self._decay + 1.0
        self._is_last_LN[row] = False
        self._stale.add(row)

    def use(self, key: Key) -> None:
        """Count a use in the layer's running step, once."""
        place = self._place(key)
        if not self._is_last_LN[place]:
            self._is_last_LN[place] = True
            self._counts_LN[place] += 1.0

    def add(self, key: Key) -> None:
        """Make an expert a candidate for eviction. One that was never used has no worth."""
        place = self._place(key)
        self._is_resident_LN[place] = True
        self._stale.add(place[0])

    def remove(self, key: Key) -> None:
        """Make an expert no candidate; its uses are remembered."""
        place = self._place(key)
        if not self._is_resident_LN[place]:
            raise KeyError(key)
        self._is_resident_LN[place] = False
        self._estimates_LN[place] = np.inf

    def price(self, layer: int, factor: float) -> None:
        """Multiply the estimates of a layer by a factor from now on."""
        row = self._place((layer, 0))[0]
        self._prices_L[row] = factor
        self._stale.add(row)

    def victim(self, pinned: Container[Key] = NOTHING) -> Key | None:
        """Return the expert with the lowest estimate."""
        for place in self._ranked:
            key = self._layers[place[0]], place[1]
            if self._is_resident_LN[place] and key not in pinned and self._worth_at(place) <= self._highest:
                return key
        found = self._lowest(pinned)
        self._rank()
        return found

    def _rank(self) -> None:
        """Rank the experts that leave next, if so many are in memory that evicting a few hardly changes the estimates."""
        count = min(MOST_RANKED, int(self._is_resident_LN.sum()) // _RESIDENT_FOR_ONE_RANKED)
        self._ranked = []
        if count > 1:
            self._estimate()
            self._ranked = self._in_order(np.argpartition(self._estimates_LN, count, axis=None)[:count].tolist())
            self._highest = self._worth_at(self._ranked[-1])

    def _lowest(self, pinned: Container[Key]) -> Key | None:
        """Return the expert with the lowest estimate of all that are not pinned."""
        self._estimate()
        passed: list[tuple[int, int]] = []
        found = None
        while found is None and self._estimates_LN.size and (least := self._estimates_LN.min()) < np.inf:
            places = np.flatnonzero(self._estimates_LN <= least + 2 * EQUAL).tolist()  # a few more than are equal
            for row, number in self._in_order(places):
                if (self._layers[row], number) not in pinned:
                    found = self._layers[row], number
                    break
                self._estimates_LN[row, number] = np.inf
                passed.append((row, number))
        self._stale.update(row for row, _ in passed)
        return found

    def worth(self, key: Key) -> float:
        """Return the estimate for an expert: the probability that its layer's next step uses it, times the layer's price."""
        return self._worth_at(self._place(key))

    def _estimate(self) -> None:
        if self._stale:
            rows = sorted(self._stale)
            self._stale.clear()
            shares_RN = self._counts_LN[rows] / self._weights_L[rows].clip(1.0)[:, None]  # 0 before a layer's first step
            estimates_RN = (1.0 - self._recency) * shares_RN + self._recency * self._is_last_LN[rows]
            estimates_RN *= self._prices_L[rows][:, None]
            self._estimates_LN[rows] = np.where(self._is_resident_LN[rows], estimates_RN, np.inf)

    def _in_order(self, places: Iterable[int]) -> list[tuple[int, int]]:
        """Return row and column of places in the flat array of estimates, the one to evict first at the front."""
        found = [divmod(place, self._estimates_LN.shape[1]) for place in places]
        if len(found) > 1:
            found.sort(key=lambda at: (self._worth_at(at), -self._turns[at[0]], self._layers[at[0]], at[1]))
        return found

    def _worth_at(self, place: tuple[int, int]) -> float:
        share = float(self._counts_LN[place]) / max(1.0, float(self._weights_L[place[0]]))
        likely = (1.0 - self._recency) * share + self._recency * bool(self._is_last_LN[place])
        return round(float(self._prices_L[place[0]]) * likely, 9)

    def _place(self, key: Key) -> tuple[int, int]:
        """Return the place of an expert in the arrays, which grow for it."""
        layer, number = key
        row = self._rows.get(layer, -1)
        if row < 0 or number >= self._counts_LN.shape[1]:
            more = int(row < 0), max(0, number + 1 - self._counts_LN.shape[1])
            if row < 0:
                row = self._rows[layer] = len(self._layers)
                self._layers.append(layer)
                self._turns.append(0)
                self._weights_L, self._prices_L = np.append(self._weights_L, 0.0), np.append(self._prices_L, 1.0)
            every = self._counts_LN, self._is_last_LN, self._is_resident_LN
            self._counts_LN, self._is_last_LN, self._is_resident_LN = (
                np.pad(each, ((0, more[0]), (0, more[1]))) for each in every
            )
            self._estimates_LN = np.full(self._counts_LN.shape, np.inf)
            self._stale.update(range(len(self._layers)))
        return row, number


class Hindsight(_AllLayersAlike):
    """Evict the expert whose next use in a recorded trace is the furthest away: no policy has fewer misses.

    The calls of `visit` and `use` must follow the trace. Raises ValueError where a step is not the trace's.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace, self._place, self._ranking = trace, -1, _Ranking()
        self._uses: defaultdict[Key, list[int]] = defaultdict(list)
        for place, (layer, experts) in enumerate(trace):
            for expert in set(experts):
                self._uses[layer, expert].append(place)

    def visit(self, layer: int) -> None:
        """Go to the next step of the trace."""
        self._place += 1
        if self._place >= len(self._trace) or self._trace[self._place][0] != layer:
            raise ValueError(f"step {self._place} of the trace is not one of layer {layer}")

    def use(self, key: Key) -> None:
        """Look for the expert's next use, if it is in memory."""
        if key in self._ranking.ranks:
            self.add(key)

    def add(self, key: Key) -> None:
        """Look for the expert's next use."""
        uses = self._uses[key]
        after = bisect_right(uses, self._place)
        self._ranking.set(key, -float(uses[after]) if after < len(uses) else -math.inf)

    def remove(self, key: Key) -> None:
        """Forget the expert."""
        del self._ranking.ranks[key]

    def victim(self, pinned: Container[Key] = NOTHING) -> Key | None:
        """Return the expert that is not used for the longest time from now."""
        return self._ranking.first(pinned)[0]


DEFAULT = "worth"
BEST = "best"
"""The name of Hindsight in reports. It is no row of POLICIES, because it needs the trace."""
POLICIES: dict[str, Callable[[], Policy]] = {DEFAULT: Worth, "lru": Recency, "lfu": Frequency}
"""The policies that a cache can have, by name."""


class Simulated(NamedTuple):
    """Uses of experts that were in memory, and uses for which an expert was read."""

    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of uses that were in memory; 1 without uses."""
        return self.hits / max(1, self.hits + self.misses) if self.hits + self.misses else 1.0


class SimulatedCache:
    """Which experts are in a cache with room for so many, step by step. It is empty at first."""

    def __init__(self, slots: int, policy: Policy) -> None:
        self.slots = slots
        self.resident: set[Key] = set()
        self._policy = policy

    def step(self, layer: int, experts: Iterable[int]) -> int:
        """Let a step of one layer use experts together; return how many of them were missing, and are there now.

        Raises ValueError if the step uses more experts than there are slots.
        """
        wanted = {(layer, expert): None for expert in experts}  # in their order, each once
        if len(wanted) > self.slots:
            raise ValueError(
                f"a step of layer {layer} uses {len(wanted)} experts together, and there are {self.slots} slots"
            )
        self._policy.visit(layer)
        for key in wanted:
            self._policy.use(key)
        missing = [key for key in wanted if key not in self.resident]
        for key in missing:
            if len(self.resident) == self.slots:
                leaving = self._policy.victim(wanted)
                assert leaving is not None
                self._policy.remove(leaving)
                self.resident.remove(leaving)
            self._policy.add(key)
            self.resident.add(key)
        return len(missing)


def simulate(trace: Trace, slots: int, policy: Policy, uncounted: int = 0) -> Simulated:
    """Return hits and misses of a cache of so many experts, which is empty before the first step.

    uncounted: steps at the beginning, which fill the cache, whose uses are not counted. Raises ValueError if a step
    uses more experts than there are slots, because they are needed together.
    """
    hits = misses = 0
    cache = SimulatedCache(slots, policy)
    for place, (layer, experts) in enumerate(trace):
        missed = cache.step(layer, experts)
        if place >= uncounted:
            hits, misses = hits + len(set(experts)) - missed, misses + missed
    return Simulated(hits, misses)


def compared(trace: Trace, slots: int, names: Iterable[str] = POLICIES, *, uncounted: int = 0) -> dict[str, Simulated]:
    """Return what each policy reaches on a trace, and BEST, the best possible in hindsight. uncounted: as in `simulate`.

    BEST has the fewest misses over the whole trace, those of the first steps included.
    """
    found = {name: simulate(trace, slots, POLICIES[name](), uncounted) for name in names}
    return found | {BEST: simulate(trace, slots, Hindsight(trace), uncounted)}
