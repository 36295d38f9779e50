"""Routing: how a token chooses its experts, as a function from router logits to (expert indices, weights).

The model's own top-k, DiEP's relaxations, adaptive skipping, every expert at once, N-1 sampled experts and a router that
is being trained are all Routings; one MoE block (experts.py) takes any of them. A Routing belongs to one layer, so what
it needs of that layer (scores, skip tables) is its own state. Weights may carry gradients: to the router's parameters
through the logits, and to whatever the Routing itself holds. Indices never do.

Shape suffixes: T tokens, N routed experts of the layer, S slots (experts a token may use), K the model's top-k,
G groups of experts, M experts of one group, B sequences, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kernels.linear import linear

NO_EXPERT = -1
"""Index of an empty slot: nothing is loaded or computed for it, whatever its weight."""

Gate = Callable[[Tensor], Tensor]
"""Router logits to shares that add up to one, over the last dimension."""


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension in float32 or better, whatever the model's dtype."""
    return logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def sigmoid_shares(logits: Tensor) -> Tensor:
    """Sigmoid scores over their sum, over the last dimension."""
    scores = _sigmoid(logits)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


class Selection(NamedTuple):
    """What a Routing returns."""

    experts: Tensor
    """[T, S] int64, each in [0, N) or NO_EXPERT; no expert twice in a row of real slots."""
    weights: Tensor
    """[T, S] float32; the block's routed output is the sum over slots of weight · FFN_expert(x)."""


class Routing(Protocol):
    """A layer's rule: router logits [T, N] to a Selection."""

    def __call__(self, logits_TN: Tensor) -> Selection: ...


@dataclass(frozen=True)
class TopK:
    """The model's own rule (eq. 1-2 of DiEP): softmax over all experts, the k largest.

    `normalise` rescales the k weights to sum to one; `scale` multiplies them all. Where the layer has fewer than k experts,
    all of them are used.
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
class GroupedTopK:
    """Device-limited routing (arXiv 2405.04434, §2.2.2): softmax over all experts, the k largest in the token's best groups.

    A group is as good as its best expert. Probabilities are the weights as they are, times `scale`. As in SigmoidTopK an
    expert whose logit is −∞ does not exist, groups may be of any size, and slots that the best groups cannot fill are empty.
    """

    experts_per_token: int
    groups: tuple[tuple[int, ...], ...]
    groups_per_token: int
    scale: float = 1.0

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
    """Noisy top-k gating (arXiv 1701.06538 §2.1, eq. 4), for training: H(x) = logits + N(0, 1) · (softplus(W_noise·x) + ε).

    ε is of the models that train so. The noise depends on the tokens themselves, so the MoE block draws it, through
    `selected`; where only logits are at hand there is none, and the base decides. It is the outermost Routing of a layer.
    The same seed gives the same noise, also where a layer is computed again in the backward pass.
    """

    base: Routing
    noise_ND: Tensor
    """[N, D] W_noise."""
    epsilon: float
    seed: int

    def __call__(self, logits_TN: Tensor) -> Selection:
        return self.base(logits_TN)

    def selected(self, x_TD: Tensor, logits_TN: Tensor) -> Selection:
        """The base's choice among noisy logits; gradients reach W_noise through them."""
        return self.base(self.noisy(x_TD, logits_TN))

    def noisy(self, x_TD: Tensor, logits_TN: Tensor) -> Tensor:
        """H(x), [T, N], in float32 or better."""
        wide = torch.promote_types(logits_TN.dtype, torch.float32)
        deviations_TN = torch.nn.functional.softplus(linear(x_TD, self.noise_ND).to(wide)) + self.epsilon
        generator = torch.Generator().manual_seed(self.seed)  # on the CPU: every device draws the same
        normal_TN = torch.randn(logits_TN.shape, generator=generator, dtype=wide)
        return logits_TN + normal_TN.to(logits_TN.device) * deviations_TN

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """The base's, without noise."""
        return probabilities(self.base, logits_TN)


