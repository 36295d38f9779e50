"""Routing: how a token selects its experts, and how it skips some of them (`Skipping`).

A Routing is a function from router logits to (expert indices, weights); `Noisy` and `Skipping` may read the tokens too,
so a MoE block calls `select`. The model's own top-k, DiEP's relaxations,
adaptive skipping, every expert at once, N-1 sampled experts and a router in training are all Routings; one MoE block
(experts.py) takes any of them. With adaptive skipping, a token skips expert e_j if its weight is below S·γ_j times the
weight of the token's best expert.

A Routing belongs to one layer and holds that layer's data (scores, skip tables). Weights may carry gradients: through
the logits to the router's parameters, and to the Routing's own tensors. Indices carry none.

Shape suffixes: T tokens, N routed experts of the layer, S slots (experts a token may use), K the model's top-k, G
groups of experts, M experts of one group, B sequences, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kernels.linear import linear

NO_EXPERT = -1
"""Index of an empty slot: nothing is loaded or computed for it, whatever its weight."""

Gate = Callable[[Tensor], Tensor]
"""Function from router logits to shares that sum to one over the last dimension."""


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension, in float32 or better whatever the model's dtype."""
    return logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def sigmoid_shares(logits: Tensor) -> Tensor:
    """Return sigmoid scores divided by their sum over the last dimension."""
    scores = _sigmoid(logits)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


class Selection(NamedTuple):
    """Result of a Routing."""

    experts: Tensor
    """[T, S] int64, each in [0, N) or NO_EXPERT; no token has an expert twice."""
    weights: Tensor
    """[T, S] float32; the block's routed output is the sum over slots of weight · FFN_expert(x)."""


class Routing(Protocol):
    """A layer's rule: a function from router logits [T, N] to a Selection."""

    def __call__(self, logits_TN: Tensor) -> Selection: ...


@dataclass(frozen=True)
class TopK:
    """The plain top-k rule (eq. 1-2 of DiEP): the k largest values of the softmax over all experts.

    `normalise` rescales the k weights to sum to one; `scale` multiplies all of them. If the layer has fewer than k
    experts, all of them are used.
    """

    experts_per_token: int
    normalise: bool
    scale: float = 1.0

    def __call__(self, logits_TN: Tensor) -> Selection:
        probabilities_TN = softmax(logits_TN)
        weights_TK, experts_TK = probabilities_TN.topk(min(self.experts_per_token, logits_TN.shape[-1]), dim=-1)
        if self.normalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return Selection(experts_TK, weights_TK if self.scale == 1.0 else weights_TK * self.scale)


