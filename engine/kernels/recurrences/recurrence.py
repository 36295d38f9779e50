"""The first fields of the records of all kernels for layers with a state.

Such a kernel computes everything between the projections for the next position of each sequence, and updates the states in
place: the gated delta rule (gated_delta.py), Mamba-2 (mamba2.py), and gated short convolutions (short_convolution.py).
"""

from __future__ import annotations

import numpy as np

from engine.kernels.compiler.memory import record_at

FIELDS = [
    ("kernels", np.int64),
    ("inputs", np.int64),  # [T, O] bfloat16: the projections of the layer's input, side by side
    ("states", np.int64),  # [T] int64: the address of each sequence's state, float32
    ("lasts", np.int64),  # [T] int64: that of the last inputs of its convolution, [K - 1, C] float32
    ("results", np.int64),  # [T, X] bfloat16
    ("tokens", np.int64),  # T, one of each sequence
]
"""The first fields of a record. All but the tokens are addresses. The parameters of the layer follow."""
RECURRENCE = np.dtype(FIELDS, align=True)
recurrence_at = record_at(RECURRENCE)
