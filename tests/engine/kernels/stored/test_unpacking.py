"""The order in which weights are unpacked, and processors without the instructions that unpack 3 bits fastest."""

from __future__ import annotations

import os

import pytest
import torch
from kernels_for_tests import kernels, needs_integers, passed_without
from packages_for_tests import needs_numba

from engine.kernels.kernel_choice import DECODING
from engine.kernels.linear import kernel_form, linear, plain
from engine.kernels.stored.quantized_weight import quantise
from engine.kernels.stored.scheme import BITS

LACKING = "-avx512vbmi"
"""A feature that NUMBA_CPU_FEATURES takes away."""


@needs_numba
def test_the_order_of_weights_by_hand() -> None:
    """4 bits: both weights of a byte. 3 bits: the second eight weights follow the first eight of each 32."""
    from engine.kernels.stored.rounded_vectors import UNIT, place_in_unit

    place = place_in_unit.py_func
    assert [place(weight, 4, 128) for weight in (0, 1, 2, 127)] == [0, 64, 1, 127]
    assert [place(weight, 2, 256) for weight in (0, 1, 3, 4)] == [0, 64, 192, 1]
    assert [place(weight, 3, 256) for weight in (0, 7, 8, 32, 40, 255)] == [0, 7, 64, 8, 72, 255]
    for bits in BITS:
        for unit in (UNIT[bits], 32):
            assert sorted(place(weight, bits, unit) for weight in range(unit)) == list(range(unit))


@needs_integers
def test_products_of_3_bits() -> None:
    """Rows of two chunks, whole units and a rest, on this processor or on one that lacks a feature."""
    from engine.kernels.compiler.processor import SHIFTS_BYTES

    if LACKING in os.environ.get("NUMBA_CPU_FEATURES", ""):
        assert not SHIFTS_BYTES
    torch.manual_seed(0)
    x, weight = torch.randn(5, 1312).bfloat16(), quantise(torch.randn(8, 1312), 3, 32, torch.bfloat16)
    assert kernel_form(kernels, [weight]) == (3, 32)
    exact = x.double() @ weight.dequantised(torch.float64).T
    assert float((linear(x, weight, choice=DECODING).double() - exact).norm() / exact.norm()) < 0.01
    assert torch.equal(plain(weight, torch.bfloat16), weight.dequantised(torch.bfloat16))


@needs_integers
@pytest.mark.slow
def test_processors_without_shifts_of_bytes_multiply_3_bits() -> None:
    assert "1 passed" in passed_without(LACKING[1:], f"{__file__}::test_products_of_3_bits")
