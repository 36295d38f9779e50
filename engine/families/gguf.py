"""The families as GGUF files describe them: one row for each, which makes the content of a config.json.

The names are those of llama.cpp (github.com/ggml-org/llama.cpp, conversion/ and gguf-py/gguf/constants.py). A row states
which metadata key has which entry of config.json, and what such files never say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.gguf_metadata import Facts
from engine.files.json_file import shown

EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
_HARMLESS = ("vocab_size", "tensor_data_layout", "attention.causal", "nextn_predict_layers")
"""Keys that are checked elsewhere or say nothing."""
_SOFTMAX, _SIGMOID = 1, 2
"""Functions of router logits (`expert_gating_func`)."""
_ROTARY_BASE = 10_000.0
"""The base of rotation where a file does not say one."""

Made = Callable[[Facts], Mapping[str, Any]]
"""Makes entries of config.json that no single key has."""


@dataclass(frozen=True)
class GgufFamily:
    """How GGUF files of one architecture describe models of one family."""

    architecture: str
    """Value of `general.architecture`."""
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys, without the architecture's name, by the entry of config.json that they have; all are required."""
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Keys that a file may lack, with the entry's value in that case."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Entries that such files never have, because the architecture implies them."""
    ignored: tuple[str, ...] = ()
    """Keys that say nothing that other keys do not say."""
    made: tuple[Made, ...] = ()
    gating: int | None = _SOFTMAX
    """The function of router logits that the family has; None for a dense family."""
    normalizes: bool | None = None
    """Whether the weights of the chosen experts sum to 1; None if the family's config.json says it."""
    permutes: bool = False
    """Whether the rows of each head of queries and keys are stored in pairs of what is rotated together."""
    feed_forward_norm: str = "ffn_norm"
    """Name of the norm after attention."""
    only_if: Callable[[Facts], bool] = lambda facts: True
    """Whether a file of this architecture is of this family. The first row that fits is taken."""

    def config(self, facts: Facts) -> dict[str, Any]:
        """Return the content of config.json. Raises CheckpointError and UnsupportedError naming the key."""
        made: dict[str, Any] = {"model_type": self.model_type}
        for make in (_sizes, *self.made):
            made |= make(facts)
        made |= {entry: facts.value(key) for entry, key in self.keys.items()}
        made |= {entry: facts.value(key, default) for entry, (key, default) in self.optional.items()}
        made |= self.fixed
        facts.only("attention.causal", True)
        if self.gating is None:
            facts.only("expert_count", 0)
        facts.only("expert_gating_func", 0, self.gating)
        if self.normalizes is not None:
            facts.only("expert_weights_norm", self.normalizes)
        facts.refuse_unread((*_HARMLESS, *self.ignored))
        return made


