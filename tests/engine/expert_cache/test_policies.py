"""Policies of the expert cache: traces worked out by hand, a naive second implementation, and the bound of hindsight."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.expert_cache.policies import (
    BEST,
    MOST_RANKED,
    POLICIES,
    Frequency,
    Hindsight,
    Key,
    Policy,
    Recency,
    Simulated,
    Trace,
    Worth,
    compared,
    simulate,
)


def one_layer(text: str) -> Trace:
    """Return a trace of one layer whose steps use the experts of each word, such as "01 2"."""
    return [(0, [int(digit) for digit in word]) for word in text.split()]


STEPS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True)), max_size=40)


def test_recency_by_hand() -> None:
    # 0 and 1 are read; 0 is used again, so 2 takes the slot of 1; then 1 takes that of 0
    assert simulate(one_layer("0 1 0 2 0 1"), 2, Recency()) == Simulated(hits=2, misses=4)
    assert simulate(one_layer("0 1 2 0 1 2"), 2, Recency()) == Simulated(hits=0, misses=6)


def test_hindsight_by_hand() -> None:
    # 2 takes the slot of 1, whose next use is later than that of 0
    assert simulate(one_layer("0 1 2 0 1 2"), 2, Hindsight(one_layer("0 1 2 0 1 2"))) == Simulated(hits=2, misses=4)
    # 3 is never used again, but is pinned beside 0 while their step runs: 1 leaves, not 3
    trace = one_layer("01 03 0 1")
    assert simulate(trace, 2, Hindsight(trace)) == Simulated(hits=2, misses=4)


def test_frequency_by_hand() -> None:
    # ranks 3 of 0 and 1 of 1: 2 takes the slot of 1, and has rank 1 + 1, the rank of 1 when it left; then 3 takes that of 2
    policy = Frequency()
    assert simulate(one_layer("0 0 0 1 2 3 0"), 2, policy) == Simulated(hits=3, misses=4)
    # 3 came at age 2: its rank is 3, and 0 has now 4 + 2. Four more newcomers outlive what was used often long ago.
    assert policy.victim() == (0, 3)
    for expert, age in ((4, 3), (5, 4), (6, 5)):
        assert policy.victim() == (0, expert - 1)
        policy.remove((0, expert - 1))
        policy.add((0, expert))
        assert policy._age == age
    policy.use((0, 6))
    assert policy.victim() == (0, 0)


def test_worth_by_hand() -> None:
    """Half-life 1: steps weigh 1, 1/2, 1/4, 1/8 and 1/16 backwards from the last, 31/16 together."""
    policy = Worth(half_life=1.0, recency=0.0)
    assert simulate(one_layer("0 0 1 0 2"), 3, policy) == Simulated(hits=2, misses=3)
    assert [policy.worth((0, expert)) for expert in range(4)] == pytest.approx([11 / 31, 4 / 31, 16 / 31, 0], abs=1e-9)
    assert policy.victim() == (0, 1)
    assert policy.victim({(0, 1)}) == (0, 0)
    assert policy.victim({(0, 0), (0, 1), (0, 2)}) is None
    assert policy.victim() == (0, 1)
    policy.remove((0, 1))
    assert policy.victim() == (0, 0)
    policy.add((0, 9))  # was read ahead and never used
    assert policy.victim() == (0, 9)


@pytest.mark.parametrize(("recency", "victim"), [(0.0, 0), (0.6, 1)])
def test_worth_of_the_last_step(recency: float, victim: int) -> None:
    """1 has three of four steps and 0 has the last one."""
    policy = Worth(half_life=1e9, recency=recency)
    simulate(one_layer("1 1 1 0"), 2, policy)
    assert policy.worth((0, 1)) == pytest.approx((1 - recency) * 0.75)
    assert policy.worth((0, 0)) == pytest.approx((1 - recency) * 0.25 + recency)
    assert policy.victim() == (0, victim)


def test_worth_counts_age_by_layer() -> None:
    """Layer 1 ran last and layer 0 is next. With equal shares, layer 1 loses its expert; LRU evicts that of 0."""
    policy, recency = Worth(), Recency()
    trace = [(0, [0]), (1, [0])] * 3
    for own in (policy, recency):
        assert simulate(trace, 2, own) == Simulated(hits=4, misses=2)
    assert (policy.victim(), recency.victim()) == ((1, 0), (0, 0))


def test_a_cycle_longer_than_memory() -> None:
    """LRU evicts exactly the expert that comes next. Worth keeps most, because the layer that just ran loses its expert."""
    trace = [(layer, [0]) for _ in range(20) for layer in range(4)]
    found = compared(trace, 3)
    assert found["lru"] == Simulated(hits=0, misses=80)
    # Hindsight reads one expert in each token after the first, but for the places where the cycle shifts
    assert found["worth"].hits >= found[BEST].hits - 10 > 30


def test_policies_forget_experts_that_left() -> None:
    for make in POLICIES.values():
        policy = make()
        policy.visit(0)
        policy.use((0, 1))
        assert policy.victim() is None
        policy.add((0, 1))
        policy.remove((0, 1))
        assert policy.victim() is None
        with pytest.raises(KeyError):
            policy.remove((0, 1))


def test_a_step_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="uses 3 experts together, and there are 2 slots"):
        simulate(one_layer("012"), 2, Recency())


def test_hindsight_follows_its_trace() -> None:
    with pytest.raises(ValueError, match="step 0 of the trace"):
        simulate([(1, [0])], 1, Hindsight([(0, [0])]))


def test_steps_that_fill_the_cache_are_not_counted() -> None:
    trace = one_layer("0 1 0 2 0 1")
    assert simulate(trace, 2, Recency(), uncounted=2) == Simulated(hits=2, misses=2)
    assert compared(trace, 2, ["lru"], uncounted=5) == {"lru": Simulated(0, 1), BEST: Simulated(0, 1)}


def test_rates() -> None:
    assert Simulated(3, 1).hit_rate == 0.75
    assert Simulated(0, 0).hit_rate == 1.0
    assert simulate([], 1, Worth()) == Simulated(0, 0)


def fewest_misses(trace: Trace, slots: int) -> int:
    """Return the fewest misses of any choice of victims, by trying all of them."""

    @cache
    def least(place: int, resident: frozenset[Key]) -> int:
        if place == len(trace):
            return 0
        layer, experts = trace[place]
        wanted = frozenset((layer, expert) for expert in experts)
        missing, others = wanted - resident, resident - wanted
        leaving = max(0, len(resident) + len(missing) - slots)
        stays = (resident - set(gone) for gone in itertools.combinations(sorted(others), leaving))
        return len(missing) + min(least(place + 1, frozenset(stay | wanted)) for stay in stays)

    return least(0, frozenset())


@given(STEPS, st.integers(2, 8))
@settings(max_examples=150, deadline=None)
def test_hindsight_is_never_worse(trace: Trace, slots: int) -> None:
    found = compared(trace, slots)
    assert {sum(each) for each in found.values()} == {sum(len(experts) for _, experts in trace)}
    assert all(found[BEST].misses <= each.misses for each in found.values())


@given(STEPS.map(lambda trace: trace[:12]), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_hindsight_is_the_best_possible(trace: Trace, slots: int) -> None:
    assert compared(trace, slots, ())[BEST].misses == fewest_misses(trace, slots)


def test_worth_weighs_layers_by_their_prices() -> None:
    policy = Worth(recency=0.0)
    for layer in (0, 1):
        policy.visit(layer)
        policy.use((layer, 0))
        policy.add((layer, 0))
        policy.visit(layer)
    assert policy.victim() == (1, 0), "equal estimates: the layer that has just run"
    policy.price(1, 1.01)
    assert policy.victim() == (0, 0) and policy.worth((1, 0)) == pytest.approx(1.01 * policy.worth((0, 0)))
    policy.price(0, 3.0)
    assert policy.victim() == (1, 0)


def test_a_large_cache_ranks_several_experts_at_once() -> None:
    """They leave in their order, but for those that were pinned or used since, as long as no other one was asked for."""
    policy = Worth(recency=0.0)
    for number in range(MOST_RANKED * 32):
        policy.add((0, number))
        for _ in range(1 + number // 32):
            policy.visit(0)
            policy.use((0, number))
    expected = [number for number in range(MOST_RANKED * 32) if number not in (0, 2)]
    assert policy.victim() == (0, 0) and len(policy._ranked) == MOST_RANKED
    policy.visit(0)
    policy.use((0, 0))
    left = []
    for _ in range(MOST_RANKED + 3):
        key = policy.victim({(0, 2)})
        assert key is not None
        left.append(key[1])
        policy.remove(key)
    assert left == expected[: len(left)]


class NaiveWorth:
    """Worth, from the whole history at every call."""

    def __init__(self, half_life: float, recency: float) -> None:
        self.half_life, self.recency = half_life, recency
        self.steps: list[tuple[int, set[Key]]] = []
        self.resident: set[Key] = set()

    def visit(self, layer: int) -> None:
        self.steps.append((layer, set()))

    def use(self, key: Key) -> None:
        self.steps[-1][1].add(key)

    def add(self, key: Key) -> None:
        self.resident.add(key)

    def remove(self, key: Key) -> None:
        self.resident.remove(key)

    def victim(self, pinned: object = ()) -> Key | None:
        return min((key for key in self.resident if key not in pinned), key=self.order, default=None)

    def order(self, key: Key) -> tuple[float, int, Key]:
        own = [(place, used) for place, (layer, used) in enumerate(self.steps) if layer == key[0]]
        ages = [age for age, (_, used) in enumerate(reversed(own)) if key in used]
        new = 1 - 2 ** (-1 / self.half_life)
        share = sum(new * 2 ** (-age / self.half_life) for age in ages)
        steps = sum(new * 2 ** (-age / self.half_life) for age in range(len(own)))
        return round((1 - self.recency) * share / steps + self.recency * (0 in ages), 9), -own[-1][0], key


@given(STEPS, st.integers(2, 8), st.sampled_from([(2.0, 0.0), (8.0, 0.1), (3.0, 0.6)]))
@settings(max_examples=150, deadline=None)
def test_worth_agrees_with_a_naive_one(trace: Trace, slots: int, numbers: tuple[float, float]) -> None:
    seen: dict[bool, list[Key | None]] = {}

    def watched(policy: Policy, own: list[Key | None]) -> Policy:
        victim = policy.victim

        def recorded(pinned: object = ()) -> Key | None:
            own.append(victim(pinned))
            return own[-1]

        policy.victim = recorded
        return policy

    for is_naive, make in ((True, NaiveWorth), (False, Worth)):
        simulate(trace, slots, watched(make(*numbers), seen.setdefault(is_naive, [])))
    assert seen[True] == seen[False]


def test_a_long_run_keeps_the_heap_small() -> None:
    random_ = random.Random(0)
    trace = [(layer, random_.sample(range(16), 2)) for _ in range(500) for layer in range(3)]
    frequency = Frequency()
    simulate(trace, 12, frequency)
    assert len(frequency._ranking._heap) <= 64 + 2 * 12
