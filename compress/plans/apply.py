"""Execute a Plan: read a checkpoint tensor by tensor and write the smaller one shard by shard.

A whole layer is never in memory. Shape suffixes: F expert width, D hidden, M experts of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.options.quantize import QuantiserOptions, quantization_entry
from compress.plans.adapted import adapted_planned_config, apply_adapted, check_fits_adapted
from compress.plans.adapted_rounding import check_rounding
from compress.plans.kept_floats import float_config, kept_floats, layout_of_parts, stays_packed
from compress.plans.plan import SHARED_EXPERT, Part, Plan, PlannedExpert, Source, check_plan, expert_width
from compress.plans.prediction_layers import PredictionTensor, kept_prediction
from compress.plans.releasing import ReleasingSource
from compress.plans.selection import moe_configs
from compress.rounding.quantizer import Quantiser
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.checkpoint import remote_code
from engine.checkpoint.checkpoint import Checkpoint, computed_dtype, in_parts
from engine.checkpoint.mxfp4 import BLOCKS, METHOD, POWERS
from engine.checkpoint.pack_quantized import CONFIG_KEY, layout_of, tensors_of
from engine.checkpoint.stacks import Stored, expert_stacks, joined, stacked_names, stored_tensors
from engine.decoder.model import Decoder, TensorSource
from engine.errors import PlanError, UnsupportedError
from engine.families.architecture import Architecture
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN, DOWN_BIAS
from engine.families.resolve import architecture_of, decoder_config
from engine.families.results import (
    as_dense,
    too_ragged_for_transformers,
    with_experts,
    with_prediction_layers,
    without_prediction_layers,
)
from engine.families.tensor_names import (
    block_prefix,
    common_tensor,
    dense_tensor,
    expert_parts,
    expert_tensor,
    ffn_parts,
    is_router_bias,
    shared_tensor,
)
from engine.families.tensor_shapes import expected_tensors, expert_rows, names_on_disk
from engine.files.json_file import write_json
from engine.files.mapped_file import RELEASE_EVERY_BYTES
from engine.files.safetensors_writer import DEFAULT_SHARD_BYTES, ShardWriter
from engine.kernels.stored.quantized_weight import QuantizedWeight, Weight
from engine.kernels.stored.scheme import Scheme


def check_fits(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise PlanError unless the plan fits this checkpoint, and UnsupportedError where its family cannot store the
    result.
    """
    if isinstance(checkpoint, AdaptedCheckpoint):
        check_fits_adapted(plan, checkpoint)
        return
    row, config = checkpoint.config.architecture, checkpoint.config
    check_plan(plan, moe_configs(config), config.common_widths)
    if plan.kind == "dense" and row.not_dense is not None:
        raise UnsupportedError(f"{checkpoint.directory}: a {row.model_type} cannot be made dense: {row.not_dense}")
    for layer, planned in plan.layers.items():
        if plan.kind == "moe" and len(planned) < row.least_experts:
            needed = f"the router of a {row.model_type} takes {row.least_experts}"
            raise PlanError(f"plan, layer {layer}: has {len(planned)} expert, and {needed}")
    widths = {width for own in _widths(plan, checkpoint).values() for width in own}
    if plan.kind == "dense" and len(widths) > 1 and not _selects_units(plan, checkpoint):
        raise PlanError(f"the plan's dense layers are {sorted(widths)} hidden units wide; they must all be equal")
    _check_units_can_go(plan, checkpoint)
    if checkpoint.schemes_used:
        _check_nothing_is_mixed(plan, checkpoint)


def check_rounded(options: QuantiserOptions, checkpoint: Checkpoint, plan: Plan | None = None) -> None:
    """Raise OptionError where the result of a plan, or for None a model as it is, cannot be rounded in this way."""
    if isinstance(checkpoint, AdaptedCheckpoint):
        check_rounding(options, checkpoint, checkpoint.config.ffn_widths() if plan is None else _widths(plan, checkpoint))
    else:
        options.check(checkpoint.config if plan is None else decoder_config(planned_config(plan, checkpoint)))


def _selects_units(plan: Plan, checkpoint: Checkpoint) -> bool:
    """Return whether hidden units go by this plan, or went from its source: dense layers are then padded to one width."""
    moes = moe_configs(checkpoint.config).values()
    sources = {width for moe in moes for width in moe.widths}
    shared = {moe.shared_width for moe in moes}
    parts = [part for experts in plan.layers.values() for expert in experts for part in expert.parts]
    return max(len(sources), len(shared)) > 1 or any(part.units is not None for part in parts)


