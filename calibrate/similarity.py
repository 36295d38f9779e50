"""Centered kernel alignment of representations (Kornblith et al. 2019), linear and RBF.

Shape suffixes: N and M representations, T samples, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cka(x_NTD: Tensor) -> Tensor:
    """Pairwise linear CKA, [N, N]: ‖YᵀX‖_F² / (‖XᵀX‖_F · ‖YᵀY‖_F) with centered X, Y.

    It is computed from Gram matrices over samples as tr(XXᵀ·YYᵀ), which has the same value and costs T² instead of D².
    """
    return pairwise(linear_grams(x_NTD))


def linear_grams(x_NTD: Tensor) -> Tensor:
    """Gram matrices XXᵀ of the centered representations, [N, T, T] float64."""
    # Convert to float64 first: the mean of a constant feature is then exact, and centering leaves exactly zero.
    x_NTD = x_NTD.double()
    centred = x_NTD - x_NTD.mean(dim=1, keepdim=True)
    return centred @ centred.transpose(1, 2)


def rbf_cka(x_NTD: Tensor) -> Tensor:
    """Pairwise RBF CKA, [N, N]: the normalized HSIC of `rbf_grams`."""
    return pairwise(rbf_grams(x_NTD))


def rbf_grams(x_NTD: Tensor) -> Tensor:
    """Centered Gram matrices, [N, T, T]: K_ij = exp(−‖x_i − x_j‖² / (2σ²)), where σ is the median distance."""
    distances = torch.cdist(x_NTD.double(), x_NTD.double())
    samples = distances.shape[1]
    upper = torch.triu_indices(samples, samples, offset=1)
    sigma = distances[:, upper[0], upper[1]].median(dim=1).values.clamp_min(1e-12)
    gram = torch.exp(-distances.square() / (2 * sigma[:, None, None].square()))
    gram = gram - gram.mean(dim=1, keepdim=True)
    return gram - gram.mean(dim=2, keepdim=True)


def pairwise(gram_NTT: Tensor) -> Tensor:
    """Pairwise CKA of representations, [N, N], from their centered Gram matrices."""
    return alignment(gram_NTT, gram_NTT).fill_diagonal_(1.0)


def alignment(gram_NTT: Tensor, other_MTT: Tensor) -> Tensor:
    """CKA ⟨K_i, K_j⟩ / (‖K_i‖ · ‖K_j‖) over the same samples, [N, M]; 0 for a constant representation."""
    flat, other = gram_NTT.flatten(1), other_MTT.flatten(1)
    scale = flat.norm(dim=1)[:, None] * other.norm(dim=1)[None, :]
    return torch.where(scale > 0, flat @ other.T / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0.0).float()
