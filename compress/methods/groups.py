"""Groups of experts that are merged into one, and functions that the merging methods share: clusters, similarities, shares.

Shape suffixes: N routed experts of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.statistics import LayerStatistics


@dataclass(frozen=True)
class Group:
    """Experts of one layer that are merged into one."""

    centre: int
    """The member that provides the order of the hidden units and the router row."""
    weights: Mapping[int, float]
    """Coefficient of each member; they sum to 1. Members with coefficient zero are left out."""


def joined(similarity_NN: Tensor, centres: Sequence[int]) -> dict[int, list[int]]:
    """Return the members of each center, the center first. Every other expert joins the most similar center.

    Ties go to the earlier center.
    """
    members = {centre: [centre] for centre in centres}
    for expert in range(len(similarity_NN)):
        if expert not in members:
            members[max(centres, key=lambda centre: float(similarity_NN[centre, expert]))].append(expert)
    return members


def clusters(distances_NN: Tensor, count: int) -> list[list[int]]:
    """Return clusters by average linkage, stopped when `count` clusters are left."""
    from scipy.cluster.hierarchy import linkage  # imported here: only merging methods need it
    from scipy.spatial.distance import squareform

    experts = len(distances_NN)
    members = {expert: [expert] for expert in range(experts)}
    if experts > 1:
        apart_NN = distances_NN.clone().fill_diagonal_(0.0)
        merges = linkage(squareform(apart_NN.numpy(), checks=False), method="average")
        for step, (one, other) in enumerate(merges[: experts - count, :2].astype(int).tolist()):
            members[experts + step] = members.pop(one) + members.pop(other)
    return sorted(sorted(cluster) for cluster in members.values())


def cosine(gram_NN: Tensor) -> Tensor:
    """Return cosines from inner products; 0 for vectors of length zero."""
    lengths_N = gram_NN.double().diagonal().clamp_min(0.0).sqrt()
    scale_NN = lengths_N[:, None] * lengths_N[None, :]
    return torch.where(scale_NN > 0, gram_NN.double() / scale_NN.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def highest(scores_N: Tensor, count: int) -> list[int]:
    """Return the indices of the highest scores, best first; ties go to the lower index."""
    best: list[int] = scores_N.argsort(descending=True, stable=True)[:count].tolist()
    return best


def most_used(group: Sequence[int], layer: LayerStatistics) -> int:
    """Return the member with the most routed tokens; ties go to the lower index."""
    return max(sorted(group), key=lambda expert: int(layer.tokens_routed[expert]))


def shares(group: Sequence[int], amounts_N: Tensor) -> dict[int, float]:
    """Return each member's share of the group's amount, without members whose amount is zero.

    All members get equal shares where the group's amount is zero.
    """
    amounts = {expert: float(amounts_N[expert]) for expert in group}
    total = sum(amounts.values())
    if total <= 0:
        return dict.fromkeys(group, 1 / len(group))
    return {expert: amount / total for expert, amount in amounts.items() if amount > 0}
