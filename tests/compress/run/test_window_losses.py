"""Perplexity's standard error over documents and the paired ratio, against closed forms and numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compress.run.losses import Losses, before_and_after, summed_by_owner

PREDICTIONS = 10


def losses(means: Tensor) -> Losses:
    """Return the losses of windows with these mean losses, in nats."""
    return Losses(means.double() * PREDICTIONS, PREDICTIONS)


def some(windows: int, seed: int, scale: float = 0.3) -> Tensor:
    return 2 + scale * torch.randn(windows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_perplexity_is_exp_of_the_mean_over_tokens() -> None:
    assert losses(torch.tensor([1.0, 2.0, 3.0])).perplexity == pytest.approx(math.e**2)


def test_the_error_of_independent_windows_is_the_textbook_one() -> None:
    """By the delta method, the error of exp(mean) is exp(mean) times the error of the mean."""
    means = some(400, 1)
    expected = losses(means).perplexity * float(means.std()) / math.sqrt(400)
    assert losses(means).standard_error(torch.arange(400)) == pytest.approx(expected, rel=0.06)


def test_windows_of_one_document_are_drawn_together() -> None:
    """Four equal windows a document tell no more than one: the error is twice that of independent windows."""
    means = some(100, 2).repeat_interleave(4)
    documents = torch.arange(100).repeat_interleave(4)
    error = losses(means).standard_error(documents)
    alone = losses(means).standard_error(torch.arange(400))
    assert error is not None and alone is not None and error / alone == pytest.approx(2.0, rel=0.08)


def test_documents_weigh_by_their_tokens() -> None:
    """Two documents, one with three windows: the means of the four possible draws, each as often, give the error."""
    means, documents = torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.tensor([0, 0, 0, 5])
    drawn = torch.tensor([1.0, 1.25, 1.25, 2.0], dtype=torch.float64).exp()
    error = losses(means).standard_error(documents)
    assert error == pytest.approx(float(drawn.std(correction=0)), rel=0.03)


def test_differences_between_documents_cancel_out_of_the_ratio() -> None:
    """A model that loses 0.1 nats on every token has a ratio of e^0.1 without doubt, however different documents are."""
    first = some(40, 3, scale=2.0)
    ratio = losses(first + 0.1).ratio_to(losses(first), torch.arange(40))
    assert ratio == pytest.approx((math.exp(0.1),) * 3)
    error = losses(first).standard_error(torch.arange(40))
    assert error is not None and error > 0.1 * losses(first).perplexity


def test_the_interval_holds_95_percent_of_repeated_samples() -> None:
    inside = 0
    for seed in range(100):
        difference = 0.05 + 0.2 * torch.randn(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        first = some(60, seed + 1000, scale=1.0)
        ratio = losses(first + difference).ratio_to(losses(first), torch.arange(60))
        assert ratio.low is not None and ratio.high is not None and ratio.low < ratio.value < ratio.high
        inside += ratio.low < math.exp(0.05) < ratio.high
    assert 88 <= inside <= 99


def test_one_document_has_no_error() -> None:
    one = losses(torch.tensor([1.0, 2.0]))
    assert one.standard_error(torch.tensor([3, 3])) is None
    assert one.ratio_to(one, torch.tensor([3, 3])) == (1.0, None, None)


def test_a_useless_model_has_a_finite_perplexity() -> None:
    useless = losses(torch.tensor([1e5, 2e5]))
    error = useless.standard_error(torch.arange(2))
    assert math.isfinite(useless.perplexity) and error is not None and math.isfinite(error)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_outputs_that_are_not_finite_have_no_perplexity(wrong: float) -> None:
    assert math.isnan(losses(torch.tensor([1.0, wrong])).perplexity)


def test_two_models_are_compared_by_the_names_of_the_figures() -> None:
    """A loss of 1 and 3 nats, and 0.5 less on either window: e², e^1.5, and a ratio of e^-0.5 without doubt."""
    first = torch.tensor([1.0, 3.0])
    found = before_and_after("perplexity", losses(first), losses(first - 0.5), torch.arange(2))
    assert found.pop("perplexity_before_stderr") == losses(first).standard_error(torch.arange(2))
    assert found.pop("perplexity_after_stderr") == losses(first - 0.5).standard_error(torch.arange(2))
    ratio = dict.fromkeys(("perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high"), math.exp(-0.5))
    assert found == pytest.approx({"perplexity_before": math.e**2, "perplexity_after": math.exp(1.5)} | ratio)


def test_windows_of_different_lengths_weigh_by_their_tokens() -> None:
    """Losses 1, 1, 1 and 2 of a token, in two windows of 3 and 1 tokens, are the four windows of one token each above."""
    whole = Losses(torch.tensor([3.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 1.0], dtype=torch.float64))
    parts, documents = losses(torch.tensor([1.0, 1.0, 1.0, 2.0])), torch.tensor([0, 0, 0, 5])
    assert whole.perplexity == pytest.approx(parts.perplexity)
    assert whole.standard_error(torch.arange(2)) == pytest.approx(parts.standard_error(documents))
    better = Losses(whole.summed_S - torch.tensor([0.3, 0.1]), whole.predictions)
    assert better.ratio_to(whole, torch.arange(2)) == pytest.approx((math.exp(-0.1),) * 3)


def test_values_are_summed_by_owner() -> None:
    found = summed_by_owner(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 0]), 4)
    assert found.tolist() == [10.0, 0.0, 5.0, 0.0]