@dataclass(frozen=True)
class ScaledTopK(TopK):
    """The plain top-k rule, after which the weight of each expert is multiplied by the expert's own factor.

    Slots are sorted by weight, largest first.
    """

    factors_N: Tensor = field(kw_only=True)
    """[N], one for each expert."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        experts_TK, weights_TK = super().__call__(logits_TN)
        weights_TK, order_TK = (weights_TK * self.factors_N[experts_TK]).sort(dim=-1, descending=True, stable=True)
        return Selection(experts_TK.gather(-1, order_TK), weights_TK)


@dataclass(frozen=True)
class GroupedTopK:
    """Device-limited routing (DeepSeek-V2, arXiv 2405.04434, §2.2.2): the k best experts in the token's best groups.

    The score of a group is the score of its best expert. The weights are the probabilities times `scale`, not
    normalized. As in SigmoidTopK, an expert whose logit is −∞ does not exist, groups may have any size, and slots that
    the best groups cannot fill are empty.
    """

    experts_per_token: int
    groups: tuple[tuple[int, ...], ...]
    groups_per_token: int
    scale: float = 1.0
    normalise: ClassVar[bool] = False

    def __call__(self, logits_TN: Tensor) -> Selection:
        probabilities_TN = softmax(logits_TN).masked_fill(logits_TN == -torch.inf, -torch.inf)
        in_best_TN = in_best_groups(probabilities_TN, self.groups, self.groups_per_token, judged_by=1)
        best = probabilities_TN.masked_fill(~in_best_TN, -torch.inf).topk(
            min(self.experts_per_token, logits_TN.shape[-1]), dim=-1
        )
        empty_TK = best.values == -torch.inf
        return Selection(best.indices.masked_fill(empty_TK, NO_EXPERT), best.values.masked_fill(empty_TK, 0.0) * self.scale)


@dataclass(frozen=True)
class Noisy:
    """Noisy top-k gating in training (arXiv 1701.06538 §2.1, eq. 4): H(x) = logits + N(0, 1) · (softplus(W_noise·x) + ε).

    ε is a constant of the model. The noise depends on the tokens, so the MoE block calls `selected`; a call with logits
    alone uses no noise. It is the outermost Routing of a layer. One seed always gives the same noise, also when a layer
    is recomputed in the backward pass.
    """

    base: Routing
    noise_ND: Tensor
    """W_noise, [N, D]."""
    epsilon: float
    seed: int

    def __call__(self, logits_TN: Tensor) -> Selection:
        return self.base(logits_TN)

    def selected(self, x_TD: Tensor, logits_TN: Tensor) -> Selection:
        """Return the base's choice for noisy logits; gradients reach W_noise through them."""
        return self.base(self.noisy(x_TD, logits_TN))

    def noisy(self, x_TD: Tensor, logits_TN: Tensor) -> Tensor:
        """Return H(x), [T, N], in float32 or better."""
        wide = torch.promote_types(logits_TN.dtype, torch.float32)
        deviations_TN = torch.nn.functional.softplus(linear(x_TD, self.noise_ND).to(wide)) + self.epsilon
        generator = torch.Generator().manual_seed(self.seed)  # on the CPU: all devices get equal noise
        normal_TN = torch.randn(logits_TN.shape, generator=generator, dtype=wide)
        return logits_TN + normal_TN.to(logits_TN.device) * deviations_TN

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """Return the base's probabilities, without noise."""
        return probabilities(self.base, logits_TN)


@dataclass(frozen=True)
class SigmoidTopK:
    """Sigmoid scores with a selection bias and groups (DeepSeek-V3, arXiv 2412.19437, §2.1.2).

    Each token takes the k experts with the largest score + bias within its best groups. The score of a group is the sum
    over its two best experts. The weights are the scores without the bias, rescaled to sum to one if `normalise` is
    set, times `scale`. Slots are sorted by weight, largest first.

    An expert whose logit is −∞ does not exist here, whatever its bias: it is never chosen, and its group is scored by
    the other experts (by one alone if only one is left). The paper has no such case; the rule makes masking an expert
    equal to removing it. If the best groups hold fewer than k experts, the other slots are empty.
    """

    experts_per_token: int
    normalise: bool
    bias_N: Tensor
    """[N] float32; added to the scores for selection only."""
    scale: float = 1.0
    groups: tuple[tuple[int, ...], ...] = ()
    """Experts of each group; () puts all in one group. After pruning, groups may have any size but zero."""
    groups_per_token: int = 1
    added_to_sum: float = 1e-20
    """Number that is added to the divisor of the weights."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        scores_TN = _sigmoid(logits_TN)
        choice_TN = (scores_TN + self.bias_N).masked_fill(logits_TN == -torch.inf, -torch.inf)
        if self.groups:
            in_best_TN = in_best_groups(choice_TN, self.groups, self.groups_per_token, judged_by=2)
            choice_TN = choice_TN.masked_fill(~in_best_TN, -torch.inf)
        best = choice_TN.topk(min(self.experts_per_token, logits_TN.shape[-1]), dim=-1)
        empty_TK = best.values == -torch.inf
        weights_TK = scores_TN.gather(-1, best.indices).masked_fill(empty_TK, 0.0)
        if self.normalise:  # scores may all be zero, where a softmax would not
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + self.added_to_sum)
        weights_TK, order_TK = (weights_TK * self.scale).sort(dim=-1, descending=True, stable=True)
        return Selection(best.indices.masked_fill(empty_TK, NO_EXPERT).gather(-1, order_TK), weights_TK)

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """Return the scores divided by their sum, as in the paper's balance loss."""
        return sigmoid_shares(logits_TN)


