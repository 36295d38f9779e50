"""Expert merging: which experts of a layer become one, with which weights, as a Plan.

A method is a pure function from one layer's statistics and a number of experts to Groups; `merging_plan` aligns the hidden
units of each group (the only step that reads weights, layer by layer) and writes the groups as a Plan.

Three things hold for all methods here, and deviate from some of their papers:
- Hidden units are aligned to the group's centre by its weights (alignment.py), also for HC-SMoE and S-SMoE, which average
  experts in the order they are stored in. Aligned experts are never further apart, so their average loses less.
- The router keeps the row of the group's centre and drops the others, so that the model really shrinks. REAM and DiEP do so
  too. The public code of M-SMoE and HC-SMoE keeps all N rows and lets those of a group lead to the same expert, which no
  checkpoint of these families can express.
- Statistics are those of the full model in every layer; layers merged before are not calibrated on again.

The texts of the M-SMoE, HC-SMoE, S-SMoE and REAM papers were not at hand; where methods.md is silent, the authors' public
code decided (UNITES-Lab/MC-SMoE; SamsungSAILMontreal/ream, which also holds HC-SMoE's clustering).

Shape suffixes: N routed experts of the layer, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from calibrate.statistics import LayerStatistics, Statistics
from compress.methods.alignment import alignment, expert_weights
from compress.methods.saliency import reap
from compress.plans.plan import Part, Plan, PlannedExpert, Source, kept_expert
from engine.checkpoint.checkpoint import Checkpoint

REAM_GROUP_SIZE = 16
"""REAM's C: the most experts, centroid included, that a centroid gathers."""


@dataclass(frozen=True)
class Group:
    """Experts of one layer that become one."""

    centre: int
    """The member whose order of hidden units and whose router row the result has."""
    weights: Mapping[int, float]
    """Coefficient of each member, adding up to 1; members without one are left out."""


# Pruned experts join those that stay


def cka_groups(layer: LayerStatistics, kept: Sequence[int]) -> list[Group]:
    """DiEP's merging (DiEP §A.5): each pruned expert joins its most similar kept expert c.

    Similarity ρ is the RBF CKA of outputs, the kernel of the paper's figures. Weights in a group are softmax(ρ(c, ·)) with
    ρ(c, c) = 1. "Normalised CKA" is read as CKA itself, which is HSIC normalised. Rows of pruned experts leave the router.
    """
    similarity_NN = layer.rbf_cka.double()
    members = _joined(similarity_NN, sorted(kept))
    return [
        Group(centre, dict(zip(group, similarity_NN[centre, group].softmax(0).tolist(), strict=True)))
        for centre, group in members.items()
    ]


# A number of experts for each layer


def m_smoe(layer: LayerStatistics, experts: int) -> list[Group]:
    """M-SMoE (Li et al. 2024, arXiv 2310.01334).

    The most used experts are dominant; every other joins the dominant one whose router logits over all tokens are closest in
    cosine. Weights: W = Σ_i f_i·W_i / Σ_i f_i, f the activation frequency, after alignment to the dominant expert. A group
    that no token was routed to is averaged evenly (the formula is 0/0 there). The paper gives layers different numbers of
    experts by a global ranking of frequency; here each layer gets what was asked for.
    """
    return [Group(centre, _shares(group, layer.tokens_routed)) for centre, group in dominated(layer, experts).items()]


def dominated(layer: LayerStatistics, experts: int) -> dict[int, list[int]]:
    """M-SMoE's groups: the most used experts, best first, each with those whose router logits are closest to its own."""
    return _joined(_cosine(layer.router_gram), _highest(layer.tokens_routed, experts))


def s_smoe(layer: LayerStatistics, experts: int) -> list[Group]:
    """S-SMoE (Zhang et al. 2025, arXiv 2407.09590): one merged expert for each cluster of similar experts.

    Clusters: average linkage on 1 − linear CKA of outputs. Weights are even. How to cluster, the weights and the centre (the
    most used member) are our choices.
    """
    members = _clusters(1.0 - layer.linear_cka.double(), experts)
    return [Group(_most_used(group, layer), dict.fromkeys(group, 1 / len(group))) for group in members]


