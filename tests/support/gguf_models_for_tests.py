"""Tiny models as GGUF files: what llama.cpp's conversion does to their names, tensors and hyperparameters, said again.

The names and permutations are those of its scripts (conversion/*.py), not those that the engine reads by.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf_for_tests import write_gguf
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint

LAYER = r"model\.layers\.(\d+)\."
NAMES: tuple[tuple[str, str], ...] = (
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (LAYER + r"input_layernorm\.", r"blk.\1.attn_norm."),
    (LAYER + r"post_attention_layernorm\.", r"blk.\1.ffn_norm."),
    (LAYER + r"self_attn\.([qkv])_proj\.", r"blk.\1.attn_\2."),
    (LAYER + r"self_attn\.o_proj\.", r"blk.\1.attn_output."),
    (LAYER + r"self_attn\.([qk])_norm\.", r"blk.\1.attn_\2_norm."),
    (LAYER + r"self_attn\.([qk])_([ab])_proj\.", r"blk.\1.attn_\2_\3."),
    (LAYER + r"self_attn\.kv_a_proj_with_mqa\.", r"blk.\1.attn_kv_a_mqa."),
    (LAYER + r"self_attn\.(q|kv)_a_layernorm\.", r"blk.\1.attn_\2_a_norm."),
    (LAYER + r"self_attn\.kv_b_proj\.", r"blk.\1.attn_kv_b."),
    (LAYER + r"self_attn\.sinks$", r"blk.\1.attn_sinks.weight"),
    (LAYER + r"\w+\.(?:gate|router|router\.layer)\.(weight|bias)$", r"blk.\1.ffn_gate_inp.\2"),
    (LAYER + r"\w+\.(?:\w+\.)?e_score_correction_bias$", r"blk.\1.exp_probs_b.bias"),
    (LAYER + r"mlp\.shared_expert_gate\.", r"blk.\1.ffn_gate_inp_shexp."),
    (LAYER + r"\w+\.shared_experts?\.(gate|up|down)_proj\.", r"blk.\1.ffn_\2_shexp."),
    (LAYER + r"mlp\.(gate|up|down)_proj\.", r"blk.\1.ffn_\2."),
)
EXPERT = re.compile(LAYER + r"\w+\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.(weight|bias)")
PROJECTIONS = {"w1": "gate", "w3": "up", "w2": "down"}
ARCHITECTURES = {
    "mixtral": "llama",
    "llama": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "gpt_oss": "gpt-oss",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "granite": "granite",
    "ernie4_5": "ernie4_5",
}
PAIRED = ("mixtral", "llama", "granite", "granitemoe", "granitemoeshared", "deepseek")
"""Families whose queries and keys are permuted."""
POST_NORM = ("gpt_oss", "glm4_moe")


def gguf_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return a model's tensors as llama.cpp's conversion names, permutes and stacks them."""
    config = checkpoint.config
    family, found, stacks = config.architecture.model_type, dict[str, Tensor](), dict[str, list[Tensor]]()
    for name in checkpoint.shapes:
        tensor = checkpoint.tensor(name)
        if (expert := EXPERT.fullmatch(name)) is not None:
            projection = PROJECTIONS.get(expert[3]) or expert[3].removesuffix("_proj")
            stacks.setdefault(f"blk.{expert[1]}.ffn_{projection}_exps.{expert[4]}", []).append(tensor)
            continue
        own = next(re.sub(pattern, stored, name) for pattern, stored in NAMES if re.match(pattern, name))
        if family in POST_NORM:
            own = own.replace(".ffn_norm.", ".post_attention_norm.")
        if family in PAIRED and (part := re.search(r"attn_([qk])\.", own)) is not None:
            tensor = permuted(tensor, config.attention_heads if part[1] == "q" else config.key_value_heads)
        found[own] = tensor.flatten() if tensor.dim() == 2 and len(tensor) == 1 else tensor
    found |= {name: torch.stack(tensors) for name, tensors in stacks.items()}
    return split_latent(found, checkpoint)