def _sizes(facts: Facts) -> dict[str, Any]:
    """Return what every file says."""
    if EMBEDDINGS not in facts.shapes:
        raise CheckpointError(f"tensor {EMBEDDINGS} is missing; give the file of a language model")
    vocabulary = facts.shapes[EMBEDDINGS][0]
    facts.only("vocab_size", vocabulary)
    heads = facts.size("attention.head_count")
    return {
        "vocab_size": vocabulary,
        "hidden_size": facts.size("embedding_length"),
        "intermediate_size": facts.size("feed_forward_length", 0) or facts.size("expert_feed_forward_length"),
        "num_hidden_layers": facts.size("block_count") - facts.size("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.size("attention.head_count_kv", heads),
        "max_position_embeddings": facts.size("context_length"),
        "rms_norm_eps": facts.value("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in facts.shapes,
        **{f"{name}_token_id": _token(facts, name) for name in ("bos", "eos", "pad")},
    }


def _token(facts: Facts, name: str) -> Any:
    return facts.metadata.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")


def _rotation(facts: Facts) -> dict[str, Any]:
    """Return the rotation, of all of a head's dimensions."""
    facts.only("rope.dimension_count", _head_dimension(facts))
    return {"rope_parameters": _rope_parameters(facts)}


def _partial_rotation(facts: Facts) -> dict[str, Any]:
    head = _head_dimension(facts)
    share = facts.size("rope.dimension_count", head) / max(head, 1)
    return {"rope_parameters": _rope_parameters(facts) | {"partial_rotary_factor": share}}


def _rope_parameters(facts: Facts) -> dict[str, Any]:
    """Return `rope_parameters`. Raises UnsupportedError for scalings whose numbers are not in the metadata."""
    kind = facts.value("rope.scaling.type", "none")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.value("rope.freq_base", _ROTARY_BASE)}
    if "rope_freqs.weight" in facts.shapes or kind not in _SCALINGS:
        what = "rope_freqs.weight" if "rope_freqs.weight" in facts.shapes else f"rope.scaling.type {shown(kind)}"
        raise UnsupportedError(f"its rotation is scaled by {what}, which is not read; take the model's safetensors")
    if kind == "none":
        facts.only("rope.scaling.factor", 0, 1)
        return parameters
    parameters |= {"rope_type": kind, "factor": facts.value("rope.scaling.factor")}
    return parameters if kind == "linear" else parameters | _yarn(facts)


_SCALINGS = ("none", "linear", "yarn")


def _yarn(facts: Facts) -> dict[str, Any]:
    """Return the parameters of YaRN (arXiv 2309.00071). The two magnitude scales of a family are always equal."""
    found = {
        "original_max_position_embeddings": facts.value("rope.scaling.original_context_length"),
        "beta_fast": facts.value("rope.scaling.yarn_beta_fast", 32),
        "beta_slow": facts.value("rope.scaling.yarn_beta_slow", 1),
    }
    facts.only("rope.scaling.yarn_ext_factor", 1, -1)
    if facts.has("rope.scaling.yarn_attn_factor"):
        found["attention_factor"] = facts.value("rope.scaling.yarn_attn_factor")
    if facts.has("rope.scaling.yarn_log_multiplier"):
        scale = round(10 * float(facts.value("rope.scaling.yarn_log_multiplier")), 6)  # stored as a tenth of it
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _head_dimension(facts: Facts) -> int:
    size = facts.size("embedding_length") // max(1, facts.size("attention.head_count"))
    return facts.size("attention.key_length", facts.size("rope.dimension_count", size))


def _heads(facts: Facts) -> dict[str, Any]:
    """Return the size of a head, which keys and values share."""
    facts.only("attention.value_length", _head_dimension(facts))
    return {"head_dim": _head_dimension(facts)}


def _undivided_heads(facts: Facts) -> dict[str, Any]:
    """Return nothing, after a check that heads divide the hidden size, which config.json implies."""
    size = facts.size("embedding_length") // max(1, facts.size("attention.head_count"))
    facts.only("attention.key_length", size)
    facts.only("attention.value_length", size)
    return {}


def _attention_biases(facts: Facts) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in facts.shapes}


def _latent(facts: Facts) -> dict[str, Any]:
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
        "rope_parameters": _rope_parameters(facts),
        "attention_bias": "blk.0.attn_q_a.bias" in facts.shapes,
    }


def _limited_groups(facts: Facts) -> dict[str, Any]:
    """Return how a token's experts are limited to groups, for a family whose config.json names the method."""
    groups = facts.size("expert_group_count", 1)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return {"n_group": groups, "topk_group": facts.size("expert_group_used_count", 1), "topk_method": method}


def _unscaled(facts: Facts) -> dict[str, Any]:
    facts.only("expert_weights_scale", 1)
    return {}


def _query_key_norm(facts: Facts) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in facts.shapes}


def _windows_in_turns(facts: Facts) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    layers = [kinds[layer % 2] for layer in range(min(facts.size("block_count"), 10_000))]
    return {"layer_types": layers, "rope_parameters": _rope_parameters(facts) | {"truncate": False}}


def _shared_width(facts: Facts) -> bool:
    return facts.size("expert_shared_feed_forward_length", 0) > 0


def _has_experts(facts: Facts) -> bool:
    return facts.size("expert_count", 0) > 0


_TOP_K = {"num_experts_per_tok": "expert_used_count"}
_MIXTURE = {"num_local_experts": "expert_count", **_TOP_K}
_FINE_WIDTH = {"moe_intermediate_size": "expert_feed_forward_length"}
_FINE_GRAINED = {"n_routed_experts": "expert_count", **_TOP_K, **_FINE_WIDTH, "n_shared_experts": "expert_shared_count"}
_DENSE_FIRST = {"first_k_dense_replace": ("leading_dense_block_count", 0)}
_SCALED = {"routed_scaling_factor": ("expert_weights_scale", 1.0)}
_GROUPS = {"n_group": ("expert_group_count", 1), "topk_group": ("expert_group_used_count", 1)}
_NORMALIZED = {"norm_topk_prob": ("expert_weights_norm", False)}
_QWEN2_MOE = {"num_experts": "expert_count", **_TOP_K, **_FINE_WIDTH}
_GRANITE = {
    "attention_multiplier": ("attention.scale", 1.0),
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_scale", 1.0),
}

