"""The families as GGUF files describe them: one row for each, which makes a config.json of metadata, and the reverse.

The names are those of llama.cpp (github.com/ggml-org/llama.cpp, conversion/ and gguf-py/gguf/constants.py). A row states
which metadata key has which entry of config.json, and what such files never say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.gguf_delta import DELTA, SECTIONS, Places, delta_places
from engine.families.gguf_metadata import ARCHITECTURE, Facts
from engine.families.gguf_parts import (
    ATTENTION_BIASES,
    FIRST_DENSE,
    HEADS,
    LATENT,
    LIMITED_GROUPS,
    PARTIAL_ROTATION,
    QUERY_KEY_NORM,
    ROTATION,
    SHARED_WIDTH,
    SIZES,
    UNDIVIDED_HEADS,
    UNGROUPED_HEADS,
    UNSCALED,
    WINDOWS_IN_TURNS,
    Part,
)
from engine.files.json_file import shown

_HARMLESS = ("vocab_size", "tensor_data_layout", "attention.causal", "nextn_predict_layers")
"""Keys that are checked elsewhere or say nothing."""
_SOFTMAX, _SIGMOID = 1, 2
"""Functions of router logits (`expert_gating_func`)."""
_GATING = "expert_gating_func"
_FLOATS = frozenset(
    [
        "attention.clamp_kqv",
        "attention.layer_norm_rms_epsilon",
        "attention.scale",
        "embedding_scale",
        "expert_weights_scale",
        "logit_scale",
        "residual_scale",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
    ]
)
"""Keys whose numbers are float32, also if config.json has whole numbers. llama.cpp refuses other types."""


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
    made: tuple[Part, ...] = ()
    """Parts that several keys say, or the tensors."""
    gating: int | None = _SOFTMAX
    """The function of router logits that the family has; None for a dense family."""
    normalizes: bool | None = None
    """Whether the weights of the chosen experts sum to 1; None if the family's config.json says it."""
    permutes: bool = False
    """Whether the rows of each head of queries and keys are stored in pairs of what is rotated together."""
    feed_forward_norm: str = "ffn_norm"
    """Name of the norm after attention."""
    further: Callable[[DecoderConfig, int, Callable[[str], bool]], Places] = lambda config, layer, has: {}
    """Returns the places of a layer's further tensors. The last argument says whether the file has a tensor in its block."""
    says: Mapping[str, str] = field(default_factory=dict)
    """Whole keys by which files of this family are told from others of the architecture; llama.cpp ignores them."""
    only_if: Callable[[Facts], bool] = lambda facts: True
    """Whether a file of this architecture is of this family. The first row that fits is taken."""

    def config(self, facts: Facts) -> dict[str, Any]:
        """Return the content of config.json. Raises CheckpointError and UnsupportedError naming the key."""
        made: dict[str, Any] = {"model_type": self.model_type}
        for part in (SIZES, *self.made):
            made |= part.read(facts)
        made |= {entry: facts.value(key) for entry, key in self.keys.items()}
        made |= {entry: facts.value(key, default) for entry, (key, default) in self.optional.items()}
        made |= self.fixed
        facts.only("attention.causal", True)
        if self.gating is None:
            facts.only("expert_count", 0)
        facts.only(_GATING, 0, self.gating)
        if self.normalizes is not None:
            facts.only("expert_weights_norm", self.normalizes)
        facts.refuse_unread(_HARMLESS)
        return made

    def metadata(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the hyperparameters of a model as metadata. Raises UnsupportedError for what no key can say.

        A config that the keys cannot say gives metadata of another config; the caller compares the two.
        """
        keys = dict(self.keys) | {entry: key for entry, (key, _) in self.optional.items()}
        found = {key: getattr(config.transformers_config, entry, None) for entry, key in keys.items()}
        for part in (SIZES, *self.made):
            found |= part.write(config)
        if self.gating == _SIGMOID:
            found[_GATING] = _SIGMOID
        stored = {key: float(value) if key in _FLOATS else value for key, value in found.items() if value is not None}
        own = {f"{self.architecture}.{key}": value for key, value in stored.items()}
        return {ARCHITECTURE: self.architecture, **self.says, **own}


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

_ROWS = (
    GgufFamily(
        "llama",
        "mixtral",
        keys=_MIXTURE,
        fixed={"sliding_window": None},
        made=(HEADS, ROTATION),
        normalizes=True,
        permutes=True,
        only_if=_has_experts,
    ),
    GgufFamily("llama", "llama", made=(HEADS, ROTATION, ATTENTION_BIASES), gating=None, permutes=True),
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
        gating=_SIGMOID,
        says={_MODEL_TYPE: _GLM_LITE},
        only_if=_is_glm_lite,
    ),
    GgufFamily(
        "deepseek2",
        "deepseek_v3",
        keys=_FINE_GRAINED,
        optional=_DENSE_FIRST | _SCALED | _GROUPS | _NORMALIZED,
        made=(LATENT,),
        gating=_SIGMOID,
        only_if=_has_choice_bias,
    ),
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
        gating=_SIGMOID,
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
        only_if=_shared_width,
    ),
    GgufFamily(
        "granitemoe",
        "granitemoe",
        keys=_MIXTURE,
        optional=_GRANITE,
        made=(UNDIVIDED_HEADS, ROTATION, ATTENTION_BIASES),
        permutes=True,
    ),
    GgufFamily(
        "granite",
        "granite",
        optional=_GRANITE,
        made=(UNDIVIDED_HEADS, ROTATION, ATTENTION_BIASES),
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
        made=(UNDIVIDED_HEADS, ROTATION, SHARED_WIDTH),
    ),
    GgufFamily("ernie4_5", "ernie4_5", made=(HEADS, ROTATION), gating=None),
    GgufFamily(
        "minimax-m2",
        "minimax_m2",
        keys=_MIXTURE | {"intermediate_size": "expert_feed_forward_length"},
        made=(HEADS, PARTIAL_ROTATION),
        gating=_SIGMOID,
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
    rows = [row for row in _ROWS if row.architecture == facts.architecture]
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
