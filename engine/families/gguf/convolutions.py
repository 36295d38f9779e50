"""LFM2-MoE in GGUF files: short convolutions in layers without heads of keys, and the places of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.families.attention import CONVOLUTION, FULL
from engine.families.config import DecoderConfig
from engine.families.gguf.forms import AS_IT_IS, Places
from engine.families.gguf.metadata import Facts
from engine.families.gguf.parts import Part, read_outline, write_sizes
from engine.families.layer_config import ShortConvolutionConfig

_GROUPS, _KERNEL = "attention.head_count_kv", "shortconv.l_cache"


def _read_sizes(facts: Facts) -> dict[str, Any]:
    return read_outline(facts, "norm_eps") | {
        "intermediate_size": facts.size("feed_forward_length"),
        "num_key_value_heads": facts.shared(_GROUPS),
        "layer_types": [FULL if groups else CONVOLUTION for groups in facts.by_layer(_GROUPS)],
        "conv_L_cache": facts.size(_KERNEL),
    }


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    return write_sizes(config) | {
        _GROUPS: [0 if layer.linear else config.key_value_heads for layer in config.layers],
        _KERNEL: config.transformers_config.conv_L_cache,
    }


def convolution_places(config: DecoderConfig, layer: int, has: Callable[[str], bool]) -> Places:
    """Return the places of a layer's tensors of a short convolution."""
    sizes = config.layers[layer].linear
    if not isinstance(sizes, ShortConvolutionConfig):
        return {}
    return {
        f"{sizes.module}.in_proj.weight": (("shortconv.in_proj.weight",), None),
        f"{sizes.module}.conv.weight": (("shortconv.conv.weight",), AS_IT_IS),
        f"{sizes.module}.out_proj.weight": (("shortconv.out_proj.weight",), None),
    }


SIZES_WITH_CONVOLUTIONS = Part(_read_sizes, _write_sizes)
