"""A layer with a state within a compiled step: its projections, the kernel of its kind, and its output."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from engine.kernels.compiler.compiling import BLOCK, helper, kernel
from engine.kernels.compiler.memory import address_of, call, integers, keep, record_at
from engine.kernels.recurrence import recurrence_at
from engine.kernels.step import LAYER_BYTES, OUTPUT, add_mixed, layer_at, multiply, step_at, write_normed

PROJECTION = np.dtype([(name, np.int64) for name in ("form", "matrices", "ends", "count")])
"""One product of a layer's input: the address of its FORM, those of its matrices and their ends as in PRODUCTS, and how many
there are."""
RECURRENT = np.dtype(
    [
        ("kernel", np.int64),  # of the layer's kind
        ("job", np.int64),  # its record, in which the parameters and the states are filled in
        ("projections", np.int64),  # PROJECTION of each product
        ("projection_count", np.int64),
        ("inputs", np.int64),  # columns of all projections
        ("targets", np.int64),  # [inputs] int64: each one's column in the record's inputs; 0 for one product in their order
        ("outputs", np.int64),  # X, columns of the results
    ]
)
"""A layer with a state. Fields are addresses unless stated otherwise."""
recurrent_at, projection_at = record_at(RECURRENT), record_at(PROJECTION)
_PROJECTION_BYTES = PROJECTION.itemsize


@kernel(BLOCK, calls=("rms_norm", "centered_norm", "products", "add_to_residual"))
def recurrent_layer(address: Any, index: Any) -> None:
    """Compute the norm, the projections, the next position and the output, and add the output to x."""
    job, place = step_at(address), step_at(address).layers + index * LAYER_BYTES
    layer, own = layer_at(place), recurrent_at(layer_at(place).recurrent)
    record = recurrence_at(own.job)
    inputs_TO = np.empty((job.tokens, own.inputs), np.uint16)
    results_TX = np.empty((job.tokens, own.outputs), np.uint16)
    write_normed(job, layer.attention_norm)
    _project(job, own, inputs_TO)
    record.tokens, record.inputs, record.results = job.tokens, address_of(inputs_TO), address_of(results_TX)
    call(own.kernel, (own.job,))
    ends = np.empty(1, np.int64)
    ends[0] = job.hidden
    multiply(job, layer.form, place + OUTPUT, address_of(ends), 1, own.outputs, address_of(results_TX), job.added)
    keep(ends)
    keep(inputs_TO)
    keep(results_TX)
    add_mixed(job, layer)


@helper
def _project(job: Any, own: Any, inputs_TO: Any) -> None:
    """Write all projections of the normed hidden states to the columns where the layer's kernel reads them."""
    first, targets_O = 0, numba.carray(integers(own.targets), (own.inputs,))
    for number in range(own.projection_count):
        each = projection_at(own.projections + number * _PROJECTION_BYTES)
        width = numba.carray(integers(each.ends), (each.count,))[-1]
        made_TW = inputs_TO if own.targets == 0 else np.empty((job.tokens, width), np.uint16)
        multiply(job, each.form, each.matrices, each.ends, each.count, job.hidden, job.normed, address_of(made_TW))
        if own.targets != 0:
            for token in range(job.tokens):
                for column in range(width):
                    inputs_TO[token, targets_O[first + column]] = made_TW[token, column]
        keep(made_TW)
        first += width
