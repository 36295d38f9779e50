"""Divergences against sums over the vocabulary in float64, their gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import engine.passes.streaming
from compress.training.divergences import DIVERGENCES, Predictions, weighted_divergence

NAMES = pytest.mark.parametrize("name", DIVERGENCES)


def naive(name: str, p: list[float], q: list[float]) -> float:
    """Return the divergence of one token by its definition."""

    def kl(one: list[float], other: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

    def mixed(one: list[float], other: list[float], share: float) -> list[float]:
        return [share * a + (1 - share) * b for a, b in zip(one, other, strict=True)]

    mean = mixed(p, q, 0.5)
    return {
        "forward-kl": kl(p, q),
        "reverse-kl": kl(q, p),
        "skew-forward-kl": kl(p, mixed(p, q, 0.1)),
        "skew-reverse-kl": kl(q, mixed(q, p, 0.1)),
        "jensen-shannon": 0.5 * kl(p, mean) + 0.5 * kl(q, mean),
    }[name]


def logits(tokens: int, vocabulary: int, seed: int) -> Tensor:
    return 2.0 * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_two_outcomes_by_hand() -> None:
    """The distributions are p = (3/4, 1/4) and q = (1/2, 1/2)."""
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert float(DIVERGENCES["forward-kl"](p, q)) == pytest.approx(forward, rel=1e-6)
    assert float(DIVERGENCES["reverse-kl"](p, q)) == pytest.approx(reverse, rel=1e-6)
    assert float(DIVERGENCES["jensen-shannon"](p, q)) == pytest.approx(
        0.5 * (0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375))
        + 0.5 * math.log(0.5 / 0.625) * 0.5
        + 0.5 * math.log(0.5 / 0.375) * 0.5,
        rel=1e-6,
    )


@NAMES
def test_each_equals_its_definition_and_is_zero_for_equals(name: str) -> None:
    p, q = logits(5, 7, 0), logits(5, 7, 1)
    values = DIVERGENCES[name](p.log_softmax(-1), q.log_softmax(-1))
    expected = [naive(name, a, b) for a, b in zip(p.softmax(-1).tolist(), q.softmax(-1).tolist(), strict=True)]
    assert values.tolist() == pytest.approx(expected, rel=1e-10)
    assert float(DIVERGENCES[name](p.log_softmax(-1), p.log_softmax(-1)).abs().max()) < 1e-12
    assert bool((values > 0).all())


@NAMES
@pytest.mark.parametrize("teacher_learns", [False, True], ids=["student", "teacher"])
def test_gradients_equal_finite_differences(name: str, teacher_learns: bool) -> None:
    p, q = logits(3, 6, 0).requires_grad_(teacher_learns), logits(3, 6, 1).requires_grad_(not teacher_learns)
    assert torch.autograd.gradcheck(lambda a, b: DIVERGENCES[name](a.log_softmax(-1), b.log_softmax(-1)), (p, q))


@NAMES
@pytest.mark.parametrize("teacher_learns", [False, True], ids=["student", "teacher"])
def test_in_chunks_from_hidden_states(name: str, teacher_learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divergences are weighted, at a temperature, and each side has its own head. The other side gets no gradient."""
    monkeypatch.setattr(engine.passes.streaming, "MOST_CHUNK_TOKENS", 4)
    generator = torch.Generator().manual_seed(0)
    teacher, student = (
        Predictions(*(torch.randn(n, 8, generator=generator, dtype=torch.float64, requires_grad=True) for n in (11, 13)))
        for _ in range(2)
    )
    weights = torch.rand(11, generator=generator, dtype=torch.float64)
    loss = weighted_divergence(DIVERGENCES[name], teacher, student, weights, temperature=1.5, teacher_learns=teacher_learns)
    plain = weights @ DIVERGENCES[name](
        (teacher.hidden_TD @ teacher.head_VD.T / 1.5).log_softmax(-1),
        (student.hidden_TD @ student.head_VD.T / 1.5).log_softmax(-1),
    )
    assert torch.isclose(loss, plain, rtol=1e-12)
    learner, other = (teacher, student) if teacher_learns else (student, teacher)
    inputs = (learner.hidden_TD, learner.head_VD)
    got = torch.autograd.grad(loss, (*inputs, other.hidden_TD, other.head_VD), allow_unused=True)
    assert got[2] is None and got[3] is None
    for ours, expected in zip(got, torch.autograd.grad(plain, inputs), strict=False):
        assert torch.allclose(ours, expected, atol=1e-10)


def test_half_precision_models_are_compared_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randn(n, 16, generator=generator).bfloat16() for n in (40, 50, 40, 50)]
    teacher, student = Predictions(*halves[:2]), Predictions(*halves[2:])
    loss = weighted_divergence(DIVERGENCES["forward-kl"], teacher, student, torch.ones(40))
    p, q = ((m.hidden_TD @ m.head_VD.T).double().log_softmax(-1) for m in (teacher, student))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-5)
