"""Losses as pure functions that never hold the logits of all tokens.

Logits are computed for a chunk of tokens at a time, in float32 or better, and gradients in the same pass as the value. The
T·V logits are therefore never held at once, and none are computed twice.

Shape suffixes: B sequences, L positions, D hidden, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.decoder.model import capped
from engine.kernels.linear import linear
from engine.passes.streaming import chunk_tokens

Measure = Callable[[Tensor, slice], Tensor]
"""A function from the logits [t, V] of some tokens, and the slice of these tokens, to a sum over them."""
ROWS_ADDED = 4096
"""Rows of the head's gradient that are widened at a time: few enough that the copy stays in the processor's cache."""


def logits_of(hidden_TD: Tensor, head_VD: Tensor | None, bias_V: Tensor | None = None) -> Tensor:
    """Return head · hidden + bias, [T, V] in float32 or better. head_VD: None for hidden states that are logits already."""
    return wide(hidden_TD if head_VD is None else linear(hidden_TD, head_VD, bias_V))


def head_loss(
    hidden_TD: Tensor,
    head_VD: Tensor | None,
    measure: Measure,
    bias_V: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return Σ of `measure` over the logits (`logits_of`); differentiable once, in all three tensors.

    cap: the model's `logit_cap`.
    """

    def of_capped(logits_TV: Tensor, part: slice) -> Tensor:
        return measure(capped(logits_TV, cap), part)

    loss: Tensor = _HeadLoss.apply(hidden_TD, head_VD, of_capped, bias_V)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    """Computes value and gradients by chunks in the forward pass; the backward pass scales the gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, head_VD: Tensor | None, measure: Measure, bias_V: Tensor | None) -> Tensor:
        total = hidden_TD.new_zeros((), dtype=_wide_dtype(hidden_TD))
        of_hidden, of_head, _, of_bias = ctx.needs_input_grad
        grad_TD = torch.empty_like(hidden_TD) if of_hidden else None
        grad_VD = torch.zeros_like(head_VD, dtype=_wide_dtype(head_VD)) if of_head and head_VD is not None else None
        grad_V = torch.zeros_like(bias_V, dtype=_wide_dtype(bias_V)) if of_bias and bias_V is not None else None
        step = chunk_tokens((hidden_TD.T if head_VD is None else head_VD).shape[0])
        for start in range(0, len(hidden_TD), step):
            part = slice(start, start + step)
            logits_TV = logits_of(hidden_TD[part], head_VD, bias_V)
            if not any(ctx.needs_input_grad):
                total += measure(logits_TV, part)
                continue
            value, own_TV = _with_gradient(measure, logits_TV, part)
            total += value
            own_TV = own_TV.to(hidden_TD.dtype)
            if grad_TD is not None:
                grad_TD[part] = own_TV if head_VD is None else linear(own_TV, head_VD.T)
            if grad_VD is not None:
                _add(grad_VD, linear(own_TV.T, hidden_TD[part].T))
            if grad_V is not None:
                grad_V += own_TV.sum(0, dtype=grad_V.dtype)
        ctx.save_for_backward(grad_TD, grad_VD, grad_V)
        ctx.dtype = (hidden_TD if head_VD is None else head_VD).dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_TD, grad_VD, grad_V = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_TD is None else grad_TD * scale,
            None if grad_VD is None else (grad_VD * scale).to(ctx.dtype),
            None,
            None if grad_V is None else (grad_V * scale).to(ctx.dtype),
        )


def _add(sum_VD: Tensor, own_VD: Tensor) -> None:
    """Add to a sum of a wider dtype in place, some rows at a time: torch would widen a copy of the whole summand."""
    for sum_rD, own_rD in zip(sum_VD.split(ROWS_ADDED), own_VD.split(ROWS_ADDED), strict=True):
        sum_rD += own_rD


@torch.enable_grad()
def _with_gradient(measure: Measure, logits_TV: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    value = measure(logits_TV.requires_grad_(), part)
    (own_TV,) = torch.autograd.grad(value, logits_TV)
    return value.detach(), own_TV


def next_token_loss(
    hidden_BLD: Tensor,
    head_VD: Tensor | None,
    tokens_BL: Tensor,
    bias_V: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of each next token in nats, summed over the B·(L−1) predictions."""
    hidden_TD = hidden_BLD[:, :-1].reshape(-1, hidden_BLD.shape[-1])
    targets_T = tokens_BL[:, 1:].reshape(-1)

    def measure(logits_TV: Tensor, part: slice) -> Tensor:
        return F.cross_entropy(logits_TV, targets_T[part], reduction="sum")

    return head_loss(hidden_TD, head_VD, measure, bias_V, cap)


def layer_distance(teacher_TD: Tensor, student_TD: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """Return MSE(LN(y^T), LN(y^S)) of one layer (Cruz Salinas et al. eq. 2), in float32.

    It is the mean over tokens and dimensions. With weights, it is Σ_t w_t · the mean over dimensions.

    LN is a layer norm without parameters, so that layers with large outputs do not dominate the others.
    """
    teacher, student = (F.layer_norm(wide(y_TD), y_TD.shape[-1:]) for y_TD in (teacher_TD, student_TD))
    if weights_T is None:
        return F.mse_loss(student, teacher)
    return (weights_T * (student - teacher).square().mean(-1)).sum()


def wide(x: Tensor) -> Tensor:
    """Return x in float32 or better, whatever the model's dtype."""
    return x.to(_wide_dtype(x))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def reconstruction_loss(hidden_BLD: Tensor, full_BLD: Tensor) -> Tensor:
    """Return Φ = ‖F'(x) − F(x)‖_F per sequence (DiEP §4.2), summed over the batch."""
    difference = wide(hidden_BLD) - wide(full_BLD)
    norms_B: Tensor = torch.linalg.vector_norm(difference, dim=(1, 2))
    return norms_B.sum()