_ROWS = (
    GgufFamily(
        "llama",
        "mixtral",
        keys=_MIXTURE,
        fixed={"sliding_window": None},
        made=(_heads, _rotation),
        normalizes=True,
        permutes=True,
        only_if=_has_experts,
    ),
    GgufFamily("llama", "llama", made=(_heads, _rotation, _attention_biases), gating=None, permutes=True),
    GgufFamily(
        "qwen2moe",
        "qwen2_moe",
        keys=_QWEN2_MOE | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        fixed={"norm_topk_prob": False},
        made=(_undivided_heads, _rotation),
        normalizes=False,
    ),
    GgufFamily(
        "qwen3moe",
        "qwen3_moe",
        keys=_QWEN2_MOE,
        fixed={"norm_topk_prob": True},
        made=(_heads, _rotation, _attention_biases),
        normalizes=True,
    ),
    GgufFamily(
        "olmoe",
        "olmoe",
        keys={"num_experts": "expert_count", **_TOP_K},
        optional={"clip_qkv": ("attention.clamp_kqv", None)},
        fixed={"norm_topk_prob": False},
        made=(_undivided_heads, _rotation, _attention_biases),
        normalizes=False,
    ),
    GgufFamily(
        "deepseek2",
        "deepseek_v3",
        keys=_FINE_GRAINED,
        optional=_DENSE_FIRST | _SCALED | _GROUPS | _NORMALIZED,
        made=(_latent,),
        gating=_SIGMOID,
        only_if=lambda facts: any(name.endswith(".exp_probs_b.bias") for name in facts.shapes),
    ),
    GgufFamily(
        "deepseek2",
        "deepseek_v2",
        keys=_FINE_GRAINED,
        optional=_DENSE_FIRST | _SCALED,
        fixed={"norm_topk_prob": False},
        made=(_latent, _limited_groups),
        normalizes=False,
    ),
    GgufFamily(
        "deepseek",
        "deepseek",
        keys=_FINE_GRAINED,
        optional=_DENSE_FIRST,
        fixed={"norm_topk_prob": False},
        made=(_undivided_heads, _rotation, _attention_biases, _unscaled),
        normalizes=False,
        permutes=True,
    ),
    GgufFamily(
        "glm4moe",
        "glm4_moe",
        keys=_FINE_GRAINED,
        optional=_DENSE_FIRST | _SCALED | _GROUPS | _NORMALIZED | {"num_nextn_predict_layers": ("nextn_predict_layers", 0)},
        made=(_heads, _partial_rotation, _attention_biases, _query_key_norm),
        gating=_SIGMOID,
        feed_forward_norm="post_attention_norm",
    ),
    GgufFamily(
        "gpt-oss",
        "gpt_oss",
        keys=_MIXTURE | {"intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window"},
        made=(_heads, _rotation, _attention_biases, _windows_in_turns),
        feed_forward_norm="post_attention_norm",
    ),
    GgufFamily(
        "granitemoe",
        "granitemoeshared",
        keys=_MIXTURE | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        optional=_GRANITE,
        made=(_undivided_heads, _rotation, _attention_biases),
        permutes=True,
        only_if=_shared_width,
    ),
    GgufFamily(
        "granitemoe",
        "granitemoe",
        keys=_MIXTURE,
        optional=_GRANITE,
        made=(_undivided_heads, _rotation, _attention_biases),
        permutes=True,
    ),
    GgufFamily(
        "granite",
        "granite",
        optional=_GRANITE,
        made=(_undivided_heads, _rotation, _attention_biases),
        gating=None,
        permutes=True,
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
        ignored=("expert_shared_feed_forward_length",),
        made=(_undivided_heads, _rotation),
    ),
    GgufFamily("ernie4_5", "ernie4_5", made=(_heads, _rotation), gating=None),
    GgufFamily(
        "minimax-m2",
        "minimax_m2",
        keys=_MIXTURE | {"intermediate_size": "expert_feed_forward_length"},
        made=(_heads, _partial_rotation),
        gating=_SIGMOID,
    ),
    GgufFamily("qwen2", "qwen2", made=(_undivided_heads, _rotation), gating=None),
    GgufFamily("qwen3", "qwen3", made=(_heads, _rotation, _attention_biases), gating=None),
)


def gguf_family(facts: Facts) -> GgufFamily:
    """Return the row for a file. Raises UnsupportedError naming an unknown architecture."""
    rows = [row for row in _ROWS if row.architecture == facts.architecture]
    if not rows:
        known = ", ".join(dict.fromkeys(row.architecture for row in _ROWS))
        raise UnsupportedError(f"GGUF architecture {shown(facts.architecture)} is not supported; supported: {known}")
    chosen = next((row for row in rows if row.only_if(facts)), None)
    if chosen is None:
        raise CheckpointError(f"metadata: it is not that of a {rows[0].architecture} model; fetch or convert it again")
    return chosen


def gguf_model_types() -> tuple[str, ...]:
    """Return the families that have a row here, by their `model_type`."""
    return tuple(dict.fromkeys(row.model_type for row in _ROWS))
