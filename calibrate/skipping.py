"""Tables for adaptive skipping, computed from calibration statistics (DiEP §4.3, MC-MoE §3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.statistics import Statistics
from engine.decoder.skip_tables import SkipTables


def skip_tables(statistics: Statistics) -> SkipTables:
    """Return the tables of each layer.

    γ1 has the medians of w_ej / w_e0, and γ2 the CKA of two experts' outputs over the layer's mean CKA. The quantile of
    the 1-norms of tokens is left out if the statistics are of an earlier version.
    """
    layers = [statistics.layers[index] for index in sorted(statistics.layers)]
    quantiles = [layer.input_norm_quantile for layer in layers if layer.input_norm_quantile is not None]
    return SkipTables(
        tuple(layer.weight_ratio_median.float() for layer in layers),
        tuple(relative_similarity(layer.linear_cka) for layer in layers),
        tuple(quantiles) if len(quantiles) == len(layers) else None,
    )


def relative_similarity(cka_NN: Tensor) -> Tensor:
    """Return CKA divided by its mean over the layer's pairs of different experts, [N, N].

    All entries are one where the layer has no such pair or the mean is zero.
    """
    experts = len(cka_NN)
    pairs = ~torch.eye(experts, dtype=torch.bool)
    mean = cka_NN[pairs].mean() if experts > 1 else torch.tensor(0.0)
    return torch.ones_like(cka_NN) if mean <= 0 else cka_NN / mean