def hc_smoe(layer: LayerStatistics, experts: int) -> list[Group]:
    """HC-SMoE (Chen et al. 2025, arXiv 2410.08589): hierarchical clustering of mean expert outputs.

    o_i = mean over x of FFN_i(x); average linkage on ‖o_i − o_j‖₂: d(A, B) = Σ_{a∈A, b∈B} ‖o_a − o_b‖₂ / (|A|·|B|). Weights
    are frequencies, W = Σ_i f_i·W_i / Σ_i f_i; a cluster that no token was routed to is averaged evenly. The mean is over
    the sample of tokens that every expert was run on, not over all; the centre, the most used member, is our choice.
    """
    outputs_ND = layer.output_mean.double()
    members = _clusters(torch.cdist(outputs_ND, outputs_ND, compute_mode="donot_use_mm_for_euclid_dist"), experts)
    return [Group(_most_used(group, layer), _shares(group, layer.tokens_routed)) for group in members]


def ream(layer: LayerStatistics, experts: int) -> list[Group]:
    """REAM (Jha et al. 2026, arXiv 2604.04356): REAP's best experts are centroids and gather the others.

    Centroids in order of their score each take the C − 1 most similar experts that are still free ("pseudo-pruning": few
    large groups, most experts stay as they are); C is 16, or more where the experts asked for could not take all otherwise.
    Similarity is the mean of (1 + cos(u_i, u_j)) / 2, u_i = mean over x of p_i(x)·FFN_i(x), and 1 − δ_ij / max δ,
    δ_ij = ‖z_i/‖z_i‖ − z_j/‖z_j‖‖₂, z_i the router logits of expert i over all tokens. Weights: W = Σ_i s_i·W_i / Σ_i s_i,
    s the REAP score, the least positive one in place of 0. u_i is over the sample of tokens that every expert was run on.
    Deviations: the paper aligns by activations too, and calibrates each layer behind the merged ones.
    """
    scores_N = reap(layer).double()
    if bool((scores_N > 0).any()):
        scores_N = scores_N.where(scores_N > 0, scores_N[scores_N > 0].min())
    centroids = _highest(scores_N, experts)
    similarity_NN = _ream_similarity(layer)
    most = max(REAM_GROUP_SIZE, math.ceil(len(scores_N) / len(centroids)))
    free = [expert for expert in range(len(scores_N)) if expert not in centroids]
    groups = []
    for centroid in centroids:
        closest = sorted(free, key=lambda expert: -float(similarity_NN[centroid, expert]))[: most - 1]
        free = [expert for expert in free if expert not in closest]
        groups.append(Group(centroid, _shares([centroid, *closest], scores_N)))
    return groups


def _ream_similarity(layer: LayerStatistics) -> Tensor:
    outputs_ND = layer.weighted_output_mean.double()
    outputs_NN = (1.0 + _cosine(outputs_ND @ outputs_ND.T)) / 2.0
    apart_NN = (2.0 - 2.0 * _cosine(layer.router_gram)).clamp_min(0.0).sqrt()
    logits_NN = 1.0 - apart_NN / apart_NN.max().clamp_min(torch.finfo(torch.float64).tiny)
    return (outputs_NN + logits_NN) / 2.0


MERGE_METHODS: dict[str, Callable[[LayerStatistics, int], list[Group]]] = {
    "m-smoe": m_smoe,
    "s-smoe": s_smoe,
    "hc-smoe": hc_smoe,
    "ream": ream,
}


def merge_groups(method: str, statistics: Statistics, experts: int) -> dict[int, list[Group]]:
    """Groups of every MoE layer by decoder layer index; a layer that has no more than `experts` stays as it is."""
    return {
        index: MERGE_METHODS[method](layer, experts) if len(layer.tokens_routed) > experts else _as_is(layer)
        for index, layer in statistics.layers.items()
    }


