"""Random scores, the baseline that every method must exceed."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.statistics import Statistics
from compress.methods.criterion import Criterion, by_scores, calibrating
from compress.run.job import statistics_of


def random_scores(statistics: Statistics, seed: int = 0) -> dict[int, Tensor]:
    """Return uniform random scores, [N] by decoder layer index."""
    generator = torch.Generator().manual_seed(seed)
    return {index: torch.rand(len(layer.tokens_routed), generator=generator) for index, layer in statistics.layers.items()}


RANDOM = Criterion(by_scores(lambda run: random_scores(statistics_of(run), run.options.calibration.seed)), calibrating)
