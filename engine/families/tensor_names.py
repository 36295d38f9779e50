"""Names on disk of a layer's tensors, by the family's row."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from engine.families.architecture import Architecture
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN, GATE, GATE_BIAS, PROJECTIONS, UP, SharedExpert, Stack

SINKS = "sinks"
LATENT_UP = "kv_b_proj.weight"
LIGHTNING = ("qkv_proj.weight", "output_gate.weight", "norm.weight", "out_proj.weight")
"""The tensors of lightning attention: queries, keys and values together, the gate, the norm, and the output."""
_AFTER_PROJECTIONS = ("conv1d.weight", "dt_bias", "A_log", "norm.weight", "out_proj.weight")
GATED_DELTA = ("in_proj_qkvz.weight", "in_proj_ba.weight", *_AFTER_PROJECTIONS)
"""The tensors of the gated delta rule: queries, keys, values and gates together; the logits of strengths and decays
together; the filters; the bias and the logarithm of the rates of decay; the norm; and the output."""
SPLIT_GATED_DELTA = (
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "in_proj_b.weight",
    "in_proj_a.weight",
    *_AFTER_PROJECTIONS,
)
"""These tensors where gates, strengths and decays have a matrix each."""
INDEXER_QUERY = "indexer.wq_b.weight"
INDEXER = (INDEXER_QUERY, "indexer.wk.weight", "indexer.k_norm.weight", "indexer.k_norm.bias", "indexer.weights_proj.weight")
"""The tensors of an indexer: queries from their latent vector, keys, the norm of keys, and the weights of heads."""
NEVER_ROUNDED = (
    *("in_proj_ba.weight", "in_proj_b.weight", "in_proj_a.weight"),
    *("indexer.wk.weight", "indexer.weights_proj.weight"),
)
"""Matrices that read a layer's input and are never rounded, like routers: small ones of the gated delta rule, which give
strengths and decays, and those of an indexer."""
MAMBA2 = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight")
"""The tensors of Mamba-2: gate, x, B, C and Δ together; the filters and their bias; the bias of Δ; the logarithm of the
rates of decay; the factors of x in the output; the norm; and the output."""
SHORT_CONVOLUTION = ("in_proj.weight", "conv.weight", "out_proj.weight")
"""The tensors of a short convolution: both gates and the input together, the filters, and the output."""
OUTPUT_NORMS = ("attention_output_norm", "feed_forward_output_norm")
"""The engine's names of the norms of what is added to the hidden state."""
LAYER_SCALAR = "layer_scalar"
"""The number by which a layer's output is multiplied, beside these norms."""
BLOCK_NORMS = ("shared_input_norm", "shared_output_norm", "routed_output_norm")
"""The engine's names of the norms around the shared expert and after the routed experts, where these have norms of their
own. The norm before the routed experts has the usual name."""
PREDICTION_NORMS = ("embedding_norm.weight", "state_norm.weight", "final_norm.weight")
"""The engine's names of the norms of a layer for multi-token prediction (PredictionLayers.norms)."""
PREDICTION_PROJECTION = "projection.weight"
"""The engine's name of its matrix (PredictionLayers.projection)."""
_DECAYS = ("dt_bias", "A_log")
_DENSE_DOWN = f"mlp.{PROJECTIONS[DOWN]}"
_LAYERS = "model.layers"
_WITHIN_LAYER = re.compile(r"(?:model\.layers(\.\d+\.)|)(.+)\.(\w+)")


def head_tensor(config: DecoderConfig) -> str:
    """Return the name of the matrix that gives the logits."""
    return "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"


def attention_prefix(config: DecoderConfig, layer: int) -> str:
    """Return the prefix of a layer's attention."""
    linear = config.layers[layer].linear
    return f"model.layers.{layer}.{'self_attn' if linear is None else linear.module}"


def block_prefix(row: Architecture, layer: int) -> str:
    """Return the prefix of a layer's MoE block."""
    return f"model.layers.{layer}.{row.experts.names.block}".removesuffix(".")


def expert_tensor(row: Architecture, layer: int, expert: int, projection: int) -> str:
    """Return the name on disk of an expert's gate (0), up (1) or down (2) projection, or of its bias (3 more)."""
    names = row.experts.names
    name = names.expert.format(expert=expert, projection=names.projections[projection % GATE_BIAS])
    if projection >= GATE_BIAS:
        name = name.removesuffix("weight") + "bias"
    return f"{block_prefix(row, layer)}.{name}"


