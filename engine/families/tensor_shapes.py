"""The tensors that a model's checkpoint holds, with their shapes, by its `DecoderConfig`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from engine.families.architecture import Architecture
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN
from engine.families.layer_config import (
    GatedDeltaConfig,
    LatentConfig,
    LightningConfig,
    LinearConfig,
    Mamba2Config,
    ShortConvolutionConfig,
    SplitGatedDeltaConfig,
)
from engine.families.tensor_names import (
    BLOCK_NORMS,
    GATED_DELTA,
    INDEXER,
    INDEXER_QUERY,
    LATENT_UP,
    LAYER_SCALAR,
    LIGHTNING,
    MAMBA2,
    NEVER_ROUNDED,
    OUTPUT_NORMS,
    SHORT_CONVOLUTION,
    SPLIT_GATED_DELTA,
    attention_prefix,
    dense_tensor,
    expert_parts,
    expert_tensor,
    ffn_parts,
    gate_hidden_tensor,
    input_scale_tensor,
    logit_bias_tensor,
    name_on_disk,
    router_bias_tensor,
    router_noise_tensor,
    router_tensor,
    shared_gate_tensor,
    shared_tensor,
    sinks_tensor,
    weight_scale_tensor,
)

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the checkpoint with its shape, experts one by one, in the order of the layers."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary_size, config.hidden_size)}
    for index in range(len(config.layers)):
        shapes.update(layer_tensors(config, index))
    shapes.update(_norm_tensors(config, "model.norm"))
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, config.hidden_size)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocabulary_size,)
    return shapes


def names_on_disk(config: DecoderConfig) -> dict[str, str]:
    """Return the names on disk of the tensors that have another name in the decoder, by that name."""
    row = config.architecture
    names = {name: name_on_disk(row, name) for name in expected_tensors(config)} if row.disk_names else {}
    return {name: on_disk for name, on_disk in names.items() if on_disk != name}


def layer_tensors(config: DecoderConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one decoder layer with their shapes."""
    row, layer, hidden = config.architecture, config.layers[index], config.hidden_size
    prefix = f"model.layers.{index}"
    shapes = _norm_tensors(config, f"{prefix}.input_layernorm") if layer.attends else {}
    shapes.update(_attention_tensors(config, index))
    shapes.update(_norm_tensors(config, f"{prefix}.post_attention_layernorm") if layer.feeds else {})
    for name in (
        *(OUTPUT_NORMS if config.output_norms else ()),
        *(BLOCK_NORMS if layer.moe and layer.moe.own_norms else ()),
    ):
        shapes.update(_norm_tensors(config, f"{prefix}.{name}"))
    if config.output_norms:
        shapes[f"{prefix}.{LAYER_SCALAR}"] = (1,)
    if layer.moe is None:
        shapes.update(_ffn(row, lambda p: dense_tensor(index, p), layer.dense_width, hidden))
        return shapes
    shapes.update(router_tensors(config, index) | expert_rows(config, index))
    if (scale := input_scale_tensor(row, index)) is not None:
        shapes[scale] = (hidden,)
    for expert in range(layer.moe.experts):
        own = expert_shapes(config, index, expert)
        shapes.update((expert_tensor(row, index, expert, part), shape) for part, shape in own.items())
    if layer.moe.shared_width:
        shapes.update(_ffn(row, lambda p: shared_tensor(row, index, p), layer.moe.shared_width, hidden))
        if (gate := shared_gate_tensor(row, index)) is not None:
            shapes[gate] = (1, hidden)
    return shapes


