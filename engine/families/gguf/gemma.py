"""Gemma 4 mixtures in GGUF files: heads and rotations that differ between kinds of layers, and the places of their tensors.

A tensor of factors, by which the frequencies of full attention are divided, says how many dimensions are rotated there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.attention import FULL, SLIDING
from engine.families.config import DecoderConfig
from engine.families.gguf.divisors import FREQUENCIES
from engine.families.gguf.forms import Places
from engine.families.gguf.metadata import Facts
from engine.families.gguf.parts import Part, read_outline, write_sizes
from engine.families.layer_config import LayerHeads
from engine.families.tensor_names import input_scale_tensor, shared_tensor, weight_scale_tensor
from engine.files.json_file import shown

_GROUPS, _SLIDES, _WINDOW = "attention.head_count_kv", "attention.sliding_window_pattern", "attention.sliding_window"
_SIZE, _BASE, _LOCAL = "attention.key_length", "rope.freq_base", "_swa"
_SAME_AS_SIZE = ("attention.value_length", "rope.dimension_count")
_ABSENT = ("attention.shared_kv_layers", "embedding_length_per_layer_input")
"""Keys of numbers that are 0 in the mixtures of this family."""
_TURNED, _STILL = 1.0, 1e30
"""Divisors of the frequencies of dimensions that are rotated, and of others."""
_NORMS = {
    "attention_output_norm": "post_attention_norm",
    "shared_input_norm": "ffn_norm",
    "shared_output_norm": "post_ffw_norm_1",
    "routed_output_norm": "post_ffw_norm_2",
    "feed_forward_output_norm": "post_ffw_norm",
}
_PROJECTIONS = ("gate", "up", "down")


def _read_layers(facts: Facts) -> dict[str, Any]:
    if not facts.size("expert_count", 0):
        raise UnsupportedError("it is a Gemma 4 without experts, which is not read; take the model's safetensors")
    for key in _ABSENT:
        facts.only(key, 0)
    kinds = [SLIDING if slides else FULL for slides in facts.flags(_SLIDES)]
    groups = dict(zip(kinds, facts.by_layer(_GROUPS), strict=True))
    if groups != (last := dict(zip(kinds[::-1], facts.by_layer(_GROUPS)[::-1], strict=True))):
        raise UnsupportedError(f"metadata: {_GROUPS} is {groups} and {last} in layers of one kind, which is not read")
    size, local = _head_size(facts, ""), _head_size(facts, _LOCAL)
    whole = groups.get(FULL)
    return read_outline(facts) | {
        "intermediate_size": facts.size("feed_forward_length"),
        "num_key_value_heads": groups.get(SLIDING, whole),
        "num_global_key_value_heads": whole,
        "head_dim": local,
        "global_head_dim": size,
        "attention_k_eq_v": any(kind == FULL and not _has_values(facts, layer) for layer, kind in enumerate(kinds)),
        "layer_types": kinds,
        "sliding_window": facts.size(_WINDOW),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": facts.value(_BASE + _LOCAL)},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": _share(facts, size),
                "rope_theta": facts.value(_BASE),
            },
        },
    }


def _head_size(facts: Facts, suffix: str) -> int:
    size = facts.size(_SIZE + suffix)
    for key in _SAME_AS_SIZE:
        facts.only(key + suffix, size)
    return size


def _has_values(facts: Facts, layer: int) -> bool:
    return f"blk.{layer}.attn_v.weight" in facts.shapes


def _share(facts: Facts, size: int) -> float:
    """Return the share of a head's dimensions that full attention rotates."""
    if facts.shapes.get(FREQUENCIES) != (size // 2,):
        raise CheckpointError(f"tensor {FREQUENCIES} is missing, or has not one number for each pair of {size} dimensions")
    factors = facts.numbers(FREQUENCIES)
    turned = len(list(takewhile(lambda factor: factor == _TURNED, factors)))
    if others := [factor for factor in factors[turned:] if not factor >= _STILL / 10]:  # NaN is among them
        raise UnsupportedError(f"tensor {FREQUENCIES} has {shown(others[0])}; numbers but 1 and 1e30 are not read")
    return turned / max(len(factors), 1)


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    heads = _heads(config)
    rope, found = config.transformers_config.rope_parameters, write_sizes(config)
    for kind, suffix in ((FULL, ""), (SLIDING, _LOCAL)):
        own = rope.get(kind, rope[FULL])
        if own.get("factor", 1.0) != 1.0:
            raise UnsupportedError(f"its rotation is scaled by {shown(own.get('rope_type'))}, which is not written as GGUF")
        size = heads.get(kind, heads[FULL]).size
        found |= {f"{key}{suffix}": size for key in (_SIZE, *_SAME_AS_SIZE)} | {f"{_BASE}{suffix}": own["rope_theta"]}
    return found | {
        _GROUPS: [config.heads_of(layer).groups for layer in range(len(config.layers))],
        _SLIDES: [layer.kind == SLIDING for layer in config.layers],
        _WINDOW: config.transformers_config.sliding_window,
        **dict.fromkeys(_ABSENT, 0),
    }


def _heads(config: DecoderConfig) -> dict[str | None, LayerHeads]:
    """Return the sizes of heads by the kind of layer."""
    return {layer.kind: config.heads_of(index) for index, layer in enumerate(config.layers)}


def gemma_constants(config: DecoderConfig) -> Mapping[str, tuple[float, ...]]:
    """Return the numbers of the tensor of factors, by its name."""
    own, size = config.transformers_config.rope_parameters[FULL], _heads(config)[FULL].size
    turned = int(own.get("partial_rotary_factor", 1.0) * size // 2)
    return {FREQUENCIES: (_TURNED,) * turned + (_STILL,) * (size // 2 - turned)}


def gemma_places(config: DecoderConfig, layer: int, has: Callable[[str], bool]) -> Places:
    """Return the places of a layer's norms, scales and shared expert, which files have as the only FFN."""
    row, prefix = config.architecture, f"model.layers.{layer}."
    shared = {shared_tensor(row, layer, part): f"ffn_{name}.weight" for part, name in enumerate(_PROJECTIONS)}
    scales = {
        input_scale_tensor(row, layer): "ffn_gate_inp.scale",
        weight_scale_tensor(row, layer): "ffn_down_exps.scale",
    }
    within = {name.removeprefix(prefix): own for name, own in (shared | scales).items() if name is not None}
    within |= {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _NORMS.items()}
    within["layer_scalar"] = "layer_output_scale.weight"
    return {ours: ((theirs,), None) for ours, theirs in within.items()}


HEADS_BY_KIND = Part(_read_layers, _write_layers)