@dataclass(frozen=True)
class BiasedTopK:
    """Softmax over all experts with a selection bias (arXiv 2408.15664).

    Each token takes the k experts with the largest probability + bias. The weights are their probabilities without the
    bias, rescaled to sum to one. Slots are sorted by weight, largest first. As in SigmoidTopK, an expert whose logit is
    −∞ does not exist.
    """

    experts_per_token: int
    bias_N: Tensor
    """[N] float32; added to the probabilities for selection only."""
    least_sum: float
    """Lower limit of the divisor of the weights, because a bias may select experts with almost zero probability."""
    scale: ClassVar[float] = 1.0
    normalise: ClassVar[bool] = True

    def __call__(self, logits_TN: Tensor) -> Selection:
        probabilities_TN = softmax(logits_TN)
        choice_TN = (probabilities_TN + self.bias_N).masked_fill(logits_TN == -torch.inf, -torch.inf)
        best = choice_TN.topk(min(self.experts_per_token, logits_TN.shape[-1]), dim=-1)
        empty_TK = best.values == -torch.inf
        weights_TK = probabilities_TN.gather(-1, best.indices).masked_fill(empty_TK, 0.0)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(self.least_sum)
        weights_TK, order_TK = weights_TK.sort(dim=-1, descending=True, stable=True)
        return Selection(best.indices.masked_fill(empty_TK, NO_EXPERT).gather(-1, order_TK), weights_TK)


@dataclass(frozen=True)
class UnweightedTopK:
    """The k experts with the largest logits, each with weight one: for routers that scale the experts' inputs."""

    experts_per_token: int

    def __call__(self, logits_TN: Tensor) -> Selection:
        best = logits_TN.topk(min(self.experts_per_token, logits_TN.shape[-1]), dim=-1)
        empty_TK = best.values == -torch.inf
        ones_TK = torch.ones_like(best.values, dtype=torch.promote_types(logits_TN.dtype, torch.float32))
        return Selection(best.indices.masked_fill(empty_TK, NO_EXPERT), ones_TK.masked_fill(empty_TK, 0.0))

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """Return the input scales divided by their sum."""
        return sigmoid_shares(logits_TN)


@dataclass(frozen=True)
class SparseMixer:
    """sparsemixer's choice without its training noise (GRIN MoE, arXiv 2409.12136; thresholds as in transformers' code).

    Experts are chosen one after the other: the largest logit z_b among those not chosen yet. Its weight is its share of
    the softmax over those experts that are near; expert i is not near if (z_b − z_i) / max(|z_i|, z_b) > 2ε. Therefore
    weights do not sum to one: an expert far ahead of the others has weight one, also as the second choice. Slots are
    sorted by weight, largest first.

    In training, gradients are those of the weights alone; the paper also estimates a gradient of the choice.
    """

    experts_per_token: int
    jitter: float
    """ε, which sets the threshold for near experts."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        scores_TN = logits_TN.to(torch.promote_types(logits_TN.dtype, torch.float32))
        left_TN, slots = scores_TN, []
        for _ in range(min(self.experts_per_token, logits_TN.shape[-1])):
            best_T1, expert_T1 = left_TN.max(dim=-1, keepdim=True)
            empty_T1 = best_T1 == -torch.inf
            far_TN = (best_T1 - scores_TN) / scores_TN.abs().maximum(best_T1) > 2.0 * self.jitter
            near_TN = left_TN.masked_fill(far_TN, -torch.inf).masked_fill(empty_T1, 0.0)
            weight_T1 = near_TN.softmax(dim=-1).gather(-1, expert_T1).masked_fill(empty_T1, 0.0)
            slots.append((expert_T1.masked_fill(empty_T1, NO_EXPERT), weight_T1))
            left_TN = left_TN.scatter(-1, expert_T1, -torch.inf)
        experts_TS, weights_TS = (torch.cat(parts, dim=-1) for parts in zip(*slots, strict=True))
        weights_TS, order_TS = weights_TS.sort(dim=-1, descending=True, stable=True)
        return Selection(experts_TS.gather(-1, order_TS), weights_TS)


@dataclass(frozen=True)
class Masked:
    """A Routing restricted to some experts: the others' logits become −∞. Pruning must give an equal result."""

    base: Routing
    kept_N: Tensor
    """bool [N], True for the kept experts."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        experts_TS, weights_TS = self.base(logits_TN.masked_fill(~self.kept_N, -torch.inf))
        return Selection(experts_TS.masked_fill(~self.kept_N[experts_TS], NO_EXPERT), weights_TS)

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """Return the base's probabilities over the kept experts."""
        return probabilities(self.base, logits_TN.masked_fill(~self.kept_N, -torch.inf))