def router_tensors(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a layer's router logits are made from, with shapes."""
    row, moe = config.architecture, config.layers[layer].moe
    assert moe is not None
    if not moe.gate_network_width:
        shapes: dict[str, tuple[int, ...]] = {router_tensor(row, layer): (moe.experts, config.hidden_size)}
        if (bias := logit_bias_tensor(row, layer)) is not None:
            shapes[bias] = (moe.experts,)
        return shapes
    return {
        gate_hidden_tensor(row, layer): (moe.gate_network_width, config.hidden_size),
        router_tensor(row, layer): (moe.experts, moe.gate_network_width),
    }


def noise_tensors(config: DecoderConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the tensors that the noise of a layer's router is made from, with shapes; empty if it has no noise."""
    moe = config.layers[layer].moe
    assert moe is not None
    if moe.noise_epsilon is None:
        return {}
    return {router_noise_tensor(config.architecture, layer): (moe.experts, config.hidden_size)}


def expert_rows(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer that have one row for each expert, with shapes."""
    row, moe = config.architecture, config.layers[layer].moe
    assert moe is not None
    shapes = router_tensors(config, layer)
    if moe.gate_network_width:
        del shapes[gate_hidden_tensor(row, layer)]
    if (bias := router_bias_tensor(row, layer)) is not None:
        shapes[bias] = row.router.choice_bias_shape(moe.experts)
    if (scale := weight_scale_tensor(row, layer)) is not None:
        shapes[scale] = (moe.experts,)
    return shapes | noise_tensors(config, layer)


def expert_shapes(config: DecoderConfig, layer: int, expert: int | None = None) -> dict[int, tuple[int, ...]]:
    """Return the shape of each tensor of one of a layer's experts, by default of the widest one, by its index."""
    moe, hidden = config.layers[layer].moe, config.hidden_size
    assert moe is not None
    width = moe.expert_width if expert is None or not moe.expert_widths else moe.expert_widths[expert]
    weights = (width, hidden), (width, hidden), (hidden, width)
    every = (*weights, (width,), (width,), (hidden,))
    return {part: every[part] for part in expert_parts(config.architecture)}


def routed_tensors(config: DecoderConfig) -> set[str]:
    """Return the names on disk of every tensor of the routed experts."""
    row = config.architecture
    return {
        expert_tensor(row, layer, expert, part)
        for layer, experts in config.experts_by_layer.items()
        for expert in range(experts)
        for part in expert_parts(row)
    }


def attention_weights(config: DecoderConfig, index: int) -> list[str]:
    """Return the names on disk of a layer's attention matrices that are multiplied by as they are.

    The matrix that makes keys and values of latent attention is excluded: for single positions, the products use its parts
    (absorbed). So are those that are never rounded.
    """
    excluded = tuple(f".{name}" for name in (LATENT_UP, INDEXER_QUERY, *NEVER_ROUNDED))
    tensors = _attention_tensors(config, index)
    return [name for name, shape in tensors if len(shape) == 2 and not name.endswith(excluded)]


def feed_forward_weights(config: DecoderConfig, index: int) -> list[str]:
    """Return the names on disk of the matrices of a layer's experts, including the shared one, or of its dense FFN."""
    row, moe = config.architecture, config.layers[index].moe
    if moe is None:
        return [dense_tensor(index, projection) for projection in ffn_parts(row) if config.layers[index].feeds]
    names = [expert_tensor(row, index, expert, part) for expert in range(moe.experts) for part in ffn_parts(row)]
    return names + [shared_tensor(row, index, projection) for projection in ffn_parts(row) if moe.shared_width]


def derived_tensors(config: DecoderConfig) -> list[str]:
    """Return the tensors that transformers writes although config.json implies them: decays of lightning attention."""
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    lightning = (layer for layer, sizes in config.linear_layers.items() if isinstance(sizes, LightningConfig))
    return [f"model.layers.{layer}.self_attn.{name}" for layer in lightning for name in names]


def _norm_tensors(config: DecoderConfig, name: str) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if config.layer_norm else ("weight",)
    return {f"{name}.{part}": (config.hidden_size,) for part in parts}


def _ffn(row: Architecture, name: Callable[[int], str], width: int, hidden: int) -> Shapes:
    for projection in ffn_parts(row) if width else ():
        yield name(projection), (hidden, width) if projection == DOWN else (width, hidden)


def _attention_tensors(config: DecoderConfig, index: int) -> Shapes:
    if not config.layers[index].attends:
        return iter(())
    prefix = attention_prefix(config, index)
    if (linear := config.layers[index].linear) is not None:
        return _LINEAR_TENSORS[type(linear)](config, linear, prefix)
    if config.latent is not None:
        return itertools.chain(_latent_tensors(config, config.latent, prefix), _indexer_tensors(config, index, prefix))
    return _grouped_query_tensors(config, index, prefix)


def _latent_tensors(config: DecoderConfig, latent: LatentConfig, prefix: str) -> Shapes:
    hidden, rank = config.hidden_size, latent.key_value_rank
    query = config.attention_heads * config.head_dimension
    if latent.query_rank:
        yield f"{prefix}.q_a_proj.weight", (latent.query_rank, hidden)
        if config.qkv_bias:
            yield f"{prefix}.q_a_proj.bias", (latent.query_rank,)
        yield f"{prefix}.q_a_layernorm.weight", (latent.query_rank,)
        yield f"{prefix}.q_b_proj.weight", (query, latent.query_rank)
    else:
        yield f"{prefix}.q_proj.weight", (query, hidden)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + latent.rotary_dimension, hidden)
    if config.qkv_bias:
        yield f"{prefix}.kv_a_proj_with_mqa.bias", (rank + latent.rotary_dimension,)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.{LATENT_UP}", (config.attention_heads * (latent.plain_dimension + latent.value_dimension), rank)
    yield f"{prefix}.o_proj.weight", (hidden, config.attention_heads * latent.value_dimension)
    if config.output_bias:
        yield f"{prefix}.o_proj.bias", (hidden,)


def _indexer_tensors(config: DecoderConfig, index: int, prefix: str) -> Shapes:
    sizes, latent = config.layers[index].indexer, config.latent
    if sizes is None or latent is None:
        return
    key, hidden = (sizes.dimension,), config.hidden_size
    shapes = (sizes.heads * sizes.dimension, latent.query_rank), (sizes.dimension, hidden), key, key, (sizes.heads, hidden)
    yield from ((f"{prefix}.{name}", shape) for name, shape in zip(INDEXER, shapes, strict=True))


def _lightning_tensors(config: DecoderConfig, sizes: LinearConfig, prefix: str) -> Shapes:
    width = sizes.heads * sizes.value_dimension
    shapes = (3 * width, config.hidden_size), (width, config.hidden_size), (width,), (config.hidden_size, width)
    yield from ((f"{prefix}.{name}", shape) for name, shape in zip(LIGHTNING, shapes, strict=True))


def _gated_delta_tensors(config: DecoderConfig, sizes: LinearConfig, prefix: str) -> Shapes:
    assert isinstance(sizes, GatedDeltaConfig)
    outputs = sizes.channels + sizes.heads * sizes.value_dimension, 2 * sizes.heads
    yield from _delta_tensors(config, sizes, prefix, GATED_DELTA, outputs)


def _split_gated_delta_tensors(config: DecoderConfig, sizes: LinearConfig, prefix: str) -> Shapes:
    assert isinstance(sizes, GatedDeltaConfig)
    outputs = sizes.channels, sizes.heads * sizes.value_dimension, sizes.heads, sizes.heads
    yield from _delta_tensors(config, sizes, prefix, SPLIT_GATED_DELTA, outputs)


def _delta_tensors(
    config: DecoderConfig, sizes: GatedDeltaConfig, prefix: str, names: tuple[str, ...], outputs: tuple[int, ...]
) -> Shapes:
    """Yield the tensors of the gated delta rule, whose projections have so many outputs."""
    shapes: tuple[tuple[int, ...], ...] = (
        *((each, config.hidden_size) for each in outputs),
        (sizes.channels, 1, sizes.kernel),
        (sizes.heads,),
        (sizes.heads,),
        (sizes.value_dimension,),
        (config.hidden_size, sizes.heads * sizes.value_dimension),
    )
    yield from ((f"{prefix}.{name}", shape) for name, shape in zip(names, shapes, strict=True))


def _mamba2_tensors(config: DecoderConfig, sizes: LinearConfig, prefix: str) -> Shapes:
    assert isinstance(sizes, Mamba2Config)
    shapes: tuple[tuple[int, ...], ...] = (
        (sizes.projected, config.hidden_size),
        (sizes.channels, 1, sizes.kernel),
        (sizes.channels,),
        *((sizes.heads,) for _ in range(3)),
        (sizes.inner,),
        (config.hidden_size, sizes.inner),
    )
    yield from ((f"{prefix}.{name}", shape) for name, shape in zip(MAMBA2, shapes, strict=True))


def _short_convolution_tensors(config: DecoderConfig, sizes: LinearConfig, prefix: str) -> Shapes:
    assert isinstance(sizes, ShortConvolutionConfig)
    hidden = config.hidden_size
    shapes = (3 * hidden, hidden), (hidden, 1, sizes.kernel), (hidden, hidden)
    yield from ((f"{prefix}.{name}", shape) for name, shape in zip(SHORT_CONVOLUTION, shapes, strict=True))


_LINEAR_TENSORS: dict[type[LinearConfig], Callable[[DecoderConfig, LinearConfig, str], Shapes]] = {
    LightningConfig: _lightning_tensors,
    GatedDeltaConfig: _gated_delta_tensors,
    Mamba2Config: _mamba2_tensors,
    ShortConvolutionConfig: _short_convolution_tensors,
    SplitGatedDeltaConfig: _split_gated_delta_tensors,
}


def _grouped_query_tensors(config: DecoderConfig, index: int, prefix: str) -> Shapes:
    hidden, (groups, size, shares_projection) = config.hidden_size, config.heads_of(index)
    query, key = config.attention_heads * size, groups * size
    projections = ("q_proj", 2 * query if config.output_gate else query), ("k_proj", key), ("v_proj", key)
    for name, rows in projections[:2] if shares_projection else projections:
        yield f"{prefix}.{name}.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"{prefix}.{name}.bias", (rows,)
    yield f"{prefix}.o_proj.weight", (hidden, query)
    if config.output_bias:
        yield f"{prefix}.o_proj.bias", (hidden,)
    if config.qk_norm != "none":
        per_head = config.qk_norm == "head"
        yield f"{prefix}.q_norm.weight", (size if per_head else query,)
        yield f"{prefix}.k_norm.weight", (size if per_head else key,)
    if config.has_sinks:
        yield sinks_tensor(index), (config.attention_heads,)
