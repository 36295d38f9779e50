"""Losses, as pure functions.

Shape suffixes: B sequences, L positions, D hidden, V vocabulary, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.linear import linear

CHUNK_TOKENS = 512


def next_token_loss(hidden_BLD: Tensor, head_VD: Tensor, tokens_BL: Tensor) -> Tensor:
    """Cross-entropy of each next token in nats, summed over the B·(L−1) predictions.

    Logits are made and, in the backward pass, made again for CHUNK_TOKENS at a time: never B·L·V of them at once.
    """
    hidden_TD = hidden_BLD[:, :-1].reshape(-1, hidden_BLD.shape[-1])
    targets_T = tokens_BL[:, 1:].reshape(-1)
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    for hidden, targets in zip(hidden_TD.split(CHUNK_TOKENS), targets_T.split(CHUNK_TOKENS), strict=True):
        total = total + checkpoint(_chunk_loss, hidden, head_VD, targets, use_reentrant=False)
    return total


def _chunk_loss(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
    logits_TV = _wide(linear(hidden_TD, head_VD))
    return F.cross_entropy(logits_TV, targets_T, reduction="sum")


def prediction_divergence(hidden_TD: Tensor, full_TD: Tensor, head_VD: Tensor, full_head_VD: Tensor | None = None) -> Tensor:
    """KL(p ‖ p') in nats, summed over T tokens: p = softmax(full head · full), p' = softmax(head · hidden), in float32.

    `full_head_VD`: None for the same head. Like `next_token_loss` it never holds more than a chunk's logits.
    """
    heads = head_VD, head_VD if full_head_VD is None else full_head_VD
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    for hidden, full in zip(hidden_TD.split(CHUNK_TOKENS), full_TD.split(CHUNK_TOKENS), strict=True):
        total = total + checkpoint(_chunk_divergence, hidden, full, *heads, use_reentrant=False)
    return total


def _chunk_divergence(hidden_TD: Tensor, full_TD: Tensor, head_VD: Tensor, full_head_VD: Tensor) -> Tensor:
    own = _wide(linear(hidden_TD, head_VD)).log_softmax(-1)
    target = _wide(linear(full_TD, full_head_VD)).log_softmax(-1)
    return F.kl_div(own, target, reduction="sum", log_target=True)


def layer_distance(teacher_TD: Tensor, student_TD: Tensor) -> Tensor:
    """MSE(LN(y^T), LN(y^S)) of one layer (seed 003 eq. 2), the mean over tokens and dimensions, in float32.

    LN is a layer norm without parameters, so that layers of large outputs do not outweigh the others.
    """
    teacher, student = (F.layer_norm(_wide(y_TD), y_TD.shape[-1:]) for y_TD in (teacher_TD, student_TD))
    return F.mse_loss(student, teacher)


def _wide(x: Tensor) -> Tensor:
    """In float32 or better, whatever the model's dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reconstruction_loss(hidden_BLD: Tensor, full_BLD: Tensor) -> Tensor:
    """Φ = ‖F'(x) − F(x)‖_F per sequence (seed 002 §4.2), summed over the batch."""
    difference = _wide(hidden_BLD) - _wide(full_BLD)
    norms_B: Tensor = torch.linalg.vector_norm(difference, dim=(1, 2))
    return norms_B.sum()
