"""The choice of experts within a compiled step, beside the rules of the layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from torch import Tensor

from engine.decoder.routing import NO_EXPERT, GroupedTopK, Selection, SigmoidTopK, TopK
from engine.decoder.step.rules import fill_groups, fill_sigmoids

UNEVEN = ((0, 3, 4), (1,), (2, 5, 6, 7, 8), (9, 10, 11))
EVEN = tuple(tuple(range(first, first + 3)) for first in range(0, 12, 3))


def chosen_by_kernel(rule: TopK | GroupedTopK | SigmoidTopK, logits_TN: Tensor) -> Selection:
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
    arrays = fill_sigmoids(layer, rule) + fill_groups(layer, rule, experts)
    chosen = torch.empty(tokens, given["slots"], dtype=torch.int64)
    weights = torch.empty(tokens, given["slots"])
    kernel = kernels.KERNELS["choose_by_sigmoid" if isinstance(rule, SigmoidTopK) else "choose_experts"]
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
    generator = torch.Generator().manual_seed(0)
    logits_TN = 4.0 * torch.randn(40, 12, generator=generator)
    for row in logits_TN:
        row[torch.randperm(12, generator=generator)[:missing]] = -torch.inf
    bias_N = torch.randn(12, generator=generator)
    rule = SigmoidTopK(slots, normalise, bias_N, 2.5, groups, groups_per_token)
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
    generator = torch.Generator().manual_seed(0)
    logits_TN = 4.0 * torch.randn(40, 12, generator=generator)
    for row in logits_TN:
        row[torch.randperm(12, generator=generator)[:missing]] = -torch.inf
    rule = kind(slots, *more, scale=2.5)
    expected, made = rule(logits_TN), chosen_by_kernel(rule, logits_TN)
    assert torch.allclose(made.weights, expected.weights, rtol=1e-5, atol=1e-30)
    is_chosen = expected.weights > 0  # without groups, experts that do not exist fill the slots in any order
    assert torch.equal(made.experts[is_chosen], expected.experts[is_chosen])
    if kind is GroupedTopK:
        assert torch.equal(made.experts, expected.experts)
