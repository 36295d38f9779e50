"""γ tables for adaptive skipping, computed from calibration statistics (DiEP §4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.statistics import Statistics
from engine.decoder.skip_tables import SkipTables


def skip_tables(statistics: Statistics) -> SkipTables:
    """Return γ1, each layer's medians of w_ej / w_e0, and γ2, the CKA of two experts' outputs over the layer's mean CKA."""
    layers = [statistics.layers[index] for index in sorted(statistics.layers)]
    return SkipTables(
        tuple(layer.weight_ratio_median.float() for layer in layers),
        tuple(relative_similarity(layer.linear_cka) for layer in layers),
    )


def relative_similarity(cka_NN: Tensor) -> Tensor:
    """Return CKA divided by its mean over the layer's pairs of different experts, [N, N].

    All entries are one where the layer has no such pair or the mean is zero.
    """
    experts = len(cka_NN)
    pairs = ~torch.eye(experts, dtype=torch.bool)
    mean = cka_NN[pairs].mean() if experts > 1 else torch.tensor(0.0)
    return torch.ones_like(cka_NN) if mean <= 0 else cka_NN / mean