def permuted(weights: Tensor, heads: int) -> Tensor:
    """Return rows in pairs of what rotates together, where a head has halves."""
    return weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def split_latent(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors with the matrix of keys and values split, and its keys transposed."""
    latent, found = checkpoint.config.latent, dict(tensors)
    for name in [name for name in tensors if ".attn_kv_b." in name]:
        assert latent is not None
        both = found.pop(name).view(checkpoint.config.attention_heads, -1, latent.key_value_rank)
        keys, values = both.split([latent.plain_dimension, latent.value_dimension], dim=1)
        found[name.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
        found[name.replace("kv_b", "v_b")] = values.contiguous()
    return found


def gguf_metadata(checkpoint: Checkpoint, **changes: Any) -> dict[str, Any]:
    """Return a model's hyperparameters as llama.cpp's conversion writes them. A change of None removes a key."""
    config, family = checkpoint.config.transformers_config, checkpoint.config.architecture.model_type
    theta = config.rope_parameters["rope_theta"]
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(theta),
        "attention.layer_norm_rms_epsilon": checkpoint.config.norm_epsilon,
        "vocab_size": config.vocab_size,
    }
    if checkpoint.config.latent is None:
        size = checkpoint.config.head_dimension
        found |= {"attention.key_length": size, "attention.value_length": size}
        found |= {"rope.dimension_count": checkpoint.config.rotary_dimension}
    if checkpoint.config.moe_layers:
        found |= {
            "expert_count": checkpoint.config.experts_by_layer[checkpoint.config.moe_layers[0]],
            "expert_used_count": checkpoint.config.experts_per_token,
        }
    found |= SAID.get(family, lambda config: {})(config) | changes
    own = {f"{ARCHITECTURES[family]}.{key}": value for key, value in found.items() if value is not None}
    tokens = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("bos", 1), ("eos", 2), ("padding", 0))}
    return {"general.architecture": ARCHITECTURES[family]} | own | tokens


def _said_fine_grained(config: Any) -> dict[str, Any]:
    return {
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
    }


def _said_latent(config: Any) -> dict[str, Any]:
    rotated = config.qk_rope_head_dim
    return _said_fine_grained(config) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + rotated,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _said_v3(config: Any) -> dict[str, Any]:
    return _said_latent(config) | {"expert_weights_norm": True, "expert_gating_func": 2}


def _said_glm(config: Any) -> dict[str, Any]:
    return _said_fine_grained(config) | {
        "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _said_gpt_oss(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
    }


def _said_granite(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _said_qwen2_moe(config: Any) -> dict[str, Any]:
    shared = config.shared_expert_intermediate_size
    return _said_width(config) | {"expert_shared_feed_forward_length": shared}


def _said_width(config: Any) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.moe_intermediate_size}


SAID: dict[str, Callable[[Any], dict[str, Any]]] = {
    "qwen2_moe": _said_qwen2_moe,
    "qwen3_moe": _said_width,
    "granite": _said_granite,
    "granitemoe": _said_granite,
    "granitemoeshared": lambda config: (
        _said_granite(config) | {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    ),
    "gpt_oss": _said_gpt_oss,
    "deepseek": lambda config: _said_fine_grained(config) | {"rope.scaling.type": "none", "expert_weights_scale": 1.0},
    "deepseek_v2": _said_latent,
    "deepseek_v3": _said_v3,
    "glm4_moe": _said_glm,
    "ernie4_5_moe": lambda config: {
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
    },
    "minimax_m2": lambda config: {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2},
}
"""Keys that the conversion of a family writes beside those that all of them have."""


def save_gguf(checkpoint: Checkpoint, path: Path, **changes: Any) -> Path:
    """Write a checkpoint as a GGUF file."""
    return write_gguf(path, gguf_metadata(checkpoint, **changes), gguf_tensors(checkpoint))
