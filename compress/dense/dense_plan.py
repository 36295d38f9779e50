"""MoE→dense (Cruz Salinas et al.): the Plan that selects a layer's experts for one FFN, with their weights a_i.

F̂FN(x) = Σ_{i≤K} a_i FFN_i(x) (eq. 5). The paper selects the experts with the most routed tokens and does not state the
initial a_i. Here a_i is expert i's share of the router probability of the K selected experts, times the mean over tokens of
the sum of a token's routed weights. Where all tokens have the same sum, as with a normalized top-k, a layer of identical
experts is reproduced exactly.

A shared expert becomes one more FFN, whose a_i is the calibration mean of its gate.

Shape suffixes: N routed experts of the layer, K selected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.statistics import LayerStatistics, Statistics
from compress.methods.criterion import layer_scores
from compress.methods.groups import Group
from compress.methods.m_smoe import dominated
from compress.methods.merging import aligned_sources
from compress.methods.random_scores import random_scores
from compress.methods.saliency import frequency, reap
from compress.options.densify import SELECTIONS
from compress.plans.plan import SHARED_EXPERT, Part, Plan, PlannedExpert, Source
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import OptionError


@dataclass(frozen=True)
class Chosen:
    """One layer's selected experts, best first. Each represents its `members`, whose unweighted mean becomes one FFN."""

    members: Mapping[int, list[int]]

    @property
    def experts(self) -> list[int]:
        """Return every expert whose weights are part of the result, ascending."""
        return sorted(expert for members in self.members.values() for expert in members)


def check_ffns(ffns: int, experts: Mapping[int, int] | Mapping[str, int]) -> None:
    """Raise OptionError unless `ffns` is from 1 to the number of experts of every layer.

    experts: number of experts by layer.
    """
    if ffns < 1:
        raise OptionError(f"ffns is {ffns}; a dense layer is made of at least one expert")
    for layer, count in experts.items():
        if count < ffns:
            raise OptionError(f"layer {layer} has {count} experts, fewer than the {ffns} FFNs asked for; lower --ffns")


def choose(select: str, statistics: Statistics, ffns: int, seed: int = 0) -> dict[int, Chosen]:
    """Return K experts of every MoE layer, by decoder layer index.

    usage: most routed tokens (as in the paper). reap: highest REAP score. random: a random choice. average: the mean of all
    experts; with several FFNs, the K most used experts, each averaged with the experts that have the most similar router
    logits.
    """
    return SELECTION_RULES[select](statistics, ffns, seed)


def _best(scores: Mapping[int, Tensor], ffns: int) -> dict[int, Chosen]:
    """Return the experts with the highest scores."""
    best = {index: values.argsort(descending=True, stable=True)[:ffns].tolist() for index, values in scores.items()}
    return {index: Chosen({expert: [expert] for expert in experts}) for index, experts in best.items()}


SELECTION_RULES: dict[str, Callable[[Statistics, int, int], dict[int, Chosen]]] = {
    "usage": lambda statistics, ffns, seed: _best(layer_scores(frequency, statistics), ffns),
    "reap": lambda statistics, ffns, seed: _best(layer_scores(reap, statistics), ffns),
    "average": lambda statistics, ffns, seed: {
        index: Chosen(dominated(layer, ffns)) for index, layer in statistics.layers.items()
    },
    "random": lambda statistics, ffns, seed: _best(random_scores(statistics, seed), ffns),
}
"""Selection rules: functions from statistics, K and a seed to the experts of every MoE layer."""
assert tuple(SELECTION_RULES) == SELECTIONS


def first_scales(layer: LayerStatistics, chosen: Chosen) -> list[float]:
    """Return the initial a_K: w̄ · Σ_members p_i / Σ_chosen p_j.

    w̄ is the mean over tokens of the sum of a token's routed weights.
    """
    amounts_K = torch.stack([layer.probability_sum[members].sum() for members in chosen.members.values()])
    total, count = float(amounts_K.sum()), len(amounts_K)
    shares_K = amounts_K / total if total > 0 else torch.full((count,), 1.0 / count)
    weight = float(layer.weight_sum.sum() / layer.tokens.clamp_min(1))
    return (weight * shares_K).tolist()


def dense_plan(
    chosen: Mapping[int, Chosen],
    statistics: Statistics,
    shared_gates: Mapping[int, float],
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Plan:
    """Return the plan. `shared_gates`: mean gate of the shared expert by layer, where there is one (block_error.py).

    The hidden units of averaged experts are first aligned to the most used expert of their group (alignment.py).
    """
    layers = {}
    for index in progress(sorted(chosen)):
        scales = first_scales(statistics.layers[index], chosen[index])
        parts = [
            Part(_sources(centre, members, checkpoint, index, device), scale)
            for (centre, members), scale in zip(chosen[index].members.items(), scales, strict=True)
        ]
        if index in shared_gates:
            parts.append(Part((Source(SHARED_EXPERT),), shared_gates[index]))
        layers[index] = (PlannedExpert(tuple(parts)),)
        checkpoint.release()
    return Plan(layers, kind="dense")


def _sources(
    centre: int, members: list[int], checkpoint: Checkpoint, layer: int, device: torch.device | str
) -> tuple[Source, ...]:
    if members == [centre]:
        return (Source(centre),)
    return aligned_sources(Group(centre, dict.fromkeys(members, 1.0 / len(members))), checkpoint, layer, device)
