"""CKA against the textbook: the ‖YᵀX‖² form for the linear kernel, an explicitly centered Gram matrix for the RBF one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from calibrate.similarity import alignment, linear_cka, rbf_cka, rbf_grams

KERNELS = pytest.mark.parametrize("cka", [linear_cka, rbf_cka])


def representations(seed: int = 0) -> Tensor:
    """Return four related representations of 40 samples in 7 dimensions, away from the origin."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(40, 7, generator=generator)
    return torch.stack([common * i + torch.randn(40, 7, generator=generator) + 3.0 for i in range(4)])


def naive_linear(x: Tensor, y: Tensor) -> float:
    x, y = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    return float((y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))


def naive_rbf(x: Tensor, y: Tensor) -> float:
    def gram(z: Tensor) -> Tensor:
        n = len(z)
        squares = torch.tensor([[float((a - b).square().sum()) for b in z.double()] for a in z.double()])
        pairs = sorted(float(squares[i, j]) ** 0.5 for i in range(n) for j in range(i))
        sigma = pairs[(len(pairs) - 1) // 2]  # the lower median, as in torch
        return torch.exp(-squares / (2 * sigma**2)).double()

    n = len(x)
    centre = torch.eye(n, dtype=torch.float64) - 1.0 / n
    k, m = centre @ gram(x) @ centre, centre @ gram(y) @ centre
    return float(torch.trace(k @ m) / (torch.trace(k @ k) * torch.trace(m @ m)) ** 0.5)


@pytest.mark.parametrize(("cka", "naive"), [(linear_cka, naive_linear), (rbf_cka, naive_rbf)])
def test_equals_the_textbook(cka: Callable[[Tensor], Tensor], naive: Callable[[Tensor, Tensor], float]) -> None:
    x = representations()
    got = cka(x)
    for i in range(4):
        for j in range(4):
            assert abs(float(got[i, j]) - naive(x[i], x[j])) < 1e-5


def test_between_two_sets_equals_the_textbook() -> None:
    x, y = representations(), representations(1)[:3, :, :5].exp() + representations()[:3, :, :5]
    got = alignment(rbf_grams(x).float(), rbf_grams(y).float())
    expected = torch.tensor([[naive_rbf(one, other) for other in y] for one in x])
    assert got.shape == (4, 3) and torch.allclose(got, expected, atol=1e-5) and float(expected.std()) > 0.01


@KERNELS
def test_is_symmetric_within_0_and_1_and_1_with_itself(cka: Callable[[Tensor], Tensor]) -> None:
    got = cka(representations())
    assert torch.equal(got, got.T) and torch.equal(got.diagonal(), torch.ones(4))
    assert bool((got >= 0).all()) and bool((got <= 1 + 1e-6).all())


@KERNELS
def test_does_not_change_under_rotation_scaling_and_shift(cka: Callable[[Tensor], Tensor]) -> None:
    x = representations()
    rotation = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(1))).Q
    moved = torch.stack([x[0], x[1] @ rotation, x[2] * 12.5, x[3] - 40.0])
    assert torch.allclose(cka(moved), cka(x), atol=1e-4)
    same = cka(torch.stack([x[0], 0.01 * x[0] @ rotation + 5.0]))
    assert torch.allclose(same, torch.ones(2, 2), atol=1e-4)


@KERNELS
def test_a_large_mean_costs_no_precision(cka: Callable[[Tensor], Tensor]) -> None:
    x = (representations() * 1024).round() / 1024
    assert torch.allclose(cka(x + 4096.0), cka(x), atol=1e-5)


@KERNELS
@pytest.mark.parametrize("value", [0.0, 2.5, 0.1])
def test_a_constant_representation_is_aligned_with_none_but_itself(cka: Callable[[Tensor], Tensor], value: float) -> None:
    x = representations()
    x[1], x[2] = value, -3 * value
    got = cka(x)
    expected = torch.eye(4)
    expected[0, 3] = expected[3, 0] = got[0, 3]
    assert torch.allclose(got, expected, atol=1e-5) and float(got[0, 3]) > 0.01
