"""The families as GGUF files describe them, one row each.

The names are those of llama.cpp (github.com/ggml-org/llama.cpp, conversion/ and gguf-py/gguf/constants.py). A row states
which metadata key has which entry of config.json, and what such files never say.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import CheckpointError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.gguf.convolutions import SIZES_WITH_CONVOLUTIONS, convolution_places
from engine.families.gguf.delta import DELTA, SECTIONS, delta_places
from engine.families.gguf.divisors import divisors_of
from engine.families.gguf.family import SIGMOID, GgufFamily
from engine.families.gguf.gemma import HEADS_BY_KIND, gemma_constants, gemma_places
from engine.families.gguf.indexer import INDEXERS, SOME_INDEXERS, indexer_places
from engine.families.gguf.mamba import BLOCKS_IN_TURNS, mamba_places
from engine.families.gguf.metadata import Facts
from engine.families.gguf.parts import (
    ATTENTION_BIASES,
    CHUNKS,
    FIRST_DENSE,
    HEADS,
    LATENT,
    LIMITED_GROUPS,
    PARTIAL_ROTATION,
    QUERY_KEY_NORM,
    ROTATION,
    SHARED_WIDTH,
    UNDIVIDED_HEADS,
    UNGROUPED_HEADS,
    UNSCALED,
    WINDOWS_IN_TURNS,
)
from engine.files.json_file import shown


def _shared_width(facts: Facts) -> bool:
    return facts.size("expert_shared_feed_forward_length", 0) > 0


def _has_experts(facts: Facts) -> bool:
    return facts.size("expert_count", 0) > 0


def _has_choice_bias(facts: Facts) -> bool:
    return any(name.endswith(".exp_probs_b.bias") for name in facts.shapes)


def _is_glm_lite(facts: Facts) -> bool:
    """Return whether a file with the layers of DeepSeek V3 is a GLM-4.7-Flash: it has a tokenizer of GLM, or says so."""
    return facts.metadata.get(_MODEL_TYPE) == _GLM_LITE or facts.metadata.get("tokenizer.ggml.pre") == "glm4"


_MODEL_TYPE, _GLM_LITE = "moe_compress.model_type", "glm4_moe_lite"
_TOP_K = {"num_experts_per_tok": "expert_used_count"}
_MIXTURE = {"num_local_experts": "expert_count", **_TOP_K}
_FINE_WIDTH = {"moe_intermediate_size": "expert_feed_forward_length"}
_FINE_GRAINED = {"n_routed_experts": "expert_count", **_TOP_K, **_FINE_WIDTH, "n_shared_experts": "expert_shared_count"}
_DENSE_FIRST = {"first_k_dense_replace": ("leading_dense_block_count", 0)}
_SCALED = {"routed_scaling_factor": ("expert_weights_scale", 1.0)}
_GROUPS = {"n_group": ("expert_group_count", 1), "topk_group": ("expert_group_used_count", 1)}
_NORMALIZED = {"norm_topk_prob": ("expert_weights_norm", False)}
_QWEN2_MOE = {"num_experts": "expert_count", **_TOP_K, **_FINE_WIDTH}
_SHARED_FFN = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_PREDICTION = {"num_nextn_predict_layers": ("nextn_predict_layers", 0)}
_GRANITE = {
    "attention_multiplier": ("attention.scale", 1.0),
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_scale", 1.0),
}

_DEEPSEEK_V3 = GgufFamily(
    "deepseek2",
    "deepseek_v3",
    keys=_FINE_GRAINED,
    optional=_DENSE_FIRST | _SCALED | _GROUPS | _NORMALIZED,
    made=(LATENT,),
    gating=SIGMOID,
    only_if=_has_choice_bias,
)

_LLAMA = GgufFamily(
    *("llama", "llama"),
    made=(HEADS, ROTATION, ATTENTION_BIASES),
    gating=None,
    permutes=True,
    constants=divisors_of,
)

_ROWS = (
    GgufFamily(
        "llama",
        "mixtral",
        keys=_MIXTURE,
        fixed={"sliding_window": None},
        made=(HEADS, ROTATION),
        normalizes=True,
        permutes=True,
        constants=divisors_of,
        only_if=_has_experts,
    ),
    _LLAMA,
    replace(_LLAMA, model_type="mistral", made=(HEADS, ROTATION), read_as="llama"),
    GgufFamily(
        "llama4",
        "llama4_text",
        keys=_MIXTURE
        | {"intermediate_size": "expert_feed_forward_length", "interleave_moe_layer_step": "interleave_moe_layer_step"},
        made=(HEADS, ROTATION, CHUNKS),
        gating=SIGMOID,
        normalizes=False,
        constants=divisors_of,
    ),
    GgufFamily(
        "qwen2moe",
        "qwen2_moe",
        keys=_QWEN2_MOE | _SHARED_FFN,
        fixed={"norm_topk_prob": False},
        made=(UNDIVIDED_HEADS, ROTATION),
        normalizes=False,
    ),
    GgufFamily(
        "qwen3moe",
        "qwen3_moe",
        keys=_QWEN2_MOE,
        fixed={"norm_topk_prob": True},
        made=(HEADS, ROTATION, ATTENTION_BIASES),
        normalizes=True,
    ),
    GgufFamily(
        "olmoe",
        "olmoe",
        keys={"num_experts": "expert_count", **_TOP_K},
        optional={"clip_qkv": ("attention.clamp_kqv", None)},
        fixed={"norm_topk_prob": False},
        made=(UNGROUPED_HEADS, ROTATION, ATTENTION_BIASES),
        normalizes=False,
    ),
    GgufFamily(
        "deepseek2",
        _GLM_LITE,
        keys=_FINE_GRAINED,
        optional=_SCALED | _GROUPS | _NORMALIZED | _PREDICTION,
        made=(LATENT, FIRST_DENSE),
        gating=SIGMOID,
        says={_MODEL_TYPE: _GLM_LITE},
        only_if=_is_glm_lite,
    ),
    _DEEPSEEK_V3,
    replace(_DEEPSEEK_V3, model_type="kimi_k2", read_as="deepseek_v3"),
    GgufFamily(
        "deepseek2",
        "deepseek_v2",
        keys=_FINE_GRAINED,
        optional=_DENSE_FIRST | _SCALED,
        fixed={"norm_topk_prob": False},
        made=(LATENT, LIMITED_GROUPS),
        normalizes=False,
    ),
    GgufFamily(
        "deepseek",
        "deepseek",
        keys=_FINE_GRAINED,
        optional=_DENSE_FIRST,
        fixed={"norm_topk_prob": False},
        made=(UNDIVIDED_HEADS, ROTATION, ATTENTION_BIASES, UNSCALED),
        normalizes=False,
        permutes=True,
    ),
    GgufFamily(
        "glm4moe",
        "glm4_moe",
        keys=_FINE_GRAINED,
        optional=_DENSE_FIRST | _SCALED | _GROUPS | _NORMALIZED | _PREDICTION,
        made=(HEADS, PARTIAL_ROTATION, ATTENTION_BIASES, QUERY_KEY_NORM),
        gating=SIGMOID,
        feed_forward_norm="post_attention_norm",
    ),
    GgufFamily(
        "gpt-oss",
        "gpt_oss",
        keys=_MIXTURE | {"intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window"},
        made=(HEADS, ROTATION, ATTENTION_BIASES, WINDOWS_IN_TURNS),
        feed_forward_norm="post_attention_norm",
    ),
    GgufFamily(
        "granitemoe",
        "granitemoeshared",
        keys=_MIXTURE | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        optional=_GRANITE,
        made=(UNDIVIDED_HEADS, ROTATION, ATTENTION_BIASES),
        permutes=True,
        constants=divisors_of,
        only_if=_shared_width,
    ),
    GgufFamily(
        "granitemoe",
        "granitemoe",
        keys=_MIXTURE,
        optional=_GRANITE,
        made=(UNDIVIDED_HEADS, ROTATION, ATTENTION_BIASES),
        permutes=True,
        constants=divisors_of,
    ),
    GgufFamily(
        "granite",
        "granite",
        optional=_GRANITE,
        made=(UNDIVIDED_HEADS, ROTATION, ATTENTION_BIASES),
        gating=None,
        permutes=True,
        constants=divisors_of,
    ),
    GgufFamily(
        "ernie4_5-moe",
        "ernie4_5_moe",
        keys={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
        },
        optional={
            "moe_layer_start_index": ("leading_dense_block_count", 0),
            "moe_layer_interval": ("interleave_moe_layer_step", 1),
        },
        made=(UNDIVIDED_HEADS, ROTATION, SHARED_WIDTH),
    ),
    GgufFamily("ernie4_5", "ernie4_5", made=(HEADS, ROTATION), gating=None),
    GgufFamily(
        "deepseek32",
        "deepseek_v32",
        keys=_FINE_GRAINED,
        optional=_SCALED | _GROUPS | _NORMALIZED | _PREDICTION,
        made=(LATENT, FIRST_DENSE, INDEXERS),
        gating=SIGMOID,
        further=indexer_places,
    ),
    GgufFamily(
        "glm-dsa",
        "glm_moe_dsa",
        keys=_FINE_GRAINED,
        optional=_SCALED | _GROUPS | _NORMALIZED | _PREDICTION,
        made=(LATENT, FIRST_DENSE, SOME_INDEXERS),
        gating=SIGMOID,
        further=indexer_places,
    ),
    GgufFamily(
        "minimax-m2",
        "minimax_m2",
        keys=_MIXTURE | {"intermediate_size": "expert_feed_forward_length"},
        made=(HEADS, PARTIAL_ROTATION),
        gating=SIGMOID,
    ),
    GgufFamily(
        "lfm2moe",
        "lfm2_moe",
        keys=_QWEN2_MOE,
        optional={"num_dense_layers": ("leading_dense_block_count", 0)},
        fixed={"norm_topk_prob": True, "routed_scaling_factor": 1.0},
        sizes=SIZES_WITH_CONVOLUTIONS,
        made=(UNDIVIDED_HEADS, ROTATION),
        gating=SIGMOID,
        output_norm="token_embd_norm",
        further=convolution_places,
    ),
    GgufFamily(
        "gemma4",
        "gemma4_text",
        keys={"num_experts": "expert_count", "top_k_experts": "expert_used_count", **_FINE_WIDTH},
        optional={"final_logit_softcapping": ("final_logit_softcapping", None)},
        fixed={"enable_moe_block": True, "hidden_size_per_layer_input": 0},
        sizes=HEADS_BY_KIND,
        feed_forward_norm="pre_ffw_norm_2",
        further=gemma_places,
        constants=gemma_constants,
    ),
    GgufFamily(
        "nemotron_h_moe",
        "nemotron_h",
        keys={
            "n_routed_experts": "expert_count",
            **_TOP_K,
            **_FINE_WIDTH,
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        optional=_SCALED | _GROUPS | _NORMALIZED,
        fixed={"time_step_min": 0.001},
        sizes=BLOCKS_IN_TURNS,
        gating=SIGMOID,
        feed_forward_norm="attn_norm",
        further=mamba_places,
    ),
    GgufFamily("qwen2", "qwen2", made=(UNDIVIDED_HEADS, ROTATION), gating=None),
    GgufFamily("qwen3", "qwen3", made=(HEADS, ROTATION, ATTENTION_BIASES), gating=None),
    GgufFamily(
        "qwen3next",
        "qwen3_next",
        keys=_QWEN2_MOE | _SHARED_FFN,
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
        made=(HEADS, PARTIAL_ROTATION, DELTA),
        normalizes=True,
        feed_forward_norm="post_attention_norm",
        further=delta_places,
    ),
    GgufFamily(
        "qwen35moe",
        "qwen3_5_moe_text",
        keys=_QWEN2_MOE | _SHARED_FFN,
        fixed={"attention_bias": False},
        made=(HEADS, SECTIONS, DELTA),
        normalizes=True,
        feed_forward_norm="post_attention_norm",
        further=delta_places,
    ),
)


def gguf_family(facts: Facts) -> GgufFamily:
    """Return the row for a file. Raises UnsupportedError naming an unknown architecture."""
    rows = [row for row in _ROWS if row.architecture == facts.architecture and row.read_as is None]
    if not rows:
        known = ", ".join(dict.fromkeys(row.architecture for row in _ROWS))
        raise UnsupportedError(f"GGUF architecture {shown(facts.architecture)} is not supported; supported: {known}")
    chosen = next((row for row in rows if row.only_if(facts)), None)
    if chosen is None:
        raise CheckpointError(f"metadata: it is not that of a {rows[0].architecture} model; fetch or convert it again")
    return chosen


def family_to_write(config: DecoderConfig) -> GgufFamily:
    """Return the row of a model's family. Raises UnsupportedError for a family without one."""
    name = config.architecture.model_type
    row = next((row for row in _ROWS if row.model_type == name), None)
    if row is None:
        raise UnsupportedError(f"a {name} is not written as GGUF; written are {', '.join(gguf_model_types())}")
    return row


def gguf_model_types() -> tuple[str, ...]:
    """Return the families that have a row here, by their `model_type`."""
    return tuple(dict.fromkeys(row.model_type for row in _ROWS))
