"""Experts whose matrices have different bits, computed in one call: against float64, and to the bit beside others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernels_for_tests import kernels, needs_integers
from test_linear import rounded_to_8_bits
from torch import Tensor

from engine.decoder.experts import CompiledExperts, Expert, expert_of
from engine.decoder.routing import NO_EXPERT, Selection
from engine.kernels.kernel_choice import DECODING
from engine.kernels.linear import expert_form, kernel_form, plain
from engine.kernels.stored.quantized_weight import QuantizedWeight, Weight, quantise

HIDDEN, WIDTHS = 160, (96, 128, 96, 64, 96)
BITS = ((2, 3, 4), (3, 3, 2), (16, 4, 8), (8, 2, 16), (4, 4, 4))
"""Bits of gate, up and down of each expert."""


def rounded(shape: tuple[int, int], bits: int, group: int = 32) -> Weight:
    weight = torch.randn(shape) / 8
    return weight.bfloat16() if bits == 16 else quantise(weight, bits, group, torch.bfloat16)


def experts_of(has_gate: bool) -> list[Expert]:
    torch.manual_seed(0)
    made = []
    for width, (gate, up, down) in zip(WIDTHS, BITS, strict=True):
        matrices = [rounded((width, HIDDEN), up), rounded((HIDDEN, width), down)]
        made.append(expert_of([rounded((width, HIDDEN), gate), *matrices] if has_gate else matrices))
    return made


def exact_product(weight: Weight, x_D: Tensor, *, many: bool) -> Tensor:
    """Return W·x in float64, for a vector that is rounded as this weight needs it."""
    if many:
        return plain(weight, torch.bfloat16).double() @ x_D.bfloat16().double()
    if isinstance(weight, QuantizedWeight):
        return weight.dequantised(torch.float64) @ rounded_to_8_bits(x_D)
    return weight.double() @ (x_D.bfloat16() if kernels.MULTIPLIES_BFLOAT16 else x_D).double()


def exact(expert: Expert, x_D: Tensor, *, many: bool) -> Tensor:
    *firsts, down = expert.projections
    made = [exact_product(weight, x_D, many=many) for weight in firsts]
    middle = F.silu(made[0]) * made[1] if expert.has_gate else made[0].relu().square()
    return exact_product(down, middle, many=many)


@needs_integers
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 150])
def test_each_matrix_is_multiplied_by_its_own_bits(tokens: int, has_gate: bool) -> None:
    """150 tokens take the kernels for many; the results of some tokens are the same to the bit without the others."""
    experts, many = experts_of(has_gate), tokens > 64
    matrices = [weight for expert in experts for weight in expert.projections]
    assert kernel_form(kernels, matrices) is None and expert_form(kernels, matrices) == kernels.MIXED
    x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, 3)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(tokens)])
    chosen[::3, 1] = NO_EXPERT
    compiled = CompiledExperts()

    def made(some: Tensor) -> Tensor:
        y = compiled(x[some].contiguous(), experts, Selection(chosen[some], weights[some]), choice=DECODING)
        assert y is not None
        return y

    y = made(torch.arange(tokens))
    for token in range(tokens):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for index, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            if index != NO_EXPERT:
                expected += weight * exact(experts[index], x[token], many=many)
        assert torch.allclose(y[token].double(), expected, rtol=2**-7, atol=3e-3 * float(expected.abs().max()))
    some = torch.randperm(tokens)[: tokens // 2 + 35 if many else tokens // 2 + 1]
    assert torch.equal(made(some), y[some])


@needs_integers
def test_a_mixture_gives_what_its_experts_give_alone() -> None:
    """An expert of one width has the same products to the bit beside experts of other widths."""
    experts = experts_of(has_gate=True)
    x, one = torch.randn(3, HIDDEN).bfloat16(), torch.ones(3, 1)
    chosen = torch.full((3, 1), 4)
    together = CompiledExperts()(x, experts, Selection(chosen, one), choice=DECODING)
    alone = CompiledExperts()(x, [experts[4]], Selection(torch.zeros_like(chosen), one), choice=DECODING)
    assert together is not None and alone is not None and torch.equal(together, alone)
