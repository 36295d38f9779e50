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
from gguf_hybrids_for_tests import (
    HYBRID_ARCHITECTURES,
    HYBRID_NAMES,
    HYBRID_SIZES,
    HYBRIDS_SAY,
    WITH_CHANGES,
    hybrid_tensors,
    said_indexers,
)
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
    (LAYER + r"linear_attn\.in_proj_(qkvz?)\.", r"blk.\1.attn_\2."),
    (LAYER + r"linear_attn\.in_proj_z\.", r"blk.\1.attn_gate."),
    (LAYER + r"linear_attn\.in_proj_ba\.", r"blk.\1.ssm_ba."),
    (LAYER + r"linear_attn\.in_proj_b\.", r"blk.\1.ssm_beta."),
    (LAYER + r"linear_attn\.in_proj_a\.", r"blk.\1.ssm_alpha."),
    (LAYER + r"linear_attn\.dt_bias$", r"blk.\1.ssm_dt.bias"),
    (LAYER + r"linear_attn\.A_log$", r"blk.\1.ssm_a"),
    (LAYER + r"linear_attn\.(conv1d|norm)\.", r"blk.\1.ssm_\2."),
    (LAYER + r"linear_attn\.out_proj\.", r"blk.\1.ssm_out."),
    (LAYER + r"mlp\.shared_expert_gate\.", r"blk.\1.ffn_gate_inp_shexp."),
    (LAYER + r"\w+\.shared_experts?\.(gate|up|down)_proj\.", r"blk.\1.ffn_\2_shexp."),
    (LAYER + r"mlp\.(gate|up|down)_proj\.", r"blk.\1.ffn_\2."),
)
EXPERT = re.compile(LAYER + r"(?:\w+\.)?experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.(weight|bias)")
PROJECTIONS = {"w1": "gate", "w3": "up", "w2": "down"}
ARCHITECTURES = {
    "mixtral": "llama",
    "llama": "llama",
    "mistral": "llama",
    "llama4_text": "llama4",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "gpt_oss": "gpt-oss",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "granite": "granite",
    "ernie4_5": "ernie4_5",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "glm4_moe_lite": "deepseek2",
    **HYBRID_ARCHITECTURES,
}
PAIRED = ("mixtral", "llama", "mistral", "granite", "granitemoe", "granitemoeshared", "deepseek")
"""Families whose queries and keys are permuted."""
TOLD_BY = {"glm4_moe_lite": {"moe_compress.model_type": "glm4_moe_lite"}}
"""Further metadata that tell a family from others of its architecture."""
POST_NORM = ("gpt_oss", "glm4_moe", "qwen3_next", "qwen3_5_moe_text")
DELTA_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"linear_value_head_dim": 8, "mlp_only_layers": []},
    "qwen3_5_moe_text": {"linear_value_head_dim": 8},
}
"""Sizes that llama.cpp has, of families with the gated delta rule."""
FURTHER_SIZES = DELTA_SIZES | HYBRID_SIZES | {"mistral": {"sliding_window": None}}
FURTHER_SIZES |= {"llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4}}
QUICK = tuple(family for family in ARCHITECTURES if family not in ("kimi_k2", "mistral", "deepseek_v32"))
"""Families that every run tests. The layers of the others are among those of these."""
READ_AS = {"kimi_k2": "deepseek_v3", "mistral": "llama"}
"""Families whose files are read as those of another one, which computes the same."""
CHANGED_VALUES = {**dict.fromkeys(DELTA_SIZES, ("norm.weight", "A_log")), "nemotron_h": ("A_log",)}
"""Ends of names of tensors whose values conversion changes, by family."""


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
        names = (*HYBRID_NAMES.get(family, ()), *NAMES)
        own = next(re.sub(pattern, stored, name) for pattern, stored in names if re.match(pattern, name))
        if family in POST_NORM:
            own = own.replace(".ffn_norm.", ".post_attention_norm.")
        if family in PAIRED and (part := re.search(r"attn_([qk])\.", own)) is not None:
            tensor = permuted(tensor, config.attention_heads if part[1] == "q" else config.key_value_heads)
        found[own] = tensor.flatten() if tensor.dim() == 2 and len(tensor) == 1 else tensor
    found |= {name: torch.stack(tensors) for name, tensors in stacks.items()}
    if family in WITH_CHANGES:
        return hybrid_tensors(found, checkpoint)
    return converted_delta(found, checkpoint) if family in DELTA_SIZES else split_latent(found, checkpoint)


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


def converted_delta(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors with the changes of Qwen3NextModel and Qwen3_5MoeTextModel (conversion/qwen.py)."""
    config, found = checkpoint.config.transformers_config, dict[str, Tensor]()
    keys, key, value = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    shared, before = config.linear_num_value_heads // keys, 2 * keys * key

    def tiled(tensor: Tensor, size: int) -> Tensor:
        return tensor.reshape(keys, shared, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        **dict.fromkeys(
            ("attn_qkv.weight", "ssm_conv1d.weight"), lambda x: torch.cat([x[:before], tiled(x[before:], value)])
        ),
        **dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a"), lambda x: tiled(x, 1)),
        "attn_gate.weight": lambda x: tiled(x, value),
        "ssm_out.weight": lambda x: tiled(x.T, value).T.contiguous(),
    }
    for name, tensor in tensors.items():
        part = name.split(".", 2)[-1]
        if part == "attn_qkvz.weight":
            *mixed, gate = tensor.view(keys, -1, tensor.shape[1]).split([key, key, shared * value, shared * value], dim=1)
            found[name.replace("qkvz", "qkv")] = torch.cat([each.flatten(0, 1) for each in mixed])
            found[name.replace("qkvz", "gate")] = gate.flatten(0, 1)
            continue
        tensor = tensor.squeeze(1) if part == "ssm_conv1d.weight" else tensor
        if checkpoint.config.architecture.model_type == "qwen3_5_moe_text" and part in changes:
            tensor = changes[part](tensor)
        if name.endswith("norm.weight") and part != "ssm_norm.weight":
            tensor = tensor.float() + 1
        found[name] = -torch.exp(tensor.float()) if part == "ssm_a" else tensor
    return found


def gguf_metadata(checkpoint: Checkpoint, **changes: Any) -> dict[str, Any]:
    """Return a model's hyperparameters as llama.cpp's conversion writes them. A change of None removes a key."""
    config, family = checkpoint.config.transformers_config, checkpoint.config.architecture.model_type
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 0)
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": checkpoint.config.key_value_heads,
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
    tokens: dict[str, Any] = {
        f"tokenizer.ggml.{name}_token_id": number for name, number in (("bos", 1), ("eos", 2), ("padding", 0))
    }
    return {"general.architecture": ARCHITECTURES[family]} | own | tokens | TOLD_BY.get(family, {})


def _said_fine_grained(config: Any) -> dict[str, Any]:
    return {
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 0),
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


def _said_delta(config: Any) -> dict[str, Any]:
    return _said_qwen2_moe(config) | {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
    }


def _said_width(config: Any) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.moe_intermediate_size}


SAID: dict[str, Callable[[Any], dict[str, Any]]] = {
    **HYBRIDS_SAY,
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
    "kimi_k2": _said_v3,
    "glm4_moe": _said_glm,
    "glm4_moe_lite": lambda config: _said_v3(config) | {"leading_dense_block_count": config.mlp_layer_types.index("sparse")},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), lambda config: _said_v3(config) | said_indexers(config)),
    "qwen3_next": _said_delta,
    "qwen3_5_moe_text": lambda config: (
        _said_delta(config) | {"rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0]}
    ),
    "ernie4_5_moe": lambda config: {
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
    },
    "llama4_text": lambda config: {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    },
    "minimax_m2": lambda config: {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2},
}
"""Keys that the conversion of a family writes beside those that all of them have."""


def save_gguf(checkpoint: Checkpoint, path: Path, **changes: Any) -> Path:
    """Write a checkpoint as a GGUF file."""
    return write_gguf(path, gguf_metadata(checkpoint, **changes), gguf_tensors(checkpoint))
