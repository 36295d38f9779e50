"""A gated short convolution of one new position of each sequence (engine/decoder/short_convolution.py).

It is rounded where torch's own steps round.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.arithmetic import narrow, widen
from engine.kernels.compiler.compiling import JOB, kernel
from engine.kernels.compiler.memory import address_of, halves, integers, keep, record_at
from engine.kernels.recurrences.convolution import filtered
from engine.kernels.recurrences.recurrence import FIELDS

SHORT_CONVOLUTION = np.dtype(
    [
        *FIELDS,  # inputs [T, 3C]: b, c and u; no state; results [T, C]
        ("filters", np.int64),  # [C, K] bfloat16
        ("channels", np.int64),  # C
        ("filter_size", np.int64),  # K
    ],
    align=True,
)
"""Arguments of the short convolution of one new position of each sequence."""
short_at = record_at(SHORT_CONVOLUTION)


@kernel(JOB)
def short_convolution(address: Any) -> None:
    """Compute sequence after sequence, which reads too little for several threads."""
    job = short_at(address)
    channels, size, unbiased = job.channels, job.filter_size, 0
    x_C, y_C = np.empty(channels, np.uint16), np.empty(channels, np.float32)
    results_TC = numba.carray(halves(job.results), (job.tokens, channels))
    for token in range(job.tokens):
        parts_3C = numba.carray(halves(job.inputs + 6 * token * channels), (3, channels))
        for index in range(channels):
            x_C[index] = narrow(widen(parts_3C[0, index]) * widen(parts_3C[2, index]))
        last = numba.carray(integers(job.lasts), (job.tokens,))[token]
        filtered(address_of(x_C), job.filters, unbiased, last, (size, channels), 0, y_C)
        for index in range(channels):
            results_TC[token, index] = narrow(widen(parts_3C[1, index]) * widen(narrow(y_C[index])))
    keep(x_C)
