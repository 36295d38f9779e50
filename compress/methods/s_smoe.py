"""S-SMoE: each cluster of experts with similar outputs becomes one expert (Zhang et al. 2025, arXiv 2407.09590).

The paper's text was not available; the clustering, the weights and the centers are choices of this project.
"""

from __future__ import annotations

from calibrate.statistics import LayerStatistics
from compress.methods.criterion import grouping
from compress.methods.groups import Group, clusters, most_used


def s_smoe(layer: LayerStatistics, experts: int) -> list[Group]:
    """Return groups of experts with similar outputs (S-SMoE, Zhang et al. 2025, arXiv 2407.09590).

    Clusters are by average linkage on 1 − linear CKA of outputs. Weights are equal. The clustering, the weights and the
    center (the most used member) are choices of this project.
    """
    members = clusters(1.0 - layer.linear_cka.double(), experts)
    return [Group(most_used(group, layer), dict.fromkeys(group, 1 / len(group))) for group in members]


S_SMOE = grouping(s_smoe)
