"""A classifier's head as a mixture with one expert for each class of the teacher (MoE-KD §4.1).

The student's linear head is W. Expert k adds b_k = Wᵀe_k to the head's output, so all experts together cost two
products with matrices of classes by classes. The gate is the teacher's classifier g^T on features that a projector G
maps into the teacher's space. If the student's head has a bias, which the paper's has not, it is included in Wᵀz here.

Shape suffixes: B batch, K experts (classes of the gate), C classes, D student features, E teacher features, H W of a
map.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

_LEAST = 1e-300


class Experts(NamedTuple):
    """b_k of all experts, as both products need them.

    Adding a constant to b_k does not change expert k; the constant is chosen so that the largest element is 0.
    """

    biases_KC: Tensor
    powers_KC: Tensor
    """exp b_kc, in float64."""

    @classmethod
    def of(cls, biases_KC: Tensor) -> Experts:
        """biases_KC: b_k = Wᵀe_k."""
        shifted_KC = biases_KC - biases_KC.detach().amax(dim=1, keepdim=True)
        return cls(shifted_KC, shifted_KC.double().exp())


def log_product(x_BC: Tensor, powers_CK: Tensor) -> Tensor:
    """Return log Σ_c exp(x_bc)·powers_ck, [B, K], as one product: no tensor with all three dimensions is created."""
    shift_B1 = x_BC.detach().amax(dim=1, keepdim=True)
    product_BK = (x_BC - shift_B1).double().exp() @ powers_CK
    return product_BK.clamp_min(_LEAST).log().to(x_BC.dtype) + shift_B1


def log_experts(scores_BC: Tensor, experts: Experts, labels_B: Tensor) -> Tensor:
    """Return log P(Y^S=y|Y^T=k,x) = log softmax_y(Wᵀz + b_k), [B, K], for each example's label and expert (eq. 6).

    scores_BC: Wᵀz.
    """
    chosen_B1 = scores_BC.gather(1, labels_B[:, None])
    return chosen_B1 + experts.biases_KC.T[labels_B] - log_product(scores_BC, experts.powers_KC.T)


def log_mixture(log_gate_BK: Tensor, scores_BC: Tensor, experts: Experts) -> Tensor:
    """Return log P(Y^S=y|x) = log Σ_k P(Y^S=y|Y^T=k,x)·P(Y^T=k|x) for every class (eq. 4), [B, C]."""
    log_normalisers_BK = log_product(scores_BC, experts.powers_KC.T)
    return scores_BC + log_product(log_gate_BK - log_normalisers_BK, experts.powers_KC)


def projector(features: int, teacher_features: int, of_map: bool) -> nn.Sequential:
    """Return G: a three-layer bottleneck from the student's features to the teacher's (§5), half as wide as the latter.

    For a map [B, D, H, W] the layers are 1×1, 3×3 and 1×1 convolutions, followed by the mean over positions; for a
    vector [B, D] they are linear. The paper names the three layers and leaves norms and activations open. The last
    layer has neither, because features of a teacher may have any sign.
    """
    width = max(1, teacher_features // 2)
    if not of_map:
        return nn.Sequential(
            *(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()), nn.Linear(width, teacher_features)
        )
    return nn.Sequential(
        *(nn.Conv2d(features, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, teacher_features, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


class Gate(nn.Module):
    """P(Y^T=k|x) = softmax_k[g^T(G(z))] (eq. 5), or 1/K for each expert if there is no projector."""

    def __init__(self, projector: nn.Sequential | None, classifier: nn.Linear | None, experts: int) -> None:
        super().__init__()
        self.projector, self.classifier, self.experts = projector, classifier, experts

    def forward(self, features: Tensor) -> Tensor:
        """Return log P(Y^T=k|x), [B, K]. features: the projector's input, [B, D, H, W] or [B, D]."""
        if self.projector is None or self.classifier is None:
            return features.new_full((len(features), self.experts), -math.log(self.experts))
        return self.of_projected(self.projector(features))

    def of_projected(self, features_BE: Tensor) -> Tensor:
        """Return log P(Y^T=k|x), [B, K], from projected features G(z)."""
        assert self.classifier is not None
        return F.log_softmax(self.classifier(features_BE), dim=-1)


class MixtureHead(nn.Module):
    """Gate and experts behind a student's W, for inference (§4.3): log P(Y^S=y|x)."""

    biases_KC: Tensor
    powers_KC: Tensor

    def __init__(self, gate: Gate, prototypes_KD: Tensor, head: nn.Linear) -> None:
        """prototypes_KD: e_k in the student's space, from which b_k = Wᵀe_k is computed once."""
        super().__init__()
        self.gate = gate
        for name, value in Experts.of(prototypes_KD @ head.weight.float().T)._asdict().items():
            self.register_buffer(name, value)

    def forward(self, features: Tensor, scores_BC: Tensor) -> Tensor:
        """Return log-probabilities, [B, C]. features: the gate's input; scores_BC: Wᵀz."""
        return log_mixture(self.gate(features), scores_BC, Experts(self.biases_KC, self.powers_KC))