def _check_units_can_go(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a selection of hidden units of packed weights.

    The rows of gate and up could go one by one, but the groups of down projections lie along the hidden units.
    """
    row = checkpoint.config.architecture
    narrowed = (
        _source_name(row, layer, source, DOWN)
        for layer, experts in plan.layers.items()
        for expert in experts
        for part in expert.parts
        if part.units
        for source in part.sources
    )
    for name in (*narrowed, *(common_tensor(checkpoint.config, layer, DOWN) for layer in plan.common)):
        if checkpoint.is_packed(name):
            raise UnsupportedError(
                f"{checkpoint.directory}: {name} is packed in groups of hidden units, so single units cannot be taken "
                "out; give --granularity expert, or prune the unquantized model and `compress quantize` the result"
            )


def _check_nothing_is_mixed(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError for a plan that would mix low-bit weights.

    A mixture would be rounded a second time; a copy is not.
    """
    made = _made_tensors(plan, checkpoint).keys() - _origins(plan, checkpoint).keys()
    mixed = sorted(name for name in made if name not in checkpoint.shapes or checkpoint.scheme(name) is not None)
    if mixed:
        raise UnsupportedError(
            f"{checkpoint.directory}: {mixed[0]} would be made of low-bit weights; take the model that this one was "
            "quantized from, and `compress quantize` the result"
        )


def check_nothing_is_lost(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError unless the result uses exactly the checkpoint's tensors outside of the plan's MoE blocks."""
    config, own = decoder_config(planned_config(plan, checkpoint)), checkpoint.config
    theirs, ours = config.architecture.model_type, own.architecture.model_type
    shapes, made = expected_tensors(config), _made_tensors(plan, checkpoint).keys() | dense_ffns(checkpoint)
    for name, shape in shapes.items():
        if name not in made and checkpoint.shapes.get(name) != shape:
            raise UnsupportedError(
                f"{checkpoint.directory}: a {theirs} needs {name} of shape {list(shape)}, which this {ours} does not have; "
                "make a plan of kind 'moe' instead"
            )
    blocks = tuple(f"{block_prefix(own.architecture, layer)}." for layer in plan.layers)
    for name in checkpoint.shapes:
        if name not in shapes and not name.startswith(blocks):
            raise UnsupportedError(
                f"{checkpoint.directory}: a {theirs} has no place for {name}, which this {ours} has; make a plan of kind "
                "'moe' instead"
            )


def _widths(plan: Plan, checkpoint: Checkpoint) -> dict[int, list[int]]:
    """Return the number of hidden units of each expert of the result, by layer."""
    moes = moe_configs(checkpoint.config)
    return {index: [expert_width(own, moes[index]) for own in experts] for index, experts in plan.layers.items()}


def planned_config(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return config.json of the result."""
    if isinstance(checkpoint, AdaptedCheckpoint):
        return adapted_planned_config(plan, checkpoint)
    raw = checkpoint.raw_config
    if not checkpoint.config.moe_layers:
        return raw  # the layers are dense already, and nothing is planned
    if plan.kind == "dense":
        return as_dense(raw, _dense_width(plan, checkpoint))
    counts = [len(plan.layers[index]) if index in plan.layers else 0 for index in range(len(checkpoint.config.layers))]
    groups = {layer: _groups(plan, checkpoint, layer) for layer in plan.layers}
    own_groups = {layer: own for layer, own in groups.items() if own}
    common = checkpoint.config.common_widths | {layer: len(units) for layer, units in plan.common.items()}
    changed = with_experts(raw, counts, own_groups, _widths(plan, checkpoint), common)
    changed["architectures"] = [checkpoint.config.architecture.causal_lm_class]
    if "block_configs" not in changed and kept_prediction(plan, checkpoint):
        changed = with_prediction_layers(changed, raw)
    needs_code = "block_configs" in changed and architecture_of(changed).in_transformers
    needs_code = needs_code and too_ragged_for_transformers(changed) is None
    return changed | {"auto_map": remote_code.auto_map()} if needs_code else changed


def _groups(plan: Plan, checkpoint: Checkpoint, layer: int) -> list[int]:
    """Return the group of each expert of the result: the group of the source expert whose router row it has.

    The list is empty for a model without expert groups.
    """
    moe = checkpoint.config.layers[layer].moe
    if moe is None or not moe.groups:
        return []
    rows = [max(expert.router, key=lambda row: row.coefficient) for expert in plan.layers[layer]]
    return [moe.groups[int(row.expert)] for row in rows]


def _dense_width(plan: Plan, checkpoint: Checkpoint) -> int:
    """Return the common FFN width of a dense model. Narrower FFNs are padded with hidden units that are zero."""
    width = max(width for own in _widths(plan, checkpoint).values() for width in own)
    if checkpoint.config.architecture.dense_sibling is None:
        return width
    return max([width, *(own.dense_width for own in checkpoint.config.layers if own.moe is None)])


def dense_ffns(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the projections of layers that have no experts."""
    dense = [index for index, layer in enumerate(checkpoint.config.layers) if layer.moe is None]
    parts = ffn_parts(checkpoint.config.architecture)
    return {dense_tensor(index, projection) for index in dense for projection in parts}


def _fitted(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a narrower FFN padded with zero hidden units, which add nothing to the FFN's output."""
    if tuple(tensor.shape) == shape:
        return tensor
    fitted = tensor.new_zeros(shape)
    fitted[tuple(slice(size) for size in tensor.shape)] = tensor
    return fitted


def apply(
    plan: Plan,
    checkpoint: Checkpoint,
    directory: Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replaced: Mapping[str, Tensor] | None = None,
    quantiser: Quantiser | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> None:
    """Write config, weights and, where layers differ in their experts, the modeling file into an empty directory.

    `replaced`: trained tensors of the result by name, which are written as given. `quantiser`: rounds weights as they are
    written; weights that are low-bit already are copied.
    """
    if isinstance(checkpoint, AdaptedCheckpoint):
        made = _expert_tensors(plan, checkpoint) | _given(replaced)
        apply_adapted(
            *(plan, checkpoint, directory),
            shard_bytes=shard_bytes,
            made=made,
            replaced=frozenset(replaced or ()),
            quantiser=quantiser,
            progress=progress,
        )
        return
    check_fits(plan, checkpoint)
    check_nothing_is_lost(plan, checkpoint)
    raw = planned_config(plan, checkpoint)
    made = _made_tensors(plan, checkpoint) | _given(replaced)
    config = decoder_config(raw)
    if quantiser is not None:
        quantiser.options.check(config)
    shapes, origins = expected_tensors(config), _origins(plan, checkpoint)
    renamed = names_on_disk(config)
    canonical = {on_disk: name for name, on_disk in renamed.items()}
    schemes = _schemes(config, checkpoint, origins, made, quantiser)
    packed = {} if schemes else _kept_packed(plan, checkpoint, replaced or {})
    kept_names = {renamed.get(name, name): origins.get(name, name) for name in shapes if name in origins or name not in made}
    may_keep = quantiser is None and stays_packed(plan, checkpoint, (replaced or {}).keys())
    floats = kept_floats(kept_names if may_keep else {}, checkpoint)
    raw |= _quantisation(config, checkpoint, quantiser, schemes) if schemes or packed else {}
    raw |= float_config(checkpoint.raw_config) if floats else {}
    prediction: dict[str, PredictionTensor] = {}
    if schemes:
        raw |= without_prediction_layers(config.architecture)
    elif plan.kind == "moe" and "block_configs" not in raw:
        prediction = kept_prediction(plan, checkpoint)
    if schemes and too_ragged_for_transformers(raw, few_bits=True) is not None:
        raw.pop("auto_map", None)
    # Low-bit weights are stored one tensor per expert, also in families that stack experts.
    one_by_one = {renamed.get(name, name): Stored(shape) for name, shape in shapes.items()}
    stored = one_by_one if schemes or floats else stored_tensors(config)
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, one in stored.items():
        own = canonical.get(name, name)
        dtype = _dtype(one.parts[0][0] if one.parts else own, checkpoint)
        if own in schemes:
            layout |= layout_of(name, one.shape, schemes[own], dtype)
        elif name + BLOCKS not in packed and name not in floats:
            layout[name] = dtype, one.shape
    layout |= floats.layout()
    layout |= {name: (torch.uint8, (len(kept), *whole.shape[1:])) for name, (whole, kept) in packed.items()}
    layout |= checkpoint.derived
    predicted = {name: own.parts(name, packed=bool(floats)) for name, own in prediction.items()}
    layout |= {name: (own.dtype, own.shape) for name, own in prediction.items() if not predicted[name]}
    layout |= layout_of_parts(part for parts in predicted.values() for part in parts.items())

    def given(name: str) -> Tensor:
        tensor = _fitted(made[name]() if name in made else checkpoint.tensor(name), shapes[name])
        return tensor if quantiser is None or name in schemes else quantiser.rescaled(name, tensor)

    def pieces_of(name: str) -> Mapping[str, Iterable[Tensor]]:
        if name in packed:
            return {name: _rows_of(*packed[name])}
        if name in floats:
            return {part: in_parts(tensor, RELEASE_EVERY_BYTES) for part, tensor in floats.parts(name).items()}
        own = canonical.get(name, name)
        if own not in schemes:
            return {name: _pieces(own, stored[name], given, layout[name][0])}
        if quantiser is not None:
            weight: Weight = quantiser(own, given(own), _dtype(own, checkpoint))
        else:
            weight = checkpoint.stored(origins.get(own, own))
        assert isinstance(weight, QuantizedWeight)
        return {part: [tensor] for part, tensor in tensors_of(name, weight).items()}

    releasing = ReleasingSource(checkpoint)
    with ShardWriter(directory, layout, shard_bytes) as writer:
        for name in progress([*(name for name in stored if name + BLOCKS not in packed), *packed]):
            for part, pieces in pieces_of(name).items():
                writer.add_rows(part, releasing.after(pieces))
        for name in checkpoint.derived:
            writer.add_rows(name, releasing.after([checkpoint.derived_tensor(name)]))
        for name, own_tensor in prediction.items():
            for part, tensor in predicted[name].items():
                writer.add_rows(part, releasing.after(in_parts(tensor, RELEASE_EVERY_BYTES)))
            if not predicted[name]:
                writer.add_rows(name, releasing.after(own_tensor.pieces()))
    write_json(directory / "config.json", raw)
    if "auto_map" in raw:
        source = remote_code.render(checkpoint.config.architecture)
        (directory / remote_code.FILE_NAME).write_text(source, encoding="utf-8")


def _schemes(
    result: DecoderConfig,
    checkpoint: Checkpoint,
    origins: Mapping[str, str],
    made: Mapping[str, Any],
    quantiser: Quantiser | None,
) -> dict[str, Scheme]:
    """Return the storage scheme of each low-bit weight of the result."""
    if quantiser is not None:
        return {name: quantiser.options.scheme_of(name) for name in quantiser.options.names(result)}
    copied = {name: origins.get(name, name) for name in expected_tensors(result) if name in origins or name not in made}
    return {name: scheme for name, origin in copied.items() if (scheme := checkpoint.scheme(origin)) is not None}


def _quantisation(
    result: DecoderConfig, checkpoint: Checkpoint, quantiser: Quantiser | None, schemes: Mapping[str, Scheme]
) -> dict[str, Any]:
    """Return the quantization entry of the result's config.json; empty where no weight is low-bit."""
    if quantiser is not None:
        return quantiser.options.config(result)
    row = checkpoint.config.architecture
    experts = [(layer, number) for layer, count in checkpoint.config.experts_by_layer.items() for number in range(count)]
    stored = {checkpoint.scheme(expert_tensor(row, *place, part)) for place in experts for part in ffn_parts(row)}
    if len(stored) > 1:  # the entry names experts by their numbers, which may have changed
        return quantization_entry(result, schemes)
    return {CONFIG_KEY: checkpoint.raw_config.get(CONFIG_KEY, {"quant_method": METHOD})}


def _kept_packed(plan: Plan, checkpoint: Checkpoint, replaced: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, list[int]]]:
    """Return stacks of packed weights that are only copied, each with the indices of its kept experts; they stay packed."""
    if not all(expert.is_copy for experts in plan.layers.values() for expert in experts):
        return {}
    found: dict[str, tuple[Tensor, list[int]]] = {}
    for layer, experts in plan.layers.items():
        kept = [int(expert.router[0].expert) for expert in experts]
        for stack in expert_stacks(checkpoint.config, layer):
            if replaced.keys() & set(stacked_names(checkpoint.config, layer, stack, 0)):
                return {}
            parts = {stack.name + part: checkpoint.packed(stack.name + part) for part in (BLOCKS, POWERS)}
            found |= {name: (whole, kept) for name, whole in parts.items() if whole is not None}
    return found


def _rows_of(whole: Tensor, kept: Iterable[int]) -> Iterator[Tensor]:
    for expert in kept:
        yield whole[expert]


def _pieces(name: str, stored: Stored, given: Callable[[str], Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a tensor of the result in pieces: blocks of rows or, for a stack, one expert after the other."""
    if stored.stack is None:
        yield from in_parts(given(name).to(dtype), RELEASE_EVERY_BYTES)
    else:
        for names in stored.parts:
            yield joined(stored.stack, [given(part).to(dtype) for part in names])


def planned_decoder(
    plan: Plan,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    replaced: Mapping[str, Tensor] | None = None,
) -> Decoder:
    """Return the result of `apply` as a decoder, without writing it. Experts that stay unchanged remain memory-mapped."""
    return Decoder(*planned_tensors(plan, checkpoint, dtype, device, replaced=replaced))


def planned_tensors(
    plan: Plan,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    replaced: Mapping[str, Tensor] | None = None,
) -> tuple[DecoderConfig, TensorSource]:
    """Return the config of the result of `apply`, and a function that returns its tensors by name, from which decoders and
    single layers are built.
    """
    made = _made_tensors(plan, checkpoint) | _given(replaced)
    config = decoder_config(planned_config(plan, checkpoint))
    shapes = expected_tensors(config)

    origins, weights = _origins(plan, checkpoint), checkpoint.weights(dtype, device)

    def source(name: str) -> Weight:
        origin = origins.get(name, name)
        if origin in checkpoint.shapes and checkpoint.scheme(origin) is not None:
            return weights(origin)
        tensor = _fitted(made[name]() if name in made else checkpoint.tensor(name), shapes[name])
        return tensor.to(device=device, dtype=computed_dtype(config.architecture, name, dtype))

    return config, source


def _dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of a tensor: that of the source's tensor of this name or, without one, that of its routed experts.

    Tensors without one in the source are made from experts, such as the FFN of a dense result.
    """
    if name in checkpoint.shapes:
        return checkpoint.dtype(name)
    layers = checkpoint.config.moe_layers
    routed = expert_tensor(checkpoint.config.architecture, layers[0], 0, DOWN) if layers else ""
    return checkpoint.dtype(routed) if routed in checkpoint.shapes else checkpoint.model_dtype


def _origins(plan: Plan, checkpoint: Checkpoint) -> dict[str, str]:
    """Return the source names of the tensors of unchanged experts, by their names in the result."""
    row = checkpoint.config.architecture
    return {
        expert_tensor(row, layer, index, part): expert_tensor(row, layer, source, part)
        for layer, experts in plan.layers.items()
        for index, expert in enumerate(experts)
        if expert.is_copy and isinstance(source := expert.parts[0].sources[0].expert, int)
        for part in expert_parts(row)
    }


def _made_tensors(plan: Plan, checkpoint: Checkpoint) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each tensor that is not copied under its own name; the function computes the tensor."""
    row, made = checkpoint.config.architecture, _expert_tensors(plan, checkpoint)
    for layer, experts in plan.layers.items():
        for name, (_, *inputs) in expert_rows(checkpoint.config, layer).items():
            if plan.kind == "moe":
                made[name] = _deferred(_rows, checkpoint, name, experts)
            elif row.dense_sibling is None:  # the softmax of one logit is always 1
                made[name] = _deferred(torch.zeros, 1, *inputs)
    for layer, units in plan.common.items():
        for projection in ffn_parts(row):
            name = common_tensor(checkpoint.config, layer, projection)
            made[name] = _deferred(_narrowed, checkpoint, name, projection, units)
    return made


def _expert_tensors(plan: Plan, checkpoint: Checkpoint) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each projection of the result's experts, by name."""
    return {
        planned_name(plan, checkpoint, layer, index, projection): _deferred(
            _projection, checkpoint, layer, expert, projection
        )
        for layer, experts in plan.layers.items()
        for index, expert in enumerate(experts)
        for projection in expert_parts(checkpoint.config.architecture)
    }


def _narrowed(checkpoint: Checkpoint, name: str, projection: int, units: Sequence[int]) -> Tensor:
    """Return a projection of an FFN with some of its hidden units."""
    return checkpoint.tensor(name).index_select(_along(projection), torch.tensor(units))


def _along(projection: int) -> int:
    """Return the dimension of hidden units in a projection."""
    return 1 if projection == DOWN else 0


def planned_name(plan: Plan, checkpoint: Checkpoint, layer: int, index: int, projection: int) -> str:
    """Return the result's name of a projection of expert `index`, or of the one FFN where the result is dense."""
    row = checkpoint.config.architecture
    if plan.kind == "dense" and row.dense_sibling is not None:
        return dense_tensor(layer, projection)
    return expert_tensor(row, layer, index, projection)


def _given(replaced: Mapping[str, Tensor] | None) -> dict[str, Callable[[], Tensor]]:
    return {name: _deferred(torch.clone, tensor) for name, tensor in (replaced or {}).items()}


def _deferred(function: Callable[..., Tensor], *arguments: Any) -> Callable[[], Tensor]:
    return lambda: function(*arguments)


def _projection(checkpoint: Checkpoint, layer: int, expert: PlannedExpert, projection: int) -> Tensor:
    """Return one projection of a planned expert: its parts concatenated along the hidden units."""
    blocks = [part_tensor(checkpoint, layer, part, projection) for part in expert.parts]
    return blocks[0] if len(blocks) == 1 else side_by_side(blocks, projection)


def side_by_side(blocks: Sequence[Tensor], projection: int) -> Tensor:
    """Concatenate a tensor of several FFNs along the hidden units: the single FFN returns the sum of their outputs.

    The biases of down projections have no hidden units; they are added.
    """
    if projection == DOWN_BIAS:
        return torch.stack(list(blocks)).sum(0)
    return torch.cat(list(blocks), dim=_along(projection))


def part_tensor(checkpoint: Checkpoint, layer: int, part: Part, projection: int) -> Tensor:
    """Return Σ coefficient · permuted source, for the down projection times the part's scale. A plain copy stays mapped.

    The sum is computed for the part's hidden units only; the bias of a down projection has none.
    """
    scale = part.scale if projection in (DOWN, DOWN_BIAS) else 1.0

    def taken(source: Source) -> Tensor:
        tensor, units = _source_tensor(checkpoint, layer, source, projection), _units_of(part, source)
        if units is None or projection == DOWN_BIAS:
            return tensor
        return tensor.index_select(_along(projection), torch.tensor(units))

    if len(part.sources) == 1 and part.sources[0].coefficient * scale == 1.0:
        return taken(part.sources[0])
    total = torch.zeros_like(taken(part.sources[0]), dtype=torch.float32)
    for source in part.sources:
        total += source.coefficient * scale * taken(source).float()
    return total


def _units_of(part: Part, source: Source) -> tuple[int, ...] | None:
    """Return the source's hidden units in the order of the part's; None for all in the source's order."""
    if part.units is None or source.permutation is None:
        return source.permutation if part.units is None else part.units
    return tuple(source.permutation[unit] for unit in part.units)


def _source_tensor(checkpoint: Checkpoint, layer: int, source: Source, projection: int) -> Tensor:
    return checkpoint.tensor(_source_name(checkpoint.config.architecture, layer, source, projection))


def _source_name(row: Architecture, layer: int, source: Source, projection: int) -> str:
    if source.expert == SHARED_EXPERT:
        return shared_tensor(row, layer, projection)
    return expert_tensor(row, layer, int(source.expert), projection)


def _rows(checkpoint: Checkpoint, name: str, experts: tuple[PlannedExpert, ...]) -> Tensor:
    """Return the result's router [M, D], or another tensor with a row for each expert, as weighted sums of source rows.

    The sums are one-hot in pruning.
    """
    weight = checkpoint.tensor(name)
    if weight.dim() > 1 and is_router_bias(checkpoint.config.architecture, name):  # [1, N]
        return _rows_of_router(weight.T, experts).T
    return _rows_of_router(weight, experts)


def _rows_of_router(weight: Tensor, experts: tuple[PlannedExpert, ...]) -> Tensor:
    copied = [expert.copied_row for expert in experts if expert.copied_row is not None]
    if len(copied) == len(experts):
        return weight[copied]
    rows = [sum(s.coefficient * weight[int(s.expert)].float() for s in expert.router) for expert in experts]
    return torch.stack([row for row in rows if isinstance(row, Tensor)])


def carried_files(source: Path) -> Iterator[Path]:
    """Yield the tokenizer, preprocessing and generation files of the source, which the result copies unchanged."""
    names = (
        "generation_config.json tokenizer.json tokenizer_config.json tokenizer.model spiece.model special_tokens_map.json "
        "added_tokens.json vocab.json vocab.txt merges.txt chat_template.jinja chat_template.json preprocessor_config.json "
        "processor_config.json"
    )
    for name in names.split():
        path = source / name
        if path.is_file():
            yield path