@dataclass(frozen=True)
class SigmoidTopK:
    """Sigmoid scores with a correction bias and groups (arXiv 2412.19437, §2.1.2): the bias chooses and never weighs.

    Each token takes the k experts of the largest score + bias within its best groups; a group is as good as the sum of its
    two best experts. The weights are the scores without the bias, rescaled to sum to one where `normalise` is set, times
    `scale`. Slots are sorted by weight, largest first.

    An expert whose logit is −∞ does not exist here, whatever its bias: it is never chosen and its group is judged by those
    left (one alone counts once). The paper has no such case; so masking an expert equals removing it. Where the best
    groups hold fewer than k experts, the other slots are empty.
    """

    experts_per_token: int
    normalise: bool
    bias_N: Tensor
    """[N] float32; added to the scores to choose."""
    scale: float = 1.0
    groups: tuple[tuple[int, ...], ...] = ()
    """The experts of each group; () puts all in one. After pruning they may be of any size, none included."""
    groups_per_token: int = 1

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
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        weights_TK, order_TK = (weights_TK * self.scale).sort(dim=-1, descending=True, stable=True)
        return Selection(best.indices.masked_fill(empty_TK, NO_EXPERT).gather(-1, order_TK), weights_TK)

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """Scores over their sum, as the paper's balance loss has them."""
        return sigmoid_shares(logits_TN)


@dataclass(frozen=True)
class BiasedTopK:
    """Softmax over all experts with a correction bias (arXiv 2408.15664): the bias chooses and never weighs.

    Each token takes the k experts of the largest probability + bias; the weights are their probabilities, rescaled to sum to
    one. Slots are sorted by weight, largest first. As in SigmoidTopK an expert whose logit is −∞ does not exist.
    """

    experts_per_token: int
    bias_N: Tensor
    """[N] float32; added to the probabilities to choose."""
    least_sum: float
    """What weights are divided by at least: a bias may choose experts of next to no probability."""

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
    """The k experts of the largest logits, each with weight one: for routers that scale what experts are given."""

    experts_per_token: int

    def __call__(self, logits_TN: Tensor) -> Selection:
        best = logits_TN.topk(min(self.experts_per_token, logits_TN.shape[-1]), dim=-1)
        empty_TK = best.values == -torch.inf
        ones_TK = torch.ones_like(best.values, dtype=torch.promote_types(logits_TN.dtype, torch.float32))
        return Selection(best.indices.masked_fill(empty_TK, NO_EXPERT), ones_TK.masked_fill(empty_TK, 0.0))

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """The scales over their sum."""
        return sigmoid_shares(logits_TN)


@dataclass(frozen=True)
class SparseMixer:
    """sparsemixer's choice without its noise of training (GRIN MoE, arXiv 2409.12136; thresholds as in transformers' code).

    Experts are chosen one after the other: the largest logit z_b, of those not chosen yet. Its weight is its share of the
    softmax among those of them that are near: all but where (z_b − z_i) / max(|z_i|, z_b) > 2ε. So weights do not add up to
    one: an expert that is well ahead of the rest weighs one, also as the second. Slots are sorted by weight, largest first.

    In training this has the gradient of the weights themselves; the paper estimates one for the choice too.
    """

    experts_per_token: int
    jitter: float
    """ε."""

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
    """A Routing in which only some experts exist: the others' logits become −∞. What pruning must equal."""

    base: Routing
    kept_N: Tensor
    """[N] bool."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        experts_TS, weights_TS = self.base(logits_TN.masked_fill(~self.kept_N, -torch.inf))
        return Selection(experts_TS.masked_fill(~self.kept_N[experts_TS], NO_EXPERT), weights_TS)

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        """The base rule's, over the kept experts."""
        return probabilities(self.base, logits_TN.masked_fill(~self.kept_N, -torch.inf))