def common_tensor(config: DecoderConfig, layer: int, projection: int) -> str:
    """Return the name on disk of a projection of the FFN that every token of a layer uses (DecoderConfig.common_widths)."""
    if config.layers[layer].moe is None:
        return dense_tensor(layer, projection)
    return shared_tensor(config.architecture, layer, projection)


def ffn_tensor(config: DecoderConfig, layer: int, number: int, projection: int) -> str:
    """Return the name on disk of a projection of one of a layer's FFNs (DecoderConfig.ffn_widths)."""
    moe = config.layers[layer].moe
    if moe is not None and number < moe.experts:
        return expert_tensor(config.architecture, layer, number, projection)
    return common_tensor(config, layer, projection)


def dense_module(row: Architecture) -> str:
    """Return transformers' name, within a layer, of the FFN of a dense layer."""
    return row.disk_names.get(_DENSE_DOWN, _DENSE_DOWN).rpartition(".")[0]


def dense_down_name(row: Architecture) -> str:
    """Return the last part of transformers' name of the down projection of a dense layer's FFN."""
    return row.disk_names.get(_DENSE_DOWN, _DENSE_DOWN).rpartition(".")[2]


def shared_module(row: Architecture) -> str:
    """Return transformers' name, within a layer, of the shared expert; a name that is never read if there is none."""
    if row.shared is None or not row.shared.stacks:
        return f"{row.modules[0]}.{'shared_expert' if row.shared is None else row.shared.name}".removeprefix(".")
    return row.shared.stacks[0].name.split(".")[0]


def ffn_parts(row: Architecture) -> range:
    """Return the indices of the projections of an FFN without biases: the shared expert, or that of a dense layer."""
    return row.experts.names.matrices


def has_gate(row: Architecture) -> bool:
    """Return whether the family's FFNs have a gate."""
    return row.experts.names.has_gate


def expert_parts(row: Architecture) -> range:
    """Return the indices of the tensors of an expert."""
    return row.experts.names.parts


def down_name(row: Architecture) -> str:
    """Return the last part of the name of an expert's down projection."""
    return row.experts.names.projections[DOWN]


def has_transposed_stacks(row: Architecture) -> bool:
    """Return whether the family stacks the transposed matrices of its experts."""
    return any(stack.transposed for stack in row.experts.names.stacks)


def router_tensor(row: Architecture, layer: int) -> str:
    """Return the name on disk of a layer's router weight [experts, hidden], or [experts, hidden units] of a gate network."""
    return f"{block_prefix(row, layer)}.{row.router.weight}"


def gate_hidden_tensor(row: Architecture, layer: int) -> str:
    """Return the name on disk of a gate network's first layer [hidden units, hidden]."""
    hidden = _in_block(row, layer, row.router.names.hidden)
    assert hidden is not None
    return hidden


def router_noise_tensor(row: Architecture, layer: int) -> str:
    """Return the name on disk of the weight of noisy top-k in training [experts, hidden]."""
    noise = _in_block(row, layer, row.router.names.noise)
    assert noise is not None
    return noise


def logit_bias_tensor(row: Architecture, layer: int) -> str | None:
    """Return the name on disk of the bias of a layer's router logits [experts]; None if there is none."""
    return _in_block(row, layer, row.router.names.logit_bias)


def router_bias_tensor(row: Architecture, layer: int) -> str | None:
    """Return the name on disk of the choice bias, which is added to a layer's scores [experts]; None if there is none."""
    return _in_block(row, layer, row.router.names.choice_bias)


def input_scale_tensor(row: Architecture, layer: int) -> str | None:
    """Return the name on disk of the weight of the norm of a router's input [hidden]; None if there is none."""
    return _in_block(row, layer, row.router.names.input_scale)


def weight_scale_tensor(row: Architecture, layer: int) -> str | None:
    """Return the name on disk of the factors of experts' weights [experts]; None if there are none."""
    return _in_block(row, layer, row.router.names.weight_scale)


def is_router_bias(row: Architecture, name: str) -> bool:
    """Return whether a tensor is the choice bias, which is added to scores for the choice of experts."""
    own = row.router.names.choice_bias
    return own is not None and name.endswith(f".{own}")


def is_decay(name: str) -> bool:
    """Return whether a tensor says how fast the memory of linear attention decays."""
    return name.endswith(_DECAYS)


