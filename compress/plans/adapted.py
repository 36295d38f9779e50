"""Execute a Plan on a checkpoint that transformers runs: experts are removed from the files, and nothing else changes.

The result is a plain checkpoint of its family, under the source's own names. Every tensor is a copy of stored bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from compress.plans.plan import Plan, check_plan
from compress.plans.releasing import Releasing
from compress.plans.selection import moe_configs
from engine.errors import PlanError, UnsupportedError
from engine.files.json_file import write_json
from engine.files.safetensors_writer import ShardWriter
from engine.transformers_models.adapted_checkpoint import AdaptedCheckpoint
from engine.transformers_models.stored_experts import StoredResult, expert_places

_LEFT_OUT = "auto_map"
"""Config key that names code beside the source's weights, which results do not have."""


def check_fits_adapted(plan: Plan, checkpoint: AdaptedCheckpoint) -> None:
    """Raise PlanError unless the plan fits, UnsupportedError unless it only removes as many whole experts of each layer."""
    check_plan(plan, moe_configs(checkpoint.config), checkpoint.config.common_widths)
    kept = _kept(plan)
    is_pruning = all(expert.is_copy for own in plan.layers.values() for expert in own)
    is_repeated = any(len(set(own)) < len(own) for own in kept.values())
    if plan.kind != "moe" or plan.common or not is_pruning or is_repeated:
        raise checkpoint.refusal()
    model_type = checkpoint.model_type
    if len(counts := {len(own) for own in plan.layers.values()}) > 1:
        raise UnsupportedError(
            f"{checkpoint.directory}: a model of the family {model_type} has one number of "
            "experts in config.json, and this plan keeps "
            f"{min(counts)} to {max(counts)} in a layer; add --uniform"
        )
    least = checkpoint.config.architecture.least_experts
    for layer, own in plan.layers.items():
        if len(own) < least:
            raise PlanError(
                f"plan, layer {layer}: keeps {len(own)} experts, and the router of a model of the "
                f"family {model_type} needs {least}"
            )
        _check_groups(kept[layer], checkpoint, layer)
    expert_places(checkpoint)


def _kept(plan: Plan) -> dict[int, list[int]]:
    """Return the numbers of the unchanged experts of each layer, in the plan's order."""
    return {
        layer: [expert.origin for expert in own if expert.is_copy and isinstance(expert.origin, int)]
        for layer, own in plan.layers.items()
    }


def _check_groups(kept: list[int], checkpoint: AdaptedCheckpoint, layer: int) -> None:
    """Raise PlanError unless the kept experts are in order, as many of each group."""
    groups = moe_configs(checkpoint.config)[layer].groups
    found = [groups[expert] for expert in kept] if groups else []
    each = len(found) // (max(groups) + 1) if groups else 0
    if found != [number for number in range(max(groups, default=-1) + 1) for _ in range(each)]:
        raise PlanError(
            f"plan, layer {layer}: a model of the family {checkpoint.model_type} needs equally "
            "many experts of each group, in order"
        )


def adapted_planned_config(plan: Plan, checkpoint: AdaptedCheckpoint) -> dict[str, Any]:
    """Return config.json of the result."""
    raw = checkpoint.count_key.changed(checkpoint.raw_config, len(next(iter(plan.layers.values()))))
    return {key: value for key, value in raw.items() if key != _LEFT_OUT}


def apply_adapted(
    plan: Plan,
    checkpoint: AdaptedCheckpoint,
    directory: Path,
    *,
    shard_bytes: int,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> None:
    """Write config and weights into an empty directory. Raises the errors of `check_fits_adapted`."""
    check_fits_adapted(plan, checkpoint)
    result, releasing = StoredResult(checkpoint, _kept(plan)), Releasing(checkpoint)
    with ShardWriter(directory, result.layout, shard_bytes) as writer:
        for name in progress(list(result.layout)):
            writer.add_rows(name, releasing.after(result.pieces(name)))
        checkpoint.release()
    write_json(directory / "config.json", adapted_planned_config(plan, checkpoint))
