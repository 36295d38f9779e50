"""Forms of weights, and for each form the kernels that multiply, prepare vectors and widen.

A form is two numbers: the bits of a weight, and the number of weights that share a scale. The kernels of a form are loaded
when a product with such weights is first requested.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from engine.kernels.compiling import KERNELS, Kernel
from engine.kernels.memory import record_at

PLAIN = (16, 1)
"""The form of bfloat16, whose values have no scales."""
FORM = np.dtype(
    [
        ("bits", np.int64),
        ("group", np.int64),  # weights that share a scale
        ("multiply", np.int64),  # addresses of kernels
        ("prepare", np.int64),
        ("widen", np.int64),  # 0 for plain weights
    ]
)
form_at = record_at(FORM)


def form_kernels(bits: int) -> list[Kernel]:
    """Return the kernels for weights of so many bits: multiply, prepare and, for low-bit weights, widen."""
    names = (
        ("multiply_plain", "prepare_plain")
        if bits == 16
        else (f"{name}_{bits}" for name in ("multiply", "prepare", "widen"))
    )
    return [KERNELS[name] for name in names]


@cache
def _record(form: tuple[int, int]) -> Any:
    record, kernels = np.zeros(1, FORM), form_kernels(form[0])
    record["bits"], record["group"] = form
    for name, kernel in zip(("multiply", "prepare", "widen"), kernels, strict=False):
        record[name] = kernel.address
    return record


@cache
def form_address(form: tuple[int, int]) -> int:
    """Return the address of the form's record, which stays the same."""
    return int(_record(form).ctypes.data)