def _in_block(row: Architecture, layer: int, name: str | None) -> str | None:
    return None if name is None else f"{block_prefix(row, layer)}.{name}"


def dense_tensor(layer: int, projection: int) -> str:
    """Return the engine's name, in every family, of a dense FFN's gate (0), up (1) or down (2) projection."""
    return f"model.layers.{layer}.mlp.{PROJECTIONS[projection]}.weight"


def name_on_disk(row: Architecture, name: str) -> str:
    """Return the name on disk of a tensor of a decoder; stacks of experts have further names (`stacks_on_disk`)."""
    found = _WITHIN_LAYER.fullmatch(name)
    assert found is not None, name
    layer, module, part = found.groups()
    prefix = "" if layer is None else row.disk_names.get(_LAYERS, _LAYERS) + layer
    return f"{prefix}{row.disk_names.get(module, module)}.{part}"


def shared_tensor(row: Architecture, layer: int, projection: int) -> str:
    """Return the name on disk of the shared expert's gate (0), up (1) or down (2) projection."""
    return f"{block_prefix(row, layer)}.{_shared(row).name}.{PROJECTIONS[projection]}.weight"


def shared_gate_tensor(row: Architecture, layer: int) -> str | None:
    """Return the name on disk of the gate that scales the shared expert, [1, hidden]; None if there is none."""
    return None if row.shared is None else _in_block(row, layer, row.shared.gate)


def _shared(row: Architecture) -> SharedExpert:
    assert row.shared is not None
    return row.shared


def stacks_on_disk(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """Return the stacks of a layer's experts on disk, by full names; empty if experts are stored one by one."""
    return tuple(replace(stack, name=f"{block_prefix(row, layer)}.{stack.name}") for stack in row.experts.names.stacks)


def shared_stacks(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """Return the stacks of a layer's shared expert on disk; empty if its projections are stored one by one."""
    stacks = () if row.shared is None else row.shared.stacks
    return tuple(replace(stack, name=f"model.layers.{layer}.{stack.name}") for stack in stacks)


def stacks_in_memory(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """Return the stacks of experts that transformers 5 has in memory, and can write. Some families have them on disk too."""
    block = ".".join(part for part in (f"model.layers.{layer}", row.modules[0], "experts") if part)
    first = Stack(f"{block}.gate_up_proj", (GATE, UP)) if has_gate(row) else Stack(f"{block}.up_proj", (UP,))
    stacks = first, Stack(f"{block}.down_proj", (DOWN,))
    on_disk = stacks_on_disk(row, layer)
    return on_disk if {stack.name for stack in stacks} <= {stack.name for stack in on_disk} else stacks


def router_in_memory(row: Architecture, layer: int) -> str:
    """Return the router's name beside these stacks."""
    return f"model.layers.{layer}.{router_module(row)}.weight"


def router_module(row: Architecture) -> str:
    """Return transformers' name, within a layer, of the router."""
    return ".".join(part for part in row.modules if part)


def sinks_tensor(layer: int) -> str:
    """Return the name on disk of a layer's attention sinks [heads]."""
    return f"model.layers.{layer}.self_attn.{SINKS}"


def prediction_names(row: Architecture, number: int, stored: Iterable[str]) -> dict[str, str]:
    """Return which stored tensors make the first layer for multi-token prediction, by names of a decoder's layer 0.

    number: that of the decoder's layers. stored: names of tensors in the files.
    """
    own = row.prediction
    if own is None:
        return {}
    outer = dict(zip((*own.norms, own.projection), (*PREDICTION_NORMS, PREDICTION_PROJECTION), strict=True))
    names = {theirs.format(number=number): f"{_LAYERS}.0.{ours}" for theirs, ours in outer.items()}
    prefix = own.layer.format(number=number)
    on_disk = row.disk_names.get(_LAYERS, _LAYERS)
    found = {name: names.get(name, f"{on_disk}.0.{name.removeprefix(prefix)}") for name in stored if name.startswith(prefix)}
    found |= {name: ours for name, ours in names.items() if name in set(stored)}
    return {ours: name for name, ours in found.items()}


def is_prediction_tensor(row: Architecture, name: str) -> bool:
    """Return whether a tensor belongs to multi-token prediction and has a name of its own, not one of a further layer."""
    prefix = None if row.prediction is None else row.prediction.prefix
    return prefix is not None and name.startswith(prefix)
