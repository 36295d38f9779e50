"""HC-SMoE: hierarchical clustering of mean expert outputs (Chen et al. 2025, arXiv 2410.08589).

d(A, B) = Σ_{a∈A, b∈B} ‖o_a − o_b‖₂ / (|A|·|B|), where o_i is the mean output of expert i. The paper's text was not
available; the implementation follows the code of SamsungSAILMontreal/ream, which includes this clustering.

Shape suffixes: N routed experts of the layer, D hidden size.
"""

from __future__ import annotations

import torch

from calibrate.statistics import LayerStatistics
from compress.methods.criterion import grouping
from compress.methods.groups import Group, clusters, most_used, shares


def hc_smoe(layer: LayerStatistics, experts: int) -> list[Group]:
    """Return groups by hierarchical clustering of mean expert outputs (HC-SMoE, Chen et al. 2025, arXiv 2410.08589).

    o_i = mean over x of FFN_i(x); average linkage on ‖o_i − o_j‖₂: d(A, B) = Σ_{a∈A, b∈B} ‖o_a − o_b‖₂ / (|A|·|B|). Weights
    are frequencies, W = Σ_i f_i·W_i / Σ_i f_i; a cluster without routed tokens is averaged with equal weights. The mean is
    over the sample of tokens on which every expert runs, not over all tokens. The center is the most used member, which is
    a choice of this project.
    """
    outputs_ND = layer.output_mean.double()
    members = clusters(torch.cdist(outputs_ND, outputs_ND, compute_mode="donot_use_mm_for_euclid_dist"), experts)
    return [Group(most_used(group, layer), shares(group, layer.tokens_routed)) for group in members]


HC_SMOE = grouping(hc_smoe)
