"""Centered kernel alignment of representations (Kornblith et al. 2019), linear and RBF.

Shape suffixes: N representations, T samples, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cka(x_NTD: Tensor) -> Tensor:
    """Pairwise linear CKA, [N, N]: ‖YᵀX‖_F² / (‖XᵀX‖_F · ‖YᵀY‖_F) with centred X, Y (methods.md §1).

    Computed from Gram matrices over samples, tr(XXᵀ·YYᵀ), which is the same number and costs T² instead of D².
    """
    # Widened first: the mean of what never varies is then exact, and nothing is left of it.
    x_NTD = x_NTD.double()
    centred = x_NTD - x_NTD.mean(dim=1, keepdim=True)
    return _alignment(centred @ centred.transpose(1, 2))


def rbf_cka(x_NTD: Tensor) -> Tensor:
    """Pairwise RBF CKA, [N, N]: K_ij = exp(−‖x_i − x_j‖² / (2σ²)), σ = the median distance; normalised HSIC."""
    distances = torch.cdist(x_NTD.double(), x_NTD.double())
    samples = distances.shape[1]
    upper = torch.triu_indices(samples, samples, offset=1)
    sigma = distances[:, upper[0], upper[1]].median(dim=1).values.clamp_min(1e-12)
    gram = torch.exp(-distances.square() / (2 * sigma[:, None, None].square()))
    gram = gram - gram.mean(dim=1, keepdim=True)
    return _alignment(gram - gram.mean(dim=2, keepdim=True))


def _alignment(gram_NTT: Tensor) -> Tensor:
    """⟨K_i, K_j⟩ / (‖K_i‖ · ‖K_j‖) of centred Gram matrices; a representation that never varies is aligned with none."""
    flat = gram_NTT.flatten(1)
    products = flat @ flat.T
    norms = products.diagonal().clamp_min(0).sqrt()
    scale = norms[:, None] * norms[None, :]
    similarity = torch.where(scale > 0, products / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0.0)
    return similarity.fill_diagonal_(1.0).float()
