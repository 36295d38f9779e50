"""Losses of a model on windows of text: perplexity, its standard error, and its ratio to another model's.

Windows have equal length; the responses of examples, and the targets of pairs, are windows of their own lengths. Errors are
those of a bootstrap over documents (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 6
and 13): documents are drawn with replacement, each with all of its windows, because tokens of one document resemble each
other. Models that read the same windows are compared on the same draws, so that the differences between documents, which
are large, cancel out.

Shape suffixes: S windows, D documents, R draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DRAWS = 2000
SEED = 0
DRAWN_AT_ONCE = 1 << 20
"""Number of drawn documents in memory at a time."""
LARGEST_EXPONENT = 700.0
"""Mean loss, in nats, above which perplexity is not larger any more: exp of more than 709 is infinite."""
TAILS = (0.025, 0.975)
"""Quantiles that bound an interval of 95 percent."""


class Ratio(NamedTuple):
    """The ratio of two perplexities, with its interval of 95 percent; None without several documents."""

    value: float
    low: float | None
    high: float | None

    def figures(self, name: str) -> dict[str, float | None]:
        """Return the ratio of a figure, and both ends of the interval, by the names of a report."""
        return {f"{name}_ratio": self.value, f"{name}_ratio_low": self.low, f"{name}_ratio_high": self.high}


@dataclass(frozen=True)
class Losses:
    """Losses of one model on windows of equal length."""

    summed_S: Tensor
    """Summed negative log-likelihood of each window's predicted tokens, in nats, float64 on the CPU."""
    predictions: int | Tensor
    """Number of predicted tokens: of each window, or one by one, [S]."""

    @property
    def perplexity(self) -> float:
        """Return exp of the mean negative log-likelihood; NaN where a loss is NaN or infinite."""
        if not bool(self.summed_S.isfinite().all()):
            return math.nan
        return math.exp(min(float(self.summed_S.sum() / self._predictions_S.sum()), LARGEST_EXPONENT))

    @property
    def _predictions_S(self) -> Tensor:
        return torch.as_tensor(self.predictions, dtype=torch.float64).expand(len(self.summed_S))

    def standard_error(self, documents_S: Tensor) -> float | None:
        """Return the standard error of the perplexity over documents; None with fewer than two documents.

        documents_S: number of each window's document.
        """
        means_R = drawn_means(self.summed_S, self._predictions_S, documents_S)
        if means_R is None:
            return None
        largest = min(float(means_R.max()), LARGEST_EXPONENT)
        return math.exp(largest) * float((means_R.clamp(max=largest) - largest).exp().std(correction=0))

    def ratio_to(self, other: Losses, documents_S: Tensor) -> Ratio:
        """Return this perplexity over that of another model on the same windows, paired by document."""
        differences_S = self.summed_S - other.summed_S
        value = math.exp(min(float(differences_S.sum() / self._predictions_S.sum()), LARGEST_EXPONENT))
        means_R = drawn_means(differences_S, self._predictions_S, documents_S)
        if means_R is None:
            return Ratio(value, None, None)
        low, high = means_R.clamp(max=LARGEST_EXPONENT).exp().quantile(torch.tensor(TAILS, dtype=torch.float64)).tolist()
        return Ratio(value, low, high)


def before_and_after(name: str, before: Losses, after: Losses, documents_S: Tensor) -> dict[str, float | None]:
    """Return two models' perplexities on the same windows, with their standard errors and their ratio, paired by document.

    name: that of the figure, such as "perplexity", with which the names of all seven begin. documents_S: number of each
    window's document.
    """
    own = {f"{name}_before": before, f"{name}_after": after}
    return (
        {key: losses.perplexity for key, losses in own.items()}
        | {f"{key}_stderr": losses.standard_error(documents_S) for key, losses in own.items()}
        | after.ratio_to(before, documents_S).figures(name)
    )


def drawn_means(values_S: Tensor, predictions_S: Tensor, documents_S: Tensor) -> Tensor | None:
    """Return the mean value of a predicted token, [R], in each draw of documents; None with fewer than two.

    values_S: the sum over each window's predicted tokens, float64.
    """
    _, owners_S = documents_S.unique(return_inverse=True)
    count = int(owners_S.max()) + 1
    if count < 2:
        return None
    values_D, predictions_D = (
        torch.zeros(count, dtype=torch.float64).index_add(0, owners_S, each_S) for each_S in (values_S, predictions_S)
    )
    generator = torch.Generator().manual_seed(SEED)
    at_once = max(1, DRAWN_AT_ONCE // count)
    means: list[Tensor] = []
    for first in range(0, DRAWS, at_once):
        drawn_RD = torch.randint(count, (min(at_once, DRAWS - first), count), generator=generator)
        means.append(values_D[drawn_RD].sum(1) / predictions_D[drawn_RD].sum(1))
    return torch.cat(means)


def summed_by_owner(values_T: Tensor, owners_T: Tensor, owners: int) -> Tensor:
    """Return the sum of the values of each owner, float64 on the CPU. owners_T: the number of each value's owner."""
    return torch.zeros(owners, dtype=torch.float64).index_add(0, owners_T.cpu(), values_T.cpu().double())