@dataclass(frozen=True)
class AllExperts:
    """Every expert for every token, weighted by the softmax over all of them (Every Expert Matters, "ALL")."""

    scale: float | Tensor = 1.0
    """Factor of the routed weights in the model (`factor_of`), with which its blocks were trained; [N] for one each."""
    gate: Gate = softmax
    """`sigmoid_shares` for routers with sigmoid scores, which the paper does not cover."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        return _every_expert(logits_TN, self.scale * self.gate(logits_TN))


@dataclass(frozen=True)
class SampledExperts:
    """Knowledge augmentation (Every Expert Matters): N−1 experts, weighted by the softmax over them.

    With `probability` they are sampled without replacement from the gate's distribution, otherwise they are the N−1
    largest. There is one draw for the whole call, from the mean distribution over tokens, or one per token
    (`per_token`).
    """

    probability: float
    generator: torch.Generator
    per_token: bool = False
    scale: float | Tensor = 1.0
    """As in AllExperts."""
    real_T: Tensor | None = None
    """bool [T], the tokens whose mean distribution a shared draw uses; None for all tokens."""
    gate: Gate = softmax
    """As in AllExperts."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        tokens, experts = logits_TN.shape
        count = max(1, experts - 1)
        probabilities_TN = self.gate(logits_TN.detach())
        # Drawn on the generator's device, so that all devices get equal draws.
        place = self.generator.device
        drawn = torch.rand(tokens if self.per_token else 1, 1, generator=self.generator, device=place) < self.probability
        real_TN = probabilities_TN if self.real_T is None else probabilities_TN[self.real_T]
        sampled_from = probabilities_TN if self.per_token else real_TN.mean(dim=0, keepdim=True)
        sampled_TS = sampled_from.to(place).multinomial(count, generator=self.generator).expand(tokens, count)
        largest_TS = probabilities_TN.topk(count, dim=-1).indices
        experts_TS = torch.where(drawn.to(logits_TN.device), sampled_TS.to(logits_TN.device), largest_TS)
        scale = self.scale[experts_TS] if isinstance(self.scale, Tensor) else self.scale
        return Selection(experts_TS, scale * self.gate(logits_TN.gather(-1, experts_TS)))


def factor_of(own: Routing) -> float | Tensor:
    """Return the factor by which a model's own Routing multiplies weights; [N] if each expert has one of its own."""
    scale: float = getattr(own, "scale", 1.0)
    return scale * own.factors_N if isinstance(own, ScaledTopK) else scale


@dataclass(frozen=True)
class MixedExperts:
    """DiEP's relaxed layer as in the paper (DiEP eq. 6, relaxation `paper`): y = β Σ_i ᾱ_i FFN_i(x).

    ᾱ = softmax(α); every expert processes every token, without router weights.
    """

    alpha_N: Tensor
    beta: Tensor

    def __call__(self, logits_TN: Tensor) -> Selection:
        mixture_N = self.beta * softmax(self.alpha_N)
        return _every_expert(logits_TN, mixture_N.expand(logits_TN.shape[0], -1))


