"""Execute a Plan on a checkpoint that transformers runs: experts change in the files, and nothing else does.

The result is a plain checkpoint of its family, under the source's own names, or one with a modeling file where layers keep
different numbers of experts or of their hidden units. Every tensor is a copy of stored bytes, but for those of experts that
lose hidden units or are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.plans.adapted_rounding import RoundedResult
from compress.plans.plan import Plan, check_plan, expert_width
from compress.plans.releasing import ReleasingSource
from compress.plans.selection import moe_configs
from compress.rounding.quantizer import Quantiser
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.expert_layers import projection_names
from engine.adapted.layer_sizes import BLOCKS_KEY, LayerSize, Sizes
from engine.adapted.stored_experts import ResultLayer, StoredResult, expert_places
from engine.checkpoint import family_code
from engine.errors import PlanError, UnsupportedError
from engine.families.experts import DOWN
from engine.families.tensor_names import expert_tensor
from engine.files.json_file import write_json
from engine.files.safetensors_writer import ShardWriter


def check_fits_adapted(plan: Plan, checkpoint: AdaptedCheckpoint) -> None:
    """Raise PlanError unless the plan fits, UnsupportedError unless a checkpoint of the family can hold its result.

    Experts of a layer of such a result are of one width, and each has the router row of one source expert.
    """
    check_plan(plan, moe_configs(checkpoint.config), checkpoint.config.common_widths)
    rows = _rows(plan)
    is_repeated = any(None in own or len(set(own)) < len(own) for own in rows.values())
    if plan.kind != "moe" or plan.common or is_repeated:
        raise checkpoint.refusal()
    sizes = _sizes(plan, checkpoint)
    least = checkpoint.config.architecture.least_experts
    for layer, own in plan.layers.items():
        if len(own) < least:
            raise PlanError(
                f"plan, layer {layer}: keeps {len(own)} experts, and the router of a model of the "
                f"family {checkpoint.model_type} needs {least}"
            )
        _check_groups(rows[layer], checkpoint, layer)
    expert_places(checkpoint)
    checkpoint.check_sizes(sizes)
    if any(not expert.is_copy for own in plan.layers.values() for expert in own):
        _check_not_low_bit(checkpoint)
        checkpoint.stored_experts  # noqa: B018  raises UnsupportedError where projections are not found
        _check_result(sizes, checkpoint)


def _check_not_low_bit(checkpoint: AdaptedCheckpoint) -> None:
    """Raise UnsupportedError for low-bit weights, which are copied, and neither mixed nor narrowed."""
    if checkpoint.low_bit:
        raise UnsupportedError(
            f"{checkpoint.directory}: {min(checkpoint.low_bit)} is a low-bit weight, and such experts can only "
            "be kept or removed as a whole; give --granularity expert, or prune the unquantized model and `compress "
            "quantize` the result"
        )


def _rows(plan: Plan) -> dict[int, list[Any]]:
    """Return the expert whose router row each expert of a layer has; None for another sum of rows."""
    return {layer: [expert.copied_row for expert in own] for layer, own in plan.layers.items()}


def _sizes(plan: Plan, checkpoint: AdaptedCheckpoint) -> dict[int, LayerSize]:
    """Return the sizes of the layers of the result. Raises UnsupportedError where experts of one layer differ in width."""
    moes, found = moe_configs(checkpoint.config), dict[int, LayerSize]()
    for layer, own in plan.layers.items():
        width, *others = sorted({expert_width(expert, moes[layer]) for expert in own})
        if others:
            raise UnsupportedError(
                f"{checkpoint.directory}: experts of one layer of a model of the family {checkpoint.model_type} have one "
                f"width, and the plan keeps {width} to {others[-1]} hidden units in layer {layer}; keep as many of each, as "
                "`compress prune --granularity unit` does"
            )
        found[layer] = LayerSize(len(own), width)
    return found


def _check_result(sizes: Sizes, checkpoint: AdaptedCheckpoint) -> None:
    """Raise UnsupportedError unless transformers builds the tensors that a plain result has."""
    raw = checkpoint.with_sizes(sizes)
    if BLOCKS_KEY in raw:  # `check_sizes` has built it
        return
    (width,) = {size.width for size in sizes.values()}
    result = checkpoint.build(raw).state_dict()
    depends = checkpoint.count_key.axes.keys() | set(projection_names(checkpoint.found))
    for name, tensor in checkpoint.model.state_dict().items():
        is_same = name in result and result[name].shape == tensor.shape
        if not is_same and name not in depends:
            raise UnsupportedError(
                f"{checkpoint.directory}: with experts of {width} hidden units, {name} of a model of the family "
                f"{checkpoint.model_type} would have another shape; remove whole experts"
            )


def _check_groups(kept: list[Any], checkpoint: AdaptedCheckpoint, layer: int) -> None:
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
    """Return config.json of the result. Raises UnsupportedError for a width of experts that it cannot have."""
    return checkpoint.with_sizes(_sizes(plan, checkpoint))


def apply_adapted(
    plan: Plan,
    checkpoint: AdaptedCheckpoint,
    directory: Path,
    *,
    shard_bytes: int,
    made: Mapping[str, Callable[[], Tensor]],
    replaced: Collection[str] = (),
    quantiser: Quantiser | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> None:
    """Write config and weights into an empty directory. Raises the errors of `check_fits_adapted`.

    made: return the projections of the result's experts, by name. replaced: names of those that are not the plan's.
    `quantiser`: rounds matrices as they are written.
    """
    check_fits_adapted(plan, checkpoint)
    sizes, row = _sizes(plan, checkpoint), checkpoint.config.architecture
    layers = {
        layer: ResultLayer(
            tuple(_rows(plan)[layer]),
            sizes[layer].width,
            frozenset(
                number
                for number, expert in enumerate(own)
                if not expert.is_copy or expert_tensor(row, layer, number, DOWN) in replaced
            ),
        )
        for layer, own in plan.layers.items()
    }
    stored = StoredResult(checkpoint, layers, lambda *place: made[expert_tensor(row, *place)]())
    result: StoredResult | RoundedResult = stored
    raw = checkpoint.with_sizes(sizes)
    if quantiser is not None:
        widths = {layer: [own.width] * len(own.rows) for layer, own in layers.items()}
        result = RoundedResult(stored, checkpoint, widths, quantiser, made)
        raw |= result.config
    releasing = ReleasingSource(checkpoint)
    with ShardWriter(directory, result.layout, shard_bytes) as writer:
        for name in progress(result.names):
            for part, pieces in result.parts(name).items():
                writer.add_rows(part, releasing.after(pieces))
        checkpoint.release()
    write_json(directory / "config.json", raw)
    if (source := family_code.source_of(raw)) is not None:
        (directory / family_code.FILE_NAME).write_text(source, encoding="utf-8")
