"""A decoder's parameters by their tensors' names on disk, for training and for writing the trained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from engine.decoder.attention import Attention
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.gated_delta import GatedDelta
from engine.decoder.latent_attention import LatentAttention
from engine.decoder.lightning_attention import LightningAttention
from engine.decoder.mamba2 import Mamba2
from engine.decoder.model import FINAL_NORM, Decoder, DecoderLayer
from engine.decoder.short_convolution import ShortConvolution
from engine.families.config import DecoderConfig
from engine.families.tensor_names import (
    BLOCK_NORMS,
    LATENT_UP,
    LIGHTNING,
    MAMBA2,
    OUTPUT_NORMS,
    SHORT_CONVOLUTION,
    attention_prefix,
    dense_tensor,
    expert_parts,
    expert_tensor,
    ffn_parts,
    gate_hidden_tensor,
    input_scale_tensor,
    logit_bias_tensor,
    router_noise_tensor,
    router_tensor,
    shared_gate_tensor,
    shared_tensor,
)
from engine.kernels.stored.quantized_weight import LowBitWeight

Named = tuple[str, nn.Parameter | LowBitWeight]
"""A weight and its name."""


def parameters_on_disk(decoder: Decoder) -> dict[str, nn.Parameter]:
    """Return every parameter by its name on disk; tied embeddings appear once.

    Parameters that training cannot change are left out: blocks of other kinds, biases that only select experts (they
    get no gradient), and low-bit weights.
    """
    found = {"model.embed_tokens.weight": decoder.embedding_VD}
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        found.update(_parameters(layer_weights(decoder.config, index, layer)))
    found |= _named(FINAL_NORM, decoder.norm, decoder.norm_bias)
    if decoder.head is not decoder.embedding_VD and isinstance(decoder.head, nn.Parameter):
        found["lm_head.weight"] = decoder.head
    if decoder.head_bias_V is not None:
        found["lm_head.bias"] = decoder.head_bias_V
    return found


def _named(name: str, weight: nn.Parameter | None, bias: nn.Parameter | None) -> dict[str, nn.Parameter]:
    parts = {f"{name}.weight": weight, f"{name}.bias": bias}
    return {own: part for own, part in parts.items() if part is not None}


def layer_weights(config: DecoderConfig, index: int, layer: DecoderLayer) -> Iterator[Named]:
    """Yield the weights of a decoder layer, low-bit weights among them, by their names on disk."""
    prefix, own = f"model.layers.{index}", attention_prefix(config, index)
    yield from _named(f"{prefix}.input_layernorm", layer.attention_norm, layer.attention_norm_bias).items()
    if layer.attention is not None:
        yield from ((f"{own}.{name}", weight) for name, weight in _attention(layer.attention))
    norm = layer.feed_forward_norm, layer.feed_forward_norm_bias
    yield from _named(f"{prefix}.post_attention_layernorm", *norm).items()
    if layer.output_norms is not None:
        yield from zip((f"{prefix}.{name}.weight" for name in OUTPUT_NORMS), layer.output_norms, strict=True)
    yield from _feed_forward(config, index, layer)


def attention_parameters(attention: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a layer's attention, by their names within it."""
    return _parameters(_attention(attention))


def _parameters(weights: Iterable[Named]) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in weights if isinstance(weight, nn.Parameter))


def _attention(attention: nn.Module) -> Iterator[Named]:
    if isinstance(attention, LightningAttention):
        own = (attention.qkv, attention.gate, attention.norm, attention.output)
        named: dict[str, nn.Parameter | LowBitWeight | None] = dict(zip(LIGHTNING, own, strict=True))
    elif isinstance(attention, GatedDelta):
        named = dict(zip(attention.names, _gated_delta(attention), strict=True))
    elif isinstance(attention, Mamba2):
        named = dict(zip(MAMBA2, _mamba2(attention), strict=True))
    elif isinstance(attention, ShortConvolution):
        named = dict(zip(SHORT_CONVOLUTION, (attention.inputs, attention.filter_D1K, attention.output), strict=True))
    elif isinstance(attention, LatentAttention):
        named = _latent(attention)
    else:
        assert isinstance(attention, Attention)
        named = _grouped(attention)
    return ((name, weight) for name, weight in named.items() if weight is not None)


def _gated_delta(attention: GatedDelta) -> tuple[nn.Parameter | LowBitWeight, ...]:
    decays = attention.decay_bias_H, attention.log_rate_H
    return *attention.projections, attention.filter_C1K, *decays, attention.norm_V, attention.output


def _mamba2(attention: Mamba2) -> tuple[nn.Parameter | LowBitWeight, ...]:
    numbers = attention.step_bias_H, attention.log_rate_H, attention.through_H
    return attention.inputs, attention.filter_C1K, attention.filter_bias_C, *numbers, attention.norm_X, attention.output


def _latent(attention: LatentAttention) -> dict[str, nn.Parameter | LowBitWeight | None]:
    return {
        "q_a_proj.weight": attention.query_down,
        "q_a_proj.bias": attention.query_down_bias,
        "q_a_layernorm.weight": attention.query_norm,
        "q_proj.weight" if attention.query_down is None else "q_b_proj.weight": attention.query_up,
        "kv_a_proj_with_mqa.weight": attention.latent_down,
        "kv_a_proj_with_mqa.bias": attention.latent_down_bias,
        "kv_a_layernorm.weight": attention.latent_norm,
        LATENT_UP: attention.latent_up,
        "o_proj.weight": attention.output,
        "o_proj.bias": attention.output_bias,
    }


def _grouped(attention: Attention) -> dict[str, nn.Parameter | LowBitWeight | None]:
    return {
        "q_proj.weight": attention.query,
        "q_proj.bias": attention.query_bias,
        "k_proj.weight": attention.key,
        "k_proj.bias": attention.key_bias,
        "v_proj.weight": attention.value,
        "v_proj.bias": attention.value_bias,
        "o_proj.weight": attention.output,
        "o_proj.bias": attention.output_bias,
        "q_norm.weight": attention.query_norm,
        "k_norm.weight": attention.key_norm,
        "sinks": attention.sinks,
    }


def _feed_forward(config: DecoderConfig, index: int, layer: DecoderLayer) -> Iterator[Named]:
    row, block = config.architecture, layer.feed_forward
    if isinstance(block, Expert):
        yield from zip((dense_tensor(index, p) for p in ffn_parts(row)), block.projections, strict=True)
    elif isinstance(block, MoeBlock):
        yield router_tensor(row, index), block.router_ND
        if block.gate_hidden_HD is not None:
            yield gate_hidden_tensor(row, index), block.gate_hidden_HD
        if block.noise_ND is not None:
            yield router_noise_tensor(row, index), block.noise_ND
        if block.logit_bias_N is not None and (bias := logit_bias_tensor(row, index)) is not None:
            yield bias, block.logit_bias_N
        if block.own_norms is not None:
            own = (f"model.layers.{index}.{name}.weight" for name in BLOCK_NORMS)
            yield from zip((input_scale_tensor(row, index), *own), block.own_norms.weights, strict=True)
        for number, expert in enumerate(block.experts):
            assert isinstance(expert, Expert)
            names = (expert_tensor(row, index, number, p) for p in expert_parts(row))
            yield from zip(names, expert.projections, strict=True)
        if block.shared is not None:
            yield from zip((shared_tensor(row, index, p) for p in ffn_parts(row)), block.shared.projections, strict=True)
        if block.shared_gate_1D is not None and (gate := shared_gate_tensor(row, index)) is not None:
            yield gate, block.shared_gate_1D
