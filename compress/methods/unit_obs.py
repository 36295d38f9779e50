"""Optimal brain surgeon for hidden units: the cost of a unit when all others may make up for it.

Hassibi and Stork, Second Order Derivatives for Network Pruning, NeurIPS 1992. With H = Σ w²·h·hᵀ + ρ̄·I over the tokens of an
expert and D its down projection, removing unit f and refitting the others costs at least Σ_t w_t²·‖ΔD·h_t‖² + ρ̄·‖ΔD‖² =
‖D_f‖² / [H⁻¹]_ff. Weighted by G, the mean square of ∂L/∂y in each dimension of the block's output, this is a loss:

    cost_f = ½ · Σ_d G_d·D_df² / [H⁻¹]_ff

Removing changes H⁻¹ and D, so units are removed in blocks, the cheapest first, and both follow:

    D ← D − D_R·([H⁻¹]_RR)⁻¹·[H⁻¹]_R,    H⁻¹ ← H⁻¹ − [H⁻¹]_:R·([H⁻¹]_RR)⁻¹·[H⁻¹]_R:

The score of a unit is its cost when it was removed, and at least that of the units removed before it.

Shape suffixes: F expert width, D hidden size, R units of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.unit_statistics import unit_moments
from compress.methods.inputs import MethodRun
from compress.methods.least_squares import factored, mean_square
from compress.methods.unit_criterion import UnitScores, down_projection, include_of, unit_criterion, unit_directory
from compress.methods.unit_fisher import gradients_of
from engine.passes import heap

RIDGE = 1e-2
"""ρ of H, where ρ̄ = ρ·mean(diag H)."""
GRADIENT_SEQUENCES = 128
"""Most sequences of the calibration text of which G is the mean: a mean square needs less text than H (docs/LOG.md)."""
STEPS = 24
"""Number of blocks in which the units of an expert are removed."""


def surgeon_scores(gram_FF: Tensor, down_DF: Tensor, weight_D: Tensor, ridge: float = RIDGE, steps: int = STEPS) -> Tensor:
    """Return the score of each unit of an expert, [F] float64.

    gram_FF: Σ w²·h·hᵀ. weight_D: G. An expert without tokens has scores of zero.
    """
    width = len(gram_FF)
    scores_F, absolute = torch.zeros(width, dtype=torch.float64), ridge * mean_square(gram_FF, True)
    if absolute == 0.0:
        return scores_F
    inverse_FF = torch.cholesky_inverse(factored(gram_FF.double(), absolute))
    own_DF, left_F, block, lowest = down_DF.double().clone(), torch.arange(width), -(-width // steps), 0.0
    while len(left_F):
        cost_F = 0.5 * (weight_D[:, None] * own_DF.square()).sum(0) / inverse_FF.diagonal()
        order_F = cost_F.argsort(stable=True)
        gone_R, kept_F = order_F[:block], order_F[block:].sort().values
        removed_R = cost_F[gone_R].cummax(0).values.clamp(min=lowest)
        scores_F[left_F[gone_R]], lowest = removed_R, float(removed_R[-1])
        solved_RF = torch.linalg.solve(inverse_FF[gone_R][:, gone_R], inverse_FF[gone_R][:, kept_F])
        own_DF = own_DF[:, kept_F] - own_DF[:, gone_R] @ solved_RF
        inverse_FF = inverse_FF[kept_F][:, kept_F] - inverse_FF[kept_F][:, gone_R] @ solved_RF
        left_F = left_F[kept_F]
    return scores_F


def obs_scores(run: MethodRun) -> UnitScores:
    """Return the score of each unit, [F] float64 for each FFN, by decoder layer index."""
    directory, output = unit_directory(run, moments=True), gradients_of(run, GRADIENT_SEQUENCES).output
    checkpoint, tokens = run.prepared.checkpoint, run.prepared.tokens_SL[:GRADIENT_SEQUENCES].numel()
    scores: dict[int, list[Tensor]] = {}
    for layer, widths in checkpoint.config.ffn_widths(include_of(run)).items():
        scores[layer] = []
        for number in range(len(widths)):
            moments = unit_moments(directory, layer, number)
            parts = (moments.fit, moments.held)
            gram_FF = sum((own if moments.is_gram else own.T @ own for own in parts), torch.zeros(()))
            scores[layer].append(surgeon_scores(gram_FF, down_projection(checkpoint, layer, number), output[layer] / tokens))
        checkpoint.release()
        heap.give_back()
    return scores


UNIT_OBS = unit_criterion(obs_scores, gradients=True, inverts=True)
