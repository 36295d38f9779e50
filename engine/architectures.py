"""What is particular to each model family: names on disk, router rule, attention kind, dense sibling.

This is the only file that names families. A family is one `Architecture` row; `decoder_config` resolves a row and a
checkpoint's config.json into a `DecoderConfig`, the plain numbers the decoder is built from, and refuses by name whatever
the config asks for and the decoder lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from engine.errors import CheckpointError, UnsupportedError
from engine.files.json_file import shown

GATE_WIDTH_KEY = "gate_network_width"
"""Config key of our own: hidden units of a gate network that are not as many as experts."""
GROUPS_KEY = "expert_groups"
"""In block_configs[i].ffn.moe, of our own: the group of each expert, where groups have lost unequal numbers of them."""


@dataclass(frozen=True)
class GateNetwork:
    """A router of two layers, logits = W2·tanh(W1·x), with noisy top-k in training: names within the block, config keys.

    The row's own `router` is W2 [experts, hidden units]. There are as many hidden units as experts, unless config.json has
    GATE_WIDTH_KEY: removing an expert takes its row out of W2 and leaves the hidden units, on which all others depend.
    """

    hidden: str
    """W1 [hidden units, D]."""
    noise: str
    """W_noise [experts, D] of noisy top-k (engine/decoder/routing.py)."""
    noise_key: str
    """Config key that says whether there is a W_noise."""
    epsilon_key: str
    """Config key of the least deviation of the noise."""


@dataclass(frozen=True)
class Stack:
    """One tensor on disk that holds some projections of all experts of a layer, [experts, outputs, inputs]."""

    name: str
    """Within the block."""
    projections: tuple[int, ...]
    """Which: their outputs one after the other."""
    transposed: bool = False
    """[experts, inputs, outputs]."""
    interleaved: bool = False
    """The outputs of several projections in turns."""


@dataclass(frozen=True)
class ClampedSwiglu:
    """(u + 1) · g · σ(α·g) in place of silu(g) · u, with g at most `limit` and u within ± `limit`."""

    alpha: float
    limit: float


class Chunk(NamedTuple):
    """Positions are in pieces of `size`, and a query looks at those of its own piece."""

    size: int


GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS = range(6)
"""The tensors of an expert, as they are numbered everywhere; some families have no biases."""
SINKS = "sinks"
LATENT_UP = "kv_b_proj.weight"
LIGHTNING = ("qkv_proj.weight", "output_gate.weight", "norm.weight", "out_proj.weight")
"""The tensors of lightning attention: of queries, keys and values together, of the gate, of the norm, of the output."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class Architecture:
    """One model family, as it is on disk. Templates take `layer` and `expert`."""

    model_type: str
    causal_lm_class: str
    """The transformers class, for the modelling file of non-uniform artifacts and for `architectures` in config.json."""
    read_as: str | None = None
    """model_type whose transformers config reads this family's config.json, where transformers has none for the family."""
    written_as: str | None = None
    """model_type that results are given, where the family is another one under a name of its own."""
    keys_of_authors: tuple[tuple[str, str], ...] = ()
    """Config keys that the family's authors have for others of transformers' config."""
    own_settings: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict, hash=False)
    """Config keys that the transformers config does not know or does not check, each with the values that the decoder
    honours, also as entries of a list; None where any will do: those keys are read elsewhere, or matter only in training."""
    dense_sibling: str | None = None
    """model_type of the family that the same weights form when each MoE layer becomes one FFN; None where there is none."""
    not_dense: str | None = None
    """Why no model of the family can be made dense; None where it can."""
    not_onnx: str | None = None
    """Why no model of the family can be written as an ONNX graph; None where it can."""
    experts_keys: tuple[str, ...] = ()
    """Config keys that hold the expert count, best first; all are written."""
    experts_per_token_key: str = "num_experts_per_tok"
    experts_per_token_copy: str | None = None
    """Config key that says the same once more, and may be missing."""
    expert_width_key: str = "intermediate_size"
    expert_sizes_key: str | None = None
    """Config key of a list of expert widths for each layer: `expert_width_key` is then what a layer's experts have
    together, shared out evenly where there is no list."""
    weight_scale_key: str | None = None
    """Config key of the factor that routed weights are multiplied by: one number, or one for each layer."""
    router_scores: str = "softmax"
    """What a router makes of its logits: "softmax" over all experts, or the "sigmoid" of each."""
    router_in_float32: bool = False
    """The router's product is taken in float32 whatever the model's dtype."""
    router_bias_dimensions: int = 1
    """2 where `router_bias` is [1, experts]."""
    least_sum_key: str | None = None
    """Config key of the least that probabilities chosen with a bias are divided by."""
    router_bias: str | None = None
    """Within the block: one number for each expert that is added to its score to choose it, and never weighs it."""
    groups_key: str | None = None
    """Config key of the number of groups that experts are in, of which a token takes its experts from the best few."""
    groups_per_token_key: str = "topk_group"
    grouped_if: tuple[str, str] | None = None
    """Config key and the value under which there are groups; None where there always are."""
    block: str = "model.layers.{layer}.mlp"
    """Prefix of the MoE block."""
    dense_block: str = "model.layers.{layer}.mlp"
    """Prefix of a dense FFN on disk. All else has its tensors under the names of `dense_tensor`."""
    dense_width_key: str = "intermediate_size"
    expert: str = "experts.{expert}.{projection}.weight"
    """Within the block; takes one of `expert_projections`."""
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate.weight"
    """Within the block: the matrix that has one row for each expert."""
    expert_biases: bool = False
    """All three projections of an expert have one."""
    swiglu_keys: tuple[str, str] | None = None
    """Config keys of α and limit, where experts have a ClampedSwiglu."""
    stacks: tuple[Stack, ...] = ()
    """How experts lie on disk where not one by one; the names of `expert` are then ours alone."""
    modules: tuple[str, str] = ("mlp", "gate")
    """What transformers calls the block within a layer, and the router within the block, once a model is loaded."""
    logit_bias: str | None = None
    """Within the block: one number for each expert that is added to its router logit."""
    gate_network: GateNetwork | None = None
    scales_inputs: bool = False
    """The sigmoid of an expert's router logit multiplies what the expert is given, and nothing what it gives."""
    always_normalises_top_k: bool = False
    mixer_jitter_key: str | None = None
    """Config key of ε, where experts are chosen one after the other by sparsemixer (engine/decoder/routing.py)."""
    least_experts: int = 1
    """Experts that a layer must keep: the family's own router always takes so many."""
    sparse_step: bool = False
    """Some layers are dense FFNs, by `decoder_sparse_step` and `mlp_only_layers`."""
    dense_first_key: str | None = None
    """Config key of how many layers at the beginning are dense FFNs."""
    layers_key: str | None = None
    """Config key of a list of the layers that hold experts."""
    layer_range_keys: tuple[str, str, str] | None = None
    """Config keys of the first and the last layer that may hold experts, and of n, where only every n-th layer does."""
    layer_step_key: str | None = None
    """Config key of n, where after those only the layers whose number is a multiple of n hold experts."""
    shared_expert: str | None = None
    """Within the block: prefix of an expert that every token uses; None where there is none."""
    shared_gate: str | None = None
    """Within the block: what scales the shared expert by sigmoid(gate · x); None where nothing does."""
    shared_experts_key: str | None = None
    """Config key of how many experts wide the shared one is; None where `shared_width_key` says its width."""
    shared_width_key: str = "shared_expert_intermediate_size"
    shared_stacks: tuple[Stack, ...] = ()
    """How the shared expert lies on disk where not one projection by one, by names within the layer: stacks of one expert,
    [outputs, inputs]."""
    qk_norm: str = "none"
    """"none", "head" (per head) or "full" (over all heads at once, before the split)."""
    qk_norm_key: str | None = None
    """Config key that says whether there is one; None where there always is."""
    qkv_bias: bool | str = False
    """True, False, or the config key that says."""
    output_bias: bool | str = False
    sinks: bool = False
    """Each head has a learnt score beside those of the keys, which takes its share of the softmax and adds nothing."""
    windows: str = "none"
    """Sliding window: "none", "all" layers (by `sliding_window`), or by "layer_types"."""
    chunk_key: str | None = None
    """Config key of the size of chunks, in layers that are `chunked_attention` by "layer_types"."""
    rotates_key: str | None = None
    """Config key of a list with a 0 for each layer that does not rotate queries and keys."""
    unit_norm_key: str | None = None
    """Config key that says whether rotated queries and keys are divided by their root mean square."""
    temperature_keys: tuple[str, str, str] | None = None
    """Config keys that say whether queries that are not rotated grow with their position (arXiv 2501.19399), from which
    position on, and how fast."""
    clip_qkv: bool = False
    partial_rotary: bool = False
    """Only the share `partial_rotary_factor` of a head's dimensions, the first ones, is rotated."""
    rotary_dimension_key: str | None = None
    """Config key of how many dimensions of a head are rotated, where it is not a share of them."""
    latent_attention: bool = False
    """Keys and values are made of a latent vector (engine/decoder/latent_attention.py)."""
    lightning_attention: bool = False
    """Layers that are `linear_attention` by "layer_types" have it (engine/decoder/lightning_attention.py)."""
    residual_keys: tuple[tuple[str, str], ...] = ()
    """What is added to is the norm's output, not its input: config keys of what it and what is added are multiplied by, of
    attention, of lightning attention, and of the feed-forward block."""
    rotary_pairs: bool | str = False
    """Rotated dimensions are paired with their neighbours and not half against half: True, False, or the config key."""
    prediction_prefix: str | None = None
    """What the names of tensors for multi-token prediction begin with, where not those of further layers."""
    prediction_layers_key: str | None = None
    """Config key of how many layers for multi-token prediction follow the last one in a checkpoint; they are not read."""
    layer_norm: bool = False
    """Norms are layer norms with a bias, not root mean squares."""
    head_bias: bool | str = False
    """True, False, or the config key that says."""
    rope_types: tuple[str, ...] = ROPE_TYPES
    rope_mscales: bool = False
    """Long and short form of `longrope` have each a factor of their own, `long_mscale` and `short_mscale`."""
    multipliers: bool = False
    """Embeddings, attention scores, what is added to the residual, and logits (a divisor) have factors in the config."""

    @property
    def in_transformers(self) -> bool:
        """Whether transformers has a class of the family."""
        return self.read_as is None


