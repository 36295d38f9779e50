"""The choice of experts within a compiled step, beside the rules of the layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from torch import Tensor

from engine.decoder.routing import NO_EXPERT, BiasedTopK, GroupedTopK, Selection, SigmoidTopK, TopK
from engine.decoder.step.rules import fill_bias, fill_groups

UNEVEN = ((0, 3, 4), (1,), (2, 5, 6, 7, 8), (9, 10, 11))
EVEN = tuple(tuple(range(first, first + 3)) for first in range(0, 12, 3))


def chosen_by_kernel(rule: TopK | GroupedTopK | SigmoidTopK | BiasedTopK, logits_TN: Tensor) -> Selection:
    tokens, experts = logits_TN.shape
    layer = np.zeros(1, kernels.LAYER)
    given: dict[str, Any] = {
        "expert_count": experts,
        "slots": min(rule.experts_per_token, experts),
        "normalizes": rule.normalise,
        "weight_scale": rule.scale,
    }
    for name, value in given.items():
        layer[name] = value
    arrays = fill_bias(layer, rule) + fill_groups(layer, rule, experts)
    chosen = torch.empty(tokens, given["slots"], dtype=torch.int64)
    weights = torch.empty(tokens, given["slots"])
    kernel = kernels.KERNELS["choose_with_bias" if layer["selection_bias"] else "choose_experts"]
    for token in range(tokens):
        kernel(layer.ctypes.data, logits_TN[token].data_ptr(), chosen[token].data_ptr(), weights[token].data_ptr())
    del arrays  # they had to live until here
    return Selection(chosen, weights)


@needs_numba
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("groups", "groups_per_token"), [((), 1), (EVEN, 2), (UNEVEN, 1), (UNEVEN, 3), (UNEVEN, 9)])
@pytest.mark.parametrize("missing", [0, 1, 5, 12])
@pytest.mark.parametrize("slots", [1, 4, 20])
def test_choices_by_sigmoid_equal_the_rule(
    slots: int, missing: int, groups: tuple[tuple[int, ...], ...], groups_per_token: int, normalise: bool
) -> None:
    logits_TN, bias_N = logits_and_bias(missing)
    check_biased(SigmoidTopK(slots, normalise, bias_N, 2.5, groups, groups_per_token), logits_TN)


@needs_numba
@pytest.mark.parametrize("least_sum", [1e-12, 0.3])
@pytest.mark.parametrize("missing", [0, 1, 5, 11])
@pytest.mark.parametrize("slots", [1, 4, 20])
def test_choices_by_softmax_and_bias_equal_the_rule(slots: int, missing: int, least_sum: float) -> None:
    logits_TN, bias_N = logits_and_bias(missing)
    check_biased(BiasedTopK(slots, bias_N, least_sum), logits_TN)


def logits_and_bias(missing: int) -> tuple[Tensor, Tensor]:
    """Return logits, −∞ for so many experts of each token, and a selection bias."""
    generator = torch.Generator().manual_seed(0)
    logits_TN = 4.0 * torch.randn(40, 12, generator=generator)
    for row in logits_TN:
        row[torch.randperm(12, generator=generator)[:missing]] = -torch.inf
    return logits_TN, torch.randn(12, generator=generator)


def check_biased(rule: SigmoidTopK | BiasedTopK, logits_TN: Tensor) -> None:
    expected, made = rule(logits_TN), chosen_by_kernel(rule, logits_TN)
    assert torch.equal(made.experts.sort(dim=-1).values, expected.experts.sort(dim=-1).values)
    assert torch.allclose(made.weights, expected.weights, rtol=1e-6, atol=1e-30)
    apart = (expected.weights.diff(dim=-1).abs() > 1e-6).all(dim=-1)  # where the order of the slots is beyond rounding
    assert torch.equal(made.experts[apart], expected.experts[apart])
    assert ((made.weights > 0) | (made.experts == NO_EXPERT)).all()


@needs_numba
@pytest.mark.parametrize("missing", [0, 1, 5, 11])
@pytest.mark.parametrize("slots", [1, 4, 20])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((TopK, (normalise,)) for normalise in (False, True)),
        *((GroupedTopK, places) for places in ((EVEN, 2), (UNEVEN, 1), (UNEVEN, 3), (UNEVEN, 9))),
    ],
)
def test_choices_by_softmax_equal_the_rule(kind: Any, more: tuple[Any, ...], slots: int, missing: int) -> None:
    logits_TN, _ = logits_and_bias(missing)
    rule = kind(slots, *more, scale=2.5)
    expected, made = rule(logits_TN), chosen_by_kernel(rule, logits_TN)
    assert torch.allclose(made.weights, expected.weights, rtol=1e-5, atol=1e-30)
    is_chosen = expected.weights > 0  # without groups, experts that do not exist fill the slots in any order
    assert torch.equal(made.experts[is_chosen], expected.experts[is_chosen])
    if kind is GroupedTopK:
        assert torch.equal(made.experts, expected.experts)
