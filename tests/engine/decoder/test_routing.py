"""Every use of a Routing in the project, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from engine.decoder.experts import Expert, MoeBlock, grouped, sparse
from engine.decoder.routing import (
    NO_EXPERT,
    AllExperts,
    BiasedTopK,
    Gated,
    Masked,
    MixedExperts,
    Noisy,
    Routing,
    SampledExperts,
    ShiftedLogits,
    SigmoidTopK,
    Skipping,
    SparseMixer,
    TopK,
    probabilities,
    select,
    softmax,
)

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))


def dense(routing: Routing, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """Return the Selection as one weight per expert, [T, N]. Empty slots contribute nothing."""
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
    assert torch.allclose(dense(TopK(2, True, 3.5)), torch.tensor([[0.0, 2.0, 0.0, 1.5]]))
    assert torch.allclose(dense(TopK(2, False, 0.5)), torch.tensor([[0.0, 0.2, 0.0, 0.15]]))


def test_masked_is_top_k_over_the_kept_experts() -> None:
    kept = torch.tensor([True, False, True, False])
    assert torch.allclose(dense(Masked(TopK(2, True), kept)), torch.tensor([[1 / 3, 0.0, 2 / 3, 0.0]]))
    assert torch.allclose(dense(Masked(TopK(1, False), kept)), torch.tensor([[0.0, 0.0, 2 / 3, 0.0]]))
    one = torch.tensor([False, False, True, False])
    experts, _ = Masked(TopK(2, True), one)(LOGITS)
    assert experts.tolist() == [[2, NO_EXPERT]], "where fewer than k are left the others are empty slots"


# Noisy top-k


NOISE = torch.tensor([[1.0, -2.0], [0.0, 3.0], [0.5, 0.5]])
"""W_noise of three experts on two inputs."""


def test_noise_is_what_the_formula_says() -> None:
    x, logits = torch.tensor([[2.0, 1.0], [0.0, -1.0]]), torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    rule = Noisy(TopK(2, True), NOISE, 0.25, 3)
    drawn = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
    by_hand = torch.tensor([[0.0, 3.0, 1.5], [2.0, -3.0, -0.5]])  # W_noise · x
    expected = logits + drawn * ((1.0 + by_hand.exp()).log() + 0.25)
    assert torch.allclose(rule.noisy(x, logits), expected, atol=1e-6)
    again = Noisy(TopK(2, True), NOISE, 0.25, 3)
    experts, weights = select(again, x, logits)
    chosen = TopK(2, True)(expected)
    assert torch.equal(experts, chosen.experts) and torch.allclose(weights, chosen.weights)


def test_the_spread_of_noise_and_how_often_it_changes_the_choice() -> None:
    """With deviation σ each, an expert whose logit is lower by d comes first with probability Φ(−d / (σ√2))."""
    draws, sigma = 40_000, math.log(2.0) + 0.1  # softplus(0) + ε
    x, logits = torch.zeros(draws, 2), torch.tensor([0.5, -0.5, -50.0]).expand(draws, 3)
    rule = Noisy(TopK(1, True), NOISE, 0.1, 0)
    noisy = rule.noisy(x, logits)
    assert torch.allclose(noisy.mean(0), logits[0], atol=0.02)
    assert torch.allclose(noisy.std(0), torch.full((3,), sigma), rtol=0.02)
    second = float((select(rule, x, logits).experts == 1).float().mean())
    assert second == pytest.approx(0.5 * math.erfc(1.0 / (2.0 * sigma)), abs=0.01)


def test_without_the_tokens_at_hand_there_is_no_noise() -> None:
    base = TopK(2, True, 2.0)
    rule = Noisy(base, torch.randn(4, 3), 1.0, 0)
    assert torch.equal(dense(rule), dense(base)) and torch.equal(probabilities(rule, LOGITS), probabilities(base, LOGITS))
    removed = Masked(base, torch.tensor([False, True, True, True]))
    noisy = select(Noisy(removed, torch.zeros(4, 3), 9.0, 0), torch.ones(50, 3), LOGITS)
    assert not bool((noisy.experts == 0).any()), "what is masked stays so whatever the noise"


def test_gradients_reach_the_noise_and_the_router() -> None:
    torch.manual_seed(0)
    noise, logits = torch.randn(4, 3, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    rule = Noisy(TopK(2, True), noise, 0.01, 0)
    (select(rule, torch.randn(6, 3), logits).weights[:, 0]).sum().backward()
    assert float(noise.grad.abs().sum()) > 0 and float(logits.grad.abs().sum()) > 0


# Sigmoid routers


SIGMOID_LOGITS = torch.logit(torch.tensor([[0.8, 0.5, 0.4, 0.1]]))


def test_the_bias_of_a_sigmoid_router_chooses_and_does_not_weigh() -> None:
    bias = torch.tensor([0.0, 0.0, 0.0, 0.6])  # 0.8 0.5 0.4 0.7
    assert torch.allclose(dense(SigmoidTopK(2, False, bias), SIGMOID_LOGITS), torch.tensor([[0.8, 0.0, 0.0, 0.1]]))
    normalised = dense(SigmoidTopK(2, True, bias, scale=2.5), SIGMOID_LOGITS)
    assert torch.allclose(normalised, torch.tensor([[0.8, 0.0, 0.0, 0.1]]) / 0.9 * 2.5)
    experts, weights = SigmoidTopK(2, False, torch.tensor([-1.0, 0.0, 0.0, 0.6]))(SIGMOID_LOGITS)
    assert experts.tolist() == [[1, 3]], "slots are in the order of the weights, not of the choice"
    assert torch.allclose(weights, torch.tensor([[0.5, 0.1]]))


def test_only_the_best_groups_of_a_sigmoid_router_are_chosen_from() -> None:
    groups = ((0, 3), (1, 2))  # 0.8 + 0.1 = 0.9 and 0.5 + 0.4 = 0.9, decided by the bias
    low = SigmoidTopK(1, False, torch.tensor([0.0, 0.1, 0.0, 0.0]), groups=groups, groups_per_token=1)
    assert torch.allclose(dense(low, SIGMOID_LOGITS), torch.tensor([[0.0, 0.5, 0.0, 0.0]]))
    high = SigmoidTopK(1, False, torch.tensor([0.0, 0.0, 0.0, 0.1]), groups=groups, groups_per_token=1)
    assert torch.allclose(dense(high, SIGMOID_LOGITS), torch.tensor([[0.8, 0.0, 0.0, 0.0]]))


def test_a_masked_expert_of_a_sigmoid_router_is_never_chosen() -> None:
    kept = torch.tensor([False, True, True, False])
    high_bias = torch.tensor([9.0, 0.0, 0.0, 9.0])
    assert torch.allclose(
        dense(Masked(SigmoidTopK(2, False, high_bias), kept), SIGMOID_LOGITS), torch.tensor([[0.0, 0.5, 0.4, 0.0]])
    )
    grouped_rule = SigmoidTopK(2, True, high_bias, groups=((0, 3), (1, 2)), groups_per_token=1)
    assert torch.allclose(dense(Masked(grouped_rule, kept), SIGMOID_LOGITS), torch.tensor([[0.0, 5 / 9, 4 / 9, 0.0]]))
    one = torch.tensor([True, True, True, False])  # group (0, 3) is now 0.8 against 0.9, and then 0.4
    plain = SigmoidTopK(2, True, torch.zeros(4), groups=((0, 3), (1, 2)), groups_per_token=1)
    assert dense(Masked(plain, one), SIGMOID_LOGITS)[0, 0] == 0
    experts, weights = Masked(plain, torch.tensor([True, False, True, False]))(SIGMOID_LOGITS)
    assert experts.tolist() == [[0, NO_EXPERT]], "the best group has one expert left, and the other group is not its own"
    assert weights.tolist() == [[1.0, 0.0]]


def naive_sigmoid_choice(rule: SigmoidTopK, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Return the weights by expert for one token, by sorting."""
    alive = [i for i, logit in enumerate(logits) if logit > float("-inf")]
    score = {i: 1 / (1 + math.exp(-logits[i])) for i in alive}

    def value(group: tuple[int, ...]) -> float:
        return sum(sorted((score[i] + bias[i] for i in group if i in score), reverse=True)[:2])

    groups = [group for group in rule.groups or (tuple(alive),) if any(i in score for i in group)]
    best = sorted(groups, key=value, reverse=True)[: rule.groups_per_token]
    allowed = [i for group in best for i in group if i in score]
    chosen = sorted(allowed, key=lambda i: -(score[i] + bias[i]))[: rule.experts_per_token]
    total = sum(score[i] for i in chosen) if rule.normalise else 1.0
    return {i: rule.scale * score[i] / total for i in chosen}


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    "groups", [(), ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)), ((7,), (), (0, 1, 2, 3, 5), (4, 6, 8, 9, 10, 11))]
)
@pytest.mark.parametrize("masked", [(), (2, 3), (3, 4, 5, 7), tuple(range(11))])
def test_sigmoid_router_equals_a_naive_loop(
    normalise: bool, groups: tuple[tuple[int, ...], ...], masked: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(60, 12, generator=generator) * 2, torch.randn(12, generator=generator)
    rule = SigmoidTopK(4, normalise, bias, 1.5, groups, 2)
    kept = torch.ones(12, dtype=torch.bool)
    kept[list(masked)] = False
    got = dense(Masked(rule, kept), logits)
    experts, weights = Masked(rule, kept)(logits)
    assert (weights.diff(dim=1) <= 0).all(), "largest first, empty slots last"
    assert torch.equal((experts != NO_EXPERT).sum(1), (got > 0).sum(1))
    expected = torch.zeros(60, 12)
    for token, row in enumerate(logits.masked_fill(~kept, -torch.inf).tolist()):
        for expert, weight in naive_sigmoid_choice(rule, row, bias.tolist()).items():
            expected[token, expert] = weight
    assert torch.allclose(got, expected, atol=1e-6)


def test_masking_a_sigmoid_router_equals_removing() -> None:
    logits, bias = torch.randn(40, 8), torch.randn(8)
    kept = [0, 2, 3, 7]
    mask = torch.zeros(8, dtype=torch.bool)
    mask[kept] = True
    full = SigmoidTopK(2, True, bias, 2.5, ((0, 1), (2, 3), (4, 5), (6, 7)), 2)
    removed = SigmoidTopK(2, True, bias[kept], 2.5, ((0,), (1, 2), (), (3,)), 2)
    assert torch.allclose(dense(Masked(full, mask), logits)[:, kept], dense(removed, logits[:, kept]), atol=1e-6)
    both = probabilities(Masked(full, mask), logits)[:, kept], probabilities(removed, logits[:, kept])
    assert torch.allclose(*both, atol=1e-6)


@pytest.mark.parametrize("normalise", [False, True])
def test_sigmoid_router_equals_that_of_transformers(normalise: bool) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"n_routed_experts": 16, "num_experts_per_tok": 4, "hidden_size": 8, "n_group": 4, "topk_group": 2}
    router = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, norm_topk_prob=normalise, routed_scaling_factor=2.5))
    torch.manual_seed(0)
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.normal_(0.0, 0.3)
        logits, weights, experts = router(torch.randn(50, 8))
    groups = tuple(tuple(range(start, start + 4)) for start in range(0, 16, 4))
    ours = SigmoidTopK(4, normalise, router.e_score_correction_bias, 2.5, groups, 2)
    assert torch.allclose(dense(ours, logits), torch.zeros(50, 16).scatter(1, experts, weights), atol=1e-6)


