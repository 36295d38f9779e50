"""The causal convolution of one new position (engine/decoder/convolution.py), as kernels of linear attention call it."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import exp, widen
from engine.kernels.compiler.compiling import helper, inline
from engine.kernels.compiler.memory import floats, halves


@inline
def silu(x: Any) -> Any:
    """Return x · σ(x)."""
    return x / (np.float32(1.0) + exp(-x))


@helper
def filtered(inputs: Any, filters: Any, biases: Any, last: Any, sizes: Any, first: Any, y_N: Any) -> None:
    """Write the convolution of some adjacent channels, and move these channels' inputs one place on.

    inputs: address of the position's channels, bfloat16. filters [C, K] and biases [C]: addresses, bfloat16; no biases: 0.
    last [K - 1, C]: address of the inputs before, float32. sizes: K and C. first: the first of the channels.
    """
    (size, channels), count = sizes, y_N.shape[0]
    x_N = numba.carray(halves(inputs + 2 * first), (count,))
    filter_NK = numba.carray(halves(filters + 2 * first * size), (count, size))
    last_SC = numba.carray(floats(last), (size - 1, channels))
    for index in range(count):
        x, channel = widen(x_N[index]), first + index
        y = x * widen(filter_NK[index, size - 1])
        for place in range(size - 1):
            y += last_SC[place, channel] * widen(filter_NK[index, place])
        for place in range(size - 2):
            last_SC[place, channel] = last_SC[place + 1, channel]
        if size > 1:
            last_SC[size - 2, channel] = x
        y_N[index] = y
    if biases != 0:
        bias_N = numba.carray(halves(biases + 2 * first), (count,))
        for index in range(count):
            y_N[index] += widen(bias_N[index])


@helper
def convolve(inputs: Any, filters: Any, biases: Any, last: Any, sizes: Any, first: Any, y_N: Any) -> None:
    """Write silu of the convolution of some adjacent channels, as `filtered`."""
    filtered(inputs, filters, biases, last, sizes, first, y_N)
    for index in range(y_N.shape[0]):
        y_N[index] = silu(y_N[index])


@helper
def softplus(x: Any) -> Any:
    """Return ln(1 + eˣ)."""
    if x < np.float32(20.0):  # beyond, it is x in float32
        return np.float32(np.log1p(np.exp(x)))
    return x
