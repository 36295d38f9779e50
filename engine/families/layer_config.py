"""The plain numbers of one decoder layer, as the parts of a family resolve them from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple


class Chunk(NamedTuple):
    """Attention within chunks of `size` positions: a query attends to the positions of its own chunk only."""

    size: int


@dataclass(frozen=True)
class ClampedSwiglu:
    """(u + 1) · g · σ(α·g) in the place of silu(g) · u, with g at most `limit` and u within ± `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class GatedGelu:
    """gelu(g) · u in the place of silu(g) · u, with the tanh approximation of gelu (arXiv 1606.08415, §2).

    gelu(g) = g · σ(alpha · (g + 0.044715·g³)). The kernels know the function by its limit, which is below 0.
    """

    alpha: ClassVar[float] = 2.0 * math.sqrt(2.0 / math.pi)
    limit: ClassVar[float] = -1.0


Activation = ClampedSwiglu | GatedGelu
"""A function of g and u between the projections of an expert."""


@dataclass(frozen=True)
class MoeConfig:
    """The sizes and the routing rule of one MoE layer."""

    experts: int
    experts_per_token: int
    expert_width: int
    """Number of hidden units of the widest expert."""
    normalise_top_k: bool
    shared_width: int = 0
    """Width of the shared expert, 0 for none."""
    weight_scale: float = 1.0
    """Factor of the routed weights."""
    scores: str = "softmax"
    """Function of the router logits: "softmax" over all experts, or the "sigmoid" of each logit."""
    groups: tuple[int, ...] = ()
    """The group of each expert; empty if a token may use any expert."""
    groups_per_token: int = 1
    """Maximum number of groups that a token's experts belong to."""
    router_in_float32: bool = False
    scales_inputs: bool = False
    """Whether an expert is given σ(its router logit) · x, and its output is added unscaled."""
    added_to_sum: float = 1e-20
    """Number that is added to the sum of sigmoids by which they are divided."""
    least_sum: float = 0.0
    """Minimum divisor of probabilities that are chosen with a bias."""
    swiglu: Activation | None = None
    """The activation between the projections of each expert, also of a shared one; None for silu(g) · u."""
    scales_weights: bool = False
    """Whether each expert has a factor, by which its weight is multiplied after all weights were normalized."""
    own_norms: bool = False
    """Whether the router, the routed experts and the shared expert each have norms of their own."""
    mixer_jitter: float | None = None
    """ε of sparsemixer; None if experts are chosen together."""
    gate_network_width: int = 0
    """Number of hidden units of the router; 0 if the router is one matrix."""
    noise_epsilon: float | None = None
    """Minimum deviation of noisy top-k; None if the router has no noise."""
    expert_widths: tuple[int, ...] = ()
    """Number of hidden units of each expert; empty if all experts have `expert_width`."""

    @property
    def restores_sum(self) -> bool:
        """Whether the weights that skipping leaves are rescaled to the sum of all of them: if all tokens have one sum."""
        return self.normalise_top_k and not self.scales_weights

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of hidden units of each expert."""
        return self.expert_widths or (self.expert_width,) * self.experts

    @property
    def mean_width(self) -> float:
        """Mean number of hidden units of an expert."""
        return sum(self.expert_widths) / self.experts if self.expert_widths else self.expert_width


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, §2.1)."""

    query_rank: int
    """d_c′, the dimension of the queries' latent vector; 0 if queries are made from the hidden state itself."""
    key_value_rank: int
    """d_c, the dimension of the vector that keys and values are made from."""
    plain_dimension: int
    """d_h, the number of dimensions of a head's query and key that are not rotated."""
    rotary_dimension: int
    """d_h^R, the number of rotated dimensions, which the keys of all heads share."""
    value_dimension: int
    """Dimensions of a head's value."""


@dataclass(frozen=True)
class IndexerConfig:
    """Sizes of the indexer that selects the positions of sparse attention. Its tensors are kept and never computed with."""

    heads: int
    dimension: int
    """Dimensions of a head's query, and of the key that all heads share."""


@dataclass(frozen=True)
class LinearConfig:
    """Sizes of a layer that has a state in the place of cached keys and values, as linear attention does."""

    module: ClassVar[str] = "self_attn"
    """Name on disk of the attention within the layer."""
    block: ClassVar[int]
    """Number of positions of a prompt that are processed together."""
    heads: int
    """Number of heads, each with a matrix of its own."""
    key_dimension: int
    """Dimensions of a head's query and key."""
    value_dimension: int

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of one sequence's state."""
        return ((self.heads, self.key_dimension, self.value_dimension),)

    @property
    def projected(self) -> int:
        """Elements of a token's queries, keys and values."""
        return self.heads * (2 * self.key_dimension + self.value_dimension)

    @property
    def held(self) -> int:
        """Numbers in float32 that a token of a prompt needs: queries, keys and values, outputs, and a block's scores."""
        return self.projected + 2 * self.heads * (self.value_dimension + self.block)

    def positions(self, length: int) -> float:
        """Return the number of positions whose scores and mixture cost as much as a token of a sequence of this length."""
        raise NotImplementedError


@dataclass(frozen=True)
class LightningConfig(LinearConfig):
    """Sizes of lightning attention (engine/decoder/lightning_attention.py)."""

    block: ClassVar[int] = 256

    def positions(self, length: int) -> float:
        """Return the positions of a block, at most `length`, and E further ones for the state."""
        return min(self.block, length) + self.key_dimension


@dataclass(frozen=True)
class GatedDeltaConfig(LinearConfig):
    """Sizes of the gated delta rule (engine/decoder/gated_delta.py)."""

    module: ClassVar[str] = "linear_attn"
    block: ClassVar[int] = 64
    key_heads: int
    """Number of heads of queries and keys. Each serves as many consecutive heads of values."""
    kernel: int
    """Number of positions that the convolution reads."""

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values before queries and keys are repeated for the heads of values."""
        return 2 * self.key_heads * self.key_dimension + self.heads * self.value_dimension

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the matrices, and of the last inputs of the convolution."""
        return *super().state_shapes, (self.kernel - 1, self.channels)

    @property
    def held(self) -> int:
        """Numbers in float32 that a token of a prompt needs, with the inputs and outputs of the convolution."""
        return 3 * self.channels + 3 * self.projected + 4 * self.heads * self.block

    def positions(self, length: int) -> float:
        """Return the number of positions that cost as much as the products within a block and with the state.

        Within a block, queries and keys are multiplied with keys, a triangular system is solved for values, and its
        solution is mixed. Keys, queries and the solution are multiplied with the state.
        """
        sizes = self.key_dimension + self.value_dimension
        within = 2 * self.key_dimension + 1.5 * self.value_dimension
        return (within * min(self.block, length) + 3 * self.key_dimension * self.value_dimension) / sizes


@dataclass(frozen=True)
class SplitGatedDeltaConfig(GatedDeltaConfig):
    """Sizes of the gated delta rule where each projection is a matrix of its own."""


@dataclass(frozen=True)
class Mamba2Config(LinearConfig):
    """Sizes of a Mamba-2 mixer (engine/decoder/mamba2.py). B and C stand in the place of keys and queries, and x in that of
    values.
    """

    module: ClassVar[str] = "mixer"
    block: ClassVar[int] = 64
    groups: int
    """Number of groups of heads. The heads of a group share B and C."""
    kernel: int
    """Number of positions that the convolution reads."""
    least_step: float
    """Minimum of Δ."""

    @property
    def inner(self) -> int:
        """Elements of a token's x, and of its gate."""
        return self.heads * self.value_dimension

    @property
    def channels(self) -> int:
        """Elements of a token's x, B and C, which the convolution reads."""
        return self.inner + 2 * self.groups * self.key_dimension

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the matrices, and of the last inputs of the convolution."""
        return *super().state_shapes, (self.kernel - 1, self.channels)

    @property
    def projected(self) -> int:
        """Elements of a token's gate, x, B, C and Δ."""
        return self.inner + self.channels + self.heads

    @property
    def held(self) -> int:
        """Numbers in float32 that a token of a prompt needs, with B and C of each head and a block's scores."""
        return 3 * self.projected + 3 * self.inner + self.heads * (2 * self.key_dimension + 3 * self.block)

    def positions(self, length: int) -> float:
        """Return the number of positions that cost as much as the products within a block and with the state.

        Within a block, C is multiplied with B in each group, and x is mixed. B and C are multiplied with the state.
        """
        sizes = self.key_dimension + self.value_dimension
        within = self.key_dimension * self.groups / self.heads + self.value_dimension
        return (within * min(self.block, length) + 2 * self.key_dimension * self.value_dimension) / sizes


@dataclass(frozen=True)
class ShortConvolutionConfig(LinearConfig):
    """Sizes of a gated short convolution (engine/decoder/short_convolution.py), as one head with a value of D numbers."""

    module: ClassVar[str] = "conv"
    block: ClassVar[int] = 1
    kernel: int
    """Number of positions that the convolution reads."""

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of the last inputs of the convolution."""
        return ((self.kernel - 1, self.value_dimension),)

    @property
    def projected(self) -> int:
        """Elements of a token's input and of its two gates."""
        return 3 * self.value_dimension

    @property
    def held(self) -> int:
        """Numbers in float32 that a token of a prompt needs, with the inputs and outputs of the convolution."""
        return self.projected + 3 * self.value_dimension

    def positions(self, length: int) -> float:
        """Return the number of positions that the convolution reads."""
        return self.kernel


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by ln(1 + ⌊(p + 1) / floor⌋) · slope + 1 (arXiv 2501.19399)."""

    floor: float
    slope: float


class LayerHeads(NamedTuple):
    """Sizes of a layer's attention."""

    groups: int
    """Number of heads of keys and values."""
    size: int
    """Dimensions of a head's query, key and value."""
    shares_projection: bool = False
    """Whether values are made from the projection of keys, before it is normed and rotated."""


class Residual(NamedTuple):
    """alpha · norm(x) + beta · f(norm(x)), in the place of x + f(norm(x))."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Multipliers:
    """Factors that a family was trained with; the defaults change nothing."""

    embedding: float = 1.0
    attention: float | None = None
    """Factor of the attention scores; None for one over the root of the head dimension."""
    residual: float = 1.0
    """Factor of the outputs of attention and feed-forward blocks."""
    logits: float = 1.0
    """Divisor of the logits."""
    rounds_embedding: bool = field(default=False, kw_only=True)
    """Whether the factor of embeddings is rounded to the model's dtype."""


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: attention, then an MoE block if `moe` is set, otherwise one FFN of `dense_width`.

    A layer of some families has one of the two only: no attention, or neither experts nor an FFN.
    """

    window: int | Chunk | None
    """Sliding window in tokens, or chunks; None if every position attends to all earlier positions."""
    moe: MoeConfig | None
    dense_width: int
    """Number of hidden units of the FFN of a layer without experts; 0 if the layer has no FFN either."""
    rotates: bool = True
    unit_norm: bool = False
    """Whether rotated queries and keys are divided by their root mean square."""
    linear: LinearConfig | None = None
    """Sizes of linear attention or of a short convolution; None if the layer caches something for each position."""
    residuals: tuple[Residual, Residual] | None = None
    """The rule of the attention and the rule of the feed-forward block; None for x + f(norm(x))."""
    indexer: IndexerConfig | None = None
    """Sizes of the indexer of sparse attention; None if the layer has none."""
    heads: LayerHeads | None = None
    """Sizes of the layer's attention where they differ between layers; None for those of the whole model."""
    kind: str | None = None
    """The kind of layer, where each kind has rotary parameters of its own; None where all layers share them."""
    attends: bool = True
    """Whether the layer has attention, or something else in its place."""

    @property
    def feeds(self) -> bool:
        """Whether the layer has experts or an FFN."""
        return self.moe is not None or self.dense_width > 0
