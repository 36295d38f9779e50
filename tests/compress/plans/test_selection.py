"""The global ranking and its simpler forms by hand, and every budget that is refused."""

from __future__ import annotations

import pytest
import torch

from compress.plans.selection import Budget
from engine.errors import OptionError

SCORES = {0: torch.tensor([0.9, 0.1, 0.8, 0.7]), 3: torch.tensor([0.2, 0.3, 0.05, 0.6])}
"""Scores of two layers. In order: 0.9 0.8 0.7 | 0.6 | 0.3 0.2 | 0.1 0.05."""


def test_global_ranking_removes_the_lowest_of_all_layers() -> None:
    assert Budget(0.5).select(SCORES) == {0: [0, 2, 3], 3: [3]}
    assert Budget(0.25).select(SCORES) == {0: [0, 2, 3], 3: [0, 1, 3]}
    assert Budget(0.6).select(SCORES) == {0: [0, 2], 3: [3]}, "round(0.6 · 8) = 5 go, and 0.6 is its layer's one"


def test_minimum_of_each_layer_stays_whatever_its_score() -> None:
    assert Budget(0.5, min_experts=2).select(SCORES) == {0: [0, 2], 3: [1, 3]}
    low = {0: torch.tensor([0.9, 0.8]), 1: torch.tensor([0.01, 0.02])}
    assert Budget(0.5).select(low) == {0: [0], 1: [1]}


def test_uneven_layers() -> None:
    uneven = {0: torch.tensor([0.5]), 1: torch.tensor([0.1, 0.9, 0.8, 0.2, 0.3])}
    assert Budget(0.5, min_experts=2).select(uneven) == {0: [0], 1: [1, 2]}, "a layer of one keeps its one"
    assert Budget(0.5, scope="layer").select({1: uneven[1]}) == {1: [1, 2, 4]}, "round(2.5) = 2 go"


def test_experts_is_an_average_for_scope_global_and_exact_for_scope_layer() -> None:
    assert Budget(experts=2).select(SCORES) == {0: [0, 2, 3], 3: [3]}
    assert Budget(experts=2, scope="layer").select(SCORES) == {0: [0, 2], 3: [1, 3]}
    uneven = {0: torch.tensor([0.5]), 1: torch.tensor([0.1, 0.9, 0.8, 0.2])}
    assert Budget(experts=2, scope="layer").select(uneven) == {0: [0], 1: [1, 2]}


def test_scope_layer_removes_the_same_share_of_each() -> None:
    assert Budget(0.5, scope="layer").select(SCORES) == {0: [0, 2], 3: [1, 3]}
    assert Budget(0.75, scope="layer").select(SCORES) == {0: [0], 3: [3]}


def test_scope_uniform_keeps_the_same_count_in_layers_of_any_size() -> None:
    assert Budget(0.5, scope="uniform").select(SCORES) == {0: [0, 2], 3: [1, 3]}
    uneven = {0: torch.tensor([0.5, 0.7, 0.1]), 1: torch.tensor([0.1, 0.9, 0.8, 0.2, 0.3])}
    assert Budget(0.5, scope="uniform").select(uneven) == {0: [0, 1], 1: [1, 2]}, "half of the average of 4"
    assert Budget(0.5, scope="layer").select(uneven) == {0: [1], 1: [1, 2, 4]}
    assert Budget(experts=3, scope="uniform").select(uneven) == {0: [0, 1, 2], 1: [1, 2, 4]}
    five = {0: torch.arange(5.0), 1: torch.arange(5.0)}
    assert Budget(0.5, scope="uniform").select(five) == Budget(0.5, scope="layer").select(five)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(0.1, scope="uniform"), "would keep 4 experts in each layer, and layer 0 has 3"),
        (Budget(experts=4, scope="uniform"), "would keep 4 experts in each layer, and layer 0 has 3"),
        (Budget(0.9, scope="uniform"), "layer 0 would keep 0 of 3 experts, under the minimum of 1"),
        (Budget(0.5, scope="uniform", min_experts=3), "layer 0 would keep 2 of 3 experts, under the minimum of 3"),
    ],
)
def test_what_scope_uniform_refuses(budget: Budget, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        budget.check({0: 3, 3: 5})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_earlier_layer_and_the_lower_index(dtype: torch.dtype) -> None:
    same = {2: torch.zeros(4, dtype=dtype), 5: torch.zeros(4, dtype=dtype)}
    assert Budget(0.5).select(same) == {2: [0, 1, 2], 5: [0]}
    assert Budget(0.5, scope="layer").select(same) == {2: [0, 1], 5: [0, 1]}


def test_groups_of_one_size_stay_and_go_together() -> None:
    """Layer 0 has (0.9, 0.5) and (0.8, 0.1) as best and second of its groups, layer 1 (0.7, 0.6) and (0.65, 0.4)."""
    scores = {0: torch.tensor([0.5, 0.9, 0.1, 0.8]), 1: torch.tensor([0.7, 0.6, 0.4, 0.65])}
    groups = dict.fromkeys(scores, (0, 0, 1, 1))
    assert Budget(0.25, min_experts=2).select(scores, groups, even=True) == {0: [1, 3], 1: [0, 1, 2, 3]}
    assert Budget(0.4, min_experts=2).select(scores, groups, even=True) == {0: [1, 3], 1: [0, 3]}, "5 are no whole pairs"
    assert Budget(0.25, scope="layer").select(scores, groups, even=True) == {0: [1, 3], 1: [0, 3]}
    assert Budget(0.5, scope="uniform").select(scores, groups, even=True) == {0: [1, 3], 1: [0, 3]}
    assert Budget(0.25).select(scores, even=True) == Budget(0.25).select(scores)


def test_negative_scores_rank_below_zero() -> None:
    """DiEP's s = α·β has both signs."""
    assert Budget(0.5).select({0: torch.tensor([-1.0, 2.0]), 1: torch.tensor([-0.5, 0.5])}) == {0: [1], 1: [1]}


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(), "either a sparsity or a number"),
        (Budget(0.5, experts=2), "either a sparsity or a number"),
        (Budget(0.0), "strictly between 0 and 1"),
        (Budget(1.0), "strictly between 0 and 1"),
        (Budget(-0.5), "strictly between 0 and 1"),
        (Budget(float("nan")), "strictly between 0 and 1"),
        (Budget(experts=0), "cannot keep 0 experts"),
        (Budget(experts=4), "cannot keep 4 experts"),
        (Budget(0.5, min_experts=0), "min-experts is 0"),
        (Budget(0.9, scope="layer"), "layer 0 would keep 0 of 4 experts, under the minimum of 1"),
        (Budget(0.5, scope="layer", min_experts=3), "layer 0 would keep 2 of 4 experts, under the minimum of 3"),
        (Budget(experts=2, scope="layer", min_experts=3), "layer 0 would keep 2 of 4 experts, under the minimum of 3"),
        (Budget(0.9), "only 1 experts would be kept"),
        (Budget(0.5, min_experts=3), "only 4 experts would be kept"),
        (Budget(experts=2, min_experts=3), "only 4 experts would be kept"),
    ],
)
def test_what_is_refused(budget: Budget, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        budget.check({0: 4, 3: 4})
    with pytest.raises(OptionError, match=message):
        budget.select(SCORES)


def test_a_layer_smaller_than_the_minimum_is_no_reason_to_refuse() -> None:
    Budget(0.25, min_experts=2).check({0: 1, 1: 7})
    Budget(experts=2, scope="layer", min_experts=2).check({0: 1, 1: 4})
