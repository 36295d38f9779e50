"""The formulas of distilling a classifier as a mixture of experts (MoE-KD), and of the two recipes beside it.

P(Y^T=k|x) is the gate and P(Y^S=y|Y^T=k,x) an expert, both by engine/transformers_models/mixture_head.py. An objective is
to be made large; it is one number for each example.

Shape suffixes: B batch, K experts (the teacher's classes), C classes, D student features, E teacher features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import DataError


def class_probabilities(logits_BK: Tensor, temperature: float) -> Tensor:
    """P^T(Y^T=k|x) = softmax_k[g^T(z^T)/τ] of the teacher (eq. 8), [B, K]."""
    return F.softmax(logits_BK / temperature, dim=-1)


class ClassMeans:
    """μ_k = Σ_i P^T(k|x_i) z_i^T / Σ_j P^T(k|x_j) over a training set (eq. 7), batch by batch, in float64.

    The hard aggregation of ablation (iv) is the same with P^T(k|x) one for the likeliest class and zero for others.
    """

    def __init__(self, hard: bool = False) -> None:
        self.hard = hard
        self._sums_KE: Tensor | None = None
        self._weights_K: Tensor | None = None

    def add(self, probabilities_BK: Tensor, features_BE: Tensor) -> None:
        """One batch of the teacher's P^T(k|x) and z^T."""
        if self.hard:
            probabilities_BK = F.one_hot(probabilities_BK.argmax(dim=-1), probabilities_BK.shape[1])
        weights_BK = probabilities_BK.double()
        sums_KE, weights_K = weights_BK.T @ features_BE.double(), weights_BK.sum(dim=0)
        self._sums_KE = sums_KE if self._sums_KE is None else self._sums_KE + sums_KE
        self._weights_K = weights_K if self._weights_K is None else self._weights_K + weights_K

    def means(self) -> Tensor:
        """μ, [K, E] in float32. Raises DataError for a class that the teacher never says."""
        assert self._sums_KE is not None and self._weights_K is not None, "means of nothing"
        if bool((self._weights_K == 0).any()):
            never = int(self._weights_K.argmin())
            raise DataError(f"the teacher never says class {never} on the training set, so it has no mean; give more data")
        return (self._sums_KE / self._weights_K[:, None]).float()

    def shares(self) -> Tensor:
        """How much of the training set each class has, [K], of sum 1."""
        assert self._weights_K is not None, "shares of nothing"
        return (self._weights_K / self._weights_K.sum()).float()


def prototype_projector(teacher_features: int, features: int) -> nn.Sequential:
    """Ψ: a two-layer network from the teacher's space to the student's, e_k = Ψ(μ_k) (eq. 7, §5)."""
    return nn.Sequential(nn.Linear(teacher_features, teacher_features), nn.ReLU(), nn.Linear(teacher_features, features))


def log_likelihood(log_gate_BK: Tensor, log_experts_BK: Tensor) -> Tensor:
    """log P(Y^S=y|x) = log Σ_k P(Y^S=y|Y^T=k,x)·P(Y^T=k|x) of each example's label (eq. 4), [B]."""
    return torch.logsumexp(log_gate_BK + log_experts_BK, dim=-1)


def e_step(log_gate_BK: Tensor, log_experts_BK: Tensor) -> Tensor:
    """log P̂(Y^T=k|x) = log P(Y^T=k|Y^S=y,x) by Bayes' theorem (eq. 12), without gradient, [B, K]."""
    return F.log_softmax((log_gate_BK + log_experts_BK).detach(), dim=-1)


def elbo(log_posterior_BK: Tensor, log_gate_BK: Tensor, log_experts_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of the bound whose difference the M-step makes large (eq. 9, 14), [B] each.

    Σ_k P̂(k|x) log P(Y^S=y|Y^T=k,x), and KL(P̂ ‖ P(Y^T=k|x)). Right after the E-step the bound is the log-likelihood, and so
    is its gradient that of the log-likelihood.
    """
    posterior_BK = log_posterior_BK.exp()
    expected_B = (posterior_BK * log_experts_BK).sum(dim=-1)
    return expected_B, (posterior_BK * (log_posterior_BK - log_gate_BK)).sum(dim=-1)


def srrl(scores_BC: Tensor, labels_B: Tensor, teacher_BK: Tensor, log_gate_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of SRRL's objective as MoE-KD has it (§4.4, β = 1), [B] each.

    log softmax_y(Wᵀz + b), and KL(P^T ‖ P(Y^T=k|x)): what is left of the bound where all experts are one (Assumption 1)
    and P̂ is the teacher's own P^T. Yang et al. also draw the features G(z) to the teacher's by their squared distance, which
    is not here.
    """
    expected_B = F.log_softmax(scores_BC, dim=-1).gather(1, labels_B[:, None])[:, 0]
    return expected_B, F.kl_div(log_gate_BK, teacher_BK, reduction="none").sum(dim=-1)


KD_WEIGHT = 0.9
"""α: how much of the loss is the teacher's."""


def kd(scores_BC: Tensor, labels_B: Tensor, teacher_logits_BC: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The two parts of Hinton et al.'s loss (§2; eq. 2 here up to a factor), [B] each.

    (1 − α) times the cross-entropy of the labels, and α·τ² times KL(P^T ‖ P^S) with both softened by τ.
    """
    labels_loss_B = F.cross_entropy(scores_BC, labels_B, reduction="none")
    soft_BC = F.log_softmax(scores_BC / temperature, dim=-1)
    divergence_B = F.kl_div(soft_BC, class_probabilities(teacher_logits_BC, temperature), reduction="none").sum(dim=-1)
    return (1 - KD_WEIGHT) * labels_loss_B, KD_WEIGHT * temperature**2 * divergence_B
