"""Sampling, checked against probabilities computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import CheckpointError, OptionError
from engine.generation import sampling
from engine.generation.options import SamplingOptions
from engine.generation.sampling import (
    BLOCK,
    FIRST,
    are_finite,
    largest,
    penalised,
    penalised_rows,
    probabilities,
    sample,
    sample_at,
)

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


@pytest.mark.parametrize("tokens", [1, BLOCK, 3 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_drawing_by_blocks_equals_adding_up_whole_rows(tokens: int, scale: float) -> None:
    """Most weights are 0, in whole blocks too, and no token of weight 0 is drawn, by 0 or by the largest number below 1."""
    generator = torch.Generator().manual_seed(tokens)
    weights_BV = (scale * torch.randn(64, tokens, generator=generator)).exp()
    weights_BV[:, BLOCK : 2 * BLOCK] = 0.0
    weights_BV[torch.rand(64, tokens, generator=generator) < 0.7] = 0.0
    weights_BV[:, 0] += weights_BV.sum(-1) == 0
    uniforms_B = torch.rand(64, dtype=torch.float64, generator=generator)
    uniforms_B[:4] = torch.tensor([0.0, 1e-300, 1 - 1e-9, 1 - 2.0**-53], dtype=torch.float64)
    found_B = sampling.drawn(weights_BV, uniforms_B[:, None])
    rows = zip(weights_BV.double().numpy().cumsum(-1), uniforms_B.tolist(), strict=True)
    assert found_B.tolist() == [int(np.searchsorted(sums, uniform * sums[-1], side="right")) for sums, uniform in rows]
    assert (weights_BV.gather(-1, found_B[:, None]) > 0).all()


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
        ({"min_p": 1.1}, "min-p"),
        ({"min_p": float("nan")}, "min-p"),
        ({"top_n_sigma": -1.0}, "top-n-sigma"),
        ({"top_n_sigma": float("inf")}, "top-n-sigma"),
        ({"repetition_penalty": 0.0}, "repetition-penalty"),
        ({"repetition_penalty": float("nan")}, "repetition-penalty"),
        ({"logit_bias": ((3, 100.5),)}, "bias of token 3"),
        ({"logit_bias": ((3, float("nan")),)}, "bias of token 3"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SamplingOptions(**options)


def kept(scores: list[float], **options: Any) -> list[int]:
    """Return the tokens that may be drawn, given their scores."""
    return probabilities(torch.tensor([scores]), SamplingOptions(temperature=1.0, **options))[0].nonzero()[:, 0].tolist()


def test_min_p_is_a_fraction_of_the_largest_probability() -> None:
    """The probabilities are 0.1, 0.5, 0.05, 0.3, 0.05, so 0.2 closes what is below 0.1, and 0.19 closes the same."""
    scores = PROBABILITIES.log().tolist()
    assert kept(scores, min_p=0.19) == [0, 1, 3] and kept(scores, min_p=0.21) == [1, 3] and kept(scores, min_p=1.0) == [1]
    assert kept(scores, min_p=0.0) == [0, 1, 2, 3, 4]
    # Halving the temperature squares the ratio 0.1 / 0.5 to 0.04.
    cold = SamplingOptions(temperature=0.5, min_p=0.05)
    assert probabilities(PROBABILITIES.log()[None], cold)[0].nonzero()[:, 0].tolist() == [1, 3]


def test_min_p_comes_before_top_p() -> None:
    """min-p leaves 0.5 and 0.3. The first, 0.5 / 0.8 = 0.625, reaches top-p 0.62; its share of all tokens, 0.5, does not."""
    scores = PROBABILITIES.log().tolist()
    assert kept(scores, min_p=0.5, top_p=0.62) == [1] and kept(scores, top_p=0.62) == [1, 3]


def test_top_n_sigma_by_hand() -> None:
    """The scores 1, 2, 3, 4, 10 have mean 4 and variance (9 + 4 + 1 + 0 + 36) / 5 = 10, so σ = 3.162."""
    scores = [1.0, 2.0, 3.0, 4.0, 10.0]
    assert kept(scores, top_n_sigma=1.0) == [4]
    assert kept(scores, top_n_sigma=1.9) == [3, 4], "10 - 1.9 · 3.162 = 3.99"
    assert kept(scores, top_n_sigma=2.3) == [2, 3, 4], "10 - 2.3 · 3.162 = 2.73"
    # Both sides are divided by the temperature, so it changes nothing.
    hot = SamplingOptions(temperature=2.0, top_n_sigma=1.9)
    assert probabilities(torch.tensor([scores]), hot)[0].nonzero()[:, 0].tolist() == [3, 4]


def test_top_n_sigma_is_over_the_tokens_that_may_follow() -> None:
    """Without 10 the scores are 1, 2, 3, 4: mean 2.5, σ = √1.25 = 1.118, and 4 - 1.118 = 2.88."""
    allowed = torch.tensor([[True, True, True, True, False]])
    options = SamplingOptions(temperature=1.0, top_n_sigma=1.0)
    shares = probabilities(torch.tensor([[1.0, 2.0, 3.0, 4.0, 10.0]]), options, allowed)[0]
    expected = torch.tensor([0.0, 0.0, 1.0, math.e, 0.0]) / (1 + math.e)
    assert torch.allclose(shares, expected)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    """The excluded token is far above the others, which must not lose their precision to it at a low temperature."""
    logits, allowed = torch.tensor([[50.0, 1.0, 3.0, 2.0]]), torch.tensor([[False, True, True, True]])
    options = SamplingOptions(temperature)
    assert torch.allclose(
        probabilities(logits, options, allowed)[:, 1:], probabilities(logits[:, 1:], options), rtol=0, atol=1e-7
    )
    assert sample_at(logits[0], options, 0, allowed[0]) in ((1, 2, 3) if temperature == 1 else (2,))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.7}])
def test_logits_of_tokens_that_may_not_follow_are_not_read(options: dict[str, Any]) -> None:
    logits, allowed = torch.tensor([torch.nan, 1.0, 3.0, torch.inf]), torch.tensor([False, True, True, False])
    assert sample_at(logits, SamplingOptions(**options), 0, allowed) in (1, 2)
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            sample_at(torch.tensor([1.0, wrong, 0.0]), SamplingOptions(**options), 0)


def test_the_repetition_penalty_by_hand() -> None:
    """Token 0 is of the prompt and token 3 was generated: 4 / 2 = 2, and -3 · 2 = -6. Token 1 is new, and stays."""
    logits = torch.tensor([4.0, 1.0, 0.0, -3.0])
    options = SamplingOptions(repetition_penalty=2.0)
    assert penalised(logits, {3: 2}, options, [0, 2, 0]).tolist() == [2.0, 1.0, 0.0, -6.0]
    assert penalised(logits, {}, options) is logits


def test_a_bias_is_added_before_the_penalties() -> None:
    """Token 0: (4 - 5) · 2 = -2, and -2 - 0.5 = -2.5. Token 1: 1 + 100."""
    options = SamplingOptions(repetition_penalty=2.0, presence_penalty=0.5, logit_bias=((0, -5.0), (1, 100.0)))
    assert penalised(torch.tensor([4.0, 1.0, 3.0]), {0: 1}, options).tolist() == [-2.5, 101.0, 3.0]


def test_rows_have_their_own_text() -> None:
    """Row 0 wrote token 1 after the prompt 0; row 1 wrote nothing after the prompt 2."""
    options = SamplingOptions(repetition_penalty=2.0, frequency_penalty=0.25)
    logits = torch.tensor([[4.0, 4.0, 4.0], [8.0, 8.0, 8.0]])
    rows = penalised_rows(logits, [[1, 1], []], options, [[0], [2]])
    assert rows.tolist() == [[2.0, 1.5, 4.0], [8.0, 8.0, 4.0]]
    assert penalised_rows(logits, [[1], []], SamplingOptions(min_p=0.1), [[0], [2]]) is logits


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.1},
        {"top_n_sigma": 1.0},
        {"top_k": 3, "min_p": 0.05},
        {"top_p": 0.8, "top_n_sigma": 1.5},
    ],
)
def test_both_ways_to_draw_have_one_distribution(options: dict[str, Any]) -> None:
    chosen = SamplingOptions(temperature=0.8, **options)
    expected = probabilities(PROBABILITIES.log()[None], chosen)[0]
    rows = sample(PROBABILITIES.log().expand(4000, -1), chosen, chosen.generator())
    places = torch.tensor([sample_at(PROBABILITIES.log(), chosen, place) for place in range(4000)])
    for tokens in (rows, places):
        shares = torch.bincount(tokens, minlength=5) / 4000
        assert torch.allclose(shares, expected, atol=0.03) and bool((shares[expected == 0] == 0).all())


def kept_by_sorting(scores_V: torch.Tensor, share: float) -> list[int]:
    """Return what top-p leaves, by a loop over all tokens in order."""
    shares, before, kept = scores_V.double().softmax(-1).tolist(), 0.0, []
    for token in sorted(range(len(scores_V)), key=lambda token: (-float(scores_V[token]), token)):
        if before < share or not kept:
            kept.append(token)
        before += shares[token]
    return sorted(kept)


@pytest.mark.parametrize("scale", [0.01, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("share", [0.1, 0.7, 0.95])
def test_top_p_of_many_tokens_equals_a_loop(scale: float, share: float) -> None:
    """Peaked rows are decided by the largest scores; in flat ones, the share takes more tokens than are tried first."""
    scores = torch.randn(4, 5 * FIRST, generator=torch.Generator().manual_seed(0)) * scale
    options = SamplingOptions(temperature=1.0, top_p=share)
    together = probabilities(scores, options)
    for row, scores_V in enumerate(scores):
        assert together[row].nonzero()[:, 0].tolist() == kept_by_sorting(scores_V, share)
        assert torch.equal(probabilities(scores_V[None], options)[0], together[row]), "a row does not depend on its company"


def test_top_p_keeps_the_first_of_equal_tokens() -> None:
    """All tokens but one are equal: 0.4 of the 0.9 of 1,000 tokens are the first 445 of them, wherever they are."""
    scores = torch.zeros(1, 1001)
    scores[0, 500] = math.log(1000 / 9)
    kept = probabilities(scores, SamplingOptions(temperature=1.0, top_p=0.5))[0].nonzero()[:, 0].tolist()
    assert kept == kept_by_sorting(scores[0], 0.5) and kept[-1] == 500 and len(kept) > FIRST


def test_the_largest_is_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert largest(logits.to(dtype)).tolist() == [1, 0]


def test_rows_with_nan_or_infinity_are_found() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 1.0], [nan, 1.0], [1.0, nan], [inf, 0.0], [0.0, -inf], [nan, inf], [3e38, -3e38]])
    assert are_finite(logits).tolist() == [True, False, False, False, False, False, True]
