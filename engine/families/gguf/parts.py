"""Parts of a model's description in a GGUF file that are more than one key for one entry of config.json.

A part is read, which gives entries of config.json, and written, which gives metadata. Keys lack the architecture's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.gguf.divisors import FREQUENCIES, KIND, scaling_of
from engine.families.gguf.metadata import Facts
from engine.families.layer_pattern import DENSE, SPARSE
from engine.files.json_file import shown

EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
_ROTARY_BASE = 10_000.0
"""The base of rotation where a file does not say one."""
_KINDS_OF_LAYERS = ("sliding_attention", "full_attention")


def _nothing(config: DecoderConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Part:
    """One part of a description, in both directions."""

    read: Callable[[Facts], Mapping[str, Any]]
    """Returns entries of config.json. Raises CheckpointError and UnsupportedError naming the key."""
    write: Callable[[DecoderConfig], Mapping[str, Any]] = _nothing
    """Returns metadata; None for a key that a file must not have. Raises UnsupportedError for what no key can say."""


def read_outline(facts: Facts, epsilon: str = "rms_norm_eps") -> dict[str, Any]:
    """Return what every file says, whatever its layers are. epsilon: config key of the ε of norms."""
    if EMBEDDINGS not in facts.shapes:
        raise CheckpointError(f"tensor {EMBEDDINGS} is missing; give the file of a language model")
    vocabulary = facts.shapes[EMBEDDINGS][0]
    facts.only("vocab_size", vocabulary)
    return {
        "vocab_size": vocabulary,
        "hidden_size": facts.size("embedding_length"),
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.size("attention.head_count"),
        "max_position_embeddings": facts.size("context_length"),
        epsilon: facts.value("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in facts.shapes,
        **{f"{name}_token_id": _token(facts, name) for name in ("bos", "eos", "pad")},
    }


def _read_sizes(facts: Facts) -> dict[str, Any]:
    return read_outline(facts) | {
        "intermediate_size": facts.size("feed_forward_length", 0) or facts.size("expert_feed_forward_length"),
        "num_key_value_heads": facts.size("attention.head_count_kv", facts.size("attention.head_count")),
    }


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """Return what `read_outline` reads, and what `SIZES` does."""
    return {
        "vocab_size": config.vocabulary_size,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config.transformers_config, "intermediate_size", None),
        "block_count": len(config.layers),
        "nextn_predict_layers": None,  # such layers are not read, so they are not written
        "attention.head_count": config.attention_heads,
        "attention.head_count_kv": config.key_value_heads,
        "context_length": config.max_positions,
        "attention.layer_norm_rms_epsilon": config.norm_epsilon,
    }


def _token(facts: Facts, name: str) -> Any:
    return facts.metadata.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")


def _read_rotation(facts: Facts) -> dict[str, Any]:
    """Return the rotation, of all of a head's dimensions."""
    facts.only("rope.dimension_count", _head_dimension(facts))
    return {"rope_parameters": _read_parameters(facts)}


def _read_partial_rotation(facts: Facts) -> dict[str, Any]:
    share = rotated_dimensions(facts) / max(_head_dimension(facts), 1)
    return {"rope_parameters": _read_parameters(facts) | {"partial_rotary_factor": share}}


def rotated_dimensions(facts: Facts) -> int:
    """Return the number of a head's dimensions that are rotated."""
    return facts.size("rope.dimension_count", _head_dimension(facts))


def _write_rotation(config: DecoderConfig) -> dict[str, Any]:
    return {"rope.dimension_count": config.rotary_dimension} | _write_parameters(config)


def _read_parameters(facts: Facts) -> dict[str, Any]:
    """Return `rope_parameters`. Raises UnsupportedError for scalings whose numbers are not in the metadata."""
    kind = facts.value("rope.scaling.type", "none")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.value("rope.freq_base", _ROTARY_BASE)}
    if kind not in _SCALINGS:
        what = f"rope.scaling.type {shown(kind)}"
        raise UnsupportedError(f"its rotation is scaled by {what}, which is not read; take the model's safetensors")
    if kind == "none":
        facts.only("rope.scaling.factor", 0, 1)
        return _read_divisors(facts, parameters["rope_theta"]) if FREQUENCIES in facts.shapes else parameters
    if FREQUENCIES in facts.shapes:
        raise UnsupportedError(f"its rotation is scaled by {shown(kind)} and {FREQUENCIES}; take the model's safetensors")
    parameters |= {"rope_type": kind, "factor": facts.value("rope.scaling.factor")}
    return parameters if kind == "linear" else parameters | _read_yarn(facts)


