"""REAM: the experts with the highest REAP scores absorb the others (Jha et al. 2026, arXiv 2604.04356).

W = Σ_i s_i·W_i / Σ_i s_i over a group, where s is the REAP score. The paper's text was not available; the implementation
follows the authors' code (SamsungSAILMontreal/ream).

Shape suffixes: N routed experts of the layer, D hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from calibrate.statistics import LayerStatistics
from compress.methods.criterion import grouping
from compress.methods.groups import Group, cosine, highest, shares
from compress.methods.saliency import reap

GROUP_SIZE = 16
"""C: the maximum size of a group, including the centroid."""


def ream(layer: LayerStatistics, experts: int) -> list[Group]:
    """Return REAM's groups (Jha et al. 2026, arXiv 2604.04356): REAP's best experts are centroids and absorb the others.

    In the order of their scores, centroids each take the C − 1 most similar experts that are still free ("pseudo-pruning":
    a few groups are large, and most experts stay unchanged). C is 16, or more where the requested number of experts could
    not absorb all others. Similarity is the mean of (1 + cos(u_i, u_j)) / 2, with u_i = mean over x of p_i(x)·FFN_i(x), and
    of 1 − δ_ij / max δ, with δ_ij = ‖z_i/‖z_i‖ − z_j/‖z_j‖‖₂ and z_i the router logits of expert i over all tokens.
    Weights: W = Σ_i s_i·W_i / Σ_i s_i with REAP score s, where the least positive score replaces 0. u_i is over the sample
    of tokens on which every expert runs. Deviations: the paper also aligns by activations, and calibrates each layer after
    the merged layers before it.
    """
    scores_N = reap(layer).double()
    if bool((scores_N > 0).any()):
        scores_N = scores_N.where(scores_N > 0, scores_N[scores_N > 0].min())
    centroids = highest(scores_N, experts)
    similarity_NN = _similarity(layer)
    most = max(GROUP_SIZE, math.ceil(len(scores_N) / len(centroids)))
    free = [expert for expert in range(len(scores_N)) if expert not in centroids]
    groups = []
    for centroid in centroids:
        closest = sorted(free, key=lambda expert: -float(similarity_NN[centroid, expert]))[: most - 1]
        free = [expert for expert in free if expert not in closest]
        groups.append(Group(centroid, shares([centroid, *closest], scores_N)))
    return groups


def _similarity(layer: LayerStatistics) -> Tensor:
    outputs_ND = layer.weighted_output_mean.double()
    outputs_NN = (1.0 + cosine(outputs_ND @ outputs_ND.T)) / 2.0
    apart_NN = (2.0 - 2.0 * cosine(layer.router_gram)).clamp_min(0.0).sqrt()
    logits_NN = 1.0 - apart_NN / apart_NN.max().clamp_min(torch.finfo(torch.float64).tiny)
    return (outputs_NN + logits_NN) / 2.0


REAM = grouping(ream)
