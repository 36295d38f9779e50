"""One-shot scores by hand on four experts and ten tokens, top-2; expert 3 was never routed to."""

from __future__ import annotations

import pytest
import torch
from formulas_for_tests import SCORES

from calibrate.statistics import LayerStatistics, Statistics
from compress.methods import METHODS
from compress.methods.criterion import layer_scores
from compress.methods.random_scores import random_scores

LAYER = LayerStatistics(
    tokens=torch.tensor(10),
    tokens_routed=torch.tensor([10, 6, 4, 0]),
    probability_sum=torch.tensor([5.0, 3.0, 1.5, 0.5]),
    routed_probability_sum=torch.tensor([5.0, 2.0, 1.0, 0.0]),
    weight_sum=torch.tensor([6.0, 3.0, 1.0, 0.0]),
    weighted_norm_sum=torch.tensor([12.0, 12.0, 10.0, 0.0]),
    norm_sum=torch.tensor([20.0, 24.0, 36.0, 0.0]),
    squared_norm_sum=torch.tensor([40.0, 96.0, 324.0, 0.0]),
    output_sum=torch.zeros(4, 2),
    output_mean=torch.zeros(4, 2),
    weighted_output_mean=torch.zeros(4, 2),
    router_gram=torch.eye(4),
    weight_ratio_median=torch.tensor([0.5]),
    linear_cka=torch.eye(4),
    rbf_cka=torch.eye(4),
    rbf_cka_before=torch.eye(4),
    unselected_probability_share=torch.tensor(0.2),
)
STATISTICS = Statistics({1: LAYER, 4: LAYER}, {})
BY_HAND = {
    "frequency": [1.0, 0.6, 0.4, 0.0],
    "probability": [0.5, 0.3, 0.15, 0.05],
    "reap": [1.2, 2.0, 2.5, 0.0],
    "man": [2.0, 4.0, 9.0, 0.0],
    "mc-moe": [1.0 * 0.6, 0.6 * 0.5, 0.4 * 0.25, 0.0],
}


@pytest.mark.parametrize("method", BY_HAND)
def test_scores_by_hand(method: str) -> None:
    got = layer_scores(SCORES[method], STATISTICS)
    assert list(got) == [1, 4]
    for values in got.values():
        assert torch.allclose(values.double(), torch.tensor(BY_HAND[method], dtype=torch.float64))


def test_every_score_has_numbers_by_hand_here() -> None:
    here = {name for name, method in METHODS.items() if method.code.startswith("compress.methods.saliency:")}
    assert here == set(SCORES) == set(BY_HAND)


def test_random_depends_on_the_seed_alone_and_differs_between_layers() -> None:
    first, again, other = (random_scores(STATISTICS, seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[layer], again[layer]) for layer in (1, 4))
    assert not torch.equal(first[1], other[1]) and not torch.equal(first[1], first[4])
    assert first[1].shape == (4,)