@dataclass(frozen=True)
class ShiftedLogits:
    """DiEP relaxation `routed`: the model's own rule on logits ζ + α, times β."""

    base: Routing
    alpha_N: Tensor
    beta: Tensor

    def __call__(self, logits_TN: Tensor) -> Selection:
        shift_N = self.alpha_N.to(logits_TN.dtype)
        shifted = getattr(self.base, "shifted", None)  # a rule that makes its own logits
        experts_TS, weights_TS = self.base(logits_TN + shift_N) if shifted is None else shifted(shift_N)
        return Selection(experts_TS, self.beta * weights_TS)


@dataclass(frozen=True)
class Gated:
    """DiEP relaxation `gated`: y = β Σ_{i∈top-k} w_i · gate_i · FFN_i(x).

    `gates` are σ(α + 2) for DiEP and ones for gate gradients.
    """

    base: Routing
    gates: Tensor
    """[N], or [B, N] for a batch of B sequences of equal length, each with its own gates."""
    beta: Tensor | float = 1.0

    def __call__(self, logits_TN: Tensor) -> Selection:
        experts_TS, weights_TS = self.base(logits_TN)
        if self.gates.dim() == 1:
            return Selection(experts_TS, self.beta * weights_TS * self.gates[experts_TS])
        sequence_T = torch.arange(len(logits_TN), device=logits_TN.device) // (len(logits_TN) // len(self.gates))
        return Selection(experts_TS, self.beta * weights_TS * self.gates[sequence_T[:, None], experts_TS])


@dataclass(frozen=True)
class Skipping:
    """Adaptive skipping (DiEP §4.3): e_j (j ≥ 1) is skipped if w_ej < S·γ_j(e_0,e_j)·w_e0.

    γ_j(e_0,e_j) = γ1_j · γ2(e_0,e_j). The threshold S scales γ; 0 skips nothing and leaves the base's Selection
    unchanged. The first `keep` experts of a token are never skipped. The base must return slots sorted by weight,
    largest first.

    With `importance_1`, important tokens are protected: a token skips nothing if the 1-norm of the block's input is
    larger (MC-MoE, arXiv 2410.06270, §3.3). MC-MoE multiplies the norm by the mean attention that the token receives
    from later tokens. This rule uses the norm alone, because a token that is being decoded has received no attention
    yet; so a token's choice does not depend on the batch, or on the piece of a prompt that it is in.
    """

    base: Routing
    gamma1_K: Tensor
    """[K-1], the layer's calibration medians of w_ej / w_e0, j = 1..K-1."""
    gamma2_NN: Tensor
    """[N, N], CKA(e_0,e_j) divided by the layer's mean CKA; ones for the rules of NAEE and MC-MoE."""
    threshold: float | Tensor
    """A number, or [T] if each token of the next call has its own threshold."""
    normalise: bool
    """Whether to rescale the remaining weights to the token's former sum; set iff the model normalizes its top-k.

    A base that finds this out itself, from its router, says so in `normalises`.
    """
    keep: int = 1
    importance_1: Tensor | None = None
    """[1], the layer's calibration quantile of ‖x‖₁, above which tokens are protected; None protects none."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        assert self.importance_1 is None, "the rule reads the tokens, call `select`"
        return self._selected(logits_TN, None)

    def selected(self, x_TD: Tensor, logits_TN: Tensor) -> Selection:
        """Return the base's choice without the experts that a token skips."""
        if self.importance_1 is None:
            return self._selected(logits_TN, None)
        return self._selected(logits_TN, importance(x_TD) > self.importance_1)

    def _selected(self, logits_TN: Tensor, protected_T: Tensor | None) -> Selection:
        experts_TS, weights_TS = self.base(logits_TN)
        if experts_TS.shape[1] <= self.keep or (isinstance(self.threshold, float | int) and self.threshold == 0):
            return Selection(experts_TS, weights_TS)
        rest_TJ = experts_TS[:, 1:]
        gamma_TJ = self.gamma1_K[: rest_TJ.shape[1]] * self.gamma2_NN[experts_TS[:, :1], rest_TJ]
        threshold = self.threshold[:, None] if isinstance(self.threshold, Tensor) else self.threshold
        skipped_TJ = weights_TS[:, 1:] < threshold * gamma_TJ * weights_TS[:, :1]
        skipped_TJ[:, : self.keep - 1] = False
        if protected_T is not None:
            skipped_TJ &= ~protected_T[:, None]
        skipped_TS = torch.nn.functional.pad(skipped_TJ, (1, 0), value=False)
        left_TS = weights_TS.masked_fill(skipped_TS, 0.0)
        if self.normalise or getattr(self.base, "normalises", False):
            # Only tokens with a skipped expert, so that the weights of the others stay bit-identical.
            renormalised_TS = left_TS * (weights_TS.sum(dim=-1, keepdim=True) / left_TS.sum(dim=-1, keepdim=True))
            left_TS = torch.where(skipped_TS.any(dim=-1, keepdim=True), renormalised_TS, left_TS)
        return Selection(experts_TS.masked_fill(skipped_TS, NO_EXPERT), left_TS)


