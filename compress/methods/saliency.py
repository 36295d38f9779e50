"""One-shot pruning scores, among them REAP: mean over tokens routed to expert i of g_i(x) · ‖FFN_i(x)‖₂, g_i its weight.

Each score is a pure function from one layer's statistics to one number per expert; higher scores are kept.

Shape suffixes: N routed experts of the layer.
"""

from __future__ import annotations

from torch import Tensor

from calibrate.statistics import LayerStatistics
from compress.methods.criterion import statistic


def frequency(layer: LayerStatistics) -> Tensor:
    """Return the share of tokens routed to each expert, [N] (expert trimming); shares are comparable between layers."""
    return layer.tokens_routed.double() / layer.tokens.clamp_min(1)


def probability(layer: LayerStatistics) -> Tensor:
    """Return the router probability of each expert, [N]: its mean over all tokens, routed or not (expert trimming)."""
    return layer.probability_sum / layer.tokens.clamp_min(1)


def reap(layer: LayerStatistics) -> Tensor:
    """Return REAP's score, [N]: the mean over routed tokens of weight · ‖FFN_i(x)‖₂; 0 where none are routed."""
    return layer.weighted_norm_sum / layer.tokens_routed.clamp_min(1)


def mean_output_norm(layer: LayerStatistics) -> Tensor:
    """Return MAN's score, [N]: the mean over routed tokens of ‖FFN_i(x)‖₂."""
    return layer.norm_sum / layer.tokens_routed.clamp_min(1)


def significance(layer: LayerStatistics) -> Tensor:
    """Return the significance of MC-MoE's pruning, [N]: access frequency × mean routing weight."""
    return frequency(layer) * layer.weight_sum / layer.tokens_routed.clamp_min(1)


FREQUENCY = statistic(frequency)
PROBABILITY = statistic(probability)
REAP = statistic(reap)
MAN = statistic(mean_output_norm)
MC_MOE = statistic(significance)
