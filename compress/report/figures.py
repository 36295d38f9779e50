"""Figures of each command, with the keys and values of its `--json` output.

A command's figures are those of every smaller model and its own. Lists have one number for each MoE layer, in order.
Perplexities are None where nothing was measured.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class TrainingFigures(TypedDict):
    """Cost and gain of one training. Each further loss term also has NAME_first and NAME_last."""

    steps: int
    learning_rate: float
    loss_first: float
    loss_last: float
    tokens_per_second: float | None
    validation_perplexity: list[list[float]]
    """Pairs of a step and the perplexity after it."""
    validation_token_accuracy: NotRequired[list[list[float]]]
    """Pairs of a step and the token accuracy after it, for an encoder-decoder."""
    best_step: int | None


class PerplexityFigures(TypedDict):
    """Perplexities of a decoder before and after, on the same windows of held-out text."""

    perplexity_before: float | None
    perplexity_before_stderr: NotRequired[float | None]
    """Standard error over documents, or over the pairs of an encoder-decoder; None with a single one."""
    perplexity_after: float | None
    perplexity_after_stderr: NotRequired[float | None]
    perplexity_ratio: NotRequired[float | None]
    """Perplexity after over that before."""
    perplexity_ratio_low: NotRequired[float | None]
    """Lower end of the ratio's interval of 95 percent, paired by document; the next field is the upper end."""
    perplexity_ratio_high: NotRequired[float | None]
    evaluation_documents: NotRequired[int]
    """Number of documents that the held-out windows are from."""


class ModelFigures(PerplexityFigures):
    """Figures of a smaller model beside those of its source."""

    artifact: str
    method: str
    sparsity: float
    """Share of the hidden units that were removed, alone or with whole experts; for a dense result, share of the experts."""
    experts_before: int
    experts_after: int
    experts_per_layer: list[int]
    units_before: NotRequired[int]
    """Hidden units of the source's routed experts and of the FFNs in --include; the next field is of the result."""
    units_after: NotRequired[int]
    widths_per_layer: NotRequired[list[list[int]]]
    """Hidden units of each expert, by MoE layer."""
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    evaluation: str
    """The text on which perplexities are measured."""
    seconds: float
    peak_memory_bytes: int
    token_accuracy_before: NotRequired[float | None]
    """Share of correct tokens of an encoder-decoder before; the next field is after."""
    token_accuracy_after: NotRequired[float | None]
    token_accuracy_before_stderr: NotRequired[float | None]
    """Standard error over pairs; the next field is after."""
    token_accuracy_after_stderr: NotRequired[float | None]
    loading_note: NotRequired[str | None]
    """The software that loads the artifact, where transformers alone does not."""
    prediction_note: NotRequired[str]
    """A sentence about layers for multi-token prediction that are not pruned, where config.json does not fit them."""
    plots: NotRequired[list[str]]
    """File names of the pictures."""


class RoundingFigures(TypedDict):
    """Figures of low-bit weights. Errors are root mean squares relative to those of the weights."""

    weight_bits: int
    group_size: int
    experts_only: bool
    quantize_head: bool
    embedding_bits: int | None
    bytes_not_quantized: int
    bytes_not_quantized_share: float
    relative_weight_error: float | None
    relative_weight_error_per_layer: list[float | None]
    rounding: str
    """nearest, awq or gptq."""
    activation_aware: bool
    output_error_ratio: float | None
    exponents_per_layer: list[list[float]]


class QuantizeFigures(ModelFigures, RoundingFigures):
    """Figures of `compress quantize`."""


class LayoutFigures(TypedDict):
    """Figures of `compress layout`. Shares and reads are None for a family whose stored experts are not known."""

    artifact: str
    method: str
    order: str
    """co-use or plain."""
    experts_per_layer: list[int]
    bytes: int
    page_bytes: int
    expert_bytes: int | None
    """Stored bytes of the largest expert, without small tensors that stay in memory."""
    reads_per_expert_before: int | None
    """Most ranges of a file that an expert lies in; the next field is of the result."""
    reads_per_expert_after: int | None
    page_aligned_share_before: float | None
    """Share of experts all of whose ranges begin and end on a page; the next field is of the result."""
    page_aligned_share_after: float | None
    neighbors_share_before: float | None
    """Share of neighbors on the disk among pairs of experts that a token uses together; None without a text. The next field
    is of the result."""
    neighbors_share_after: float | None
    miss_costs: list[dict[str, Any]]
    """Savings and costs of miss thresholds (engine/checkpoint/miss_costs.py); empty without a held-out text."""
    note: str | None
    seconds: float
    peak_memory_bytes: int


class SearchFigures(TypedDict):
    """Figures of NAEE's comparison of subsets."""

    search: str
    """"exhaustive", or "greedy" where a layer has too many subsets."""
    subsets: int
    """The largest number of subsets of a layer."""


