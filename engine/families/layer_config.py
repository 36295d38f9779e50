"""The plain numbers of one decoder layer, as the parts of a family resolve them from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """Positions are in pieces of `size`, and a query attends to those of its own piece."""

    size: int


@dataclass(frozen=True)
class ClampedSwiglu:
    """(u + 1) · g · σ(α·g) in place of silu(g) · u, with g at most `limit` and u within ± `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeConfig:
    """The sizes and the routing rule of one MoE layer."""

    experts: int
    experts_per_token: int
    expert_width: int
    normalise_top_k: bool
    shared_width: int = 0
    """Width of the shared expert, 0 for none."""
    weight_scale: float = 1.0
    """Factor of the routed weights."""
    scores: str = "softmax"
    """What the router makes of its logits: "softmax" over all experts, or the "sigmoid" of each."""
    groups: tuple[int, ...] = ()
    """The group of each expert; empty where a token may use any expert."""
    groups_per_token: int = 1
    """The largest number of groups that a token's experts belong to."""
    router_in_float32: bool = False
    scales_inputs: bool = False
    """An expert is given σ(its router logit) · x, and its output is added as it is."""
    least_sum: float = 0.0
    """The least divisor of probabilities that are chosen with a bias."""
    swiglu: ClampedSwiglu | None = None
    """The activation between an expert's projections; None for silu(g) · u."""
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
    """d_c′, of the queries' latent vector; 0 where queries are made from the hidden state itself."""
    key_value_rank: int
    """d_c, of the vector that keys and values are made from."""
    plain_dimension: int
    """d_h, of what a head's query and key have besides rotated dimensions."""
    rotary_dimension: int
    """d_h^R, of the rotated part, which all heads' keys share."""
    value_dimension: int
    """Dimensions of a head's value."""


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by ln(1 + ⌊(p + 1) / floor⌋) · slope + 1 (arXiv 2501.19399)."""

    floor: float
    slope: float


class Residual(NamedTuple):
    """alpha · norm(x) + beta · f(norm(x)), in place of x + f(norm(x))."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Multipliers:
    """Factors that a family was trained with; the defaults change nothing."""

    embedding: float = 1.0
    attention: float | None = None
    """Factor of the attention scores; None for one over the root of the head dimension."""
    residual: float = 1.0
    """Factor of what attention and feed-forward blocks add."""
    logits: float = 1.0
    """Divisor of the logits."""


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
    """The layer's attention is linear."""
    residuals: tuple[Residual, Residual] | None = None
    """The rule of attention and that of the feed-forward block; None for x + f(norm(x))."""