def test_a_bias_on_probabilities_chooses_and_never_weighs() -> None:
    """Probabilities are 0.1, 0.4, 0.2, 0.3. With the bias experts 0 and 3 are chosen, with weights 0.1 and 0.3 over 0.4."""
    rule = BiasedTopK(2, torch.tensor([0.5, -0.3, 0.0, 0.2]), 1e-12)
    experts, weights = rule(LOGITS)
    assert experts.tolist() == [[3, 0]] and torch.allclose(weights, torch.tensor([[0.75, 0.25]]))
    floor = BiasedTopK(1, torch.tensor([5.0, 0.0, 0.0, 0.0]), 0.2)
    assert torch.allclose(floor(LOGITS).weights, torch.tensor([[0.5]])), "0.1 over at least 0.2"
    logits = 3.0 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([1, 3])
    mask = torch.isin(torch.arange(4), kept)
    removed = BiasedTopK(2, rule.bias_N[kept], 1e-12)
    assert torch.allclose(dense(Masked(rule, mask), logits)[:, kept], dense(removed, logits[:, kept]), atol=1e-6)
    assert dense(Masked(rule, mask), logits)[:, [0, 2]].abs().max() == 0.0


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparsemixer_equals_that_of_transformers(jitter: float) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    logits[0], logits[1, 2:] = 0.0, 1.0
    weights, experts = sparsemixer(logits, jitter_eps=jitter, training=False)
    rule = SparseMixer(2, jitter)
    assert torch.allclose(dense(rule, logits), torch.zeros(200, 6).scatter(1, experts, weights), atol=1e-6)
    assert bool((rule(logits).weights.diff(dim=1) <= 0).all()), "largest first"
    kept = torch.tensor([0, 2, 5])
    mask = torch.isin(torch.arange(6), kept)
    assert torch.allclose(dense(Masked(rule, mask), logits)[:, kept], dense(rule, logits[:, kept]), atol=1e-6)