def merge_pruned(kept: Mapping[int, Sequence[int]], statistics: Statistics) -> dict[int, list[Group]]:
    """`cka_groups` of every layer, for the experts that a pruning keeps."""
    return {index: cka_groups(statistics.layers[index], experts) for index, experts in kept.items()}


def merging_plan(
    groups: Mapping[int, Sequence[Group]],
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Plan:
    """The groups as a Plan, their members aligned to the centres; experts in the order of the centres.

    Reads the experts that are merged, one pair at a time, and releases them after each layer. A permutation has as many
    numbers as an expert has hidden units, so a merging plan is some 0.1 % of the size of the experts that it merges.
    """
    layers = {}
    for index in progress(sorted(groups)):
        ordered = sorted(groups[index], key=lambda group: group.centre)
        layers[index] = tuple(_planned(group, checkpoint, index, device) for group in ordered)
        checkpoint.release()
    return Plan(layers)


def _planned(group: Group, checkpoint: Checkpoint, layer: int, device: torch.device | str) -> PlannedExpert:
    if set(group.weights) == {group.centre}:
        return kept_expert(group.centre)
    return PlannedExpert((Part(aligned_sources(group, checkpoint, layer, device)),), (Source(group.centre),))


def aligned_sources(group: Group, checkpoint: Checkpoint, layer: int, device: torch.device | str) -> tuple[Source, ...]:
    """The members with their weights, their hidden units in the order of the centre's."""
    centre = expert_weights(checkpoint, layer, group.centre)
    return tuple(
        Source(
            expert,
            weight,
            None if expert == group.centre else alignment(centre, expert_weights(checkpoint, layer, expert), device),
        )
        for expert, weight in sorted(group.weights.items())
    )


def _as_is(layer: LayerStatistics) -> list[Group]:
    return [Group(expert, {expert: 1.0}) for expert in range(len(layer.tokens_routed))]


def _joined(similarity_NN: Tensor, centres: Sequence[int]) -> dict[int, list[int]]:
    """Members of each centre, itself first: every other expert joins the most similar; ties go to the earlier centre."""
    members = {centre: [centre] for centre in centres}
    for expert in range(len(similarity_NN)):
        if expert not in members:
            members[max(centres, key=lambda centre: float(similarity_NN[centre, expert]))].append(expert)
    return members


def _clusters(distances_NN: Tensor, count: int) -> list[list[int]]:
    """Average linkage, stopped when `count` clusters are left."""
    experts = len(distances_NN)
    members = {expert: [expert] for expert in range(experts)}
    if experts > 1:
        apart_NN = distances_NN.clone().fill_diagonal_(0.0)
        merges = linkage(squareform(apart_NN.numpy(), checks=False), method="average")
        for step, (one, other) in enumerate(merges[: experts - count, :2].astype(int).tolist()):
            members[experts + step] = members.pop(one) + members.pop(other)
    return sorted(sorted(cluster) for cluster in members.values())


def _cosine(gram_NN: Tensor) -> Tensor:
    """Cosines from inner products; 0 with what has no length."""
    lengths_N = gram_NN.double().diagonal().clamp_min(0.0).sqrt()
    scale_NN = lengths_N[:, None] * lengths_N[None, :]
    return torch.where(scale_NN > 0, gram_NN.double() / scale_NN.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def _highest(scores_N: Tensor, count: int) -> list[int]:
    """The best experts, best first; ties go to the lower index."""
    best: list[int] = scores_N.argsort(descending=True, stable=True)[:count].tolist()
    return best


def _most_used(group: Sequence[int], layer: LayerStatistics) -> int:
    return max(sorted(group), key=lambda expert: int(layer.tokens_routed[expert]))


def _shares(group: Sequence[int], amounts_N: Tensor) -> dict[int, float]:
    """Each member's share of the group's amount, without those that have none; even where nobody has any."""
    amounts = {expert: float(amounts_N[expert]) for expert in group}
    total = sum(amounts.values())
    if total <= 0:
        return dict.fromkeys(group, 1 / len(group))
    return {expert: amount / total for expert, amount in amounts.items() if amount > 0}
