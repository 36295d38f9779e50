"""Which hidden unit of one expert is which of another: permutation alignment before experts are averaged.

Permuting the hidden units of an expert (rows of gate and up, columns of down) changes no output, so two experts that do the
same may be far apart in their weights, and their plain average does nothing. M-SMoE (Li et al. 2024, arXiv 2310.01334)
permutes each expert towards the centre of its group first, by linear assignment on the weights.

Shape suffixes: F hidden units of an expert, D hidden size, B a block of D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.families.tensor_names import expert_parts, expert_tensor

BLOCK = 512
"""Hidden dimensions widened to float32 at a time."""


def held_bytes(width: int, hidden: int) -> int:
    """The most that aligning and averaging experts of these sizes holds, in the assignment or in the widened projections."""
    return max(12 * width**2 + 2 * 4 * width * BLOCK, 3 * 4 * width * hidden)


Projections = tuple[Tensor, ...]
"""gate_FD, up_FD, down_DF of one SwiGLU expert, and where it has biases gate_F, up_F, down_D; in any floating dtype."""


def expert_weights(checkpoint: Checkpoint, layer: int, expert: int) -> Projections:
    """An expert's projections as stored, mapped from disk."""
    row = checkpoint.config.architecture
    return tuple(checkpoint.tensor(expert_tensor(row, layer, expert, part)) for part in expert_parts(row))


def alignment(centre: Projections, expert: Projections, device: torch.device | str = "cpu") -> tuple[int, ...] | None:
    """The permutation π that brings `expert` closest to `centre`, None where that is the order it has.

    Rows W_j = gate_j ⊕ up_j ⊕ downᵀ_j, and the unit's two biases where there are any, are a hidden unit's weights. π
    minimises Σ_j ‖W_j^centre − W_π(j)^expert‖², which is maximising Σ_j ⟨W_j^centre, W_π(j)^expert⟩; unit π(j) of the expert
    is to be added to unit j of the centre, as `Source.permutation` has it. The order as stored is among the candidates, so
    aligned experts are never further apart.

    Products are in float32, BLOCK dimensions at a time. The assignment (Jonker–Volgenant, on the processor) needs the F × F
    similarities in float32 and then in float64, 12·F² bytes at most. Measured on one core with unrelated experts, it takes
    0.02 s for F = 768 and 1.4 s for 4,096, less for related ones; the time grows a little faster than F². A pair with
    F = 14,336 and D = 4,096 takes 2.5 GB, 2.5 · 10¹² multiply-adds and, by that growth, about half a minute of assignment.
    """
    from scipy.optimize import linear_sum_assignment  # here: only merging needs it

    width = len(centre[0])
    cost_FF = torch.zeros(width, width, device=device)
    for ours_FD, theirs_FD in zip(_of_units(centre), _of_units(expert), strict=True):
        for start in range(0, ours_FD.shape[1], BLOCK):
            ours_FB, theirs_FB = (x_FD[:, start : start + BLOCK].to(device, torch.float32) for x_FD in (ours_FD, theirs_FD))
            cost_FF.addmm_(ours_FB, theirs_FB.T, alpha=-1.0)
    costs = cost_FF.cpu().double().numpy()  # what the solver works on; given anything else, it makes a copy of its own
    del cost_FF
    _, units = linear_sum_assignment(costs)
    permutation = tuple(units.tolist())
    return None if permutation == tuple(range(width)) else permutation


def _of_units(projections: Projections) -> list[Tensor]:
    """The same with a row for each hidden unit: [F, D] or [F, 1] each."""
    gate_FD, up_FD, down_DF, *biases = projections
    return [gate_FD, up_FD, down_DF.T, *(bias_F[:, None] for bias_F in biases[:2])]