def _read_divisors(facts: Facts, base: float) -> dict[str, Any]:
    """Return `rope_parameters` from the tensor of divisors. Raises the errors of `scaling_of`."""
    pairs = rotated_dimensions(facts) // 2
    if facts.shapes[FREQUENCIES] != (pairs,):
        raise CheckpointError(f"tensor {FREQUENCIES} does not have one number for each of {pairs} pairs of dimensions")
    return scaling_of(facts.numbers(FREQUENCIES), base)


def _write_parameters(config: DecoderConfig) -> dict[str, Any]:
    parameters = config.transformers_config.rope_parameters
    kind, base = parameters.get("rope_type", "default"), {"rope.freq_base": parameters["rope_theta"]}
    if kind in ("default", KIND):  # the latter is said by a tensor
        return base
    if kind not in _SCALINGS:
        raise UnsupportedError(f"its rotation is scaled by {shown(kind)}, which is not written as GGUF")
    scaled = base | {"rope.scaling.type": kind, "rope.scaling.factor": parameters["factor"]}
    return scaled if kind == "linear" else scaled | _write_yarn(parameters)


_SCALINGS = ("none", "linear", "yarn")
_YARN_KEYS = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1}
_MAGNITUDE = "rope.scaling.yarn_log_multiplier"
"""A tenth of both magnitude scales."""


def _read_yarn(facts: Facts) -> dict[str, Any]:
    """Return the parameters of YaRN (arXiv 2309.00071). The two magnitude scales of a family are always equal."""
    found = {name: facts.value(key, _YARN_DEFAULTS.get(name)) for name, key in _YARN_KEYS.items()}
    if found["original_max_position_embeddings"] is None:
        facts.value(_YARN_KEYS["original_max_position_embeddings"])  # says that it is missing
    if found["attention_factor"] is None:
        del found["attention_factor"]
    facts.only("rope.scaling.yarn_ext_factor", 1, -1)
    if facts.has(_MAGNITUDE):
        scale = round(10 * float(facts.value(_MAGNITUDE)), 6)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _write_yarn(parameters: Mapping[str, Any]) -> dict[str, Any]:
    scales = [parameters.get(name) for name in ("mscale", "mscale_all_dim")]
    if scales[0] != scales[1]:
        raise UnsupportedError(f"its rotation has the magnitude scales {scales[0]} and {scales[1]}, and GGUF files have one")
    magnitude = {} if scales[0] is None else {_MAGNITUDE: scales[0] / 10}
    return {key: parameters.get(name, _YARN_DEFAULTS.get(name)) for name, key in _YARN_KEYS.items()} | magnitude


def _head_dimension(facts: Facts) -> int:
    size = facts.size("embedding_length") // max(1, facts.size("attention.head_count"))
    return facts.size("attention.key_length", facts.size("rope.dimension_count", size))


def _read_heads(facts: Facts) -> dict[str, Any]:
    """Return the size of a head, which keys and values share."""
    facts.only("attention.value_length", _head_dimension(facts))
    return {"head_dim": _head_dimension(facts)}


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    return {"attention.key_length": config.head_dimension, "attention.value_length": config.head_dimension}


def _read_undivided_heads(facts: Facts) -> dict[str, Any]:
    """Return nothing, after a check that heads divide the hidden size, which config.json implies."""
    size = facts.size("embedding_length") // max(1, facts.size("attention.head_count"))
    facts.only("attention.key_length", size)
    facts.only("attention.value_length", size)
    return {}


def _write_ungrouped_heads(config: DecoderConfig) -> dict[str, Any]:
    """Return nothing, after a check: llama.cpp normalizes keys of the hidden size only."""
    if config.key_value_heads != config.attention_heads:
        raise UnsupportedError("its query heads share key heads, which llama.cpp does not have in this family")
    return {}


def _read_attention_biases(facts: Facts) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in facts.shapes}


def _read_latent(facts: Facts) -> dict[str, Any]:
    """Return the sizes of latent attention. Earlier files lack the keys `…_mla` and store unabsorbed heads."""
    rotated, absorbed = facts.size("rope.dimension_count"), facts.has("attention.key_length_mla")
    facts.value("attention.key_length", None), facts.value("attention.value_length", None)
    key, value = (f"attention.{part}_length{'_mla' if absorbed else ''}" for part in ("key", "value"))
    return {
        "q_lora_rank": facts.value("attention.q_lora_rank", None),
        "kv_lora_rank": facts.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": facts.size(key) - rotated,
        "v_head_dim": facts.size(value),
        "num_key_value_heads": facts.size("attention.head_count"),
        "rope_parameters": _read_parameters(facts),
        "attention_bias": "blk.0.attn_q_a.bias" in facts.shapes,
    }


