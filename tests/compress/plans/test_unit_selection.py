"""Selection of hidden units: worked out by hand for each scope, and every budget that is refused."""

from __future__ import annotations

import pytest
import torch

from compress.plans.plan import kept_expert, narrowed_expert
from compress.plans.unit_selection import default_multiple, select_units, units_plan
from engine.errors import OptionError

SCORES = {
    0: [torch.tensor([0.9, 0.1, 0.8, 0.2]), torch.tensor([0.3, 0.4, 0.5, 0.6])],
    2: [torch.tensor([0.01, 0.02, 0.03, 0.7]), torch.tensor([0.15, 0.25, 0.35, 0.45])],
}
"""Scores of two layers with two experts of four units."""


def test_global_scope_removes_the_lowest_units_of_all_layers() -> None:
    kept = select_units(SCORES, 0.5, "global", 1)
    assert kept == {0: [[0, 2], [1, 2, 3]], 2: [[3], [2, 3]]}, "0.01 0.02 0.03 0.1 0.15 0.2 0.25 0.3 leave"


def test_units_leave_in_blocks_with_the_lowest_mean() -> None:
    # Means of the blocks of two: 0.15 and 0.85, 0.35 and 0.55, 0.015 and 0.365, 0.2 and 0.4.
    assert select_units(SCORES, 0.5, "global", 2) == {0: [[0, 2], [2, 3]], 2: [[2, 3], [2, 3]]}
    assert select_units(SCORES, 0.25, "global", 2) == {0: [[0, 2], [0, 1, 2, 3]], 2: [[2, 3], [0, 1, 2, 3]]}
    assert select_units(SCORES, 0.3, "global", 2) == select_units(SCORES, 0.25, "global", 2), "4.8 units are two blocks"


def test_scope_layer_removes_the_same_share_of_each_layer() -> None:
    assert select_units(SCORES, 0.5, "layer", 1) == {0: [[0, 2], [2, 3]], 2: [[3], [1, 2, 3]]}


def test_uniform_scope_keeps_the_same_width_in_every_expert() -> None:
    assert select_units(SCORES, 0.25, "uniform", 1) == {0: [[0, 2, 3], [1, 2, 3]], 2: [[1, 2, 3], [1, 2, 3]]}
    assert select_units(SCORES, 0.4, "uniform", 2) == select_units(SCORES, 0.5, "uniform", 2), "2.4 is nearest to 2"


def test_experts_of_a_layer_keep_one_width() -> None:
    """Mean scores by rank: 0.2, 0.3, 0.65, 0.75 in the first layer and 0.08, 0.135, 0.19, 0.575 in the other one."""
    narrow = {0: [[0, 2, 3], [1, 2, 3]], 2: [[3], [3]]}
    assert select_units(SCORES, 0.5, "global", 1, even=True) == narrow
    assert select_units(SCORES, 0.3, "global", 2, even=True) == {0: [[0, 1, 2, 3]] * 2, 2: [[2, 3]] * 2}
    assert select_units(SCORES, 0.5, "global", 2, even=True) == {0: [[0, 2], [2, 3]], 2: [[2, 3]] * 2}
    assert select_units(SCORES, 0.25, "layer", 1, even=True) == {0: narrow[0], 2: [[1, 2, 3]] * 2}
    assert select_units(SCORES, 0.25, "uniform", 1, even=True) == select_units(SCORES, 0.25, "uniform", 1)
    more = {0: SCORES[0] * 2, 2: SCORES[2]}
    assert select_units(more, 0.5, "global", 1, even=True) == {0: narrow[0] * 2, 2: narrow[2]}, (
        "12 of 24 units leave: 6, 4, and not 4 more"
    )


def test_whole_experts_leave_only_where_that_is_allowed() -> None:
    low = {
        0: [torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0.9])],
        1: [torch.tensor([0.01, 0.02]), torch.tensor([0.6, 0.7])],
    }
    assert select_units(low, 0.5, "global", 1) == {0: [[1], [1]], 1: [[1], [1]]}
    assert select_units(low, 0.5, "global", 1, min_experts=1) == {0: [[], [0, 1]], 1: [[], [0, 1]]}
    assert select_units(low, 0.5, "global", 1, min_experts=2) == select_units(low, 0.5, "global", 1)


