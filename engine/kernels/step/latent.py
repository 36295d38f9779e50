"""A layer with latent attention within a compiled step."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.attention.latent import latent_at
from engine.kernels.compiler.compiling import BLOCK, helper, kernel
from engine.kernels.compiler.memory import address_of, call, keep
from engine.kernels.compiler.parallel import kernels_at
from engine.kernels.step.layers import (
    KEY,
    LAYER_BYTES,
    OUTPUT,
    QUERY,
    add_mixed,
    layer_at,
    move,
    multiply,
    step_at,
    write_normed,
)

NORM_EPSILON = np.float32(1e-6)
"""Epsilon of the norms of latent vectors, independent of the config."""


@kernel(BLOCK, calls=("rms_norm", "centered_norm", "products", "add_columns", "attend_latent", "add_to_residual"))
def latent_layer(address: Any, index: Any) -> None:
    """Compute the norm, the projections, the attention of each step and the output, and add the output to x.

    The matrices of the layer's record are the projection from the hidden state or the query's latent vector to queries, the
    projections to latent vectors and keys, and to the query's latent vector (none if it has no `columns`), and the output.
    """
    job, place = step_at(address), step_at(address).layers + index * LAYER_BYTES
    layer, table, own = layer_at(place), kernels_at(job.kernels), latent_at(layer_at(place).attention)
    tokens, ranks = job.tokens, own.rank + own.rotated + layer.columns
    queries, values = own.heads * (own.plain + own.rotated), own.heads * own.value_size
    down, latents = np.empty(tokens * ranks, np.uint16), np.empty(tokens * own.rank, np.uint16)
    query, mixed = np.empty(tokens * queries, np.uint16), np.empty(tokens * values, np.uint16)
    write_normed(job, layer.attention_norm)
    _project_down(job, place, address_of(down))
    _norm_columns(job, address_of(down), ranks, 0, own.rank, layer.key_norm, address_of(latents))
    query_latents = np.empty(tokens * layer.columns, np.uint16)
    x, inputs, ends = job.normed, job.hidden, np.empty(1, np.int64)
    if layer.columns > 0:
        x, inputs, first = address_of(query_latents), layer.columns, own.rank + own.rotated
        _norm_columns(job, address_of(down), ranks, first, layer.columns, layer.query_norm, x)
    ends[0] = queries
    multiply(job, layer.form, place + QUERY, address_of(ends), 1, inputs, x, address_of(query))
    own.latent_stride, own.key_stride, own.query_stride = own.rank, ranks, queries
    _attend(job, layer, address_of(query), address_of(latents), address_of(down) + 2 * own.rank, address_of(mixed))
    ends[0] = job.hidden
    multiply(job, layer.form, place + OUTPUT, address_of(ends), 1, values, address_of(mixed), job.added)
    keep(ends)
    keep(down)
    keep(latents)
    keep(query_latents)
    keep(query)
    keep(mixed)
    if layer.output_bias != 0:
        call(table.add_columns, (job.added, tokens, job.hidden, 0, job.hidden, layer.output_bias))
    add_mixed(job, layer)


@helper
def _project_down(job: Any, place: Any, down: Any) -> None:
    """Write latent vectors, keys, and the queries' latent vectors with their biases, side by side."""
    layer, own, table = layer_at(place), latent_at(layer_at(place).attention), kernels_at(job.kernels)
    ends = np.empty(2, np.int64)
    ends[0], ends[1] = own.rank + own.rotated, own.rank + own.rotated + layer.columns
    count = 2 if layer.columns > 0 else 1
    multiply(job, layer.form, place + KEY, address_of(ends), count, job.hidden, job.normed, down)
    if layer.key_bias != 0:
        call(table.add_columns, (down, job.tokens, ends[1], 0, ends[0], layer.key_bias))
    if layer.query_bias != 0:
        call(table.add_columns, (down, job.tokens, ends[1], ends[0], layer.columns, layer.query_bias))
    keep(ends)


@helper
def _norm_columns(job: Any, y: Any, width: Any, first: Any, count: Any, weight: Any, results: Any) -> None:
    """Write the norms of `count` columns of y [T, width] to the results [T, count]."""
    norm = kernels_at(job.kernels).rms_norm
    for token in range(job.tokens):
        call(norm, (y + 2 * (token * width + first), weight, NORM_EPSILON, 1, count, results + 2 * token * count))


@helper
def _attend(job: Any, layer: Any, query: Any, latents: Any, keys: Any, mixed: Any) -> None:
    """Attend with one call for a batch, or with one call for each of several positions of one sequence."""
    own = latent_at(layer.attention)
    before, cosine, sine, past = own.past, own.cosine, own.sine, np.empty(own.sequences, np.int64)
    for step in range(job.tokens // own.sequences):
        move(own, step, before, cosine, sine, past)
        own.query, own.latent = query + 2 * step * own.query_stride, latents + 2 * step * own.latent_stride
        own.key, own.results = keys + 2 * step * own.key_stride, mixed + 2 * step * own.heads * own.value_size
        call(kernels_at(job.kernels).attend_latent, (layer.attention,))
    own.past, own.cosine, own.sine = before, cosine, sine
    keep(past)
