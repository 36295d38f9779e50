"""Formulas of distilling a classifier as a mixture of experts (MoE-KD), and of the recipes KD and SRRL.

P(Y^T=k|x) is the gate and P(Y^S=y|Y^T=k,x) is an expert, both in engine/transformers_models/mixture_head.py. Objectives are
maximized; each is one number per example.

Shape suffixes: B batch, K experts (the teacher's classes), C classes, D student features, E teacher features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import DataError


def class_probabilities(logits_BK: Tensor, temperature: float) -> Tensor:
    """Return the teacher's P^T(Y^T=k|x) = softmax_k[g^T(z^T)/τ] (eq. 8), [B, K]."""
    return F.softmax(logits_BK / temperature, dim=-1)


class ClassMeans:
    """μ_k = Σ_i P^T(k|x_i) z_i^T / Σ_j P^T(k|x_j) over a training set (eq. 7), accumulated by batches in float64.

    The hard aggregation of ablation (iv) has P^T(k|x) = 1 for the most probable class and 0 for the others.
    """

    def __init__(self, hard: bool = False) -> None:
        self.hard = hard
        self._sums_KE: Tensor | None = None
        self._weights_K: Tensor | None = None

    def add(self, probabilities_BK: Tensor, features_BE: Tensor) -> None:
        """Add one batch of the teacher's P^T(k|x) and z^T."""
        if self.hard:
            probabilities_BK = F.one_hot(probabilities_BK.argmax(dim=-1), probabilities_BK.shape[1])
        weights_BK = probabilities_BK.double()
        sums_KE, weights_K = weights_BK.T @ features_BE.double(), weights_BK.sum(dim=0)
        self._sums_KE = sums_KE if self._sums_KE is None else self._sums_KE + sums_KE
        self._weights_K = weights_K if self._weights_K is None else self._weights_K + weights_K

    def means(self) -> Tensor:
        """Return μ, [K, E] in float32. Raises DataError for a class that the teacher never predicts."""
        assert self._sums_KE is not None and self._weights_K is not None, "means of nothing"
        if bool((self._weights_K == 0).any()):
            never = int(self._weights_K.argmin())
            raise DataError(f"the teacher never says class {never} on the training set, so it has no mean; give more data")
        return (self._sums_KE / self._weights_K[:, None]).float()

    def shares(self) -> Tensor:
        """Return the mean of the teacher's P^T(k|x) over the training set, [K], with sum 1."""
        assert self._weights_K is not None, "shares of nothing"
        return (self._weights_K / self._weights_K.sum()).float()


def prototype_projector(teacher_features: int, features: int) -> nn.Sequential:
    """Return Ψ, a two-layer network from the teacher's feature space to the student's: e_k = Ψ(μ_k) (eq. 7, §5)."""
    return nn.Sequential(nn.Linear(teacher_features, teacher_features), nn.ReLU(), nn.Linear(teacher_features, features))


def log_likelihood(log_gate_BK: Tensor, log_experts_BK: Tensor) -> Tensor:
    """Return log P(Y^S=y|x) = log Σ_k P(Y^S=y|Y^T=k,x)·P(Y^T=k|x) of each example's label (eq. 4), [B]."""
    return torch.logsumexp(log_gate_BK + log_experts_BK, dim=-1)


def e_step(log_gate_BK: Tensor, log_experts_BK: Tensor) -> Tensor:
    """Return log P̂(Y^T=k|x) = log P(Y^T=k|Y^S=y,x) by Bayes' theorem (eq. 12), without gradient, [B, K]."""
    return F.log_softmax((log_gate_BK + log_experts_BK).detach(), dim=-1)


def elbo(log_posterior_BK: Tensor, log_gate_BK: Tensor, log_experts_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two terms whose difference, the bound, the M-step maximizes (eq. 9, 14), [B] each.

    They are Σ_k P̂(k|x) log P(Y^S=y|Y^T=k,x) and KL(P̂ ‖ P(Y^T=k|x)). Directly after the E-step the bound equals the
    log-likelihood, and so does its gradient.
    """
    posterior_BK = log_posterior_BK.exp()
    expected_B = (posterior_BK * log_experts_BK).sum(dim=-1)
    return expected_B, (posterior_BK * (log_posterior_BK - log_gate_BK)).sum(dim=-1)


def srrl(scores_BC: Tensor, labels_B: Tensor, teacher_BK: Tensor, log_gate_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two terms of SRRL's objective in MoE-KD's form (§4.4, β = 1), [B] each.

    They are log softmax_y(Wᵀz + b) and KL(P^T ‖ P(Y^T=k|x)): the bound where all experts are equal (Assumption 1) and P̂ is
    the teacher's own P^T. Yang et al. also minimize `feature_distance`.
    """
    expected_B = F.log_softmax(scores_BC, dim=-1).gather(1, labels_B[:, None])[:, 0]
    return expected_B, F.kl_div(log_gate_BK, teacher_BK, reduction="none").sum(dim=-1)


def feature_distance(projected_BE: Tensor, teacher_BE: Tensor) -> Tensor:
    """Return Yang et al.'s feature loss ‖G(z) − z^T‖², as a mean over the features as in their code, [B]."""
    return (projected_BE - teacher_BE).square().mean(dim=-1)


KD_WEIGHT = 0.9
"""α: weight of the teacher's term in the loss."""


def kd(scores_BC: Tensor, labels_B: Tensor, teacher_logits_BC: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the two terms of Hinton et al.'s loss (§2; eq. 2 up to a factor), [B] each.

    They are (1 − α) times the cross-entropy on the labels, and α·τ² times KL(P^T ‖ P^S) with both softened by τ.
    """
    labels_loss_B = F.cross_entropy(scores_BC, labels_B, reduction="none")
    soft_BC = F.log_softmax(scores_BC / temperature, dim=-1)
    divergence_B = F.kl_div(soft_BC, class_probabilities(teacher_logits_BC, temperature), reduction="none").sum(dim=-1)
    return (1 - KD_WEIGHT) * labels_loss_B, KD_WEIGHT * temperature**2 * divergence_B
