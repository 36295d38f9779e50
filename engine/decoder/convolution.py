"""Causal convolution along positions, one filter per channel, as linear attention and state space models apply it.

    y_t = Σ_k w_k ⊙ x_{t-K+1+k}, with k from 0 to K - 1

The cache holds the last K - 1 inputs, which are zero before the first position.

Shape suffixes: B batch, L new positions, C channels, K positions of a filter, S the K - 1 positions before.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_convolution(x_BLC: Tensor, filter_CK: Tensor, before_BSC: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return y [B, L, C], and the last K - 1 inputs [B, S, C]. The inputs before are zero by default."""
    length, size = x_BLC.shape[1], filter_CK.shape[1]
    if before_BSC is None:
        before_BSC = x_BLC.new_zeros(x_BLC.shape[0], size - 1, x_BLC.shape[2])
    seen_BPC = torch.cat((before_BSC, x_BLC), dim=1)
    y_BLC = seen_BPC[:, :length] * filter_CK[:, 0]
    for place in range(1, size):
        y_BLC = torch.addcmul(y_BLC, seen_BPC[:, place : place + length], filter_CK[:, place])
    return y_BLC, seen_BPC[:, length:].clone()  # a view would keep all inputs alive
