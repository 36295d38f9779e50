"""Divergences between next-token distributions, per token, in float32 or better.

p is the teacher's distribution, q the student's. Each divergence takes both as log-probabilities, so either model may be
the trained one: gradients flow into every tensor that requires them. Sources: forward and reverse KL (Every Expert Matters
§3), skewed KL (DistiLLM, Ko et al. 2024, eq. 4 and 6), generalized Jensen–Shannon (GKD, Agarwal et al. 2024, eq. 1).

For some distributions only the K most probable tokens are known, and the total probability of all others. Both
distributions are then compared over K + 1 outcomes. The result is a lower bound of the full divergence.

Shape suffixes: T tokens, t some of them, D hidden, V vocabulary, K most probable tokens, C outcomes: K, and all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.options.distill import DIVERGENCE_NAMES
from compress.training.losses import head_loss, wide
from engine.decoder.model import capped
from engine.kernels.linear import linear
from engine.passes.streaming import chunk_tokens

Divergence = Callable[[Tensor, Tensor], Tensor]
"""A function from log p [T, V] and log q [T, V] to nats per token, [T]."""

SKEW = 0.1
"""α of the skewed forms: the share in the mixture of the divergence's first distribution. The value is DistiLLM's choice."""
JENSEN_SHANNON = 0.5
"""β: the share of the teacher in the mean distribution."""


def forward_kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p − log q)."""
    return _kl(p_TV, q_TV)


def reverse_kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(q ‖ p)."""
    return _kl(q_TV, p_TV)


def skew_forward_kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(p ‖ αp + (1−α)q)."""
    return _kl(p_TV, _mixed(p_TV, q_TV, SKEW))


def skew_reverse_kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """KL(q ‖ αq + (1−α)p)."""
    return _kl(q_TV, _mixed(q_TV, p_TV, SKEW))


def jensen_shannon(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """β KL(p ‖ m) + (1−β) KL(q ‖ m), m = βp + (1−β)q."""
    mean_TV = _mixed(p_TV, q_TV, JENSEN_SHANNON)
    return JENSEN_SHANNON * _kl(p_TV, mean_TV) + (1.0 - JENSEN_SHANNON) * _kl(q_TV, mean_TV)


DIVERGENCES: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "skew-forward-kl": skew_forward_kl,
    "skew-reverse-kl": skew_reverse_kl,
    "jensen-shannon": jensen_shannon,
}
assert tuple(DIVERGENCES) == DIVERGENCE_NAMES


@dataclass(frozen=True)
class Predictions:
    """Next-token predictions of a model at some positions of the text, stored as hidden states and head."""

    hidden_TD: Tensor
    """Hidden states after the last norm."""
    head_VD: Tensor
    head_bias_V: Tensor | None = None
    logit_cap: float | None = None

    def logs(self, part: slice, temperature: float) -> Tensor:
        """Return log p at some positions and a temperature, [t, V]."""
        logits_tV = capped(wide(linear(self.hidden_TD[part], self.head_VD, self.head_bias_V)), self.logit_cap)
        return (logits_tV / temperature).log_softmax(-1)

    def outcomes(self, logs_tV: Tensor, part: slice) -> Tensor:
        """Return another model's log-probabilities at those positions over the outcomes of this class: every token."""
        return logs_tV


@dataclass(frozen=True)
class LargestPredictions:
    """The K most probable tokens of next-token predictions, and all other tokens as one outcome."""

    tokens_TK: Tensor
    logs_TC: Tensor
    """Log-probabilities at the temperature of the cache; the last column is that of all other tokens."""

    def logs(self, part: slice, temperature: float) -> Tensor:
        """Return the stored log-probabilities, [t, C], at the temperature of the cache."""
        return self.logs_TC[part]

    def outcomes(self, logs_tV: Tensor, part: slice) -> Tensor:
        """Return another model's log-probabilities at those positions over these outcomes, [t, C]."""
        return outcomes(logs_tV, self.tokens_TK[part].long())


def outcomes(logs_TV: Tensor, tokens_TK: Tensor) -> Tensor:
    """Return log-probabilities of some tokens, and of all others together, [T, C].

    The others are summed: one minus the probability of the K tokens would lose all digits.
    """
    others_TV = logs_TV.scatter(-1, tokens_TK, -math.inf)
    return torch.cat([logs_TV.gather(-1, tokens_TK), others_TV.logsumexp(-1, keepdim=True)], -1)


@torch.no_grad()
def largest_predictions(made: Predictions, count: int, temperature: float) -> LargestPredictions:
    """Return the `count` most probable tokens, fewer than the vocabulary.

    Logits are computed for a chunk of tokens at a time.
    """
    found, step = [], chunk_tokens(len(made.head_VD))
    for start in range(0, len(made.hidden_TD), step):
        logs_TV = made.logs(slice(start, start + step), temperature)
        tokens_TK = logs_TV.topk(count).indices
        found.append((tokens_TK, outcomes(logs_TV, tokens_TK)))
    return LargestPredictions(*(torch.cat(each) for each in zip(*found, strict=True)))


def weighted_divergence(
    divergence: Divergence,
    teacher: Predictions | LargestPredictions,
    student: Predictions,
    weights_T: Tensor | None = None,
    *,
    temperature: float = 1.0,
    teacher_learns: bool = False,
) -> Tensor:
    """Return Σ_t w_t · divergence(p_t, q_t), with all weights 1 by default.

    Gradients flow into the student's predictions, or into the teacher's with `teacher_learns`. `temperature` divides the
    logits of both. Logits are computed for a chunk of tokens at a time.
    """
    learner, other = student, teacher
    if teacher_learns:
        assert isinstance(teacher, Predictions)
        learner, other = teacher, student

    def measure(logits_TV: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            fixed_TC = other.logs(part, temperature)
        own_TC = other.outcomes((logits_TV / temperature).log_softmax(-1), part)
        values_T = divergence(own_TC, fixed_TC) if teacher_learns else divergence(fixed_TC, own_TC)
        return values_T.sum() if weights_T is None else (weights_T[part].to(values_T.dtype) * values_T).sum()

    return head_loss(learner.hidden_TD, learner.head_VD, measure, learner.head_bias_V, learner.logit_cap)


def _kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    return F.kl_div(q_TV, p_TV, reduction="none", log_target=True).sum(-1)


def _mixed(one_TV: Tensor, other_TV: Tensor, share: float) -> Tensor:
    """Return log(share · one + (1 − share) · other)."""
    return torch.logaddexp(one_TV + math.log(share), other_TV + math.log1p(-share))
