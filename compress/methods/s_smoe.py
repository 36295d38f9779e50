"""S-SMoE: clusters of experts with similar outputs become one each (Zhang et al. 2025, arXiv 2407.09590).

The paper's text was not at hand; how to cluster, the weights and the centres are our choices.
"""

from __future__ import annotations

from calibrate.statistics import LayerStatistics
from compress.methods.criterion import grouping
from compress.methods.groups import Group, clusters, most_used


def s_smoe(layer: LayerStatistics, experts: int) -> list[Group]:
    """S-SMoE (Zhang et al. 2025, arXiv 2407.09590): one merged expert for each cluster of similar experts.

    Clusters: average linkage on 1 − linear CKA of outputs. Weights are even. How to cluster, the weights and the centre (the
    most used member) are our choices.
    """
    members = clusters(1.0 - layer.linear_cka.double(), experts)
    return [Group(most_used(group, layer), dict.fromkeys(group, 1 / len(group))) for group in members]


S_SMOE = grouping(s_smoe)
