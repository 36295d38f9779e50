"""One-shot pruning scores: each a pure function from one layer's statistics to a score per expert, higher = keep.

Shape suffixes: N routed experts of the layer.
"""

from __future__ import annotations

from torch import Tensor

from calibrate.statistics import LayerStatistics
from compress.methods.criterion import statistic


def frequency(layer: LayerStatistics) -> Tensor:
    """Expert trimming: tokens routed to the expert, as a share so that layers compare."""
    return layer.tokens_routed.double() / layer.tokens.clamp_min(1)


def probability(layer: LayerStatistics) -> Tensor:
    """Expert trimming by the router's probability: its mean over all tokens, routed or not."""
    return layer.probability_sum / layer.tokens.clamp_min(1)


def reap(layer: LayerStatistics) -> Tensor:
    """REAP: mean over routed tokens of weight · ‖FFN_i(x)‖₂; 0 for an expert never routed to."""
    return layer.weighted_norm_sum / layer.tokens_routed.clamp_min(1)


def mean_output_norm(layer: LayerStatistics) -> Tensor:
    """MAN: mean over routed tokens of ‖FFN_i(x)‖₂."""
    return layer.norm_sum / layer.tokens_routed.clamp_min(1)


def significance(layer: LayerStatistics) -> Tensor:
    """MC-MoE's pruning part: access frequency × mean routing weight."""
    return frequency(layer) * layer.weight_sum / layer.tokens_routed.clamp_min(1)


FREQUENCY = statistic(frequency)
PROBABILITY = statistic(probability)
REAP = statistic(reap)
MAN = statistic(mean_output_norm)
MC_MOE = statistic(significance)