_DEEPSEEK: dict[str, Any] = {
    "experts_keys": ("n_routed_experts",),
    "expert_width_key": "moe_intermediate_size",
    "dense_first_key": "first_k_dense_replace",
    "shared_expert": "shared_experts",
    "shared_experts_key": "n_shared_experts",
    "qkv_bias": "attention_bias",
}
"""What DeepSeek's families and those after them have in common."""
_SIGMOID_GROUPS: dict[str, Any] = {
    "weight_scale_key": "routed_scaling_factor",
    "router_scores": "sigmoid",
    "router_bias": "gate.e_score_correction_bias",
    "router_in_float32": True,
    "groups_key": "n_group",
    "prediction_layers_key": "num_nextn_predict_layers",
}
_DEEPSEEK_TRAINING = dict.fromkeys(("aux_loss_alpha", "seq_aux", "ep_size"))
_DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    causal_lm_class="DeepseekV3ForCausalLM",
    own_settings={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        **_DEEPSEEK_TRAINING,
    },
    dense_sibling="deepseek_v3",
    **_DEEPSEEK,
    **_SIGMOID_GROUPS,
    output_bias="attention_bias",
    latent_attention=True,
    rotary_pairs="rope_interleave",
)

_GRANITE_MOE = Architecture(
    model_type="granitemoe",
    causal_lm_class="GraniteMoeForCausalLM",
    dense_sibling="granite",
    experts_keys=("num_local_experts",),
    block="model.layers.{layer}.block_sparse_moe",
    router="router.layer.weight",
    stacks=(Stack("input_linear.weight", (GATE, UP)), Stack("output_linear.weight", (DOWN,))),
    modules=("block_sparse_moe", "router"),
    always_normalises_top_k=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    multipliers=True,
)