def test_sparsemixer_of_one_expert_leaves_a_slot_empty_and_has_gradients() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    one = Masked(SparseMixer(2, 0.3), torch.tensor([False, True, False]))(logits)
    assert one.experts.tolist() == [[1, NO_EXPERT]] * 5 and torch.equal(one.weights, torch.tensor([[1.0, 0.0]] * 5))
    (gradient,) = torch.autograd.grad(SparseMixer(2, 0.5)(logits).weights.square().sum(), logits)
    assert bool(gradient.isfinite().all()) and float(gradient.abs().sum()) > 0.0


def test_probabilities_are_the_routing_s_own() -> None:
    assert torch.equal(probabilities(TopK(2, True), LOGITS), softmax(LOGITS))
    by_hand = torch.tensor([[0.8, 0.5, 0.4, 0.1]]) / 1.8
    assert torch.allclose(probabilities(SigmoidTopK(2, True, torch.ones(4)), SIGMOID_LOGITS), by_hand)
    kept = torch.tensor([True, False, True, False])
    assert torch.allclose(probabilities(Masked(TopK(2, True), kept), LOGITS), torch.tensor([[1 / 3, 0.0, 2 / 3, 0.0]]))


def test_all_experts_is_the_softmax() -> None:
    assert torch.allclose(dense(AllExperts()), LOGITS.exp())


