"""The refit of down projections against `numpy.linalg.lstsq`, worked out beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from calibrate.unit_statistics import Moments
from compress.methods.least_squares import DEFAULT_RIDGE, FIRST_RIDGES, RIDGES, Narrowed, best_ridge, refit_layer
from compress.methods.least_squares import refitted as solution
from engine.errors import DataError

HIDDEN, WIDTH, TOKENS = 5, 12, 40
KEPT = (0, 2, 3, 7, 8, 11)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(name="down")
def down_projection() -> Tensor:
    return draws(HIDDEN, WIDTH, seed=1)


@pytest.fixture(name="rows")
def weighted_units() -> Tensor:
    """Weighted hidden units w·h of some tokens, which depend on each other, [T, F]."""
    return draws(TOKENS, 4, seed=2) @ draws(4, WIDTH, seed=3) + 0.3 * draws(TOKENS, WIDTH, seed=4)


def by_numpy(rows: Tensor, down: Tensor, kept: Sequence[int], ridge: float) -> Tensor:
    """Return the least squares solution of [A_K; sqrt(ρ̄) I] D'ᵀ = [A Dᵀ; sqrt(ρ̄) D_Kᵀ]."""
    absolute = ridge * float(np.mean(np.sum(rows.numpy() ** 2, axis=0)))
    own = down.numpy()[:, list(kept)]
    left = np.concatenate([rows.numpy()[:, list(kept)], absolute**0.5 * np.eye(len(kept))])
    right = np.concatenate([rows.numpy() @ down.numpy().T, absolute**0.5 * own.T])
    return torch.from_numpy(np.linalg.lstsq(left, right, rcond=None)[0].T)


def refitted(moments: Tensor, is_gram: bool, down: Tensor, kept: Sequence[int], ridge: float) -> Tensor:
    return solution(Narrowed(Moments(moments, moments, is_gram), down, tuple(kept)), moments, ridge)


def lost(moments: Tensor, is_gram: bool, down: Tensor, kept: Sequence[int], fitted: Tensor) -> float:
    """Return Σ ‖D·a − D'·a_K‖² over the tokens of the moments."""
    difference = down.double().clone()
    difference[:, list(kept)] -= fitted.double()
    gram = moments.double() if is_gram else moments.double().T @ moments.double()
    return float(((difference @ gram) * difference).sum())


@pytest.mark.parametrize("ridge", RIDGES)
def test_the_refit_equals_numpy(rows: Tensor, down: Tensor, ridge: float) -> None:
    expected = by_numpy(rows, down, KEPT, ridge)
    assert torch.allclose(refitted(rows.T @ rows, True, down, KEPT, ridge), expected, atol=1e-9)
    assert torch.allclose(refitted(rows, False, down, KEPT, ridge), expected, atol=1e-9), "from a sample of tokens"


def test_a_sample_with_fewer_tokens_than_units_has_the_same_solution(rows: Tensor, down: Tensor) -> None:
    few = rows[:3]
    primal, dual = (refitted(each, is_gram, down, KEPT, 0.01) for each, is_gram in ((few.T @ few, True), (few, False)))
    assert torch.allclose(primal, dual, atol=1e-9)
    assert not torch.allclose(primal, down[:, list(KEPT)], atol=1e-2)


def test_the_refit_is_the_minimum(rows: Tensor, down: Tensor) -> None:
    best = refitted(rows.T @ rows, True, down, KEPT, 1e-12)
    least = lost(rows, False, down, KEPT, best)
    residual = rows @ down.T - rows[:, list(KEPT)] @ best.T
    assert least == pytest.approx(float(residual.square().sum()))
    assert lost(rows.T @ rows, True, down, KEPT, best) == pytest.approx(least)
    for seed in range(5):
        assert lost(rows, False, down, KEPT, best + 0.01 * draws(*best.shape, seed=seed)) > least


@pytest.mark.parametrize("is_gram", [True, False])
def test_an_expert_without_tokens_keeps_its_columns(down: Tensor, is_gram: bool) -> None:
    nothing = torch.zeros(WIDTH, WIDTH) if is_gram else torch.zeros(0, WIDTH)
    assert torch.equal(refitted(nothing, is_gram, down, KEPT, 0.01), down[:, list(KEPT)])


def test_few_tokens_change_little(down: Tensor) -> None:
    """Tokens change only what they show: in directions of the kept units that no token has, D' is D_K."""
    one = draws(1, WIDTH, seed=5)
    changed = refitted(one.T @ one, True, down, KEPT, 0.01) - down[:, list(KEPT)]
    unseen = torch.linalg.svd(one[:, list(KEPT)]).Vh[1:]
    assert float(changed.norm()) > 0.1
    assert float((changed @ unseen.T).abs().max()) < 1e-9