def _write_latent(config: DecoderConfig) -> dict[str, Any]:
    """Return the sizes in the absorbed form, in which all heads share one latent key and value."""
    latent = config.latent
    assert latent is not None
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": latent.query_rank or None,
        "attention.kv_lora_rank": latent.key_value_rank,
        "attention.key_length": latent.key_value_rank + latent.rotary_dimension,
        "attention.value_length": latent.key_value_rank,
        "attention.key_length_mla": latent.plain_dimension + latent.rotary_dimension,
        "attention.value_length_mla": latent.value_dimension,
        "rope.dimension_count": latent.rotary_dimension,
    } | _write_parameters(config)


def _read_limited_groups(facts: Facts) -> dict[str, Any]:
    """Return how a token's experts are limited to groups, for a family whose config.json names the method."""
    groups = facts.size("expert_group_count", 1)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return {"n_group": groups, "topk_group": facts.size("expert_group_used_count", 1), "topk_method": method}


def _write_limited_groups(config: DecoderConfig) -> dict[str, Any]:
    """Return a single group: llama.cpp scores a group by its two best experts, and this family by the best one."""
    if any(layer.moe is not None and layer.moe.groups for layer in config.layers):
        raise UnsupportedError("its router scores groups of experts by the best one of each, which llama.cpp does not have")
    return {"expert_group_count": 1, "expert_group_used_count": 1}


def _read_unscaled(facts: Facts) -> dict[str, Any]:
    facts.only("expert_weights_scale", 1)
    return {}


def _write_unscaled(config: DecoderConfig) -> dict[str, Any]:
    return {"expert_weights_scale": 1.0}


def _read_shared_width(facts: Facts) -> dict[str, Any]:
    """Return nothing: other keys say the width too, and this one is not always right."""
    facts.value("expert_shared_feed_forward_length", None)
    return {}


def _write_shared_width(config: DecoderConfig) -> dict[str, Any]:
    widths = [layer.moe.shared_width for layer in config.layers if layer.moe is not None]
    return {"expert_shared_feed_forward_length": max(widths, default=0)}


def _read_query_key_norm(facts: Facts) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in facts.shapes}


def _read_windows_in_turns(facts: Facts) -> dict[str, Any]:
    layers = [_KINDS_OF_LAYERS[layer % 2] for layer in facts.listed]
    return {"layer_types": layers, "rope_parameters": _read_parameters(facts) | {"truncate": False}}


def _read_chunks(facts: Facts) -> dict[str, Any]:
    """Return what llama.cpp's code has for Llama 4. Published models with 128 experts do not normalize queries and keys."""
    return {
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attention_bias": False,
        "use_qk_norm": facts.size("expert_count") != 128,
        "intermediate_size_mlp": facts.size("feed_forward_length"),
    }


def _write_chunks(config: DecoderConfig) -> dict[str, Any]:
    return {"feed_forward_length": config.transformers_config.intermediate_size_mlp}


def _read_first_dense(facts: Facts) -> dict[str, Any]:
    """Return the kind of each layer's feed-forward block, for a family whose config.json lists them."""
    layers = len(facts.listed)
    dense = min(facts.size("leading_dense_block_count", 0), layers)
    return {"mlp_layer_types": [DENSE] * dense + [SPARSE] * (layers - dense)}


def _write_first_dense(config: DecoderConfig) -> dict[str, Any]:
    return {"leading_dense_block_count": min(config.moe_layers, default=len(config.layers))}


SIZES = Part(_read_sizes, write_sizes)
ROTATION = Part(_read_rotation, _write_rotation)
PARTIAL_ROTATION = Part(_read_partial_rotation, _write_rotation)
HEADS = Part(_read_heads, _write_heads)
UNDIVIDED_HEADS = Part(_read_undivided_heads)
UNGROUPED_HEADS = Part(_read_undivided_heads, _write_ungrouped_heads)
ATTENTION_BIASES = Part(_read_attention_biases)
LATENT = Part(_read_latent, _write_latent)
LIMITED_GROUPS = Part(_read_limited_groups, _write_limited_groups)
UNSCALED = Part(_read_unscaled, _write_unscaled)
SHARED_WIDTH = Part(_read_shared_width, _write_shared_width)
QUERY_KEY_NORM = Part(_read_query_key_norm)
WINDOWS_IN_TURNS = Part(_read_windows_in_turns)
CHUNKS = Part(_read_chunks, _write_chunks)
FIRST_DENSE = Part(_read_first_dense, _write_first_dense)
