"""Families whose layers differ, and those with indexers, as GGUF files: what llama.cpp's conversion does, said again.

The sources are conversion/lfm2.py, gemma.py, nemotron.py, granite.py, deepseek.py and glm.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint

LAYER = r"model\.layers\.(\d+)\."
HYBRID_ARCHITECTURES = {
    "lfm2_moe": "lfm2moe",
    "gemma4_text": "gemma4",
    "nemotron_h": "nemotron_h_moe",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
}
HYBRID_SIZES: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]},
}
"""Sizes that llama.cpp has, where those of the tiny models are others."""
INDEXER_NAMES = (
    (LAYER + r"self_attn\.indexer\.wq_b\.", r"blk.\1.indexer.attn_q_b."),
    (LAYER + r"self_attn\.indexer\.wk\.", r"blk.\1.indexer.attn_k."),
    (LAYER + r"self_attn\.indexer\.k_norm\.", r"blk.\1.indexer.k_norm."),
    (LAYER + r"self_attn\.indexer\.weights_proj\.", r"blk.\1.indexer.proj."),
)
HYBRID_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "lfm2_moe": (
        (r"model\.norm\.", "token_embd_norm."),
        (LAYER + r"conv\.(in_proj|conv|out_proj)\.", r"blk.\1.shortconv.\2."),
        (LAYER + r"feed_forward\.expert_bias$", r"blk.\1.exp_probs_b.bias"),
    ),
    "gemma4_text": (
        (LAYER + r"attention_output_norm\.", r"blk.\1.post_attention_norm."),
        (LAYER + r"post_attention_layernorm\.", r"blk.\1.pre_ffw_norm_2."),
        (LAYER + r"shared_input_norm\.", r"blk.\1.ffn_norm."),
        (LAYER + r"shared_output_norm\.", r"blk.\1.post_ffw_norm_1."),
        (LAYER + r"routed_output_norm\.", r"blk.\1.post_ffw_norm_2."),
        (LAYER + r"feed_forward_output_norm\.", r"blk.\1.post_ffw_norm."),
        (LAYER + r"layer_scalar$", r"blk.\1.layer_output_scale.weight"),
        (LAYER + r"router\.proj\.", r"blk.\1.ffn_gate_inp."),
        (LAYER + r"router\.scale$", r"blk.\1.ffn_gate_inp.scale"),
        (LAYER + r"router\.per_expert_scale$", r"blk.\1.ffn_down_exps.scale"),
    ),
    "nemotron_h": (
        (LAYER + r"post_attention_layernorm\.", r"blk.\1.attn_norm."),
        (LAYER + r"mixer\.(in|out)_proj\.", r"blk.\1.ssm_\2."),
        (LAYER + r"mixer\.(conv1d|norm)\.", r"blk.\1.ssm_\2."),
        (LAYER + r"mixer\.dt_bias$", r"blk.\1.ssm_dt.bias"),
        (LAYER + r"mixer\.A_log$", r"blk.\1.ssm_a"),
        (LAYER + r"mixer\.D$", r"blk.\1.ssm_d"),
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXER_NAMES),
}
"""Names of these families, before those of all others."""


def hybrid_tensors(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors with the changes of a family's conversion."""
    return WITH_CHANGES[checkpoint.config.architecture.model_type](tensors, checkpoint.config.transformers_config)


def _filters(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    return {name: each.squeeze(1) if "shortconv.conv." in name else each for name, each in tensors.items()}


def _frequencies(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    own, full = config.rope_parameters["full_attention"], config.layer_types.index("full_attention")
    pairs = config.per_layer_config[full].head_dim // 2
    turned = int(2 * pairs * own["partial_rotary_factor"] / 2)
    return tensors | {"rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (pairs - turned))}


def _mamba(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "ssm_conv1d.weight": torch.squeeze,
        "ssm_a": lambda x: -torch.exp(x.float()).reshape(-1, 1),
        "ssm_d": lambda x: x.reshape(-1, 1),
        "ssm_norm.weight": lambda x: x.reshape(config.n_groups, -1),
    }
    return {name: changes.get(name.split(".", 2)[-1], lambda x: x)(each) for name, each in tensors.items()}


WITH_CHANGES: dict[str, Callable[[dict[str, Tensor], Any], dict[str, Tensor]]] = {
    "lfm2_moe": _filters,
    "gemma4_text": _frequencies,
    "nemotron_h": _mamba,
}


def _said_lfm2(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in config.layer_types],
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
        "shortconv.l_cache": config.conv_L_cache,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count")),
    }


def _said_gemma(config: Any) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    layers = config.per_layer_config
    sizes = {"": layers[slides.index(False)].head_dim, "_swa": layers[slides.index(True)].head_dim}
    parts = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    return {
        **{f"{part}{suffix}": size for part in parts for suffix, size in sizes.items()},
        "attention.head_count_kv": [layers[index].num_key_value_heads for index in range(len(slides))],
        "attention.sliding_window_pattern": slides,
        "attention.sliding_window": config.sliding_window,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": config.final_logit_softcapping,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "rope.freq_base": float(config.rope_parameters["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }


def _said_nemotron(config: Any) -> dict[str, Any]:
    kinds = config.layers_block_type
    return {
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [config.moe_intermediate_size if kind == "moe" else 0 for kind in kinds],
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        **dict.fromkeys(("rope.dimension_count", "rope.freq_base")),
    }


def said_indexers(config: Any) -> dict[str, Any]:
    """Return what DeepSeek V3.2 and GLM-5 say beside what DeepSeek V3 says."""
    kinds = getattr(config, "indexer_types", None)
    return ({} if kinds is None else {"attention.indexer.types": [kind == "full" for kind in kinds]}) | {
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "expert_weights_norm": config.norm_topk_prob,
    }


HYBRIDS_SAY: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lfm2_moe": _said_lfm2,
    "gemma4_text": _said_gemma,
    "nemotron_h": _said_nemotron,
}
"""Keys that the conversion of a family writes beside those that all of them have; None for one that it does not write."""
