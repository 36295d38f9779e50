"""Every use that the project has for a Routing, against numbers by hand, before anything is built on the protocol."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.experts import Expert, MoeBlock, grouped, sparse
from engine.routing import (
    NO_EXPERT,
    AllExperts,
    Gated,
    HardMask,
    Masked,
    MixedExperts,
    Routing,
    SampledExperts,
    ShiftedLogits,
    Skipping,
    TopK,
)

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))


def dense(routing: Routing, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """The Selection as one weight per expert, [T, N]: empty slots contribute nothing."""
    experts, weights = routing(logits)
    result = torch.zeros(logits.shape)
    for token in range(len(logits)):
        for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
            if expert != NO_EXPERT:
                result[token, expert] += weight
    return result


def test_top_k_with_and_without_renormalisation() -> None:
    assert torch.allclose(dense(TopK(2, False)), torch.tensor([[0.0, 0.4, 0.0, 0.3]]))
    assert torch.allclose(dense(TopK(2, True)), torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7]]))
    assert torch.allclose(dense(TopK(9, True)), LOGITS.exp()), "k shrinks to the experts there are"


def test_masked_is_top_k_over_the_kept_experts() -> None:
    kept = torch.tensor([True, False, True, False])
    assert torch.allclose(dense(Masked(TopK(2, True), kept)), torch.tensor([[1 / 3, 0.0, 2 / 3, 0.0]]))
    assert torch.allclose(dense(Masked(TopK(1, False), kept)), torch.tensor([[0.0, 0.0, 2 / 3, 0.0]]))
    one = torch.tensor([False, False, True, False])
    experts, _ = Masked(TopK(2, True), one)(LOGITS)
    assert experts.tolist() == [[2, NO_EXPERT]], "where fewer than k are left the others are empty slots"


def test_all_experts_is_the_softmax() -> None:
    assert torch.allclose(dense(AllExperts()), LOGITS.exp())


def test_sampled_experts_are_the_largest_n_minus_1_when_nothing_is_drawn() -> None:
    weights = dense(SampledExperts(0.0, torch.Generator().manual_seed(0)))
    assert torch.allclose(weights, torch.tensor([[0.0, 0.4, 0.2, 0.3]]) / 0.9)


@pytest.mark.parametrize("per_token", [False, True])
def test_sampled_experts_leave_out_each_expert_about_as_often_as_drawing_says(per_token: bool) -> None:
    """Without replacement, N-1 of N: expert i is left out with the probability that it comes last."""
    generator = torch.Generator().manual_seed(0)
    probabilities = LOGITS.exp()[0].tolist()
    last = [0.0] * 4
    for order in _orders(probabilities):
        last[order[0][-1]] += order[1]
    counts = torch.zeros(4)
    for _ in range(1 if per_token else 3000):
        logits = LOGITS.expand(3000 if per_token else 1, 4)
        counts += (dense(SampledExperts(1.0, generator, per_token), logits) == 0).sum(0)
    assert torch.allclose(counts / 3000, torch.tensor(last), atol=0.03)


def _orders(probabilities: list[float]) -> list[tuple[list[int], float]]:
    from itertools import permutations

    result = []
    for order in permutations(range(len(probabilities))):
        chance, left = 1.0, 1.0
        for expert in order:
            chance *= probabilities[expert] / left
            left = max(left - probabilities[expert], 1e-12)
        result.append((list(order), chance))
    return result


def test_paper_relaxation_ignores_the_router() -> None:
    alpha = torch.log(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert torch.allclose(dense(MixedExperts(alpha, torch.tensor(0.5))), torch.tensor([[0.05, 0.1, 0.15, 0.2]]))


def test_routed_relaxation_shifts_the_logits_and_is_the_model_at_zero() -> None:
    zero, one = torch.zeros(4), torch.tensor(1.0)
    assert torch.equal(dense(ShiftedLogits(TopK(2, True), zero, one)), dense(TopK(2, True)))
    shift = torch.log(torch.tensor([8.0, 1.0, 1.0, 1.0]))  # 0.8, 0.4, 0.2, 0.3 before normalising
    shifted = dense(ShiftedLogits(TopK(2, True), shift, torch.tensor(2.0)))
    assert torch.allclose(shifted, 2 * torch.tensor([[2 / 3, 1 / 3, 0.0, 0.0]]))


def test_gated_relaxation_scales_the_model_s_own_weights() -> None:
    gates = torch.tensor([0.0, 0.5, 1.0, 1.0])
    assert torch.allclose(dense(Gated(TopK(2, True), gates, 2.0)), torch.tensor([[0.0, 4 / 7, 0.0, 6 / 7]]))


def test_hard_mask_reroutes_forward_and_passes_gradient_to_the_gates() -> None:
    gates = torch.tensor([0.9, 0.1, 0.8, 0.7], requires_grad=True)
    open_experts = torch.tensor([True, False, True, True])
    experts, weights = HardMask(TopK(2, True), gates, open_experts)(LOGITS)
    assert experts.tolist() == [[3, 2]] and torch.allclose(weights, torch.tensor([[0.6, 0.4]]))
    (weights * torch.tensor([[10.0, 1.0]])).sum().backward()
    assert torch.allclose(gates.grad, torch.tensor([0.0, 0.0, 0.4, 6.0]))


def test_skipping_by_hand() -> None:
    """w = 4/7, 3/7; γ1 = 0.8, γ2(1,3) = 1.0: skipped iff 3/7 < S · 0.8 · 4/7, that is S > 0.9375."""
    gamma2 = torch.ones(4, 4)
    skipped = Skipping(TopK(2, True), torch.tensor([0.8]), gamma2, threshold=0.94, normalise=True)
    kept = Skipping(TopK(2, True), torch.tensor([0.8]), gamma2, threshold=0.93, normalise=True)
    assert skipped(LOGITS).experts.tolist() == [[1, NO_EXPERT]]
    assert torch.allclose(dense(skipped), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    assert torch.equal(dense(kept), dense(TopK(2, True)))
    gamma2[1, 3] = 2.0
    assert Skipping(TopK(2, True), torch.tensor([0.8]), gamma2, 0.5, True)(LOGITS).experts.tolist() == [[1, NO_EXPERT]]


def test_skipping_per_rank_keeps_the_first_and_the_weights_of_models_that_do_not_renormalise() -> None:
    rule = Skipping(TopK(3, False), torch.tensor([0.5, 0.9]), torch.ones(4, 4), threshold=1.0, normalise=False)
    assert torch.allclose(dense(rule), torch.tensor([[0.0, 0.4, 0.0, 0.3]])), "0.3 ≥ 0.5·0.4 stays, 0.2 < 0.9·0.4 goes"
    two = Skipping(TopK(3, False), torch.tensor([9.0, 9.0]), torch.ones(4, 4), 1.0, False, keep=2)
    assert torch.allclose(dense(two), torch.tensor([[0.0, 0.4, 0.0, 0.3]]))


def test_threshold_zero_is_bit_identical_to_no_skipping() -> None:
    logits = torch.randn(50, 8)
    base = TopK(2, True)
    plain, skipping = base(logits), Skipping(base, torch.ones(1), torch.ones(8, 8), 0.0, True)(logits)
    assert torch.equal(plain.experts, skipping.experts) and torch.equal(plain.weights, skipping.weights)


def random_block(routing: Routing, experts: int = 4, hidden: int = 6, width: int = 5) -> MoeBlock:
    torch.manual_seed(0)
    parts = [
        Expert(torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(hidden, width)) for _ in range(experts)
    ]
    return MoeBlock(torch.randn(experts, hidden), parts, routing)


def test_a_router_that_is_trained_gets_gradients_and_nothing_else_does() -> None:
    block = random_block(AllExperts())
    block.router_ND.requires_grad_(True)
    x = torch.randn(7, 6)
    block(x).square().sum().backward()
    assert block.router_ND.grad is not None and block.router_ND.grad.abs().sum() > 0
    assert all(p.grad is None for name, p in block.named_parameters() if name != "router_ND")
    # Against finite differences in float64.
    block = block.double()
    block.router_ND.grad = None
    x = x.double()
    block(x).square().sum().backward()
    step = torch.zeros_like(block.router_ND)
    step[2, 3] = 1e-5
    with torch.no_grad():
        block.router_ND += step
        above = block(x).square().sum()
        block.router_ND -= 2 * step
        below = block(x).square().sum()
    assert torch.isclose((above - below) / 2e-5, block.router_ND.grad[2, 3], rtol=1e-5)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_grouped_and_sparse_paths_equal_the_naive_sum(tokens: int, skip: bool) -> None:
    base = TopK(2, True)
    routing = Skipping(base, torch.tensor([0.7]), torch.ones(4, 4), 1.0, True) if skip else base
    block = random_block(routing)
    x = torch.randn(tokens, 6)
    selection = routing(torch.nn.functional.linear(x, block.router_ND))
    naive = torch.stack(
        [
            sum(
                (
                    w * block.experts[e](x[t])
                    for e, w in zip(selection.experts[t].tolist(), selection.weights[t], strict=True)
                    if e != NO_EXPERT
                ),
                torch.zeros(6),
            )
            for t in range(tokens)
        ]
    )
    assert isinstance(block.experts, nn.ModuleList)
    assert torch.allclose(grouped(x, selection, block.experts), naive, atol=1e-5)
    assert torch.allclose(sparse(x, selection, block.experts), naive, atol=1e-5)


def test_grouped_gradients_equal_the_naive_ones() -> None:
    block = random_block(TopK(2, True)).requires_grad_(True)
    x = torch.randn(9, 6, requires_grad=True)
    block(x).sin().sum().backward()
    fast = [p.grad.clone() for p in block.parameters()] + [x.grad.clone()]
    block.zero_grad()
    x.grad = None
    logits = torch.nn.functional.linear(x, block.router_ND)
    experts, weights = TopK(2, True)(logits)
    every = torch.stack([expert(x) for expert in block.experts], dim=1)
    one_hot = torch.zeros(9, 4).scatter(1, experts, weights)
    (one_hot[..., None] * every).sum(1).sin().sum().backward()
    for got, parameter in zip(fast, [*block.parameters(), x], strict=True):
        assert torch.allclose(got, parameter.grad, atol=1e-5)
