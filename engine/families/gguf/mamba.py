"""Nemotron-H in GGUF files: layers that are a single block, their kinds and sizes, and the places of Mamba-2's tensors.

A layer with heads of keys has attention, one with hidden units has experts, and one with neither has Mamba-2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.attention import FULL, LINEAR
from engine.families.config import DecoderConfig
from engine.families.gguf.forms import AS_IT_IS, Form, Places, Rate
from engine.families.gguf.metadata import Facts
from engine.families.gguf.parts import Part, read_outline, write_sizes
from engine.families.layer_config import Mamba2Config
from engine.families.layer_pattern import EXPERTS

_GROUPS, _WIDTH, _EXPERT_WIDTH = "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length"
_SIZES = {
    "mamba_num_heads": "ssm.time_step_rank",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
}
_INNER = "ssm.inner_size"
_LAYER_NORM = "attention.layer_norm_epsilon"
"""The ε of layer norms, which layers for multi-token prediction have. llama.cpp asks for it in every file."""
_WITHOUT_MEANING = ("rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned", _LAYER_NORM)
"""Keys that conversion writes and the layers that are read have no use for."""


def _read_blocks(facts: Facts) -> dict[str, Any]:
    for key in _WITHOUT_MEANING:
        facts.value(key, None)
    found = {entry: facts.size(key) for entry, key in _SIZES.items()}
    inner, heads = facts.size(_INNER), found["mamba_num_heads"]
    if not heads or inner % heads:
        raise CheckpointError(f"metadata: {facts.architecture}.{_INNER} is {inner}, which {heads} heads cannot share evenly")
    if facts.shared(_WIDTH) != (width := facts.size(_EXPERT_WIDTH)):
        raise UnsupportedError(
            f"metadata: {facts.architecture}.{_WIDTH} is {facts.shared(_WIDTH)}, and experts have {width}"
        )
    size = facts.size("attention.key_length")
    facts.only("attention.value_length", size)
    facts.only("expert_shared_count", 1)
    return read_outline(facts, "layer_norm_epsilon") | {
        **found,
        "mamba_head_dim": inner // heads,
        "head_dim": size,
        "num_key_value_heads": facts.shared(_GROUPS),
        "layers_block_type": _kinds(facts),
    }


def _kinds(facts: Facts) -> list[str]:
    both = list(zip(facts.by_layer(_GROUPS), facts.by_layer(_WIDTH), strict=True))
    if (wrong := next((layer for layer, each in enumerate(both) if all(each)), None)) is not None:
        raise CheckpointError(f"metadata: layer {wrong} has both heads of keys and hidden units; fetch or convert it again")
    return [FULL if groups else EXPERTS if width else LINEAR for groups, width in both]


def _write_blocks(config: DecoderConfig) -> dict[str, Any]:
    dense = [layer for layer, own in enumerate(config.layers) if own.feeds and own.moe is None]
    if dense:
        raise UnsupportedError(
            f"its layer {dense[0]} is an FFN without experts, which llama.cpp does not have beside experts"
        )
    family = config.transformers_config
    return write_sizes(config) | {
        _GROUPS: [config.key_value_heads if own.attends and not own.linear else 0 for own in config.layers],
        _WIDTH: [0 if own.moe is None else own.moe.expert_width for own in config.layers],
        **{key: getattr(family, entry) for entry, key in _SIZES.items()},
        _INNER: family.mamba_num_heads * family.mamba_head_dim,
        "attention.key_length": config.head_dimension,
        "attention.value_length": config.head_dimension,
        "expert_shared_count": 1,
        _LAYER_NORM: config.norm_epsilon,
    }


def mamba_places(config: DecoderConfig, layer: int, has: Callable[[str], bool]) -> Places:
    """Return the places of a layer's tensors of Mamba-2."""
    sizes = config.layers[layer].linear
    if not isinstance(sizes, Mamba2Config):
        return {}
    found: dict[str, tuple[tuple[str, ...], Form | None]] = {
        "in_proj.weight": (("ssm_in.weight",), None),
        "conv1d.weight": (("ssm_conv1d.weight",), AS_IT_IS),
        "conv1d.bias": (("ssm_conv1d.bias",), None),
        "dt_bias": (("ssm_dt.bias",), None),
        "A_log": (("ssm_a",), Form(values=Rate(), row=1)),
        "D": (("ssm_d",), Form(row=1)),
        "norm.weight": (("ssm_norm.weight",), Form(row=sizes.inner // sizes.groups)),
        "out_proj.weight": (("ssm_out.weight",), None),
    }
    return {f"{sizes.module}.{name}": place for name, place in found.items()}


BLOCKS_IN_TURNS = Part(_read_blocks, _write_blocks)