_MINIMAX = Architecture(
    # MiniMax-Text-01 and M1 (arXiv 2501.08313), as transformers names what is in their config.
    model_type="minimax",
    causal_lm_class="MiniMaxForCausalLM",
    own_settings={
        "postnorm": (True,),
        "shared_intermediate_size": (0, None),
        **dict.fromkeys(("rotary_dim", "shared_moe_mode", "max_model_len")),
    },
    not_onnx="its lightning attention keeps a state, for which our graphs have no input",
    experts_keys=("num_local_experts",),
    block="model.layers.{layer}.block_sparse_moe",
    expert_projections=("w1", "w3", "w2"),
    always_normalises_top_k=True,
    windows="all",
    rotary_dimension_key="rotary_dim",
    lightning_attention=True,
    residual_keys=(
        ("full_attn_alpha_factor", "full_attn_beta_factor"),
        ("linear_attn_alpha_factor", "linear_attn_beta_factor"),
        ("mlp_alpha_factor", "mlp_beta_factor"),
    ),
)
_MINIMAX_AUTHORS: dict[str, Any] = {
    "read_as": "minimax",
    "written_as": "minimax",
    "keys_of_authors": (
        ("attn_type_list", "layer_types"),
        *(
            (f"layernorm_{theirs}_{factor}", f"{ours}_{factor}_factor")
            for theirs, ours in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
            for factor in ("alpha", "beta")
        ),
    ),
}
"""Of configs in the words of their own code."""
_KINDS_OF_AUTHORS = {0: "linear_attention", 1: "full_attention"}
"""Entries of their list of layers."""
_LIGHTNING_KINDS = set(_KINDS_OF_AUTHORS.values())

ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture(
            model_type="mixtral",
            causal_lm_class="MixtralForCausalLM",
            dense_sibling="mistral",
            experts_keys=("num_local_experts",),
            block="model.layers.{layer}.block_sparse_moe",
            expert_projections=("w1", "w3", "w2"),
            always_normalises_top_k=True,
            windows="all",
        ),
        Architecture(
            model_type="qwen2_moe",
            causal_lm_class="Qwen2MoeForCausalLM",
            dense_sibling="qwen2",
            experts_keys=("num_experts",),
            expert_width_key="moe_intermediate_size",
            sparse_step=True,
            shared_expert="shared_expert",
            shared_gate="shared_expert_gate.weight",
            qkv_bias="qkv_bias",
            windows="layer_types",
        ),
        Architecture(
            model_type="qwen3_moe",
            causal_lm_class="Qwen3MoeForCausalLM",
            dense_sibling="qwen3",
            # transformers 5 writes num_local_experts, every older reader wants num_experts.
            experts_keys=("num_experts", "num_local_experts"),
            expert_width_key="moe_intermediate_size",
            sparse_step=True,
            qk_norm="head",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            windows="all",
        ),
        Architecture(
            model_type="olmoe",
            causal_lm_class="OlmoeForCausalLM",
            experts_keys=("num_experts",),
            qk_norm="full",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            clip_qkv=True,
        ),
        Architecture(
            # LLaMA-MoE v1 (arXiv 2406.16554; github.com/pjlab-sys4nlp/llama-moe, which has the classes).
            model_type="llama_moe",
            causal_lm_class="LlamaMoEForCausalLM",
            read_as="llama",
            own_settings={
                "gate_type": ("TopKBalancedNoisyGate",),
                "gate_network": ("mlp",),
                "gate_use_softmax": (True,),
                "calculator_type": ("UniversalCalculator",),
                "multiply_gate_scores": (True,),
                "add_weight_norm": (False,),
                # The family's class ignores these.
                "rope_theta": (10000,),
                "rope_parameters": (None,),
                "attention_bias": (False,),
                "head_dim": (None,),
                **dict.fromkeys(("num_selects", "size_experts", "score_scale_factor", GATE_WIDTH_KEY)),
                "gate_add_noise": (True, False),
                **dict.fromkeys(("gate_noise_epsilon", "gate_use_balance", "gate_balance_loss_weight")),
                # Of another calculator.
                **dict.fromkeys(("drop_tokens", "dropped_padding", "capacity_factor")),
            },
            dense_sibling="llama",
            experts_keys=("num_experts",),
            experts_per_token_key="num_selects",
            expert_sizes_key="size_experts",
            weight_scale_key="score_scale_factor",
            expert="calculator.experts.{projection}.{expert}",
            expert_projections=("weight_gate", "weight_up", "weight_down"),
            router="gate.gate_network.2.weight",
            gate_network=GateNetwork(
                hidden="gate.gate_network.0.weight",
                noise="gate.weight_noise.weight",
                noise_key="gate_add_noise",
                epsilon_key="gate_noise_epsilon",
            ),
            always_normalises_top_k=True,
        ),
        Architecture(
            # DeepSeekMoE (arXiv 2401.06066; huggingface.co/deepseek-ai/deepseek-moe-16b-base, which has the classes).
            model_type="deepseek",
            causal_lm_class="DeepseekForCausalLM",
            read_as="llama",
            own_settings={
                "scoring_func": ("softmax",),
                "head_dim": (None,),  # which the family's class ignores
                **dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")),
                **dict.fromkeys(("first_k_dense_replace", "moe_layer_freq")),
                **_DEEPSEEK_TRAINING,
            },
            dense_sibling="llama",
            **_DEEPSEEK,
            layer_step_key="moe_layer_freq",
            output_bias="attention_bias",
            rope_types=("default", "linear", "dynamic"),
        ),
        Architecture(
            model_type="deepseek_v2",
            causal_lm_class="DeepseekV2ForCausalLM",
            own_settings={
                "scoring_func": ("softmax",),
                "topk_method": ("greedy", "group_limited_greedy"),
                "norm_topk_prob": (False,),
                "moe_layer_freq": (1,),
                **_DEEPSEEK_TRAINING,
            },
            dense_sibling="deepseek_v2",
            **_DEEPSEEK,
            weight_scale_key="routed_scaling_factor",
            router_in_float32=True,
            groups_key="n_group",
            grouped_if=("topk_method", "group_limited_greedy"),
            output_bias="attention_bias",
            latent_attention=True,
            rotary_pairs=True,
        ),
        _DEEPSEEK_V3,
        # Kimi K2 is a DeepSeek V3 that needs code of its own for nothing but its name.
        replace(_DEEPSEEK_V3, model_type="kimi_k2", read_as="deepseek_v3", written_as="deepseek_v3"),
        Architecture(
            model_type="glm4_moe",
            causal_lm_class="Glm4MoeForCausalLM",
            own_settings={"partial_rotary_factor": None},
            dense_sibling="glm4_moe",
            **_DEEPSEEK,
            **_SIGMOID_GROUPS,
            qk_norm="head",
            qk_norm_key="use_qk_norm",
            partial_rotary=True,
        ),
        _GRANITE_MOE,
        replace(
            _GRANITE_MOE,
            model_type="granitemoeshared",
            causal_lm_class="GraniteMoeSharedForCausalLM",
            shared_expert="shared_expert",
            shared_width_key="shared_intermediate_size",
            shared_stacks=(
                Stack("shared_mlp.input_linear.weight", (GATE, UP)),
                Stack("shared_mlp.output_linear.weight", (DOWN,)),
            ),
        ),
        Architecture(
            model_type="granite",
            causal_lm_class="GraniteForCausalLM",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            multipliers=True,
        ),
        Architecture(
            model_type="phimoe",
            causal_lm_class="PhimoeForCausalLM",
            own_settings={"hidden_dropout": None, "original_max_position_embeddings": None},
            experts_keys=("num_local_experts",),
            block="model.layers.{layer}.block_sparse_moe",
            expert_projections=("w1", "w3", "w2"),
            modules=("mlp", "router"),
            mixer_jitter_key="router_jitter_noise",
            least_experts=2,
            not_dense="it has no dense sibling, and its router takes two experts, so that one cannot be a dense layer",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            windows="all",
            layer_norm=True,
            head_bias="lm_head_bias",
            rope_types=("default", "longrope"),
            rope_mscales=True,
        ),
        Architecture(
            model_type="ernie4_5_moe",
            causal_lm_class="Ernie4_5_MoeForCausalLM",
            own_settings={
                "use_bias": (False,),  # of all projections, the experts' too
                "moe_gate": ("topk",),
                "moe_gate_act": ("softmax",),
                "moe_use_aux_free": (True,),
                "use_rmsnorm": (True,),
                **dict.fromkeys(("moe_capacity", "moe_aux_loss_lambda")),
            },
            dense_sibling="ernie4_5",
            experts_keys=("moe_num_experts",),
            experts_per_token_key="moe_k",
            expert_width_key="moe_intermediate_size",
            router_bias="moe_statics.e_score_correction_bias",
            router_bias_dimensions=2,
            least_sum_key="moe_norm_min",
            router_in_float32=True,
            always_normalises_top_k=True,
            layer_range_keys=("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
            shared_expert="shared_experts",
            shared_experts_key="moe_num_shared_experts",
            rotary_pairs=True,
            prediction_layers_key="num_nextn_predict_layers",
            prediction_prefix="model.mtp_",
        ),
        Architecture(
            model_type="ernie4_5",
            causal_lm_class="Ernie4_5ForCausalLM",
            own_settings={"use_bias": (False,)},
            rotary_pairs=True,
        ),
        Architecture(
            model_type="minimax_m2",
            causal_lm_class="MiniMaxM2ForCausalLM",
            own_settings={
                "scoring_func": ("sigmoid",),
                "use_routing_bias": (True,),
                "use_qk_norm": (True,),
                "qk_norm_type": ("per_layer",),
                "attn_type_list": (1,),
                "shared_intermediate_size": (0,),
                **dict.fromkeys(("rotary_dim", "partial_rotary_factor", "mlp_intermediate_size", "shared_moe_mode")),
                **dict.fromkeys(("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "max_model_len")),
                **dict.fromkeys((f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")), (1,)),
            },
            experts_keys=("num_local_experts",),
            block="model.layers.{layer}.block_sparse_moe",
            expert_projections=("w1", "w3", "w2"),
            router_scores="sigmoid",
            router_bias="e_score_correction_bias",
            always_normalises_top_k=True,
            qk_norm="full",
            partial_rotary=True,
            prediction_layers_key="num_mtp_modules",
        ),
        _MINIMAX,
        replace(_MINIMAX, model_type="minimax_text_01", **_MINIMAX_AUTHORS),
        replace(_MINIMAX, model_type="minimax_m1", **_MINIMAX_AUTHORS),
        Architecture(
            model_type="llama4_text",
            causal_lm_class="Llama4ForCausalLM",
            own_settings={"for_llm_compressor": None, "cache_implementation": None},
            not_dense="the inputs of its experts are scaled by the router, token by token, which no FFN does",
            not_onnx="its chunked attention and experts whose inputs the router scales have no form in our graphs",
            experts_keys=("num_local_experts",),
            block="model.layers.{layer}.feed_forward",
            dense_block="model.layers.{layer}.feed_forward",
            dense_width_key="intermediate_size_mlp",
            router="router.weight",
            router_scores="sigmoid",
            scales_inputs=True,
            stacks=(
                Stack("experts.gate_up_proj", (GATE, UP), transposed=True),
                Stack("experts.down_proj", (DOWN,), transposed=True),
            ),
            modules=("feed_forward", "router"),
            layers_key="moe_layers",
            shared_expert="shared_expert",
            shared_width_key="intermediate_size",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            chunk_key="attention_chunk_size",
            rotary_pairs=True,
            rotates_key="no_rope_layers",
            unit_norm_key="use_qk_norm",
            temperature_keys=("attn_temperature_tuning", "floor_scale", "attn_scale"),
        ),
        Architecture(
            model_type="gpt_oss",
            causal_lm_class="GptOssForCausalLM",
            own_settings={"experts_per_token": None, "initial_context_length": None},
            experts_keys=("num_local_experts",),
            experts_per_token_copy="experts_per_token",
            router="router.weight",
            logit_bias="router.bias",
            expert_biases=True,
            swiglu_keys=("swiglu_alpha", "swiglu_limit"),
            stacks=(
                Stack("experts.gate_up_proj", (GATE, UP), transposed=True, interleaved=True),
                Stack("experts.gate_up_proj_bias", (GATE_BIAS, UP_BIAS), interleaved=True),
                Stack("experts.down_proj", (DOWN,), transposed=True),
                Stack("experts.down_proj_bias", (DOWN_BIAS,)),
            ),
            modules=("mlp", "router"),
            always_normalises_top_k=True,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            sinks=True,
            windows="layer_types",
        ),
        Architecture(model_type="mistral", causal_lm_class="MistralForCausalLM", windows="all"),
        Architecture(
            model_type="llama",
            causal_lm_class="LlamaForCausalLM",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
        ),
        Architecture(model_type="qwen2", causal_lm_class="Qwen2ForCausalLM", qkv_bias=True, windows="layer_types"),
        Architecture(
            model_type="qwen3",
            causal_lm_class="Qwen3ForCausalLM",
            qk_norm="head",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            windows="layer_types",
        ),
    )
}


@dataclass(frozen=True)
class EncoderDecoder:
    """One family of encoder-decoders. transformers runs these; here is what their weights and configs are called."""

    model_type: str
    model_class: str
    feed_forward: str
    """Prefix of an FFN or MoE block; takes `stack` ("encoder" or "decoder"), `layer` and its `place` in the layer."""
    activation_key: str
    scaled_head_key: str
    """Key of the config's flag for hidden states that are divided by √hidden before the head."""
    dense_sibling: str | None = None
    """model_type of the family that the same weights form when each MoE block becomes one FFN; None for a dense family."""
    experts_key: str = ""
    width_key: str = "d_ff"
    embedding: str = "shared.weight"
    head: str = "lm_head.weight"
    """Of its own only where embeddings are not tied."""

    def block(self, stack: str, layer: int) -> str:
        """Prefix of the FFN or MoE block; a decoder layer has attention to the encoder before it."""
        return self.feed_forward.format(stack=stack, layer=layer, place=STACKS.index(stack) + 1)


STACKS = ("encoder", "decoder")
EXPERT_OF_BLOCK = "experts.expert_{expert}"
ROUTER_OF_BLOCK = "router"
FFN_PROJECTIONS = ("wi.weight", "wo.weight")
"""[width, hidden] and [hidden, width] of an FFN or expert without a gate."""
GATED_PROJECTIONS = ("wi_0.weight", "wi_1.weight")
"""In place of the first where an FFN has one: what goes through the activation, and what that is multiplied by."""

ENCODER_DECODERS: dict[str, EncoderDecoder] = {
    row.model_type: row
    for row in (
        EncoderDecoder(
            model_type="switch_transformers",
            model_class="SwitchTransformersForConditionalGeneration",
            feed_forward="{stack}.block.{layer}.layer.{place}.mlp",
            activation_key="dense_act_fn",
            scaled_head_key="tie_word_embeddings",
            dense_sibling="t5",
            experts_key="num_experts",
        ),
        EncoderDecoder(
            model_type="t5",
            model_class="T5ForConditionalGeneration",
            feed_forward="{stack}.block.{layer}.layer.{place}.DenseReluDense",
            activation_key="feed_forward_proj",
            scaled_head_key="scale_decoder_outputs",
        ),
    )
}


CLASSIFIER_CLASSES = {"ForImageClassification": "images", "ForSequenceClassification": "texts"}
"""How the classes of transformers' classifiers end, which run any family of theirs, and what they are given."""


def classified(config: Mapping[str, Any]) -> str | None:
    """What a model with this config.json classifies, "images" or "texts"; None where it is no classifier."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    found = (what for end, what in CLASSIFIER_CLASSES.items() if isinstance(name, str) and name.endswith(end))
    return next(found, None)


@dataclass(frozen=True)
class MoeConfig:
    """One MoE layer's sizes."""

    experts: int
    experts_per_token: int
    expert_width: int
    normalise_top_k: bool
    shared_width: int = 0
    """Width of the shared expert, 0 for none."""
    weight_scale: float = 1.0
    """Factor of the routed weights."""
    scores: str = "softmax"
    """What the router makes of its logits: "softmax", or the "sigmoid" of each beside a bias that chooses."""
    groups: tuple[int, ...] = ()
    """The group of each expert; empty where a token may use any."""
    groups_per_token: int = 1
    """Groups that a token's experts are of, at most."""
    router_in_float32: bool = False
    scales_inputs: bool = False
    """An expert is given σ(its router logit) · x, and its output is added as it is."""
    least_sum: float = 0.0
    """What probabilities chosen with a bias are divided by at least."""
    swiglu: ClampedSwiglu | None = None
    """What is between an expert's projections; None for silu(g) · u."""
    mixer_jitter: float | None = None
    """ε of sparsemixer; None where experts are chosen together."""
    gate_network_width: int = 0
    """Hidden units of the router; 0 where the router is one matrix."""
    noise_epsilon: float | None = None
    """Least deviation of noisy top-k; None where the router has no noise."""


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, §2.1)."""

    query_rank: int
    """d_c′, of the queries' latent vector; 0 where queries are made of the hidden state itself."""
    key_value_rank: int
    """d_c, of the vector that keys and values are made of."""
    plain_dimension: int
    """d_h, of what a head's query and key have besides rotated dimensions."""
    rotary_dimension: int
    """d_h^R, of the rotated part, which all heads' keys share."""
    value_dimension: int
    """Of a head's value."""


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by ln(1 + ⌊(p + 1) / floor⌋) · slope + 1 (arXiv 2501.19399)."""

    floor: float
    slope: float


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: MoE where `moe` is set, otherwise one FFN of `dense_width`."""

    window: int | Chunk | None
    """Sliding window in tokens, or pieces of so many; None attends to everything before."""
    moe: MoeConfig | None
    dense_width: int
    rotates: bool = True
    unit_norm: bool = False
    """Rotated queries and keys are divided by their root mean square."""
    is_lightning: bool = False
    """Its attention is linear."""
    residuals: tuple[Residual, Residual] | None = None
    """Of attention and of the feed-forward block; None where what they give is added to what their norms are given."""


class Residual(NamedTuple):
    """alpha · norm(x) + beta · f(norm(x)), in place of x + f(norm(x))."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Multipliers:
    """Factors of a family that was trained with them; what is here changes nothing."""

    embedding: float = 1.0
    attention: float | None = None
    """Of the scores; None for one over the root of the head dimension."""
    residual: float = 1.0
    """Of what attention and feed-forward add."""
    logits: float = 1.0
    """A divisor."""


@dataclass(frozen=True)
class DecoderConfig:
    """Everything the decoder is built from, in plain numbers."""

    architecture: Architecture
    vocabulary_size: int
    hidden_size: int
    attention_heads: int
    key_value_heads: int
    head_dimension: int
    """Of queries and keys."""
    rotary_dimension: int
    """The first dimensions of a head, which are rotated; the last ones of latent attention."""
    rotary_pairs: bool
    """Neighbours are rotated together, not half against half."""
    latent: LatentConfig | None
    """None where heads have keys and values of their own."""
    qk_norm: str
    norm_epsilon: float
    qkv_bias: bool
    output_bias: bool
    head_bias: bool
    clip_qkv: float | None
    tied_embeddings: bool
    max_positions: int
    prediction_layers: int
    """Layers for multi-token prediction, which follow the last one in a checkpoint and are not read."""
    layers: tuple[LayerConfig, ...]
    multipliers: Multipliers
    temperature: Temperature | None
    """Of layers that do not rotate."""
    transformers_config: Any = field(repr=False, compare=False)
    """The family's transformers config: rotary embeddings are initialised from it."""

    @property
    def cached(self) -> tuple[int, int, int]:
        """What attention keeps of a position: groups, and dimensions of a group's key and of its value.

        Latent attention has one group: the latent vector in place of the key, the rotated key in place of the value.
        """
        if self.latent is None:
            return self.key_value_heads, self.head_dimension, self.head_dimension
        return 1, self.latent.key_value_rank, self.latent.rotary_dimension

    @property
    def caching_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep something of each position; all others have a state."""
        return tuple(index for index, layer in enumerate(self.layers) if not layer.is_lightning)

    @property
    def lightning_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a state of lightning attention."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.is_lightning)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        """Routed experts of each MoE layer, in order."""
        return tuple(layer.moe.experts for layer in self.layers if layer.moe is not None)

    @property
    def experts_by_layer(self) -> dict[int, int]:
        """The same by decoder layer index."""
        return dict(zip(self.moe_layers, self.experts_per_layer, strict=True))

    @property
    def experts_per_token(self) -> int:
        """The model's top-k; 0 for a dense model."""
        return max((layer.moe.experts_per_token for layer in self.layers if layer.moe is not None), default=0)


@dataclass(frozen=True)
class Wrapper:
    """A family whose models hold a language model of a row of the table beside other parts, which are not read."""

    config_key: str
    """Of the language model's own config."""
    prefix: str
    """Of the language model's tensors."""
    others: tuple[str, ...]
    """Prefixes of all other tensors."""


WRAPPERS = {"llama4": Wrapper("text_config", "language_model.", ("vision_model.", "multi_modal_projector."))}

# Keys that a config.json may carry and that change nothing in what the decoder computes.
_HARMLESS_KEYS = frozenset(
    [
        "auto_map",
        "block_configs",
        "quantization_config",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "pretraining_tp",
        "router_jitter_noise",
        "output_router_logits",
        "router_aux_loss_coef",
        "initializer_range",
        "attention_dropout",
        "num_experts",
        "num_local_experts",
        "norm_topk_prob",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_type",
        "max_window_layers",
        "use_sliding_window",
        "sliding_window",
        "head_dim",
        "layer_types",
        "moe_layers",
        "unsloth_version",
        "_name_or_path",
        "architectures",
        "model_type",
        "num_labels",
        "id2label",
        "label2id",
    ]
)
_WITHHELD_KEYS = frozenset(["model_type", "auto_map", "block_configs", "quantization_config"])
_FLAGS = ("output_hidden_states", "output_attentions", "return_dict", "use_cache", "tie_word_embeddings", "is_decoder")
_COUNTS = frozenset(["num_labels", "n_layer", "num_experts_per_tok"])
_SIZES = (
    "_size",
    "_dim",
    "_heads",
    "_rank",
    "_width",
    "_channels",
    "_inner",
    "_embd",
    "d_model",
    "d_ff",
    "_groups",
    "_group",
)
MAX_HEAD, MAX_SIZE, MAX_NUMBER = 1 << 16, 1 << 24, (1 << 31) - 1
"""The most dimensions of a head, elements along any dimension, and anything else that config.json says as an integer."""
MAX_LIST = 10_000
"""transformers makes lists as long as some keys of config.json say; longer ones belong to no real model."""


def load_transformers_config(config: Mapping[str, Any]) -> Any:
    """The family's transformers config object for a raw config.json."""
    # Imported here: transformers takes seconds to import, and `--help` must not wait for it.
    from transformers import CONFIG_MAPPING

    _refuse_absurd(config)
    for key in _FLAGS:
        if not isinstance(config.get(key), bool | None):
            raise CheckpointError(f"config.json: {key} is {shown(config[key])}; it must be true or false")
    row = ARCHITECTURES.get(config["model_type"])
    values = {key: value for key, value in _renamed(row, config).items() if key not in _WITHHELD_KEYS}
    try:
        return CONFIG_MAPPING[(row and row.read_as) or config["model_type"]](**values)
    except Exception as error:  # transformers and huggingface_hub validate with classes of their own
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"config.json cannot be read as a {config['model_type']} config: {reason}") from error


def _refuse_absurd(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for sizes of no real model, before transformers makes lists or tables of them."""
    pending: list[Any] = [config]
    while pending:
        found = pending.pop()
        for key, value in found.items() if isinstance(found, Mapping) else [(None, each) for each in found]:
            if isinstance(value, Mapping | list):
                pending.append(value)
            elif isinstance(value, int) and not -MAX_NUMBER <= value <= _most(key):
                where = "a number in a list" if key is None else key if key.isprintable() else shown(key)
                raise CheckpointError(f"config.json: {where} is {shown(value)}; that is no real model")


def _most(key: str | None) -> int:
    """The largest number that this key of config.json may have."""
    if key is None:
        return MAX_NUMBER
    if key in _COUNTS or (key.startswith("n") and key.endswith(("_layers", "_experts"))):
        return MAX_LIST
    if key.endswith("head_dim") or key in ("d_kv", "rotary_dim"):
        return MAX_HEAD
    return MAX_SIZE if key.endswith(_SIZES) else MAX_NUMBER


def check_token_ids(where: str, values: Mapping[str, Any], vocabulary: int) -> None:
    """Raise CheckpointError unless the special tokens in a config are of the vocabulary; -1 stands for none of it."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = values.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (type(token) is int and -1 <= token < vocabulary):
                raise CheckpointError(
                    f"{where}: {key} is {shown(value)}; it must be a token below {vocabulary}, or a list of tokens"
                )


def _renamed(row: Architecture | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with transformers' keys in the place of the authors'."""
    if row is None or not row.keys_of_authors:
        return dict(config)
    names = dict(row.keys_of_authors)
    values = {names.get(key, key): value for key, value in config.items()}
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        values["layer_types"] = [_KINDS_OF_AUTHORS.get(kind, kind) if isinstance(kind, int) else kind for kind in kinds]
    return values


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The row for a raw config.json; unknown families are refused by name."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type; is this a Hugging Face checkpoint?")
    if model_type in ENCODER_DECODERS:
        raise UnsupportedError(
            f"model family {model_type!r} is an encoder-decoder, which this command does not take; `compress densify` makes "
            "mixtures of that kind dense, `compress export` writes ONNX graphs of them, and transformers runs them"
        )
    if (what := classified(config)) is not None:
        raise UnsupportedError(
            f"this {model_type!r} is a classifier of {what}, which this command does not take; distill, evaluate, bench, "
            "export and inspect do"
        )
    if model_type not in ARCHITECTURES:
        raise UnsupportedError(
            f"model family {model_type!r} is not supported; supported families: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[model_type]


def language_model(config: dict[str, Any]) -> tuple[dict[str, Any], Wrapper | None]:
    """The config of the language model that a raw config.json describes, and the family around it, if there is one."""
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return config, None
    own = config.get(wrapper.config_key)
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json: {wrapper.config_key} is missing; give the config.json of the whole model")
    shared = ("quantization_config", "dtype", "torch_dtype")
    return {key: config[key] for key in shared if key in config} | own, wrapper


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Resolve a raw config.json. Raises UnsupportedError naming each attribute that the decoder cannot honour."""
    row = architecture_of(config)
    config = _renamed(row, config)
    family = load_transformers_config(config)
    _refuse_what_is_lacking(row, config, family)
    counts = experts_per_layer(row, config, family)
    heads = positive(family, "num_attention_heads")
    hidden = positive(family, "hidden_size")
    if getattr(family, "head_dim", 0) is None:
        family.head_dim = hidden // heads  # transformers' rope initialisers take None for a number
    latent = _latent(family) if row.latent_attention else None
    _check_heads(config, family, hidden, heads, latent)
    size = latent.plain_dimension + latent.rotary_dimension if latent else getattr(family, "head_dim", None)
    size = size or hidden // heads
    partial = family.rope_parameters.get("partial_rotary_factor", 1.0) if row.partial_rotary else 1.0
    rotated = latent.rotary_dimension if latent else int(size * partial)
    if row.rotary_dimension_key is not None:
        rotated = _rotary_dimension(row.rotary_dimension_key, family, size)
    return DecoderConfig(
        architecture=row,
        vocabulary_size=positive(family, "vocab_size"),
        hidden_size=hidden,
        attention_heads=heads,
        key_value_heads=positive(family, "num_key_value_heads"),
        head_dimension=size,
        rotary_dimension=rotated,
        rotary_pairs=_flag(row.rotary_pairs, family),
        latent=latent,
        qk_norm=row.qk_norm if row.qk_norm_key is None or getattr(family, row.qk_norm_key, False) else "none",
        norm_epsilon=_epsilon(family),
        qkv_bias=_flag(row.qkv_bias, family),
        output_bias=_flag(row.output_bias, family),
        head_bias=_flag(row.head_bias, family),
        clip_qkv=_clip(family) if row.clip_qkv else None,
        tied_embeddings=bool(family.tie_word_embeddings),
        max_positions=positive(family, "max_position_embeddings"),
        prediction_layers=_natural(family, row.prediction_layers_key) if row.prediction_layers_key else 0,
        layers=tuple(_layer_config(row, config, family, index, count) for index, count in enumerate(counts)),
        multipliers=_multipliers(family) if row.multipliers else Multipliers(),
        temperature=_temperature(row, family),
        transformers_config=family,
    )


def check_onnx(config: DecoderConfig) -> None:
    """Raise UnsupportedError for a model that cannot be written as an ONNX graph."""
    if (reason := config.architecture.not_onnx) is not None:
        raise UnsupportedError(f"a {config.architecture.model_type} cannot be exported: {reason}")


def positive(family: Any, key: str) -> int:
    """A number that there must be. Raises CheckpointError for anything else."""
    value = getattr(family, key, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _natural(family: Any, key: str) -> int:
    """0 for None."""
    return 0 if getattr(family, key, None) in (None, 0) else positive(family, key)


def _latent(family: Any) -> LatentConfig:
    return LatentConfig(
        query_rank=_natural(family, "q_lora_rank"),
        key_value_rank=positive(family, "kv_lora_rank"),
        plain_dimension=positive(family, "qk_nope_head_dim"),
        rotary_dimension=positive(family, "qk_rope_head_dim"),
        value_dimension=positive(family, "v_head_dim"),
    )


def _check_heads(
    config: Mapping[str, Any], family: Any, hidden: int, heads: int, latent: LatentConfig | None = None
) -> None:
    """Raise CheckpointError for sizes that do not divide, which shapes alone would not show."""
    groups, size = positive(family, "num_key_value_heads"), getattr(family, "head_dim", None) or hidden // heads
    if latent is not None:
        if heads != groups or latent.rotary_dimension % 2:
            raise CheckpointError(
                f"config.json: latent attention of {heads} heads has num_key_value_heads {groups} and rotates "
                f"{latent.rotary_dimension} dimensions; it needs as many of the one as of the other, and an even number"
            )
        return
    if heads % groups:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {groups} key-value heads evenly")
    if not config.get("head_dim") and hidden % heads:
        raise CheckpointError(f"config.json: hidden_size {hidden} is not divisible by {heads} attention heads")
    if size < 2 or size % 2:
        raise CheckpointError(f"config.json: a head has {size} dimensions; rotary positions need an even number")


def _rotary_dimension(key: str, family: Any, size: int) -> int:
    """All of a head's dimensions where config.json does not say."""
    rotated = _natural(family, key) or size
    if rotated > size or rotated % 2:
        raise CheckpointError(f"config.json: {key} is {rotated}; of {size} dimensions an even number can be rotated")
    return rotated


def _epsilon(family: Any) -> float:
    if not (value := _number("rms_norm_eps", family.rms_norm_eps)) <= 1:
        raise CheckpointError(f"config.json: rms_norm_eps is {value}; it must be a small number")
    return value


def _clip(family: Any) -> float | None:
    value = getattr(family, "clip_qkv", None)
    if value is not None and not (isinstance(value, int | float) and 0 < value < 1e38):
        raise CheckpointError(f"config.json: clip_qkv is {shown(value)}; it must be a positive number")
    return value


def _temperature(row: Architecture, family: Any) -> Temperature | None:
    if row.temperature_keys is None or not getattr(family, row.temperature_keys[0]):
        return None
    floor, slope = (_number(key, getattr(family, key)) for key in row.temperature_keys[1:])
    if not floor:
        raise CheckpointError(f"config.json: {row.temperature_keys[1]} is {floor}; it must be a positive number")
    return Temperature(floor, slope)


def _multipliers(family: Any) -> Multipliers:
    keys = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    values = [_number(key, getattr(family, key)) for key in keys]
    if not all(values):
        raise CheckpointError(f"config.json: {', '.join(keys)} are {values}; they must be positive numbers")
    return Multipliers(*values)


def _flag(rule: bool | str, family: Any) -> bool:
    return bool(getattr(family, rule, False)) if isinstance(rule, str) else rule


def _refuse_what_is_lacking(row: Architecture, config: Mapping[str, Any], family: Any) -> None:
    lacking = []
    if (act := getattr(family, "hidden_act", "silu")) not in ("silu", "swish"):
        lacking.append(f"hidden_act={act!r}")
    if getattr(family, "mlp_bias", False):
        lacking.append("mlp_bias=true")
    rope = family.rope_parameters or {}
    if rope.get("rope_type", "default") not in row.rope_types:
        lacking.append(f"rope_type={rope.get('rope_type')!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        lacking.append("rope_parameters for each kind of layer")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not row.partial_rotary:
        lacking.append(f"partial_rotary_factor={rope['partial_rotary_factor']}")
    has = {"linear": row.lightning_attention, "chunked": row.chunk_key is not None}
    kinds = [kind for kind, there in has.items() if not there]
    if any(kind in own for own in getattr(family, "layer_types", None) or () for kind in kinds):
        lacking.append(f"layer_types={sorted(set(family.layer_types))}")
    if row.lightning_attention and not {"full_attention"} <= set(own := family.layer_types or ()) <= _LIGHTNING_KINDS:
        lacking.append(f"layer_types={sorted(set(own))}")
    for key, honoured in row.own_settings.items():
        values = config[key] if isinstance(config.get(key), list) else [config.get(key)]
        said = key in config or bool(row.keys_of_authors)  # theirs have defaults of their own
        if honoured is not None and said and any(value not in honoured for value in values):
            lacking.append(f"{key}={config.get(key)!r}")
    known = set(type(family)().to_dict()) | _HARMLESS_KEYS | set(row.own_settings) | {row.prediction_layers_key}
    lacking += [f"{key}={config[key]!r}" for key in config if key not in known and config[key] not in (None, False)]
    if lacking:
        raise UnsupportedError(
            f"config.json of this {row.model_type} asks for what the engine does not have: {', '.join(lacking)[:500]}; "
            "remove it only if it has no effect on this model"
        )


def experts_per_layer(row: Architecture, config: Mapping[str, Any], family: Any) -> list[int]:
    """Routed experts per decoder layer, 0 where the layer is dense."""
    layers = positive(family, "num_hidden_layers")
    if not row.experts_keys:
        return [0] * layers
    declared = [config[key] for key in row.experts_keys if isinstance(config.get(key), int)]
    if len(set(declared)) > 1:
        raise CheckpointError(f"config.json: {' and '.join(row.experts_keys)} disagree: {declared}")
    experts, per_token = positive(family, row.experts_keys[0]), positive(family, row.experts_per_token_key)
    if per_token > experts:
        raise CheckpointError(
            f"config.json: a token cannot use {per_token} of {experts} experts ({row.experts_per_token_key})"
        )
    counts = [experts if _holds_experts(row, family, index) else 0 for index in range(layers)]
    blocks = config.get("block_configs")
    return counts if blocks is None else _block_config_counts(blocks, counts)


def _holds_experts(row: Architecture, family: Any, index: int) -> bool:
    only_dense = set(getattr(family, "mlp_only_layers", None) or ()) if row.sparse_step else set()
    step = positive(family, "decoder_sparse_step") if row.sparse_step else 1
    if index in only_dense or (index + 1) % step:
        return False
    if row.layers_key is not None and index not in (getattr(family, row.layers_key) or ()):
        return False
    if row.layer_range_keys is not None:
        first, last, every = row.layer_range_keys
        if not _natural(family, first) <= index <= _natural(family, last) or (index + 1) % positive(family, every):
            return False
    if row.dense_first_key is not None and index < _natural(family, row.dense_first_key):
        return False
    return row.layer_step_key is None or index % (_natural(family, row.layer_step_key) or 1) == 0


def _block_config_counts(blocks: Any, counts: list[int]) -> list[int]:
    """Per-layer counts of a non-uniform artifact: `block_configs[i].ffn.moe.num_local_experts`."""
    if not isinstance(blocks, list) or len(blocks) != len(counts):
        raise CheckpointError(f"config.json: block_configs must be a list of {len(counts)} layers")
    result = []
    for index, (block, count) in enumerate(zip(blocks, counts, strict=True)):
        try:
            moe = block["ffn"]["moe"]
            kept = 0 if moe is None else moe["num_local_experts"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"config.json: block_configs[{index}] lacks ffn.moe.num_local_experts") from error
        if type(kept) is not int or not 0 <= kept <= count or (kept == 0) != (count == 0):
            raise CheckpointError(
                f"config.json: block_configs[{index}].ffn.moe.num_local_experts is {kept!r}; layer {index} can hold "
                f"{'no experts' if count == 0 else f'1 to {count}'}"
            )
        result.append(kept)
    return result


def _layer_config(row: Architecture, config: Mapping[str, Any], family: Any, index: int, experts: int) -> LayerConfig:
    moe = None
    if experts:
        groups = _groups(row, config, family, index, experts)
        moe = MoeConfig(
            experts=experts,
            # Where pruning left fewer than k, the layer's own top-k shrinks to what is left.
            experts_per_token=min(positive(family, row.experts_per_token_key), experts),
            expert_width=_expert_width(row, family, index, experts),
            normalise_top_k=row.always_normalises_top_k or bool(getattr(family, "norm_topk_prob", False)),
            shared_width=_shared_width(row, family),
            scores=row.router_scores,
            groups=groups,
            groups_per_token=positive(family, row.groups_per_token_key) if groups else 1,
            router_in_float32=row.router_in_float32,
            scales_inputs=row.scales_inputs,
            weight_scale=_weight_scale(row, family, index),
            least_sum=0.0 if row.least_sum_key is None else _number(row.least_sum_key, getattr(family, row.least_sum_key)),
            swiglu=_swiglu(row, family),
            mixer_jitter=_mixer_jitter(row, family),
            gate_network_width=_gate_network_width(row, family),
            noise_epsilon=_noise_epsilon(row, family),
        )
    rotates = row.rotates_key is None or bool(_of_layer(family, row.rotates_key, index))
    unit_norm = row.unit_norm_key is not None and rotates and bool(getattr(family, row.unit_norm_key))
    window = _window(row, family, index)
    is_lightning = row.lightning_attention and _of_layer(family, "layer_types", index) == "linear_attention"
    residuals = _residuals(row, family, is_lightning) if row.residual_keys else None
    dense_width = positive(family, row.dense_width_key)
    return LayerConfig(window, moe, dense_width, rotates, unit_norm, is_lightning, residuals)


def _residuals(row: Architecture, family: Any, is_lightning: bool) -> tuple[Residual, Residual]:
    attention, lightning, feed_forward = (
        Residual(*(_number(key, getattr(family, key)) for key in keys)) for keys in row.residual_keys
    )
    return lightning if is_lightning else attention, feed_forward


def _of_layer(family: Any, key: str, index: int) -> Any:
    """An entry of a list with one for each layer."""
    values = getattr(family, key, None)
    if not isinstance(values, list) or len(values) < positive(family, "num_hidden_layers"):
        raise CheckpointError(f"config.json: {key} must be a list with an entry for each layer")
    return values[index]


def _shared_width(row: Architecture, family: Any) -> int:
    if row.shared_expert is None:
        return 0
    if row.shared_experts_key is None:
        return _natural(family, row.shared_width_key)
    return _natural(family, row.shared_experts_key) * positive(family, row.expert_width_key)


def _group_count(row: Architecture, family: Any) -> int:
    """1 where experts are in no groups."""
    if row.groups_key is None or (row.grouped_if and getattr(family, row.grouped_if[0], None) != row.grouped_if[1]):
        return 1
    return _natural(family, row.groups_key) or 1


def _groups(row: Architecture, config: Mapping[str, Any], family: Any, index: int, experts: int) -> tuple[int, ...]:
    """The group of each of a layer's experts: as `block_configs` says, or all of equal size, one after the other."""
    count = _group_count(row, family)
    if count == 1:
        return ()
    used, per_token = positive(family, row.groups_per_token_key), positive(family, row.experts_per_token_key)
    if used > count:
        raise CheckpointError(f"config.json: a token cannot use {used} of {count} groups ({row.groups_per_token_key})")
    blocks = config.get("block_configs")
    groups = None if blocks is None else blocks[index]["ffn"]["moe"].get(GROUPS_KEY)
    if groups is not None:
        own = groups if isinstance(groups, list) else []
        if len(own) != experts or not all(type(group) is int and 0 <= group < count for group in own):
            raise CheckpointError(
                f"config.json: block_configs[{index}].ffn.moe.{GROUPS_KEY} is {shown(groups)}; it must be a list of "
                f"{experts} groups from 0 to {count - 1}"
            )
        return tuple(own)
    if experts % count:
        raise CheckpointError(f"config.json: {experts} experts cannot share {count} groups evenly ({row.groups_key})")
    if per_token > used * (experts // count):
        raise CheckpointError(
            f"config.json: a token cannot use {per_token} experts of {used} groups that have {experts // count} each"
        )
    return tuple(expert // (experts // count) for expert in range(experts))


def _expert_width(row: Architecture, family: Any, index: int, experts: int) -> int:
    """Hidden units of each of a layer's experts. Raises UnsupportedError where they differ in width."""
    width = positive(family, row.expert_width_key)
    if row.expert_sizes_key is None:
        return width
    count = positive(family, row.experts_keys[0])
    if width % count:
        raise CheckpointError(f"config.json: {count} experts cannot share {row.expert_width_key} {width} evenly")
    width //= count
    sizes = getattr(family, row.expert_sizes_key, None)
    if sizes is None:
        return width
    if not isinstance(sizes, list) or len(sizes) != positive(family, "num_hidden_layers"):
        raise CheckpointError(f"config.json: {row.expert_sizes_key} must be a list for each layer, or null")
    if sizes[index] != [width] * experts:
        raise UnsupportedError(
            f"config.json: {row.expert_sizes_key}[{index}] is {shown(sizes[index])}; the engine has experts of one width, "
            f"here {experts} of {width}"
        )
    return width


def _weight_scale(row: Architecture, family: Any, index: int) -> float:
    if row.weight_scale_key is None:
        return 1.0
    value = getattr(family, row.weight_scale_key, 1.0)
    if isinstance(value, list) and len(value) == positive(family, "num_hidden_layers"):
        value = value[index]
    return _number(row.weight_scale_key, value)


def _swiglu(row: Architecture, family: Any) -> ClampedSwiglu | None:
    if row.swiglu_keys is None:
        return None
    alpha, limit = (_number(key, getattr(family, key)) for key in row.swiglu_keys)
    if not limit:
        raise CheckpointError(f"config.json: {row.swiglu_keys[1]} is {limit}; it must be a positive number")
    return ClampedSwiglu(alpha, limit)


def _mixer_jitter(row: Architecture, family: Any) -> float | None:
    key = row.mixer_jitter_key
    if key is None:
        return None
    if (used := positive(family, row.experts_per_token_key)) != row.least_experts:
        raise UnsupportedError(
            f"config.json: {row.experts_per_token_key} is {used}; the router of a {row.model_type} takes {row.least_experts}"
        )
    return _number(key, getattr(family, key))


def _gate_network_width(row: Architecture, family: Any) -> int:
    if row.gate_network is None:
        return 0
    recorded = getattr(family, GATE_WIDTH_KEY, None) is not None
    return positive(family, GATE_WIDTH_KEY if recorded else row.experts_keys[0])


def _noise_epsilon(row: Architecture, family: Any) -> float | None:
    if row.gate_network is None or not getattr(family, row.gate_network.noise_key, True):
        return None
    return _number(row.gate_network.epsilon_key, getattr(family, row.gate_network.epsilon_key, 1e-2))


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e38:
        raise CheckpointError(f"config.json: {key} is {shown(value)}; it must be a number from 0, or one for each layer")
    return float(value)


def _window(row: Architecture, family: Any, index: int) -> int | Chunk | None:
    if row.chunk_key is not None and _of_layer(family, "layer_types", index) == "chunked_attention":
        return None if getattr(family, row.chunk_key) is None else Chunk(positive(family, row.chunk_key))
    if row.windows == "none":
        return None
    if row.windows == "layer_types" and family.layer_types[index] != "sliding_attention":
        return None
    return _natural(family, "sliding_window") or None


def expert_tensor(row: Architecture, layer: int, expert: int, projection: int) -> str:
    """Name on disk of an expert's gate (0), up (1) or down (2) projection, or of its bias (3 more)."""
    name = row.expert.format(expert=expert, projection=row.expert_projections[projection % GATE_BIAS])
    if projection >= GATE_BIAS:
        name = name.removesuffix("weight") + "bias"
    return f"{row.block.format(layer=layer)}.{name}"


def expert_parts(row: Architecture) -> range:
    """Of how many tensors an expert is, as they are numbered."""
    return range(DOWN_BIAS + 1 if row.expert_biases else DOWN + 1)


def router_tensor(row: Architecture, layer: int) -> str:
    """Name on disk of a layer's router weight [experts, hidden], of a gate network [experts, hidden units]."""
    return f"{row.block.format(layer=layer)}.{row.router}"


def gate_hidden_tensor(row: Architecture, layer: int) -> str:
    """Name on disk of a gate network's first layer [hidden units, hidden]."""
    assert row.gate_network is not None
    return f"{row.block.format(layer=layer)}.{row.gate_network.hidden}"


def router_bias_tensor(row: Architecture, layer: int) -> str | None:
    """Name on disk of what is added to the scores of a layer's experts to choose them [experts]; None where nothing is."""
    return None if row.router_bias is None else f"{row.block.format(layer=layer)}.{row.router_bias}"


def is_router_bias(row: Architecture, name: str) -> bool:
    """Whether a tensor is what is added to scores to choose experts."""
    return row.router_bias is not None and name.endswith(f".{row.router_bias}")


def router_noise_tensor(row: Architecture, layer: int) -> str:
    """Name on disk of what noisy top-k is made of in training [experts, hidden]."""
    assert row.gate_network is not None
    return f"{row.block.format(layer=layer)}.{row.gate_network.noise}"


def logit_bias_tensor(row: Architecture, layer: int) -> str:
    """Name on disk of what is added to a layer's router logits [experts]."""
    return f"{row.block.format(layer=layer)}.{row.logit_bias}"


def router_tensors(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """What a layer's router logits are made of, with shapes."""
    row, moe = config.architecture, config.layers[layer].moe
    assert moe is not None
    if not moe.gate_network_width:
        shapes: dict[str, tuple[int, ...]] = {router_tensor(row, layer): (moe.experts, config.hidden_size)}
        if row.logit_bias is not None:
            shapes[logit_bias_tensor(row, layer)] = (moe.experts,)
        return shapes
    return {
        gate_hidden_tensor(row, layer): (moe.gate_network_width, config.hidden_size),
        router_tensor(row, layer): (moe.experts, moe.gate_network_width),
    }


def noise_tensors(config: DecoderConfig, layer: int) -> dict[str, tuple[int, int]]:
    """What the noise of a layer's router is made of, with shapes; nothing where it has none."""
    moe = config.layers[layer].moe
    assert moe is not None
    if moe.noise_epsilon is None:
        return {}
    return {router_noise_tensor(config.architecture, layer): (moe.experts, config.hidden_size)}


def expert_rows(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer that have one row for each expert, with shapes."""
    row, bias = config.architecture, router_bias_tensor(config.architecture, layer)
    hidden = {gate_hidden_tensor(row, layer)} if row.gate_network is not None else set()
    shapes = {name: shape for name, shape in router_tensors(config, layer).items() if name not in hidden}
    if bias is not None:
        shapes[bias] = (1,) * (row.router_bias_dimensions - 1) + (config.experts_by_layer[layer],)
    return shapes | noise_tensors(config, layer)


def dense_tensor(layer: int, projection: int) -> str:
    """A dense FFN's gate (0), up (1) or down (2) projection, as most families have it on disk (row.dense_block)."""
    return f"model.layers.{layer}.mlp.{('gate_proj', 'up_proj', 'down_proj')[projection]}.weight"


def shared_tensor(row: Architecture, layer: int, projection: int) -> str:
    """Name on disk of the shared expert's gate (0), up (1) or down (2) projection."""
    part = ("gate_proj", "up_proj", "down_proj")[projection]
    return f"{row.block.format(layer=layer)}.{row.shared_expert}.{part}.weight"


def stacks_on_disk(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """Where a checkpoint of the family has a layer's experts, under full names; nothing where they lie one by one."""
    return tuple(replace(stack, name=f"{row.block.format(layer=layer)}.{stack.name}") for stack in row.stacks)


def shared_stacks(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """The same of a layer's shared expert."""
    return tuple(replace(stack, name=f"model.layers.{layer}.{stack.name}") for stack in row.shared_stacks)


def stacks_in_memory(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """The same as transformers 5 holds them, and writes them if told to; some families have them so on disk too."""
    block = f"model.layers.{layer}.{row.modules[0]}.experts"
    stacks = Stack(f"{block}.gate_up_proj", (GATE, UP)), Stack(f"{block}.down_proj", (DOWN,))
    on_disk = stacks_on_disk(row, layer)
    return on_disk if {stack.name for stack in stacks} <= {stack.name for stack in on_disk} else stacks


def router_in_memory(row: Architecture, layer: int) -> str:
    """The router's name beside them."""
    return f"model.layers.{layer}.{'.'.join(row.modules)}.weight"


def expert_shapes(config: DecoderConfig, layer: int) -> tuple[tuple[int, ...], ...]:
    """Of each tensor of one of a layer's experts."""
    moe, hidden = config.layers[layer].moe, config.hidden_size
    assert moe is not None
    weights = tuple(shape for _, shape in _ffn(str, moe.expert_width, hidden))
    biases = ((moe.expert_width,), (moe.expert_width,), (hidden,)) if config.architecture.expert_biases else ()
    return weights + biases


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape, experts one by one, in the order of the layers."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary_size, config.hidden_size)}
    for index in range(len(config.layers)):
        shapes.update(layer_tensors(config, index))
    shapes.update(_norm_tensors(config, "model.norm"))
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, config.hidden_size)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocabulary_size,)
    return shapes


def _norm_tensors(config: DecoderConfig, name: str) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if config.architecture.layer_norm else ("weight",)
    return {f"{name}.{part}": (config.hidden_size,) for part in parts}


def layer_tensors(config: DecoderConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one decoder layer with their shapes."""
    row, layer, hidden = config.architecture, config.layers[index], config.hidden_size
    prefix = f"model.layers.{index}"
    shapes = _norm_tensors(config, f"{prefix}.input_layernorm")
    shapes.update(_attention_tensors(config, index))
    shapes.update(_norm_tensors(config, f"{prefix}.post_attention_layernorm"))
    if layer.moe is None:
        shapes.update(_ffn(lambda p: dense_tensor(index, p), layer.dense_width, hidden))
        return shapes
    shapes.update(router_tensors(config, index) | expert_rows(config, index))
    of_expert = expert_shapes(config, index)
    for expert in range(layer.moe.experts):
        shapes.update((expert_tensor(row, index, expert, part), shape) for part, shape in enumerate(of_expert))
    if layer.moe.shared_width:
        shapes.update(_ffn(lambda p: shared_tensor(row, index, p), layer.moe.shared_width, hidden))
        if (gate := shared_gate_tensor(row, index)) is not None:
            shapes[gate] = (1, hidden)
    return shapes


def attention_weights(config: DecoderConfig, index: int) -> list[str]:
    """Names on disk of the matrices of a layer's attention that are multiplied by as they are.

    Not of the one that keys and values of latent attention are made by: single positions are read with its parts (absorbed).
    """
    tensors = _attention_tensors(config, index)
    return [name for name, shape in tensors if len(shape) == 2 and not name.endswith(f".{LATENT_UP}")]


def feed_forward_weights(config: DecoderConfig, index: int) -> list[str]:
    """Names on disk of the matrices of a layer's experts, the shared one among them, or of its dense FFN."""
    row, moe = config.architecture, config.layers[index].moe
    if moe is None:
        return [dense_tensor(index, projection) for projection in range(3)]
    names = [expert_tensor(row, index, expert, projection) for expert in range(moe.experts) for projection in range(3)]
    return names + [shared_tensor(row, index, projection) for projection in range(3) if moe.shared_width]


def shared_gate_tensor(row: Architecture, layer: int) -> str | None:
    """Name on disk of the gate that scales the shared expert, [1, hidden]; None where nothing scales it."""
    return None if row.shared_gate is None else f"{row.block.format(layer=layer)}.{row.shared_gate}"


def _ffn(name: Any, width: int, hidden: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield name(0), (width, hidden)
    yield name(1), (width, hidden)
    yield name(2), (hidden, width)


def _latent_tensors(config: DecoderConfig, latent: LatentConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, rank = config.hidden_size, latent.key_value_rank
    query = config.attention_heads * config.head_dimension
    if latent.query_rank:
        yield f"{prefix}.q_a_proj.weight", (latent.query_rank, hidden)
        if config.qkv_bias:
            yield f"{prefix}.q_a_proj.bias", (latent.query_rank,)
        yield f"{prefix}.q_a_layernorm.weight", (latent.query_rank,)
        yield f"{prefix}.q_b_proj.weight", (query, latent.query_rank)
    else:
        yield f"{prefix}.q_proj.weight", (query, hidden)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + latent.rotary_dimension, hidden)
    if config.qkv_bias:
        yield f"{prefix}.kv_a_proj_with_mqa.bias", (rank + latent.rotary_dimension,)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.{LATENT_UP}", (config.attention_heads * (latent.plain_dimension + latent.value_dimension), rank)
    yield f"{prefix}.o_proj.weight", (hidden, config.attention_heads * latent.value_dimension)
    if config.output_bias:
        yield f"{prefix}.o_proj.bias", (hidden,)


def sinks_tensor(layer: int) -> str:
    """Name on disk of a layer's attention sinks [heads]."""
    return f"model.layers.{layer}.self_attn.{SINKS}"


def derived_tensors(config: DecoderConfig) -> list[str]:
    """Tensors that transformers writes beside the weights and config.json says too: the decays of lightning attention."""
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    return [f"model.layers.{layer}.self_attn.{name}" for layer in config.lightning_layers for name in names]


def _attention_tensors(config: DecoderConfig, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix = f"model.layers.{index}.self_attn"
    if config.latent is not None:
        yield from _latent_tensors(config, config.latent, prefix)
        return
    if config.layers[index].is_lightning:
        width = config.attention_heads * config.head_dimension
        shapes = (3 * width, config.hidden_size), (width, config.hidden_size), (width,), (config.hidden_size, width)
        yield from ((f"{prefix}.{name}", shape) for name, shape in zip(LIGHTNING, shapes, strict=True))
        return
    hidden, size = config.hidden_size, config.head_dimension
    query, key = config.attention_heads * size, config.key_value_heads * size
    for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        yield f"{prefix}.{name}.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"{prefix}.{name}.bias", (rows,)
    yield f"{prefix}.o_proj.weight", (hidden, query)
    if config.output_bias:
        yield f"{prefix}.o_proj.bias", (hidden,)
    if config.qk_norm != "none":
        per_head = config.qk_norm == "head"
        yield f"{prefix}.q_norm.weight", (size if per_head else query,)
        yield f"{prefix}.k_norm.weight", (size if per_head else key,)
    if config.architecture.sinks:
        yield f"{prefix}.{SINKS}", (config.attention_heads,)


def with_experts(
    config: dict[str, Any], experts_per_decoder_layer: list[int], groups: Mapping[int, Sequence[int]] | None = None
) -> dict[str, Any]:
    """config.json of the same model with other expert counts (0 = the layer was dense and stays so).

    groups: of each expert of a layer that has groups, by layer. Uniform counts, also in all groups, give a plain config of
    the family. Others add `block_configs`; the caller adds `auto_map`.
    """
    row, family = architecture_of(config), load_transformers_config(config)
    counts = sorted({count for count in experts_per_decoder_layer if count})
    changed = {key: value for key, value in _renamed(row, config).items() if key not in _OF_ANOTHER}
    changed |= {"model_type": row.written_as or row.model_type} | _without_prediction_layers(row)
    largest = counts[-1]
    for key in row.experts_keys:
        changed[key] = largest
    # A config may leave its family's default out.
    per_token, group_count = getattr(family, row.experts_per_token_key), _group_count(row, family)
    is_plain = len(counts) == 1 and _is_plain(row, largest, group_count, (groups or {}).values())
    if is_plain and group_count > 1:
        per_token = min(per_token, positive(family, row.groups_per_token_key) * (largest // group_count))
    changed[row.experts_per_token_key] = min(per_token, largest)
    if row.experts_per_token_copy in config:
        changed[row.experts_per_token_copy] = min(per_token, largest)
    changed |= _changed_widths(row, config, experts_per_decoder_layer)
    if not is_plain:
        changed["block_configs"] = [
            {"ffn": {"moe": _block_config(count, (groups or {}).get(index)) if count else None}}
            for index, count in enumerate(experts_per_decoder_layer)
        ]
    return changed


_OF_ANOTHER = frozenset(["block_configs", "auto_map", "quantization_config", GATE_WIDTH_KEY])
"""Config keys that say something of the weights that a result is made from."""


def _without_prediction_layers(row: Architecture) -> dict[str, Any]:
    return {} if row.prediction_layers_key is None else {row.prediction_layers_key: 0}


def _is_plain(row: Architecture, experts: int, groups: int, of_layers: Iterable[Sequence[int]]) -> bool:
    """Whether the family's own classes build layers of so many experts, whose groups are `of_layers`."""
    each, rest = divmod(experts, groups)
    even = [expert // max(each, 1) for expert in range(experts)]
    if rest or any(list(own) != even for own in of_layers):
        return False
    # transformers judges every group by its two best experts, also where all experts are one group.
    return each >= 2 or row.router_scores != "sigmoid" or not row.in_transformers


def _block_config(count: int, groups: Sequence[int] | None) -> dict[str, Any]:
    return {"num_local_experts": count} | ({GROUPS_KEY: list(groups)} if groups else {})


def _changed_widths(row: Architecture, config: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """What else depends on the number of experts: their sizes, and the router's hidden units, which stay as they are."""
    changed: dict[str, Any] = {}
    if row.expert_sizes_key is None and row.gate_network is None:
        return changed
    moe = next(layer.moe for layer in decoder_config(config).layers if layer.moe is not None)
    if row.expert_sizes_key is not None:
        changed[row.expert_width_key] = max(counts) * moe.expert_width
        changed[row.expert_sizes_key] = [[moe.expert_width] * count for count in counts]
    if moe.gate_network_width not in (0, max(counts)):
        changed[GATE_WIDTH_KEY] = moe.gate_network_width
    return changed


def otherwise_in_transformers(config: Mapping[str, Any]) -> str | None:
    """Why transformers' class computes another function than the model that was trained; None where it does not."""
    if architecture_of(config).rotary_dimension_key is None:
        return None
    whole = decoder_config(config)
    if whole.rotary_dimension == whole.head_dimension:
        return None
    return f"its class rotates all of a head's {whole.head_dimension} dimensions, and this model {whole.rotary_dimension}"


def loading_note(config: Mapping[str, Any], few_bits: bool = False) -> str | None:
    """Who loads a checkpoint with this config.json, in a clause; None where transformers does.

    few_bits: with packed weights, which are always one by one.
    """
    row = architecture_of(config)
    if few_bits and (row.stacks or row.shared_stacks):
        return f"only moe-compress loads it: experts of a {row.model_type} are stacked elsewhere, and here packed one by one"
    if few_bits and not row.in_transformers:
        return f"only moe-compress loads it: transformers has no {row.model_type}"
    if (reason := otherwise_in_transformers(config)) is not None:
        return f"transformers loads another model: {reason}; moe-compress loads it as it was trained"
    if row.in_transformers:
        return None
    if "block_configs" in config or GATE_WIDTH_KEY in config:
        network = " and as many hidden units in every gate network" if row.gate_network else ""
        return (
            f"only moe-compress loads it: transformers has no {row.model_type}, and the class that its authors publish "
            f"needs as many experts in every layer{network}"
        )
    return f"transformers has no {row.model_type}: moe-compress loads it, and the class that its authors publish"


def as_dense(config: dict[str, Any], width: int) -> dict[str, Any]:
    """config.json of the dense sibling, each FFN `width` wide.

    A family without a sibling stays what it is, with one expert of that width in each MoE layer, which every token uses
    with weight 1: as dense a model as its checkpoints can express.
    """
    row = architecture_of(config)
    if row.dense_sibling is None:
        counts = [int(layer.moe is not None) for layer in decoder_config(config).layers]
        return with_experts(config, counts) | {row.expert_width_key: width, "architectures": [row.causal_lm_class]}
    sibling = ARCHITECTURES[row.dense_sibling]
    kind = {"model_type": sibling.model_type, "architectures": [sibling.causal_lm_class], "intermediate_size": width}
    if sibling.dense_first_key is not None:  # the mixture's own family, of which all layers may be dense
        kept = {key: value for key, value in config.items() if key not in _OF_ANOTHER}
        kind[sibling.dense_first_key] = positive(load_transformers_config(config), "num_hidden_layers")
        return kept | kind | _without_prediction_layers(sibling)
    from transformers import CONFIG_MAPPING

    # What the config says, and what it leaves to its family's defaults where the sibling's are others. The rotary
    # parameters are always written whole: old configs have them under names of their own.
    known = CONFIG_MAPPING[sibling.model_type]().to_dict()
    meant = load_transformers_config(config).to_dict()
    kept = {key: value for key, value in config.items() if key in known or key in ("rope_theta", "torch_dtype")}
    kept |= {key: meant[key] for key in known if key not in config and key in meant and meant[key] != known[key]}
    kept["rope_parameters"] = meant["rope_parameters"]
    if known.get("head_dim") is not None and "head_dim" not in meant:
        kept["head_dim"] = decoder_config(config).head_dimension
    kept |= kind
    kept.setdefault("sliding_window", None)
    return kept


def as_dense_encoder_decoder(config: dict[str, Any], width: int) -> dict[str, Any]:
    """config.json of the dense sibling of an encoder-decoder mixture, each FFN `width` wide.

    Raises UnsupportedError naming what the sibling cannot express.
    """
    row = ENCODER_DECODERS[config["model_type"]]
    assert row.dense_sibling is not None
    sibling = ENCODER_DECODERS[row.dense_sibling]
    from transformers import CONFIG_MAPPING

    meant = load_transformers_config(config).to_dict()
    _refuse_what_has_no_place(row, sibling, config, meant)
    known = CONFIG_MAPPING[sibling.model_type]().to_dict()
    kept = {key: value for key, value in config.items() if key in known or key == "torch_dtype"}
    kept |= {key: meant[key] for key in known if key not in config and key in meant and meant[key] != known[key]}
    return kept | {
        # No key of the sibling's own config, but its models look for it there.
        "decoder_start_token_id": meant["decoder_start_token_id"],
        "model_type": sibling.model_type,
        "architectures": [sibling.model_class],
        row.width_key: width,
        sibling.activation_key: meant[row.activation_key],
    }


def _refuse_what_has_no_place(
    row: EncoderDecoder, sibling: EncoderDecoder, config: Mapping[str, Any], meant: Mapping[str, Any]
) -> None:
    from transformers.activations import ACT2FN

    activation, lacking = meant[row.activation_key], []
    for key in dict.fromkeys((row.activation_key, sibling.activation_key)):
        # Old configs have the sibling's key too; both must say the same plain activation.
        if config.get(key, activation) != activation or activation not in ACT2FN or "-" in activation:
            lacking.append(f"{key}={shown(config.get(key, activation))}")
    if config.get("is_gated_act"):
        lacking.append("is_gated_act=true")
    if not meant["tie_word_embeddings"]:
        lacking.append(f"tie_word_embeddings=false (a {sibling.model_type} has no place for {row.head})")
    lacking += [f"no {key}" for key in ("pad_token_id", "decoder_start_token_id") if not isinstance(meant.get(key), int)]
    if lacking:
        raise UnsupportedError(
            f"config.json of this {row.model_type} asks for what a {sibling.model_type} made of it cannot have: "
            f"{', '.join(lacking)}; this model cannot be made dense"
        )
