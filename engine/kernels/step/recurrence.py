"""A layer with a state within a compiled step: its projections, the kernel of its kind, and its output."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.compiler.compiling import BLOCK, kernel
from engine.kernels.compiler.memory import address_of, call, keep, record_at
from engine.kernels.recurrences.recurrence import recurrence_at
from engine.kernels.step.layers import LAYER_BYTES, OUTPUT, add_mixed, arrange, layer_at, multiply, step_at, write_normed

RECURRENT = np.dtype(
    [
        ("kernel", np.int64),  # of the layer's kind
        ("job", np.int64),  # its record, in which the parameters and the states are filled in
        ("form", np.int64),  # FORM of the projections
        ("matrices", np.int64),  # MATRIX of each projection
        ("ends", np.int64),  # as in PRODUCTS
        ("count", np.int64),  # number of projections
        ("inputs", np.int64),  # columns of all projections
        ("sources", np.int64),  # [inputs] int64: which of them each column of the record's inputs is; 0 if they are the same
        ("outputs", np.int64),  # X, columns of the results
    ]
)
"""A layer with a state. Fields are addresses unless stated otherwise."""
recurrent_at = record_at(RECURRENT)


@kernel(BLOCK, calls=("rms_norm", "centered_norm", "products", "add_to_residual"))
def recurrent_layer(address: Any, index: Any) -> None:
    """Compute the norm, the projections, the next position and the output, and add the output to x."""
    job, place = step_at(address), step_at(address).layers + index * LAYER_BYTES
    layer, own = layer_at(place), recurrent_at(layer_at(place).recurrent)
    record = recurrence_at(own.job)
    made_TO, results_TX = np.empty((job.tokens, own.inputs), np.uint16), np.empty((job.tokens, own.outputs), np.uint16)
    arranged_TO = np.empty((job.tokens if own.sources != 0 else 0, own.inputs), np.uint16)
    write_normed(job, layer.attention_norm)
    inputs = address_of(made_TO)
    multiply(job, own.form, own.matrices, own.ends, own.count, job.hidden, job.normed, inputs)
    if own.sources != 0:
        inputs = address_of(arranged_TO)
        arrange(job.tokens, address_of(made_TO), own.inputs, own.sources, own.inputs, inputs)
    record.tokens, record.inputs, record.results = job.tokens, inputs, address_of(results_TX)
    call(own.kernel, (own.job,))
    ends = np.empty(1, np.int64)
    ends[0] = job.hidden
    multiply(job, layer.form, place + OUTPUT, address_of(ends), 1, own.outputs, address_of(results_TX), job.added)
    keep(ends)
    keep(made_TO)
    keep(arranged_TO)
    keep(results_TX)
    add_mixed(job, layer)
