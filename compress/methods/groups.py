"""Groups of experts that become one, and what the merging methods have in common: clusters, similarities, shares.

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
    """Experts of one layer that become one."""

    centre: int
    """The member whose order of hidden units and whose router row the result has."""
    weights: Mapping[int, float]
    """Coefficient of each member, adding up to 1; members without one are left out."""


def joined(similarity_NN: Tensor, centres: Sequence[int]) -> dict[int, list[int]]:
    """Members of each centre, itself first: every other expert joins the most similar; ties go to the earlier centre."""
    members = {centre: [centre] for centre in centres}
    for expert in range(len(similarity_NN)):
        if expert not in members:
            members[max(centres, key=lambda centre: float(similarity_NN[centre, expert]))].append(expert)
    return members


def clusters(distances_NN: Tensor, count: int) -> list[list[int]]:
    """Average linkage, stopped when `count` clusters are left."""
    from scipy.cluster.hierarchy import linkage  # here: only methods that merge need it
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
    """Cosines from inner products; 0 with what has no length."""
    lengths_N = gram_NN.double().diagonal().clamp_min(0.0).sqrt()
    scale_NN = lengths_N[:, None] * lengths_N[None, :]
    return torch.where(scale_NN > 0, gram_NN.double() / scale_NN.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def highest(scores_N: Tensor, count: int) -> list[int]:
    """The best experts, best first; ties go to the lower index."""
    best: list[int] = scores_N.argsort(descending=True, stable=True)[:count].tolist()
    return best


def most_used(group: Sequence[int], layer: LayerStatistics) -> int:
    """The member that most tokens were routed to; ties go to the lower index."""
    return max(sorted(group), key=lambda expert: int(layer.tokens_routed[expert]))


def shares(group: Sequence[int], amounts_N: Tensor) -> dict[int, float]:
    """Each member's share of the group's amount, without those that have none; even where nobody has any."""
    amounts = {expert: float(amounts_N[expert]) for expert in group}
    total = sum(amounts.values())
    if total <= 0:
        return dict.fromkeys(group, 1 / len(group))
    return {expert: amount / total for expert, amount in amounts.items() if amount > 0}
