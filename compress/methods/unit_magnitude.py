"""Magnitude of hidden units: Σ over tokens of w²·h_f²·‖D_f‖², the unit's part in the energy of the block's output.

w is the weight of the FFN's output, h_f the unit and D_f its column of the down projection. One pass of text, without
gradients.

Shape suffixes: D hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from calibrate.unit_statistics import UnitSums
from compress.methods.unit_criterion import UnitScores, down_projection, sums_of, unit_criterion
from engine.checkpoint.checkpoint import Checkpoint
from engine.passes import heap


def magnitude_scores(checkpoint: Checkpoint, sums: Mapping[int, UnitSums]) -> UnitScores:
    """Return the score of each unit, [F] float64 for each FFN, by decoder layer index. One layer is in memory at a time."""
    scores: dict[int, list[Tensor]] = {}
    for layer, own in sums.items():
        energies = enumerate(own.weighted_square_sum)
        scores[layer] = [energy_F * column_energies(down_projection(checkpoint, layer, n)) for n, energy_F in energies]
        checkpoint.release()
        heap.give_back()
    return scores


def column_energies(down_DF: Tensor) -> Tensor:
    """Return ‖D_f‖² of each column, [F] float64."""
    return down_DF.double().square().sum(0)


UNIT_MAGNITUDE = unit_criterion(lambda run: magnitude_scores(run.prepared.checkpoint, sums_of(run)), gradients=False)