def test_a_gram_matrix_that_rounding_made_indefinite_is_solved(down: Tensor) -> None:
    """Two units of much larger size than all others, and in proportion, as float32 stores them."""
    rows = draws(TOKENS, WIDTH, seed=6)
    rows[:, 2] *= 1e4
    rows[:, 3] = rows[:, 2] * 3.1
    gram = (rows.T @ rows).float()
    gram[2, 3] = gram[3, 2] = gram[2, 3] * (1 + 2e-7)  # one unit in the last place
    assert float(torch.linalg.eigvalsh(gram.double()[KEPT, :][:, KEPT])[0]) < 0.0
    fitted = refitted(gram, True, down, KEPT, 1e-9)
    before = lost(rows, False, down, KEPT, down[:, list(KEPT)])
    assert bool(fitted.isfinite().all()) and lost(rows, False, down, KEPT, fitted) < before


def test_moments_that_overflowed_are_refused(down: Tensor) -> None:
    gram = torch.eye(WIDTH)
    gram[0, 0] = torch.inf
    with pytest.raises(DataError, match="NaN or infinity"):
        refitted(gram, True, down, KEPT, 0.01)


# A layer


def experts_of(fits: list[Tensor], helds: list[Tensor], down: Tensor) -> Iterator[Narrowed]:
    for fit, held in zip(fits, helds, strict=True):
        yield Narrowed(Moments(fit.T @ fit, held.T @ held, True), down, KEPT)


def test_the_ridge_is_chosen_on_the_held_out_tokens_of_all_experts(down: Tensor) -> None:
    mixing = draws(4, WIDTH, seed=3)
    noisy = [draws(8, 4, seed=seed) @ mixing + 2.0 * draws(8, WIDTH, seed=seed + 50) for seed in (10, 11)]
    others = [draws(400, 4, seed=seed) @ mixing + 2.0 * draws(400, WIDTH, seed=seed + 50) for seed in (12, 13)]
    errors = {
        ridge: sum(
            float((held @ down.T - held[:, list(KEPT)] @ by_numpy(fit, down, KEPT, ridge).T).square().sum())
            for fit, held in zip(noisy, others, strict=True)
        )
        for ridge in RIDGES
    }
    best = min(errors, key=errors.__getitem__)
    assert best != RIDGES[0], "eight tokens need a ridge"
    found = refit_layer(lambda: experts_of(noisy, others, down), dtype=torch.float64)
    assert found.ridge == best
    energy = sum(float((held @ down.T).square().sum()) for held in others)
    without = sum(lost(held, False, down, KEPT, down[:, list(KEPT)]) for held in others)
    assert found.error == pytest.approx(errors[best] / energy)
    assert found.error_without == pytest.approx(without / energy)
    for own, fit, held in zip(found.downs, noisy, others, strict=True):
        expected = by_numpy(torch.cat([fit, held]), down, KEPT, best)
        assert torch.allclose(own, expected, atol=1e-9), "the result is fitted to all tokens"


@pytest.mark.parametrize("best", range(len(RIDGES)))
def test_the_best_ridge_is_found_and_those_far_from_it_are_not_tried(best: int) -> None:
    tried: list[float] = []

    def errors_of(ridges: Sequence[float]) -> dict[float, float]:
        tried.extend(ridges)
        return {ridge: abs(RIDGES.index(ridge) - best) - 1.0 for ridge in ridges}

    assert best_ridge(errors_of) == (RIDGES[best], -1.0)
    needed = {*FIRST_RIDGES, *RIDGES[max(0, best - 1) : best + 2], *RIDGES[best:3]}
    assert sorted(tried) == sorted(needed), "each once"


def test_samples_are_fitted_to_both_parts(rows: Tensor, down: Tensor) -> None:
    narrowed = Narrowed(Moments(rows[:30], rows[30:], False), down, KEPT)
    found = refit_layer(lambda: [narrowed], dtype=torch.float64)
    assert torch.allclose(found.downs[0], by_numpy(rows, down, KEPT, found.ridge), atol=1e-9)


def test_a_given_ridge_is_used(rows: Tensor, down: Tensor) -> None:
    found = refit_layer(lambda: experts_of([rows[:30]], [rows[30:]], down), 0.5)
    assert found.ridge == 0.5 and found.downs[0].dtype == torch.float32
    assert torch.allclose(found.downs[0].double(), by_numpy(rows, down, KEPT, 0.5), atol=1e-5)


def test_without_held_out_tokens_the_ridge_is_not_the_weakest(rows: Tensor, down: Tensor) -> None:
    """A short text has no held-out sequence, and nothing shows that a weak ridge does no harm."""
    found = refit_layer(lambda: experts_of([rows], [torch.zeros(0, WIDTH)], down))
    assert found.ridge == DEFAULT_RIDGE > RIDGES[0] and found.error is found.error_without is None
