"""Groups of experts to a Plan: the hidden units of each group are aligned, and its members averaged.

Three things hold for all merging methods, and deviate from some of their papers:
- Hidden units are aligned to the group's centre by its weights (alignment.py), also for HC-SMoE and S-SMoE, which average
  experts in the order they are stored in. Aligned experts are never further apart, so their average loses less.
- The router keeps the row of the group's centre and drops the others, so that the model really shrinks. REAM and DiEP do so
  too. The public code of M-SMoE and HC-SMoE keeps all N rows and lets those of a group lead to the same expert, which no
  checkpoint of these families can express.
- Statistics are those of the full model in every layer; layers merged before are not calibrated on again.

Aligning is the only step that reads weights, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from calibrate.statistics import LayerStatistics, Statistics
from compress.methods.alignment import alignment, expert_weights
from compress.methods.groups import Group
from compress.methods.inputs import MethodRun
from compress.plans.plan import Part, Plan, PlannedExpert, Source, kept_expert, plan_from_json, plan_to_json
from engine.checkpoint.checkpoint import Checkpoint
from engine.passes import processes


def merge_groups(
    method: Callable[[LayerStatistics, int], list[Group]], statistics: Statistics, experts: int
) -> dict[int, list[Group]]:
    """Groups of every MoE layer by decoder layer index; a layer that has no more than `experts` stays as it is."""
    return {
        index: method(layer, experts) if len(layer.tokens_routed) > experts else _as_is(layer)
        for index, layer in statistics.layers.items()
    }


def _as_is(layer: LayerStatistics) -> list[Group]:
    return [Group(expert, {expert: 1.0}) for expert in range(len(layer.tokens_routed))]


def merged_plan(run: MethodRun, groups: Mapping[int, Sequence[Group]]) -> Plan:
    """The groups aligned, once over interruptions: with wide experts that takes longest. Processes share out the layers."""

    def aligned() -> dict[str, Any]:
        own = merging_plan(
            dict(processes.share(sorted(groups.items()))),
            run.prepared.checkpoint,
            device=run.options.device,
            progress=run.bar("aligning (layers)"),
        )
        parts = processes.all_told(plan_to_json(own))
        return parts[0] | {"layers": {layer: experts for part in parts for layer, experts in part["layers"].items()}}

    return plan_from_json(run.work.once("merging_plan", aligned))


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
