"""Vectors that are rounded to 8 bits for products, against a plain loop in float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from packages_for_tests import needs_numba

OFFSETS = {"prepare_8": (8, 128), "prepare_4": (4, 8), "prepare_3": (3, 4), "prepare_2": (2, 2), "prepare_blocks": (8, 1)}
"""Bits of the weights that a kernel prepares vectors for, and the offset of these weights."""


def prepared(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bytes of a kernel, its scales and its offsets."""
    from engine.kernels.compiled import KERNELS

    made = np.zeros(len(values) + len(values) // 32 * 8, np.uint8)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(KERNELS[name].address)
    call(values.ctypes.data, len(values), made.ctypes.data)
    scales, offsets = made[len(values) :].view(np.float32).reshape(2, -1)
    return made[: len(values)].view(np.int8), scales, offsets


@needs_numba
@pytest.mark.parametrize("size", [32, 96, 128, 288, 512, 1056])
@pytest.mark.parametrize("name", OFFSETS)
def test_each_32_values_have_a_scale(name: str, size: int) -> None:
    from engine.kernels.stored.rounded_vectors import UNIT, place_in_unit

    bits, offset = OFFSETS[name]
    unit = 32 if name == "prepare_blocks" else UNIT[bits]
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    values[:32] = 0
    found, scales, offsets = prepared(name, values)
    for group, own in enumerate(values.reshape(-1, 32)):
        scale = np.abs(own).max() / 127
        numbers = np.rint(own / scale) if scale > 0 else own
        run = unit if group * 32 < size - size % unit else 32
        first = group * 32 - group * 32 % run
        places = [first + place_in_unit.py_func(group * 32 - first + value, bits, run) for value in range(32)]
        assert np.abs(found[places] - numbers).max() <= np.any(np.abs(own / max(scale, 1e-9) % 1 - 0.5) < 1e-4)
        assert scales[group] == pytest.approx(scale)
        assert offsets[group] == pytest.approx(scale * found[places].sum(dtype=np.int64) * offset, rel=1e-6)


@needs_numba
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", OFFSETS)
def test_a_value_that_is_not_finite_makes_its_scale_nan(name: str, value: float) -> None:
    values = np.ones(96, np.float32)
    values[40] = value
    _, scales, offsets = prepared(name, values)
    assert np.isnan(scales).tolist() == np.isnan(offsets).tolist() == [False, True, False]