@dataclass(frozen=True)
class AllExperts:
    """Every expert on every token, weighted by the softmax over all of them (Every Expert Matters, "ALL")."""

    scale: float = 1.0
    """The model's own factor on routed weights (TopK.scale): its blocks were trained with it."""
    gate: Gate = softmax
    """`sigmoid_shares` for routers of sigmoid scores, of which the paper has none."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        return _every_expert(logits_TN, self.scale * self.gate(logits_TN))


@dataclass(frozen=True)
class SampledExperts:
    """Knowledge augmentation (Every Expert Matters): N−1 experts, gate = softmax over those.

    With `probability` they are sampled without replacement from the gate distribution, otherwise they are the N−1
    largest. One draw for the whole call (`per_token=False`: the distribution is the mean over tokens) or one per token.
    """

    probability: float
    generator: torch.Generator
    per_token: bool = False
    scale: float = 1.0
    """As in AllExperts."""
    real_T: Tensor | None = None
    """[T] bool: whose mean the shared draw is from; None for all tokens."""
    gate: Gate = softmax
    """As in AllExperts."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        tokens, experts = logits_TN.shape
        count = max(1, experts - 1)
        probabilities_TN = self.gate(logits_TN.detach())
        # Drawn where the generator is, so that every device draws the same.
        place = self.generator.device
        drawn = torch.rand(tokens if self.per_token else 1, 1, generator=self.generator, device=place) < self.probability
        real_TN = probabilities_TN if self.real_T is None else probabilities_TN[self.real_T]
        sampled_from = probabilities_TN if self.per_token else real_TN.mean(dim=0, keepdim=True)
        sampled_TS = sampled_from.to(place).multinomial(count, generator=self.generator).expand(tokens, count)
        largest_TS = probabilities_TN.topk(count, dim=-1).indices
        experts_TS = torch.where(drawn.to(logits_TN.device), sampled_TS.to(logits_TN.device), largest_TS)
        return Selection(experts_TS, self.scale * self.gate(logits_TN.gather(-1, experts_TS)))


@dataclass(frozen=True)
class MixedExperts:
    """DiEP's relaxed layer as the paper has it (DiEP eq. 6, relaxation `paper`): y = β Σ_i ᾱ_i FFN_i(x).

    ᾱ = softmax(α); every expert on every token, no router weight.
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
        experts_TS, weights_TS = self.base(logits_TN + self.alpha_N.to(logits_TN.dtype))
        return Selection(experts_TS, self.beta * weights_TS)


@dataclass(frozen=True)
class Gated:
    """DiEP relaxation `gated`: y = β Σ_{i∈top-k} w_i · gate_i · FFN_i(x).

    `gates` are σ(α + 2) for DiEP and ones for gate gradients.
    """

    base: Routing
    gates: Tensor
    """[N], or [B, N] for a batch of B sequences of equal length, each with gates of its own."""
    beta: Tensor | float = 1.0

    def __call__(self, logits_TN: Tensor) -> Selection:
        experts_TS, weights_TS = self.base(logits_TN)
        if self.gates.dim() == 1:
            return Selection(experts_TS, self.beta * weights_TS * self.gates[experts_TS])
        sequence_T = torch.arange(len(logits_TN), device=logits_TN.device) // (len(logits_TN) // len(self.gates))
        return Selection(experts_TS, self.beta * weights_TS * self.gates[sequence_T[:, None], experts_TS])


@dataclass(frozen=True)
class Skipping:
    """Adaptive skipping (DiEP §4.3): e_j (j ≥ 1) is skipped when w_ej < S·γ_j(e_0,e_j)·w_e0.

    γ_j(e_0,e_j) = γ1_j · γ2(e_0,e_j). Threshold S scales γ; 0 skips nothing and leaves the base Selection untouched.
    The first `keep` experts of a token are never skipped. The base must give slots sorted by weight, largest first.
    """

    base: Routing
    gamma1_K: Tensor
    """[K-1] the layer's calibration medians of w_ej / w_e0, j = 1..K-1."""
    gamma2_NN: Tensor
    """[N, N] CKA(e_0,e_j) over the layer's mean CKA; ones for NAEE's rule."""
    threshold: float | Tensor
    """[T] where each token of the next call has its own."""
    normalise: bool
    """Rescale what is left after a skip to what the token's weights added up to: iff the model renormalises its top-k."""
    keep: int = 1

    def __call__(self, logits_TN: Tensor) -> Selection:
        experts_TS, weights_TS = self.base(logits_TN)
        if experts_TS.shape[1] <= self.keep or (isinstance(self.threshold, float | int) and self.threshold == 0):
            return Selection(experts_TS, weights_TS)
        rest_TJ = experts_TS[:, 1:]
        gamma_TJ = self.gamma1_K[: rest_TJ.shape[1]] * self.gamma2_NN[experts_TS[:, :1], rest_TJ]
        threshold = self.threshold[:, None] if isinstance(self.threshold, Tensor) else self.threshold
        skipped_TJ = weights_TS[:, 1:] < threshold * gamma_TJ * weights_TS[:, :1]
        skipped_TJ[:, : self.keep - 1] = False
        skipped_TS = torch.nn.functional.pad(skipped_TJ, (1, 0), value=False)
        left_TS = weights_TS.masked_fill(skipped_TS, 0.0)
        if self.normalise:  # only tokens that lost something, so that the others keep their weights to the bit
            renormalised_TS = left_TS * (weights_TS.sum(dim=-1, keepdim=True) / left_TS.sum(dim=-1, keepdim=True))
            left_TS = torch.where(skipped_TS.any(dim=-1, keepdim=True), renormalised_TS, left_TS)
        return Selection(experts_TS.masked_fill(skipped_TS, NO_EXPERT), left_TS)


