"""The knapsack of `compress fit`, against an exhaustive search and small cases worked out by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from compress.fitting.choices import Limit, choose, least_total, total
from engine.errors import OptionError


def exhaustive(cost_IO, limits):
    """Return the least cost of any choice that keeps the limits."""
    best = float("inf")
    for choice in product(range(cost_IO.shape[1]), repeat=len(cost_IO)):
        choice_I = torch.tensor(choice)
        if all(total(limit.size_IO, choice_I) <= limit.most for limit in limits):
            best = min(best, total(cost_IO, choice_I))
    return best


def test_a_small_case_by_hand():
    """Two items; 10 units: 4 + 6 costs 1 + 0, 6 + 4 costs 0 + 3, 4 + 4 costs 4. The first is best."""
    cost_IO = torch.tensor([[0.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    size_IO = torch.tensor([[6.0, 4.0], [6.0, 4.0]], dtype=torch.float64)
    assert choose(cost_IO, [Limit(size_IO, 10, "bytes")]).tolist() == [1, 0]
    assert choose(cost_IO, [Limit(size_IO, 12, "bytes")]).tolist() == [0, 0]
    assert choose(cost_IO, [Limit(size_IO, 9, "bytes")]).tolist() == [1, 1]


def test_the_repair_spends_what_is_left():
    """The relaxation alone cannot choose one of three equal items; the repair gives the byte to one of them."""
    cost_IO = torch.tensor([[0.0, 1.0]] * 3, dtype=torch.float64)
    size_IO = torch.tensor([[2.0, 1.0]] * 3, dtype=torch.float64)
    chosen_I = choose(cost_IO, [Limit(size_IO, 5, "bytes")])
    assert total(size_IO, chosen_I) == 5


@pytest.mark.parametrize("seed", range(12))
def test_near_the_exhaustive_search(seed):
    """Sizes fall and costs rise with the option; the result is feasible, and near the best of all 4^6 choices."""
    generator = torch.Generator().manual_seed(seed)
    cost_IO = torch.rand(6, 4, generator=generator, dtype=torch.float64).cumsum(dim=1) - 0.2
    size_IO = (torch.rand(6, 4, generator=generator, dtype=torch.float64) + 0.1).flip(1).cumsum(dim=1).flip(1)
    other_IO = size_IO * (0.5 + torch.rand(6, 1, generator=generator, dtype=torch.float64))
    first = Limit(size_IO, 0.55 * float(size_IO[:, 0].sum()), "bytes")
    second = Limit(other_IO, 0.6 * float(other_IO[:, 0].sum()), "bytes for a token")
    for limits in ([first], [first, second]):
        chosen_I = choose(cost_IO, limits)
        assert all(total(limit.size_IO, chosen_I) <= limit.most for limit in limits)
        best, found = exhaustive(cost_IO, limits), total(cost_IO, chosen_I)
        assert best <= found <= best + float((cost_IO[:, 1:] - cost_IO[:, :-1]).max())  # within one step of one item


def test_options_that_an_item_lacks_are_never_chosen():
    cost_IO = torch.tensor([[0.0, torch.inf], [0.0, 1.0]], dtype=torch.float64)
    size_IO = torch.tensor([[5.0, 0.0], [5.0, 1.0]], dtype=torch.float64)
    limit = Limit(size_IO, 6, "bytes")
    assert least_total(limit, cost_IO) == 6
    assert choose(cost_IO, [limit]).tolist() == [0, 1]


def test_an_impossible_target_names_the_least():
    cost_IO, size_IO = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([[4.0, 3.0], [4.0, 2.0]], dtype=torch.float64)
    with pytest.raises(OptionError, match="the target is 4 bytes, and the least that is possible is 5"):
        choose(cost_IO, [Limit(size_IO, 4, "bytes")])


def test_two_targets_that_exclude_each_other():
    cost_IO = torch.zeros(1, 2, dtype=torch.float64)
    first = Limit(torch.tensor([[1.0, 9.0]], dtype=torch.float64), 2, "bytes")
    second = Limit(torch.tensor([[9.0, 1.0]], dtype=torch.float64), 2, "bytes for a token")
    with pytest.raises(OptionError, match="raise one of the two"):
        choose(cost_IO, [first, second])
