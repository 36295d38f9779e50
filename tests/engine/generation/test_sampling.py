"""Sampling, checked against probabilities computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import CheckpointError, OptionError
from engine.generation.options import SamplingOptions
from engine.generation.sampling import penalised, sample

ALL = {0, 1, 2, 3, 4}
PROBABILITIES = torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05])


def drawn(**options: Any) -> set[int]:
    """Return every token that 2,000 draws give."""
    return set(frequencies(**options).nonzero()[:, 0].tolist())


def frequencies(**options: Any) -> torch.Tensor:
    chosen = SamplingOptions(**options)
    tokens = sample(PROBABILITIES.log().expand(2000, -1), chosen, chosen.generator())
    assert tokens.dtype == torch.int64
    return torch.bincount(tokens, minlength=5) / 2000


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    assert sample(logits, SamplingOptions(), torch.Generator()).tolist() == [1, 0]


def test_temperature_one_draws_from_the_softmax() -> None:
    assert torch.allclose(frequencies(temperature=1.0), PROBABILITIES, atol=0.04)


def test_temperature_sharpens() -> None:
    # Halving the temperature squares the probabilities.
    expected = PROBABILITIES.square() / PROBABILITIES.square().sum()
    assert torch.allclose(frequencies(temperature=0.5), expected, atol=0.04)


@pytest.mark.parametrize(("k", "kept"), [(1, {1}), (2, {1, 3}), (3, {0, 1, 3}), (5, ALL), (99, ALL)])
def test_top_k(k: int, kept: set[int]) -> None:
    assert drawn(temperature=1.0, top_k=k) == kept


@pytest.mark.parametrize(("p", "kept"), [(1e-9, {1}), (0.45, {1}), (0.6, {1, 3}), (0.85, {0, 1, 3}), (1.0, ALL)])
def test_top_p(p: float, kept: set[int]) -> None:
    assert drawn(temperature=1.0, top_p=p) == kept


def test_top_p_acts_on_what_top_k_left() -> None:
    # Among the two remaining tokens, token 1 has 0.5 / 0.8 = 0.625.
    assert drawn(temperature=1.0, top_k=2, top_p=0.62) == {1}
    assert drawn(temperature=1.0, top_k=2, top_p=0.63) == {1, 3}


def test_top_k_keeps_k_among_equals() -> None:
    options = SamplingOptions(temperature=1.0, top_k=2)
    tokens = sample(torch.zeros(500, 6), options, options.generator())
    assert len(set(tokens.tolist())) == 2


def test_the_seed_decides() -> None:
    assert torch.equal(frequencies(temperature=1.0, seed=3), frequencies(temperature=1.0, seed=3))
    assert not torch.equal(frequencies(temperature=1.0, seed=3), frequencies(temperature=1.0, seed=4))


def test_penalties_by_hand() -> None:
    """Token 0 came three times: 4 - 0.5 - 3 · 0.25 = 2.75. Token 2 came once: 3 - 0.5 - 0.25 = 2.25."""
    logits = torch.tensor([4.0, 1.0, 3.0, 2.5])
    options = SamplingOptions(presence_penalty=0.5, frequency_penalty=0.25)
    assert penalised(logits, {0: 3, 2: 1}, options).tolist() == [2.75, 1.0, 2.25, 2.5]
    assert penalised(logits, {}, options) is logits and penalised(logits, {0: 3}, SamplingOptions()) is logits
    assert logits.tolist() == [4.0, 1.0, 3.0, 2.5]
    rewarded = penalised(logits, {3: 2}, SamplingOptions(frequency_penalty=-2.0))
    assert rewarded.tolist() == [4.0, 1.0, 3.0, 6.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_are_refused(bad: float) -> None:
    with pytest.raises(CheckpointError, match="--dtype float32"):
        sample(torch.tensor([[0.0, bad]]), SamplingOptions(), torch.Generator())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.1}, "top-p"),
        ({"top_k": -1}, "top-k"),
        ({"seed": -1}, "seed"),
        ({"presence_penalty": 2.1}, "presence penalty"),
        ({"frequency_penalty": float("nan")}, "frequency penalty"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SamplingOptions(**options)
