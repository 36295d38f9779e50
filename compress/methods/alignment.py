"""Permutation alignment: matching the hidden units of two experts before the experts are averaged.

A permutation of an expert's hidden units (rows of gate and up, columns of down) changes no output. Two experts that compute
similar functions may therefore have distant weights, and their plain average is useless. M-SMoE (Li et al. 2024, arXiv
2310.01334) first permutes each expert towards the center of its group, by linear assignment on the weights.

Shape suffixes: F hidden units of an expert, D hidden size, B a block of D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.families.tensor_names import expert_parts, expert_tensor

BLOCK = 512
"""Number of hidden dimensions that are converted to float32 at a time."""


def held_bytes(width: int, hidden: int) -> int:
    """The most bytes that aligning and averaging two experts holds, for the assignment or the float32 projections."""
    return max(12 * width**2 + 2 * 4 * width * BLOCK, 3 * 4 * width * hidden)


Projections = tuple[Tensor, ...]
"""gate_FD, up_FD, down_DF of one SwiGLU expert and, if it has biases, gate_F, up_F, down_D; in any floating dtype. An expert
without a gate has up_FD and down_DF."""


def expert_weights(checkpoint: Checkpoint, layer: int, expert: int) -> Projections:
    """Return an expert's projections as stored, memory-mapped."""
    row = checkpoint.config.architecture
    return tuple(checkpoint.tensor(expert_tensor(row, layer, expert, part)) for part in expert_parts(row))


def alignment(centre: Projections, expert: Projections, device: torch.device | str = "cpu") -> tuple[int, ...] | None:
    """Return the permutation π that brings `expert` closest to `centre`, or None where that is the identity.

    A hidden unit has the weights W_j = gate_j ⊕ up_j ⊕ downᵀ_j and, where there are any, its two biases. π minimizes `Σ_j
    ‖W_j^centre − W_π(j)^expert‖²`, which is equivalent to maximizing `Σ_j ⟨W_j^centre, W_π(j)^expert⟩` (`centre` is the
    argument). Unit π(j) of the expert is added to unit j of the center, as in `Source.permutation`. The stored order is
    among the candidates, so alignment never increases the distance.

    Products are computed in float32, BLOCK dimensions at a time. The assignment (Jonker–Volgenant, on the CPU) needs the F
    × F similarities in float32 and then in float64, at most 12·F² bytes. Measured on one core with unrelated experts, it
    takes 0.02 s for F = 768 and 1.4 s for F = 4,096, and less for related ones; the time grows slightly faster than F². A
    pair with F = 14,336 and D = 4,096 takes 2.5 GB, 2.5 · 10¹² multiply-adds and, by extrapolation, about half a minute of
    assignment.
    """
    from scipy.optimize import linear_sum_assignment  # imported here: only merging needs it

    width = len(centre[0])
    cost_FF = torch.zeros(width, width, device=device)
    for ours_FD, theirs_FD in zip(_of_units(centre), _of_units(expert), strict=True):
        for start in range(0, ours_FD.shape[1], BLOCK):
            ours_FB, theirs_FB = (x_FD[:, start : start + BLOCK].to(device, torch.float32) for x_FD in (ours_FD, theirs_FD))
            cost_FF.addmm_(ours_FB, theirs_FB.T, alpha=-1.0)
    costs = cost_FF.cpu().double().numpy()  # the solver works on float64 and would copy any other input
    del cost_FF
    _, units = linear_sum_assignment(costs)
    permutation = tuple(units.tolist())
    return None if permutation == tuple(range(width)) else permutation


def _of_units(projections: Projections) -> list[Tensor]:
    """Return the projections with one row per hidden unit: [F, D] or [F, 1] each."""
    *ins, down_DF = (matrix for matrix in projections if matrix.dim() > 1)
    biases = (bias for bias in projections if bias.dim() == 1)
    return [*ins, down_DF.T, *(bias_F[:, None] for bias_F, _ in zip(biases, ins, strict=False))]
