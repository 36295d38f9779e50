"""Policies of an expert cache: which expert in memory is evicted when another one is read.

A key is (layer, expert). A cache tells its policy when a layer's step begins (`visit`), which experts the step uses (`use`,
in memory or not), and which enter and leave memory (`add`, `remove`); `victim` returns the expert to evict. The
experts of one step are needed together, so none of them is evicted for another: they are pinned.

`Worth` is the default. It estimates how likely each expert is to be used the next time its layer runs. `Recency` and
`Frequency` are the usual LRU and LFU. `Hindsight` knows the future of a recorded trace, and is the bound that the others are
compared with (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol

Key = tuple[int, int]
"""(decoder layer, expert)."""
Step = tuple[int, Sequence[int]]
"""(decoder layer, the experts that one token, or the tokens of one batch, chose there)."""
Trace = Sequence[Step]
"""Steps in the order in which they ran: all layers of one token, then those of the next."""
NOTHING: Container[Key] = frozenset()


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

    def victim(self, pinned: Container[Key] = NOTHING) -> Key | None:
        """Return the expert in memory to evict next, or None if all are pinned. It stays until `remove`."""


class Recency:
    """LRU: the expert that was used least recently is evicted. Pinned experts are passed over one by one."""

    def __init__(self) -> None:
        self._resident: OrderedDict[Key, None] = OrderedDict()

    def visit(self, layer: int) -> None:
        """Begin a step, which changes nothing here."""

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


class Frequency:
    """LFU with dynamic aging: rank = uses while in memory + the rank of the last expert that was evicted.

    Experts that were often used long ago are passed by new ones in the end (Arlitt et al., "Evaluating content management
    techniques for Web proxy caches", 2000).
    """

    def __init__(self) -> None:
        self._ranking, self._uses, self._age = _Ranking(), defaultdict[Key, int](int), 0.0

    def visit(self, layer: int) -> None:
        """Begin a step, which changes nothing here."""

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


class _LayerWorth:
    """The experts of one layer. Time is counted in steps of this layer."""

    def __init__(self) -> None:
        self.clock = 0
        self.turn = 0  # number of the last step among those of all layers
        self.weight: dict[Key, float] = {}  # log2 of Σ 2^(t/half-life) over the steps t that used an expert
        self.last: set[Key] = set()  # used by the last step
        self.others = _Ranking()  # in memory, and not used by the last step
        self.resident: set[Key] = set()
        self.least: tuple[float, int, Key] | None = None  # the candidate for eviction, while it is known


class Worth:
    """Evict the expert that is least likely to be used when its layer runs next.

    The estimate for an expert is (1 − r) · f + r · l. f is its share of its layer's steps, with weights that halve every
    `half_life` steps, l is 1 if the last step of the layer used it and otherwise 0, and r is `recency`. Uses count whether
    the expert was in memory or not. Time is counted by layer: an expert is as old as its layer has run without it, so
    experts of layers whose turn comes next are not older than others. If estimates are equal in nine digits, the layer that
    has just run loses its expert, because its next turn is the furthest away.

    `victim` takes O(L + log n) time, where L is the number of layers.
    """

    def __init__(self, half_life: float = 32.0, recency: float = 0.3) -> None:
        self._half_life, self._recency = half_life, recency
        self._new = 1.0 - 2.0 ** (-1.0 / half_life)  # 1 / the sum of the weights of endlessly many steps
        self._layers: defaultdict[int, _LayerWorth] = defaultdict(_LayerWorth)
        self._turn = 0

    def visit(self, layer: int) -> None:
        """Begin a step of one layer: all of its experts are one step older."""
        own = self._layers[layer]
        for key in own.last & own.resident:
            own.others.set(key, own.weight[key])
        self._turn += 1
        own.clock, own.turn, own.last, own.least = own.clock + 1, self._turn, set(), None

    def use(self, key: Key) -> None:
        """Count a use in the layer's running step, once."""
        own = self._layers[key[0]]
        if key in own.last:
            return
        own.last.add(key)
        own.others.ranks.pop(key, None)
        before, now = own.weight.get(key, -math.inf), own.clock / self._half_life
        own.weight[key] = max(before, now) + math.log2(1.0 + 2.0 ** -abs(before - now))
        own.least = None

    def add(self, key: Key) -> None:
        """Make an expert a candidate for eviction. One that was never used has no worth."""
        own = self._layers[key[0]]
        own.resident.add(key)
        if key not in own.last:
            own.others.set(key, own.weight.get(key, -math.inf))
        own.least = None

    def remove(self, key: Key) -> None:
        """Make an expert no candidate; its uses are remembered."""
        own = self._layers[key[0]]
        own.resident.remove(key)
        own.others.ranks.pop(key, None)
        own.least = None

    def victim(self, pinned: Container[Key] = NOTHING) -> Key | None:
        """Return the expert with the lowest estimate."""
        found = [least for own in self._layers.values() if (least := self._least(own, pinned)) is not None]
        return min(found)[2] if found else None

    def worth(self, key: Key) -> float:
        """Return the estimated probability that the next step of its layer uses an expert."""
        own = self._layers[key[0]]
        weights = (1.0 - 2.0 ** (-own.clock / self._half_life)) / self._new  # of all steps of the layer
        share = 2.0 ** (own.weight[key] - own.clock / self._half_life) / weights if key in own.weight else 0.0
        return round((1.0 - self._recency) * share + self._recency * (key in own.last), 9)

    def _least(self, own: _LayerWorth, pinned: Container[Key]) -> tuple[float, int, Key] | None:
        """Return (estimate, −turn, key) of a layer's candidate, or None.

        It is remembered if no pinned expert is passed over.
        """
        if own.least is not None and own.least[2] not in pinned:
            return own.least
        old, passed = own.others.first(pinned)
        recent = own.last & own.resident
        free = [key for key in recent if key not in pinned]
        found = min(((self.worth(key), -own.turn, key) for key in ([] if old is None else [old]) + free), default=None)
        own.least = None if passed or len(free) < len(recent) else found
        return found


class Hindsight:
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
