"""How far one next-token distribution is from another, per token, in float32 or better.

p is the teacher's distribution, q the student's. Each divergence takes both as log-probabilities, so either may be the one
that learns: gradients go wherever the tensors want them. Sources: forward and reverse KL (Every Expert Matters §3), skewed
KL (DistiLLM, Ko et al. 2024, eq. 4 and 6), generalised Jensen–Shannon (GKD, Agarwal et al. 2024, eq. 1).

Shape suffixes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.losses import head_loss
from engine.linear import linear

Divergence = Callable[[Tensor, Tensor], Tensor]
"""log p [T, V] and log q [T, V] to nats per token, [T]."""

SKEW = 0.1
"""α of the skewed forms: how much of the one distribution is mixed into the other. DistiLLM's choice."""
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


@dataclass(frozen=True)
class Predictions:
    """Next-token predictions of a model at some places of the text, as what they are made of."""

    hidden_TD: Tensor
    """After the last norm."""
    head_VD: Tensor


def weighted_divergence(
    divergence: Divergence,
    teacher: Predictions,
    student: Predictions,
    weights_T: Tensor | None = None,
    *,
    temperature: float = 1.0,
    teacher_learns: bool = False,
) -> Tensor:
    """Σ_t w_t · divergence(p_t, q_t), without weights their sum.

    Gradients go into the student's predictions, or into the teacher's where it learns. `temperature` divides the logits of
    both. Logits are made for a chunk of tokens at a time.
    """
    learner, other = (teacher, student) if teacher_learns else (student, teacher)

    def measure(logits_TV: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            fixed_TV = linear(other.hidden_TD[part], other.head_VD).to(logits_TV.dtype)
            fixed_TV = (fixed_TV / temperature).log_softmax(-1)
        own_TV = (logits_TV / temperature).log_softmax(-1)
        values_T = divergence(own_TV, fixed_TV) if teacher_learns else divergence(fixed_TV, own_TV)
        return values_T.sum() if weights_T is None else (weights_T[part].to(values_T.dtype) * values_T).sum()

    return head_loss(learner.hidden_TD, learner.head_VD, measure)


def _kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    return F.kl_div(q_TV, p_TV, reduction="none", log_target=True).sum(-1)


def _mixed(one_TV: Tensor, other_TV: Tensor, share: float) -> Tensor:
    """log(share · one + (1 − share) · other)."""
    return torch.logaddexp(one_TV + math.log(share), other_TV + math.log1p(-share))