def importance(x_TD: Tensor) -> Tensor:
    """Return the 1-norm of each token's input to the router, [T], in float32 or better."""
    norms_T: Tensor = torch.linalg.vector_norm(x_TD, ord=1, dim=-1, dtype=torch.promote_types(x_TD.dtype, torch.float32))
    return norms_T


def select(routing: Routing, x_TD: Tensor, logits_TN: Tensor) -> Selection:
    """Return a Routing's choice for these tokens; Noisy and Skipping may need more than the logits."""
    return routing.selected(x_TD, logits_TN) if isinstance(routing, Noisy | Skipping) else routing(logits_TN)


def probabilities(routing: Routing, logits_TN: Tensor) -> Tensor:
    """Return the router's probability of each expert, [T, N], each row summing to one.

    This is the softmax of the logits, unless the Routing has its own `probabilities`.
    """
    own = getattr(routing, "probabilities", softmax)
    result: Tensor = own(logits_TN)
    return result


def _sigmoid(logits: Tensor) -> Tensor:
    """Return the sigmoid in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()


def in_best_groups(
    choice_TN: Tensor, groups: tuple[tuple[int, ...], ...], groups_per_token: int, *, judged_by: int
) -> Tensor:
    """Return bool [T, N]: whether the expert's group is among the token's best.

    `judged_by`: number of best experts whose sum is the group's score.
    """
    scores_TG = torch.stack([_group_score(choice_TN[:, list(group)], judged_by) for group in groups], dim=1)
    count = min(groups_per_token, len(groups))
    best_TG = torch.zeros_like(scores_TG, dtype=torch.bool).scatter_(1, scores_TG.topk(count, dim=-1).indices, True)
    group_of = {expert: index for index, group in enumerate(groups) for expert in group}
    return best_TG[:, [group_of[expert] for expert in range(choice_TN.shape[-1])]]


def _group_score(choice_TM: Tensor, judged_by: int) -> Tensor:
    """Return the sum of a group's best scores, [T]; −∞ if no expert exists."""
    best_TJ = choice_TM.topk(min(judged_by, choice_TM.shape[1]), dim=-1).values
    missing_TJ = best_TJ == -torch.inf
    return best_TJ.masked_fill(missing_TJ, 0.0).sum(dim=-1).masked_fill(missing_TJ.all(dim=-1), -torch.inf)


def _every_expert(logits_TN: Tensor, weights_TN: Tensor) -> Selection:
    tokens, experts = logits_TN.shape
    return Selection(torch.arange(experts, device=logits_TN.device).expand(tokens, experts), weights_TN)


def rule_of(routing: Routing) -> Any:
    """Return the rule that chooses experts, without skipping."""
    return routing.base if isinstance(routing, Skipping) else routing