class RefitFigures(TypedDict):
    """Figures of the refit of down projections, by MoE layer.

    Errors are on a part of the calibration text that was not fitted; None without such a part. Where whole experts leave,
    there is only a correction.
    """

    ridge_per_layer: NotRequired[list[float]]
    error_without_per_layer: NotRequired[list[float | None]]
    """Share of the mean square of the experts' outputs that their remaining units miss without the refit."""
    error_per_layer: NotRequired[list[float | None]]
    """That share after the refit."""
    drift_before_per_layer: NotRequired[list[float | None]]
    """Share of the mean square of the hidden states after the layer by which those of the smaller model differ, before the
    layer's correction; earlier layers are corrected."""
    drift_per_layer: NotRequired[list[float | None]]
    """That share after the correction."""


class PruneFigures(ModelFigures):
    """Figures of `compress prune` and `compress merge`; with --bits also RoundingFigures."""

    recover_steps: int
    training: dict[str, TrainingFigures]
    granularity: NotRequired[str]
    refit: NotRequired[RefitFigures | None]
    """The refit of the down projections; None where none was made."""
    naee: NotRequired[SearchFigures]
    expert_likeness: NotRequired[float | None]
    """Mean cosine of the down projections of a layer's first two experts, where hidden units were removed."""


class FrontierPoint(TypedDict):
    """One choice of `compress fit`. Divergences are from the model's predictions, in nats per token."""

    bytes: int
    """Size of the weight files; counted for choices that are not carried out."""
    active_bytes: float
    """Bytes of weights that a token reads, on average over the calibration text."""
    predicted_kl: float
    measured_kl: float | None
    """None for a choice that was not carried out."""
    measured_kl_of_removal: NotRequired[float]
    """The part of removing hidden units, without rounding."""
    measured_kl_of_parts: NotRequired[dict[str, list[float]]]
    """Divergences of removing units and of rounding where only the routed experts of a few neighboring layers change, by the
    first of these layers; "-1" stands for the matrices outside of the routed experts."""
    tokens_per_second: NotRequired[float | None]
    """Speed of decoding one sequence; None under a memory limit."""


class FitFigures(ModelFigures):
    """Figures of `compress fit`; with low-bit weights also RoundingFigures."""

    granularity: str
    refit: RefitFigures | None
    target_bytes: int | None
    target_active_bytes: int | None
    active_bytes: float
    weight_file_bytes: int
    kl: float
    """Measured divergence of the result."""
    matrices_by_bits: dict[str, int]
    """Number of matrices of each width."""
    factors: dict[str, list[float]]
    """Factors that correct the predicted divergences of removing units and of rounding after the last choice, by layer; "-1"
    stands for all matrices outside of the routed experts."""
    frontier: list[FrontierPoint]


class SweepFigures(TypedDict):
    """Figures of `compress prune` with several methods or sparsities, and of `compress fit` with several sizes."""

    output: str
    runs: list[Any]
    """Figures of each result, as the command gives them for one."""
    rows: list[dict[str, Any]]
    """The rows of `compress compare`."""
    notes: list[str]
    seconds: float
    peak_memory_bytes: int


class ChoiceFigures(TypedDict):
    """Figures of the experts selected for a dense model's feed-forward networks."""

    ffns: int
    select: str
    selected_experts: dict[str, list[int]]
    """Selected experts by layer, ascending."""
    family: str
    family_note: str
    block_error_per_layer: list[float]
    """Mean relative error of each layer's output against the mixture's, before any training."""
    top_expert_share_per_layer: list[float]
    effective_experts_per_layer: list[float]
    training: dict[str, TrainingFigures]


class DecoderChoiceFigures(ChoiceFigures):
    """Figures of the selected experts of a decoder."""

    shared_gate_error_per_layer: list[float] | None
    scales_per_layer: list[list[float]] | None


class DensifyFigures(ModelFigures, DecoderChoiceFigures):
    """Figures of `compress densify` of a decoder."""


class PairsChoiceFigures(ChoiceFigures):
    """Figures of the selected experts of an encoder-decoder, whose layers have names."""

    sequences_cut: int
    sequence_length: int
    layers: list[str]
    router_weight_error_per_layer: list[float]
    router_weight_per_layer: list[float]
    dropped_share_per_layer: list[float]
    scales_per_layer: list[list[float]]
    mixture_validation_token_accuracy: float | None
    """Token accuracy of the mixture on the pairs that the best state is chosen by; None where nothing is trained."""


class DensifyPairsFigures(ModelFigures, PairsChoiceFigures):
    """Figures of `compress densify` of an encoder-decoder."""


