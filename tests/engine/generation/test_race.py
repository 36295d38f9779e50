"""Tokens drawn by a race: the distribution, and the numbers that two distributions share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import engine.generation.race
from engine.generation.options import SamplingOptions
from engine.generation.race import FEW, LIKELY, race, uniform, uniform_of
from engine.generation.sampling import probabilities, sample_at

DRAWS = 20_000


def shares(p_V: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return how often each token is drawn at as many places."""
    return np.bincount([race(p_V, seed, place) for place in range(DRAWS)], minlength=len(p_V)) / DRAWS


@pytest.mark.parametrize(
    "p",
    [
        [0.5, 0.25, 0.125, 0.125],
        [0.0, 1.0, 0.0],
        [0.9, *[1e-4] * 1000],  # a tenth of the draws falls on tokens that race together
        [1 / 64] * 64,
    ],
)
def test_draws_have_the_distribution(p: list[float]) -> None:
    """Each token within five standard deviations of its share, and so the sum of the unlikely ones."""
    p_V = np.array(p, np.float32)
    found_V = shares(p_V)
    assert (np.abs(found_V - p_V) <= 5 * np.sqrt(p_V * (1 - p_V) / DRAWS)).all(), "0 is never drawn"
    unlikely_V = p_V < p_V.max() * LIKELY
    assert abs(found_V[unlikely_V].sum() - p_V[unlikely_V].sum()) <= 5 * math.sqrt(0.1 * 0.9 / DRAWS)


def test_numbers_are_those_of_splitmix64() -> None:
    """The first outputs of SplitMix64 with seed 0, as published, without their last twelve bits."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    expected = [(number >> 12) * 2.0**-52 + 2.0**-53 for number in published]
    assert uniform(0, np.arange(1, 4)).tolist() == expected


def test_one_number_is_that_of_an_array() -> None:
    for key in (0, 1, 2**63, 2**64 - 1):
        places = np.array([-2, -1, 0, 1, 5, 151_935], np.int64)
        assert uniform(key, places).tolist() == [uniform_of(key, place) for place in places.tolist()]


def test_numbers_are_between_zero_and_one() -> None:
    numbers = uniform(7, np.arange(100_000))
    assert 0 < numbers.min() < 1e-4 and 1 - 1e-4 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005 and len(set(numbers.tolist())) == len(numbers)


def test_a_loop_over_few_tokens_and_arrays_over_many_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights_V = np.random.default_rng(1).exponential(size=FEW).astype(np.float32)
    looped = [race(weights_V, 3, place) for place in range(500)]
    monkeypatch.setattr(engine.generation.race, "FEW", 0)
    assert looped == [race(weights_V, 3, place) for place in range(500)] and len(set(looped)) > 5


@pytest.mark.parametrize("likely", [4, 40])
def test_a_part_of_the_vocabulary_draws_what_the_whole_draws_without_the_others(likely: int) -> None:
    """Numbers belong to tokens, and not to their places in the array; weights need not sum to one."""
    generator = np.random.default_rng(2)
    ids_C = np.sort(generator.choice(500, size=60, replace=False))
    weights_C = np.full(60, LIKELY / 4, np.float32)
    weights_C[:likely] = generator.uniform(0.1, 1.0, size=likely)
    whole_V = np.zeros(500, np.float32)
    whole_V[ids_C] = weights_C
    drawn = [race(weights_C, 8, place, ids_C) for place in range(DRAWS)]
    assert drawn == [race(whole_V / whole_V.sum(), 8, place) for place in range(DRAWS)]
    assert set(drawn) & set(ids_C[likely:].tolist()), "unlikely tokens are drawn too"


def test_seed_and_place_decide() -> None:
    p_V = np.full(1000, 1e-3, np.float32)
    written = [[race(p_V, seed, place) for place in range(8)] for seed in range(3)]
    assert written == [[race(p_V, seed, place) for place in range(8)] for seed in range(3)]
    assert len({token for text in written for token in text}) > 20, "24 draws of 1000 tokens are hardly ever equal"


def test_two_distributions_choose_one_token_as_often_as_the_race_promises() -> None:
    """They agree with a probability of at least (1 - d) / (1 + d) at a total variation d (Daliri et al. 2025, Theorem 1)."""
    generator = np.random.default_rng(0)
    logits_V = generator.normal(size=200) * 2
    p_V, q_V = (
        np.exp(x - np.logaddexp.reduce(x)).astype(np.float32) for x in (logits_V, logits_V + generator.normal(size=200) / 4)
    )
    distance = 0.5 * np.abs(p_V - q_V).sum()
    agreed = np.mean([race(p_V, 5, place) == race(q_V, 5, place) for place in range(5000)])
    assert 0.05 < distance < 0.5 and agreed >= (1 - distance) / (1 + distance) - 0.02


def test_rounding_never_draws_what_has_no_probability() -> None:
    """The likely tokens sum up to less than one by rounding, and nothing is left."""
    p_V = np.array([0.3, 0.3, 0.3999, 0.0], np.float32)
    assert {race(p_V, 0, place) for place in range(DRAWS)} == {0, 1, 2}


def test_a_token_at_a_place_is_one_of_the_allowed_ones() -> None:
    logits_V = torch.tensor([9.0, 1.0, 2.0, 8.0])
    allowed_V = torch.tensor([False, True, True, False])
    options = SamplingOptions(temperature=1.0, seed=4)
    drawn = [sample_at(logits_V, options, place, allowed_V) for place in range(2000)]
    share = float(probabilities(logits_V[None], options, allowed_V[None])[0, 2])
    assert set(drawn) == {1, 2} and abs(drawn.count(2) / 2000 - share) < 0.05
    assert sample_at(logits_V, SamplingOptions(), 0, allowed_V) == 2 and sample_at(logits_V, SamplingOptions(), 0) == 0
