"""Attention with relative position biases (Raffel et al. §2.1) as standard ONNX nodes; scores are not scaled.

A head's bias depends only on the distance from query to key, and is constant from distance `farthest` on. Therefore a
table holds one row for each distance up to `farthest`, and a text may have any length.

Shape suffixes: B batch, L queries, P keys, S source positions, H heads, E head dimension, D hidden, R distances.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.onnx.attention import MASKED
from engine.onnx.graph import BOOL, Graph
from engine.onnx.layers import Layers


def buckets(distances: Tensor, count: int, farthest: int, both_ways: bool) -> Tensor:
    """Return the bucket of each distance from query to key: half of them are exact, the others have logarithmic widths.

    `both_ways`: keys after the query have separate buckets, half of all; otherwise they share the bucket of distance 0.
    """
    first = torch.zeros_like(distances)
    if both_ways:
        count //= 2
        first, distances = count * (distances > 0), distances.abs()
    else:
        distances = (-distances).clamp_min(0)
    exact = count // 2
    share = torch.log(distances.float() / exact) / math.log(farthest / exact)
    far = (exact + (share * (count - exact)).clamp_min(0).long()).clamp_max(count - 1)
    return first + torch.where(distances < exact, distances, far)


def position_bias(layers: Layers, weight: str, query_L: str, key_P: str, farthest: int, both_ways: bool) -> str:
    """Return the bias [1, H, L, P] to add to scores, from the weight [buckets, H]; positions are vectors of integers."""
    graph = layers.graph

    def table_RH() -> Tensor:
        weight_H = layers.source(weight)
        return weight_H[buckets(torch.arange(-farthest, farthest + 1), len(weight_H), farthest, both_ways)]

    distance_LP = graph.node("Sub", key_P, graph.node("Unsqueeze", query_L, graph.integers(1)))
    near_LP = graph.node("Clip", distance_LP, graph.integer(-farthest), graph.integer(farthest))
    row_LP = graph.node("Add", near_LP, graph.integer(farthest))
    bias_LPH = graph.node("Gather", graph.weight(f"{weight}.by_distance", table_RH), row_LP, axis=0)
    return graph.node("Unsqueeze", graph.node("Transpose", bias_LPH, perm=[2, 0, 1]), graph.integers(0))


def causal_mask(graph: Graph, query_L: str, key_P: str) -> str:
    """Return the causal mask [L, P] to add to scores."""
    seen_LP = graph.node("LessOrEqual", key_P, graph.node("Unsqueeze", query_L, graph.integers(1)))
    return graph.node("Where", seen_LP, graph.number(0.0), graph.number(MASKED))


def padding_mask(graph: Graph, mask_BS: str) -> str:
    """Return the mask [B, 1, 1, S] that hides padding, to add to scores."""
    real_B11S = graph.node("Unsqueeze", graph.node("Cast", mask_BS, to=BOOL), graph.integers(1, 2))
    return graph.node("Where", real_B11S, graph.number(0.0), graph.number(MASKED))


def split_heads(graph: Graph, x: str, heads: int, size: int) -> str:
    """Reshape [B, L, H · E] to [B, H, L, E]; L may be 0."""
    return graph.node("Transpose", graph.node("Reshape", x, graph.integers(0, 0, heads, size)), perm=[0, 2, 1, 3])


def attend(graph: Graph, query_BHLE: str, key_BHPE: str, value_BHPE: str, bias_BHLP: str) -> str:
    """Return the sum of values weighted by the softmax of scores and biases, [B, L, H · E]."""
    scores_BHLP = graph.node("MatMul", query_BHLE, graph.node("Transpose", key_BHPE, perm=[0, 1, 3, 2]))
    weights_BHLP = graph.node("Softmax", graph.node("Add", scores_BHLP, bias_BHLP), axis=-1)
    mixed_BLHE = graph.node("Transpose", graph.node("MatMul", weights_BHLP, value_BHPE), perm=[0, 2, 1, 3])
    return graph.node("Reshape", mixed_BLHE, graph.integers(0, 0, -1))
