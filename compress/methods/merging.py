"""Conversion of groups into a Plan: each group's hidden units are aligned, and its members are averaged.

Three rules hold for all merging methods and deviate from some of their papers:
- Hidden units are aligned to the group's center by their weights (alignment.py), also for HC-SMoE and S-SMoE, which average
  experts in their stored order. Alignment never increases the distance between experts, so their average loses less.
- The router keeps the row of the group's center and drops the others, so that the model really becomes smaller. REAM and
  DiEP do so too. The public code of M-SMoE and HC-SMoE keeps all N rows and maps those of a group to one expert, which
  checkpoints of these families cannot express.
- Statistics of every layer are those of the full model; calibration is not repeated after earlier layers are merged.

Alignment is the only step that reads weights, layer by layer.
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
from engine.errors import UnsupportedError
from engine.families.config import DecoderConfig
from engine.passes import processes


def merge_groups(
    method: Callable[[LayerStatistics, int], list[Group]], statistics: Statistics, experts: int
) -> dict[int, list[Group]]:
    """Return the groups of every MoE layer by decoder layer index. Layers of at most `experts` experts stay unchanged."""
    return {
        index: method(layer, experts) if len(layer.tokens_routed) > experts else _as_is(layer)
        for index, layer in statistics.layers.items()
    }


def _as_is(layer: LayerStatistics) -> list[Group]:
    return [Group(expert, {expert: 1.0}) for expert in range(len(layer.tokens_routed))]


def merged_plan(run: MethodRun, groups: Mapping[int, Sequence[Group]]) -> Plan:
    """Return the plan of the aligned groups, which is saved: alignment takes longest with wide experts.

    Processes share layers.
    """

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


def check_averaging(config: DecoderConfig) -> None:
    """Raise UnsupportedError for layers whose experts differ in width, because their hidden units have no counterparts."""
    layers = [index for index, layer in enumerate(config.layers) if layer.moe is not None and layer.moe.expert_widths]
    if layers:
        raise UnsupportedError(
            f"experts of layer {layers[0]} differ in width, so they cannot be averaged; merge the model before its hidden "
            "units are pruned, or prune experts with --merge none"
        )


def merging_plan(
    groups: Mapping[int, Sequence[Group]],
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Plan:
    """Return the groups as a Plan, their members aligned to the centers, with experts in the order of the centers.

    The merged experts are read one pair at a time and released after each layer. A permutation has one number per hidden
    unit, so a merging plan has about 0.1 % of the size of the experts that it merges.
    """
    check_averaging(checkpoint.config)
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
    """Return the members with their weights, and with the permutations that align them to the center."""
    centre = expert_weights(checkpoint, layer, group.centre)
    return tuple(
        Source(
            expert,
            weight,
            None if expert == group.centre else alignment(centre, expert_weights(checkpoint, layer, expert), device),
        )
        for expert, weight in sorted(group.weights.items())
    )