def select(routing: Routing, x_TD: Tensor, logits_TN: Tensor) -> Selection:
    """What a Routing chooses for these tokens; only noise looks at more than the logits."""
    return routing.selected(x_TD, logits_TN) if isinstance(routing, Noisy) else routing(logits_TN)


def probabilities(routing: Routing, logits_TN: Tensor) -> Tensor:
    """What the router itself takes for each expert's probability, [T, N], each row summing to one.

    The softmax of the logits, unless the Routing has a `probabilities` of its own.
    """
    own = getattr(routing, "probabilities", softmax)
    result: Tensor = own(logits_TN)
    return result


def _sigmoid(logits: Tensor) -> Tensor:
    """Sigmoid in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()


def in_best_groups(
    choice_TN: Tensor, groups: tuple[tuple[int, ...], ...], groups_per_token: int, *, judged_by: int
) -> Tensor:
    """[T, N] bool: the expert's group is among the token's best; `judged_by`: experts whose sum a group is judged by."""
    scores_TG = torch.stack([_group_score(choice_TN[:, list(group)], judged_by) for group in groups], dim=1)
    count = min(groups_per_token, len(groups))
    best_TG = torch.zeros_like(scores_TG, dtype=torch.bool).scatter_(1, scores_TG.topk(count, dim=-1).indices, True)
    group_of = {expert: index for index, group in enumerate(groups) for expert in group}
    return best_TG[:, [group_of[expert] for expert in range(choice_TN.shape[-1])]]


def _group_score(choice_TM: Tensor, judged_by: int) -> Tensor:
    """[T] sum of the best of a group's experts; −∞ where there is none."""
    best_TJ = choice_TM.topk(min(judged_by, choice_TM.shape[1]), dim=-1).values
    missing_TJ = best_TJ == -torch.inf
    return best_TJ.masked_fill(missing_TJ, 0.0).sum(dim=-1).masked_fill(missing_TJ.all(dim=-1), -torch.inf)


def _every_expert(logits_TN: Tensor, weights_TN: Tensor) -> Selection:
    tokens, experts = logits_TN.shape
    return Selection(torch.arange(experts, device=logits_TN.device).expand(tokens, experts), weights_TN)
