"""The families, one row each. A row has the names and config keys of one family. The parts implement their use.

To add a family, write its row here: docs/adding-a-family.md shows one and lists the steps.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.aliases import AuthorsWords, OwnWords, another_name, only, unused
from engine.families.architecture import Architecture
from engine.families.attention import (
    FULL,
    LINEAR,
    ChunkedLayers,
    ClippedGroupedQuery,
    GatedDelta,
    GroupedQuery,
    GroupedQueryWithSinks,
    HeadsByLayer,
    Latent,
    Lightning,
    Mamba2Layers,
    OptionallyNormed,
    ShortConvolutions,
    SlidingLayers,
    SlidingWindow,
    SparseLatent,
    SplitGatedDelta,
)
from engine.families.experts import (
    DOWN,
    GATE,
    NAMES_OF_LAYER,
    NAMES_OF_MIXER,
    PROJECTIONS,
    UP,
    ClampedExperts,
    ExpertNames,
    Experts,
    GeluExperts,
    PartitionedExperts,
    SharedExpert,
    SharedExperts,
    Stack,
    renamed,
    transposed_stacks,
)
from engine.families.head import Head, PredictionLayers
from engine.families.layer_pattern import (
    SINGLE_BLOCK_NAMES,
    DenseFirst,
    DenseFirstThenEveryNth,
    EveryLayer,
    LayerRange,
    ListedKinds,
    ListedLayers,
    SingleBlocks,
    SparseStep,
)
from engine.families.residual import (
    SANDWICH_NAMES,
    LayerNorms,
    NormResidual,
    RootMeanSquareNorms,
    SandwichResidual,
    ScaledResidual,
    ZeroCenteredNorms,
)
from engine.families.rotation import (
    CountedRotation,
    LongRotation,
    NoRotation,
    PartialRotation,
    Rotation,
    RotationByKind,
    SomeLayersRotate,
)
from engine.families.router import (
    BiasedLogits,
    GateNetwork,
    Groups,
    InputScaling,
    LeastSum,
    NormedInput,
    SigmoidTopK,
    SparseMixer,
    TopK,
)

_SPARSE_BLOCK = ExpertNames("block_sparse_moe", ("w1", "w3", "w2"))
_BIASED = GroupedQuery(qkv_bias="attention_bias", output_bias="attention_bias")

# LLaMA-MoE
_CALCULATOR = ExpertNames("mlp", ("weight_gate", "weight_up", "weight_down"), "calculator.experts.{projection}.{expert}")

# DeepSeek's families and those derived from them
_FINE_GRAINED = Experts(("n_routed_experts",), width="moe_intermediate_size")
_SIGMOID_GROUPS = SigmoidTopK(
    scale="routed_scaling_factor", in_float32=True, choice_bias="gate.e_score_correction_bias", groups=Groups()
)
_LIMITED_GROUPS = Groups(only_if=("topk_method", "group_limited_greedy"))
_DEEPSEEK_TRAINING = unused("aux_loss_alpha", "seq_aux", "ep_size")
_DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    attention=Latent(qkv_bias="attention_bias", output_bias="attention_bias"),
    rotation=Rotation(pairs="rope_interleave"),
    router=_SIGMOID_GROUPS,
    experts=_FINE_GRAINED,
    shared=SharedExperts(),
    layers=DenseFirst(),
    prediction=PredictionLayers(),
    settings=only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1) | _DEEPSEEK_TRAINING,
    dense_sibling="deepseek_v3",
)

_SPARSE = SparseLatent(qkv_bias="attention_bias", output_bias="attention_bias")
_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    model_type="deepseek_v32",
    causal_lm_class="DeepseekV32ForCausalLM",
    attention=_SPARSE,
    rotation=Rotation(pairs=True, types=("default", "linear", "yarn", "llama3")),
    layers=ListedKinds(),
    settings=_DEEPSEEK_V3.settings | only(rope_interleave=True) | unused("pretraining_tp"),
    dense_sibling="deepseek_v32",
)

# Granite
_GRANITE_NAMES = ExpertNames(
    "block_sparse_moe",
    stacks=(Stack("input_linear.weight", (GATE, UP)), Stack("output_linear.weight", (DOWN,))),
    modules=("block_sparse_moe", "router"),
)
_SHARED_MLP = (Stack("shared_mlp.input_linear.weight", (GATE, UP)), Stack("shared_mlp.output_linear.weight", (DOWN,)))
_GRANITE_MOE = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    attention=_BIASED,
    router=TopK("router.layer.weight", normalized=True),
    experts=Experts(("num_local_experts",), names=_GRANITE_NAMES),
    residual=ScaledResidual(),
    dense_sibling="granite",
)

# MiniMax
_MINIMAX_RESIDUAL = NormResidual(
    attention=("full_attn_alpha_factor", "full_attn_beta_factor"),
    lightning=("linear_attn_alpha_factor", "linear_attn_beta_factor"),
    feed_forward=("mlp_alpha_factor", "mlp_beta_factor"),
)
_MINIMAX = Architecture(
    # MiniMax-Text-01 and M1 (arXiv 2501.08313), with transformers' names for the keys of their config.
    "minimax",
    "MiniMaxForCausalLM",
    attention=Lightning(window=SlidingWindow()),
    rotation=CountedRotation(),
    router=TopK(normalized=True),
    experts=Experts(("num_local_experts",), names=_SPARSE_BLOCK),
    residual=_MINIMAX_RESIDUAL,
    settings=only(postnorm=True, shared_intermediate_size=(0, None)) | unused("shared_moe_mode", "max_model_len"),
)
_MINIMAX_AUTHORS = AuthorsWords(
    "minimax",
    "minimax",
    names=(
        ("attn_type_list", "layer_types"),
        *(
            (f"layernorm_{theirs}_{factor}", f"{ours}_{factor}_factor")
            for theirs, ours in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
            for factor in ("alpha", "beta")
        ),
    ),
    kinds=(LINEAR, FULL),
)

# Qwen3.5, and Qwen3.6 under the same name
_QWEN_PREDICTION = PredictionLayers(
    prefix="mtp.",
    layer="mtp.layers.0.",
    norms=("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"),
    projection="mtp.fc.weight",
)
_QWEN3_5 = Architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    attention=SplitGatedDelta("head", qkv_bias="attention_bias", output_bias="attention_bias"),
    rotation=PartialRotation(),
    norms=ZeroCenteredNorms(),
    prediction=replace(_QWEN_PREDICTION, count="mtp_num_hidden_layers"),
    settings=only(attn_output_gate=True, output_gate_type="swish")
    | unused("mamba_ssm_dtype", "mtp_use_dedicated_embeddings"),
)

# LFM2
_LFM2_BLOCK = ExpertNames("feed_forward", ("w1", "w3", "w2"), modules=("feed_forward", "gate"))
_LFM2_NAMES = renamed(norms=("operator_norm", "ffn_norm", "embedding_norm"), head_norm="layernorm", ffn=_LFM2_BLOCK)

# Nemotron-H
# Llama 4 and GPT-OSS
_LLAMA4_NAMES = ExpertNames("feed_forward", stacks=transposed_stacks(), modules=("feed_forward", "router"))
_GPT_OSS_NAMES = ExpertNames(stacks=transposed_stacks(interleaved=True, biases=True), modules=("mlp", "router"))

_ROWS = (
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        attention=GroupedQuery(window=SlidingWindow()),
        router=TopK(normalized=True),
        experts=Experts(("num_local_experts",), names=_SPARSE_BLOCK),
        dense_sibling="mistral",
    ),
    Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        attention=GroupedQuery(qkv_bias="qkv_bias", window=SlidingLayers()),
        experts=Experts(("num_experts",), width="moe_intermediate_size"),
        shared=SharedExpert(gate="shared_expert_gate.weight"),
        layers=SparseStep(),
        dense_sibling="qwen2",
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        attention=replace(_BIASED, qk_norm="head", window=SlidingWindow()),
        # transformers 5 writes num_local_experts, but every older reader needs num_experts.
        experts=Experts(("num_experts", "num_local_experts"), width="moe_intermediate_size"),
        layers=SparseStep(),
        dense_sibling="qwen3",
    ),
    Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        attention=GatedDelta("head", qkv_bias="attention_bias", output_bias="attention_bias"),
        rotation=PartialRotation(),
        experts=Experts(("num_experts",), width="moe_intermediate_size"),
        shared=SharedExpert(gate="shared_expert_gate.weight"),
        layers=SparseStep(),
        norms=ZeroCenteredNorms(),
        prediction=_QWEN_PREDICTION,
        dense_sibling="qwen3_next",
    ),
    replace(
        _QWEN3_5,
        model_type="qwen3_5_moe_text",
        causal_lm_class="Qwen3_5MoeForCausalLM",
        router=TopK(normalized=True),
        experts=Experts(("num_experts",), width="moe_intermediate_size"),
        shared=SharedExpert(gate="shared_expert_gate.weight"),
        layers=EveryLayer(dense_width="moe_intermediate_size"),
        settings=_QWEN3_5.settings | only(mlp_only_layers=None) | unused("intermediate_size"),
        dense_sibling="qwen3_5_text",
    ),
    _QWEN3_5,
    Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        attention=ClippedGroupedQuery(qk_norm="full", qkv_bias="attention_bias", output_bias="attention_bias"),
        experts=Experts(("num_experts",)),
    ),
    Architecture(
        # LLaMA-MoE v1 (arXiv 2406.16554; github.com/pjlab-sys4nlp/llama-moe, which has the classes).
        "llama_moe",
        "LlamaMoEForCausalLM",
        router=GateNetwork("gate.gate_network.2.weight", ("num_selects",), normalized=True, scale="score_scale_factor"),
        experts=PartitionedExperts(("num_experts",), names=_CALCULATOR),
        words=OwnWords(read_as="llama"),
        settings=only(gate_type="TopKBalancedNoisyGate", gate_network="mlp", gate_use_softmax=True)
        | only(calculator_type="UniversalCalculator", multiply_gate_scores=True, add_weight_norm=False)
        | only(rope_theta=10000, rope_parameters=None, attention_bias=False, head_dim=None)  # which its class ignores
        | only(gate_add_noise=(True, False))
        | unused("gate_use_balance", "gate_balance_loss_weight", "drop_tokens", "dropped_padding", "capacity_factor"),
        dense_sibling="llama",
    ),
    Architecture(
        # DeepSeekMoE (arXiv 2401.06066; huggingface.co/deepseek-ai/deepseek-moe-16b-base, which has the classes).
        "deepseek",
        "DeepseekForCausalLM",
        attention=_BIASED,
        rotation=Rotation(types=("default", "linear", "dynamic")),
        experts=_FINE_GRAINED,
        shared=SharedExperts(),
        layers=DenseFirstThenEveryNth(),
        words=OwnWords(read_as="llama"),
        settings=only(scoring_func="softmax", head_dim=None) | _DEEPSEEK_TRAINING,  # its class ignores head_dim
        dense_sibling="llama",
    ),
    Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        attention=Latent(qkv_bias="attention_bias", output_bias="attention_bias"),
        rotation=Rotation(pairs=True),
        router=TopK(scale="routed_scaling_factor", in_float32=True, groups=_LIMITED_GROUPS),
        experts=_FINE_GRAINED,
        shared=SharedExperts(),
        layers=DenseFirst(),
        settings=only(scoring_func="softmax", topk_method=("greedy", "group_limited_greedy"))
        | only(norm_topk_prob=False, moe_layer_freq=1)
        | _DEEPSEEK_TRAINING,
        dense_sibling="deepseek_v2",
    ),
    _DEEPSEEK_V3,
    # Kimi K2 is a DeepSeek V3 whose own code differs only in its name.
    replace(_DEEPSEEK_V3, model_type="kimi_k2", words=another_name("deepseek_v3")),
    _DEEPSEEK_V32,
    replace(
        # GLM-5, whose layers may share the selection of an indexer
        _DEEPSEEK_V32,
        model_type="glm_moe_dsa",
        causal_lm_class="GlmMoeDsaForCausalLM",
        attention=replace(_SPARSE, sharing="indexer_types"),
        settings=_DEEPSEEK_V32.settings
        | unused("indexer_rope_interleave", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
        dense_sibling="glm_moe_dsa",
    ),
    Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        attention=OptionallyNormed(qk_norm="head", qkv_bias="attention_bias"),
        rotation=PartialRotation(),
        router=_SIGMOID_GROUPS,
        experts=_FINE_GRAINED,
        shared=SharedExperts(),
        layers=DenseFirst(),
        prediction=PredictionLayers(),
        dense_sibling="glm4_moe",
    ),
    replace(
        # GLM-4.7-Flash has the layers of DeepSeek V3.
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        causal_lm_class="Glm4MoeLiteForCausalLM",
        layers=ListedKinds(),
        settings=only(scoring_func="sigmoid", topk_method="noaux_tc", partial_rotary_factor=1.0),
        dense_sibling="glm4_moe_lite",
    ),
    _GRANITE_MOE,
    replace(
        _GRANITE_MOE,
        model_type="granitemoeshared",
        causal_lm_class="GraniteMoeSharedForCausalLM",
        shared=SharedExpert(width="shared_intermediate_size", stacks=_SHARED_MLP),
    ),
    Architecture("granite", "GraniteForCausalLM", attention=_BIASED, residual=ScaledResidual()),
    Architecture(
        "phimoe",
        "PhimoeForCausalLM",
        attention=replace(_BIASED, window=SlidingWindow()),
        rotation=LongRotation(),
        router=SparseMixer(),
        experts=Experts(("num_local_experts",), names=replace(_SPARSE_BLOCK, modules=("mlp", "router"))),
        norms=LayerNorms(),
        head=Head(bias="lm_head_bias"),
        settings=unused("hidden_dropout", "original_max_position_embeddings"),
        not_dense="it has no dense sibling, and its router takes two experts, so that one cannot be a dense layer",
    ),
    Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        rotation=Rotation(pairs=True),
        router=LeastSum(per_token=("moe_k",), in_float32=True, choice_bias="moe_statics.e_score_correction_bias"),
        experts=Experts(("moe_num_experts",), width="moe_intermediate_size"),
        shared=SharedExperts(width="moe_num_shared_experts"),
        layers=LayerRange("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
        prediction=PredictionLayers(prefix="model.mtp_"),
        # use_bias applies to all projections, including those of the experts.
        settings=only(use_bias=False, moe_gate="topk", moe_gate_act="softmax", moe_use_aux_free=True, use_rmsnorm=True)
        | unused("moe_capacity", "moe_aux_loss_lambda"),
        dense_sibling="ernie4_5",
    ),
    Architecture("ernie4_5", "Ernie4_5ForCausalLM", rotation=Rotation(pairs=True), settings=only(use_bias=False)),
    Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        attention=GroupedQuery(qk_norm="full"),
        rotation=PartialRotation(),
        router=SigmoidTopK(normalized=True, choice_bias="e_score_correction_bias"),
        experts=Experts(("num_local_experts",), names=_SPARSE_BLOCK),
        prediction=PredictionLayers("num_mtp_modules"),
        settings=only(scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer")
        | only(attn_type_list=1, shared_intermediate_size=0)
        | unused("rotary_dim", "mlp_intermediate_size", "shared_moe_mode", "use_mtp", "mtp_transformer_layers")
        | unused("max_model_len")
        | only(layernorm_full_attention_beta=1, layernorm_linear_attention_beta=1, layernorm_mlp_beta=1),
    ),
    _MINIMAX,
    replace(_MINIMAX, model_type="minimax_text_01", words=_MINIMAX_AUTHORS),
    replace(_MINIMAX, model_type="minimax_m1", words=_MINIMAX_AUTHORS),
    Architecture(
        "llama4_text",
        "Llama4ForCausalLM",
        attention=replace(_BIASED, window=ChunkedLayers("attention_chunk_size")),
        rotation=SomeLayersRotate(pairs=True),
        router=InputScaling("router.weight"),
        experts=Experts(("num_local_experts",), names=_LLAMA4_NAMES),
        shared=SharedExpert(width="intermediate_size"),
        layers=ListedLayers("moe_layers", dense_width="intermediate_size_mlp"),
        settings=unused("for_llm_compressor", "cache_implementation"),
        disk_names={f"mlp.{name}": f"feed_forward.{name}" for name in PROJECTIONS},
        not_dense="the inputs of its experts are scaled by the router, token by token, which no FFN does",
        not_onnx="its chunked attention and experts whose inputs the router scales have no form in our graphs",
    ),
    Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        attention=HeadsByLayer("head", qkv_bias="attention_bias", output_bias="attention_bias", window=SlidingLayers()),
        rotation=RotationByKind(),
        router=NormedInput(),
        experts=GeluExperts(("num_experts",), width="moe_intermediate_size", names=NAMES_OF_LAYER),
        shared=SharedExpert("mlp", width="intermediate_size"),
        residual=SandwichResidual(),
        head=Head(cap="final_logit_softcapping"),
        settings=only(hidden_activation="gelu_pytorch_tanh", enable_moe_block=True),
        disk_names=SANDWICH_NAMES,
        not_dense="its experts and the FFN beside them have norms of their own, which one FFN has not",
        not_onnx="its heads differ between layers and its experts have norms of their own, which our graphs cannot have",
    ),
    Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        attention=GroupedQueryWithSinks(qkv_bias="attention_bias", output_bias="attention_bias", window=SlidingLayers()),
        router=BiasedLogits("router.weight", ("num_experts_per_tok", "experts_per_token"), normalized=True),
        experts=ClampedExperts(("num_local_experts",), names=_GPT_OSS_NAMES),
        settings=unused("initial_context_length"),
    ),
    Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        attention=ShortConvolutions("head"),
        router=SigmoidTopK(scale="routed_scaling_factor", choice_bias="expert_bias", added_to_sum=1e-6),
        experts=Experts(("num_experts",), width="moe_intermediate_size", names=_LFM2_BLOCK),
        layers=DenseFirst("num_dense_layers"),
        norms=RootMeanSquareNorms("norm_eps"),
        settings=only(conv_bias=False, use_expert_bias=True) | unused("tie_embedding"),
        disk_names=_LFM2_NAMES | {"self_attn.o_proj": "self_attn.out_proj"},
        dense_sibling="lfm2_moe",
    ),
    Architecture(
        # Nemotron-H and Nemotron 3, whose layers are single blocks
        "nemotron_h",
        "NemotronHForCausalLM",
        attention=Mamba2Layers(),
        rotation=NoRotation(),
        router=_SIGMOID_GROUPS,
        experts=Experts(("n_routed_experts",), width="moe_intermediate_size", names=NAMES_OF_MIXER),
        shared=SharedExpert("shared_experts", width="moe_shared_expert_intermediate_size"),
        layers=SingleBlocks(),
        norms=RootMeanSquareNorms("layer_norm_epsilon"),
        prediction=PredictionLayers(prefix="mtp."),
        disk_names=SINGLE_BLOCK_NAMES,
        dense_sibling="nemotron_h",
    ),
    Architecture("mistral", "MistralForCausalLM", attention=GroupedQuery(window=SlidingWindow())),
    Architecture("llama", "LlamaForCausalLM", attention=_BIASED),
    Architecture("qwen2", "Qwen2ForCausalLM", attention=GroupedQuery(qkv_bias=True, window=SlidingLayers())),
    Architecture("qwen3", "Qwen3ForCausalLM", attention=replace(_BIASED, qk_norm="head", window=SlidingLayers())),
)
ARCHITECTURES: dict[str, Architecture] = {row.model_type: row for row in _ROWS}