def test_first_block_has_the_units_beyond_the_largest_multiple() -> None:
    scores = {0: [torch.arange(5.0), torch.arange(5.0) + 10.0]}
    assert select_units(scores, 0.1, "global", 2) == {0: [[1, 2, 3, 4], [0, 1, 2, 3, 4]]}
    assert select_units(scores, 0.3, "global", 2) == {0: [[3, 4], [0, 1, 2, 3, 4]]}


def test_equal_scores_stay_in_earlier_layers() -> None:
    equal = {layer: [torch.ones(2), torch.ones(2)] for layer in (0, 1)}
    assert select_units(equal, 0.25, "global", 1) == {0: [[0, 1], [0, 1]], 1: [[0], [0]]}


def test_default_multiple_leaves_eight_blocks() -> None:
    assert default_multiple({0: [192, 192]}) == 16
    assert default_multiple({0: [96], 1: [192]}) == 8
    assert default_multiple({0: [14336]}) == 64
    assert default_multiple({0: [5]}) == 1


@pytest.mark.parametrize(
    ("sparsity", "scope", "multiple", "message"),
    [
        (0.5, "global", 8, "unit-multiple is 8, and the narrowest expert has 4 hidden units"),
        (0.8, "global", 1, "would keep 3 hidden units, and 4 experts of at least 1 need 4"),
        (0.9, "layer", 1, "layer 0: a sparsity of 0.9 would keep 1 hidden units"),
        (0.9, "uniform", 1, "would keep less than one multiple of 1 hidden units in each expert of 4"),
        (0.05, "uniform", 1, "a uniform result would keep 4 hidden units in each expert, and the narrowest has 4"),
    ],
)
def test_budgets_without_a_result_are_refused(sparsity: float, scope: str, multiple: int, message: str) -> None:
    with pytest.raises(OptionError) as error:
        select_units(SCORES, sparsity, scope, multiple)
    assert message in str(error.value)


def test_ffns_that_every_token_uses_never_leave() -> None:
    """Layer 0 has one expert and a shared expert, layer 1 is dense."""
    low = {0: [torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.2])], 1: [torch.tensor([0.3, 0.4])]}
    routed = {0: 1}
    assert select_units(low, 0.5, "global", 1, 1, routed) == {0: [[1], [1]], 1: [[1]]}
    assert select_units(low, 0.34, "global", 1, 1, routed) == {0: [[0, 1], [1]], 1: [[1]]}
    assert select_units(low, 0.5, "layer", 1, 1, routed) == {0: [[1], [1]], 1: [[1]]}
    with pytest.raises(OptionError, match="need 3"):
        select_units(low, 0.7, "global", 1, 1, routed)


def test_uniform_widths_are_those_of_each_kind() -> None:
    scores = {0: [torch.arange(4.0), torch.arange(8.0)], 1: [torch.arange(16.0)]}
    assert select_units(scores, 0.5, "uniform", 2, None, {0: 1}) == {0: [[2, 3], [4, 5, 6, 7]], 1: [list(range(8, 16))]}


def test_a_plan_has_the_units_of_other_ffns_beside_the_experts() -> None:
    plan = units_plan({0: [[0, 1], [1]], 1: [[0]], 2: [[0], [0, 1]]}, {0: [2], 2: [2]}, {0: 2, 1: 3, 2: 2})
    assert plan.common == {0: (1,), 1: (0,)}
    assert plan.layers == {0: (kept_expert(0),), 2: (narrowed_expert(0, [0]),)}


def test_plan_has_copies_narrowed_experts_and_nothing_of_experts_that_leave() -> None:
    plan = units_plan({0: [[0, 1], [], [1]]}, {0: [2, 2, 2]})
    assert plan.layers == {0: (kept_expert(0), narrowed_expert(2, [1]))}
