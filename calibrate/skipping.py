"""γ tables for adaptive skipping, from statistics (DiEP §4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.statistics import Statistics
from engine.decoder.skip_tables import SkipTables


def skip_tables(statistics: Statistics) -> SkipTables:
    """γ1: the layer's medians of w_ej / w_e0. γ2: CKA of two experts' outputs over the layer's mean CKA."""
    layers = [statistics.layers[index] for index in sorted(statistics.layers)]
    return SkipTables(
        tuple(layer.weight_ratio_median.float() for layer in layers),
        tuple(relative_similarity(layer.linear_cka) for layer in layers),
    )


def relative_similarity(cka_NN: Tensor) -> Tensor:
    """CKA over its mean over the layer's pairs of different experts, [N, N]; ones where there is no pair or no mean."""
    experts = len(cka_NN)
    pairs = ~torch.eye(experts, dtype=torch.bool)
    mean = cka_NN[pairs].mean() if experts > 1 else torch.tensor(0.0)
    return torch.ones_like(cka_NN) if mean <= 0 else cka_NN / mean