def test_sampled_experts_are_the_largest_n_minus_1_when_nothing_is_drawn() -> None:
    weights = dense(SampledExperts(0.0, torch.Generator().manual_seed(0)))
    assert torch.allclose(weights, torch.tensor([[0.0, 0.4, 0.2, 0.3]]) / 0.9)


@pytest.mark.parametrize("per_token", [False, True])
def test_sampled_experts_leave_out_each_expert_about_as_often_as_drawing_says(per_token: bool) -> None:
    """N-1 of N experts are drawn without replacement. Expert i is left out with the probability that it comes last."""
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
    shift = torch.log(torch.tensor([8.0, 1.0, 1.0, 1.0]))  # 0.8, 0.4, 0.2, 0.3 before normalization
    shifted = dense(ShiftedLogits(TopK(2, True), shift, torch.tensor(2.0)))
    assert torch.allclose(shifted, 2 * torch.tensor([[2 / 3, 1 / 3, 0.0, 0.0]]))


def test_gated_relaxation_scales_the_model_s_own_weights() -> None:
    gates = torch.tensor([0.0, 0.5, 1.0, 1.0])
    assert torch.allclose(dense(Gated(TopK(2, True), gates, 2.0)), torch.tensor([[0.0, 4 / 7, 0.0, 6 / 7]]))


def test_each_sequence_of_a_batch_may_have_gates_of_its_own() -> None:
    gates = torch.tensor([[0.0, 0.5, 1.0, 1.0], [1.0, 0.25, 1.0, 0.5]])
    experts, weights = Gated(TopK(2, True), gates)(LOGITS.expand(4, -1))  # two sequences of two tokens
    assert experts.tolist() == [[3, 1]] * 4 or experts.tolist() == [[1, 3]] * 4
    by_expert = torch.zeros(4, 4).scatter(1, experts, weights)
    first, second = [0.0, 2 / 7, 0.0, 3 / 7], [0.0, 1 / 7, 0.0, 3 / 14]
    assert torch.allclose(by_expert, torch.tensor([first, first, second, second]))


def test_skipping_by_hand() -> None:
    """With w = 4/7, 3/7, γ1 = 0.8 and γ2(1,3) = 1.0: skipped iff 3/7 < S · 0.8 · 4/7, that is S > 0.9375."""
    gamma2 = torch.ones(4, 4)
    skipped = Skipping(TopK(2, True), torch.tensor([0.8]), gamma2, threshold=0.94, normalise=True)
    kept = Skipping(TopK(2, True), torch.tensor([0.8]), gamma2, threshold=0.93, normalise=True)
    assert skipped(LOGITS).experts.tolist() == [[1, NO_EXPERT]]
    assert torch.allclose(dense(skipped), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    assert torch.equal(dense(kept), dense(TopK(2, True)))
    scaled = Skipping(TopK(2, True, 4.0), torch.tensor([0.8]), gamma2, threshold=0.94, normalise=True)
    assert torch.allclose(dense(scaled), torch.tensor([[0.0, 4.0, 0.0, 0.0]])), "what is left adds up to what all did"
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
    # The reference is finite differences in float64.
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
    block = random_block(TopK(2, True)).double().requires_grad_(True)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    block(x).sin().sum().backward()
    fast = [p.grad.clone() for p in block.parameters()] + [x.grad.clone()]
    block.zero_grad()
    x.grad = None
    logits = torch.nn.functional.linear(x, block.router_ND)
    experts, weights = TopK(2, True)(logits)
    every = torch.stack([expert(x) for expert in block.experts], dim=1)
    one_hot = torch.zeros(9, 4, dtype=torch.float64).scatter(1, experts, weights.double())
    (one_hot[..., None] * every).sum(1).sin().sum().backward()
    for got, parameter in zip(fast, [*block.parameters(), x], strict=True):
        assert torch.allclose(got, parameter.grad, atol=1e-5)