class DistillationFigures(TrainingFigures):
    """Figures of distillation of a language model: its training, and its gain on responses."""

    teacher: str | None
    recipe: str
    divergence: str | None
    router: NotRequired[dict[str, float]]
    """First and last loss of the teacher's routers, where the recipe trains them."""
    metric_name: str
    metric_before: float
    metric_after: float
    teacher_experts: int | None
    """Experts that each token of the teacher uses; None for its own number."""
    teacher_metric: float | None
    """The teacher's own value of the metric with so many experts; None unless a number is given."""
    response_perplexity_before: float
    """Perplexity of the responses in the data; its standard error is over examples, and the ratio is paired by example."""
    response_perplexity_after: float
    response_perplexity_before_stderr: float | None
    response_perplexity_after_stderr: float | None
    response_perplexity_ratio: float
    response_perplexity_ratio_low: float | None
    response_perplexity_ratio_high: float | None
    response_dtype: str | None
    """Dtype of the weights that wrote responses; None if none were written."""
    time_share: dict[str, float]
    teacher_unselected_share_per_layer: list[float] | None
    router_divergence_per_layer: list[float] | None
    """KL(old ‖ new) of the trained routers on the same inputs, the mean over tokens."""
    router_drift_mean_per_layer: list[float] | None
    """KL(old ‖ new) where the old and the new teacher each route their own hidden states; the next field is the maximum."""
    router_drift_max_per_layer: list[float] | None
    prompts_left_out: int
    prompts_cut: int
    responses_cut: int
    rows_left_out: int
    examples: int
    """Number of examples that the metrics before and after are measured on."""


class DistillFigures(ModelFigures, DistillationFigures):
    """Figures of `compress distill` of language models.

    With --select-by rouge-l, validation_rouge_l replaces validation_perplexity.
    """


class TeacherExpertsFigures(TypedDict):
    """Figures of `compress distill` with several --teacher-experts."""

    output: str
    runs: list[DistillFigures]
    rows: list[dict[str, Any]]
    """The metric of each student and of its teacher."""
    seconds: float
    peak_memory_bytes: int


class ClassifierFigures(TypedDict):
    """Figures of `compress distill` of classifiers. Each loss term also has NAME_first and NAME_last."""

    artifact: str
    teacher: str | None
    recipe: str
    ablation: str | None
    steps: int
    epochs: int
    loss_first: float
    loss_last: float
    metric_name: str
    metric_before: float
    metric_after: float
    top5_before: float | None
    """Top-5 accuracy; None for five classes or fewer."""
    top5_after: float | None
    teacher_top5: float | None
    accuracy_without_mixture: float | None
    teacher_accuracy: float | None
    probe_before: float | None
    probe_after: float | None
    training_examples: int
    held_out_examples: int
    evaluation: str
    classes: int
    experts: int
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    examples_per_second: float | None
    seconds: float
    peak_memory_bytes: int


class EvaluateFigures(TypedDict):
    """Figures of `compress evaluate`: perplexity."""

    metric: str
    value: float
    value_stderr: float | None
    """Standard error over documents, or over the pairs of an encoder-decoder; None with a single one."""
    tokens: int
    documents: int
    """Number of documents that the text's windows are from."""
    skip_threshold: float
    experts_skipped_share: float | None
    """Share of expert evaluations that were skipped; None for a dense or an exported model."""
    seconds: float
    data: str
    split: str
    windows: str


class TaskFigures(TypedDict):
    """Figures of `compress evaluate --tasks`."""

    metric: str
    value: dict[str, Any]
    """The harness's own results by task."""
    tokens: None
    skip_threshold: float
    experts_skipped_share: float | None
    """Share of expert evaluations that were skipped; None without a threshold."""
    seconds: float


class PhaseFigures(TypedDict):
    """One phase of a planned run."""

    phase: str
    flops: float
    bytes_moved: float
    seconds: float
    memory_bytes: int


class PolicyFigures(TypedDict):
    """One policy of the expert cache, simulated."""

    hit_rate: float
    """Share of the experts of tokens that are in memory."""
    read_bytes_per_token: float
    read_seconds_per_token: float
    tokens_per_second: float
    """Speed where reads of missing experts and computation alternate."""
    tokens_per_second_reading_ahead: float
    """Upper bound of the speed: all reads happen during computation."""


class DecodingFigures(PolicyFigures):
    """Decoding within a limit of memory. Figures of PolicyFigures are those of `policy`."""

    memory_limit_bytes: int
    interpreter_bytes: int
    resident_weights_bytes: int
    """All weights but the routed experts."""
    kv_cache_bytes: int
    slot_bytes: int
    """Stored bytes of the largest expert."""
    slots: int
    """Experts that the limit holds."""
    experts: int
    routing: str
    """Where the experts of the simulated tokens are from."""
    tokens_simulated: int
    """The first half of them fills the cache and is not counted."""
    disk_bytes_per_second: float
    disk_source: str
    memory_bytes_per_second: float
    weights_bytes_per_token: int
    compute_seconds_per_token: float
    tokens_per_second_all_in_memory: float
    policy: str
    policies: dict[str, PolicyFigures]
    """Every policy by name, and `best`, the best possible in hindsight."""


class PlanRunFigures(TypedDict):
    """Figures of `compress plan-run`."""

    model: str
    architecture: str
    method: str
    device: str
    device_source: str
    calibration: str
    product_efficiency: float
    bandwidth_efficiency: float
    dtype: str
    parameters: int
    weights_bytes: int
    tokens: int
    flops: float
    bytes_moved: float
    seconds: float
    peak_memory_bytes: int
    device_memory_bytes: int
    fits: bool
    phases: list[PhaseFigures]
    decoding: DecodingFigures | None
    """Text from the model within --memory-limit; None without that."""
