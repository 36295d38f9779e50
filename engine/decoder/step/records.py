"""Everything that the compiled steps of a decoder read, made once for its weights: tables, records, and scratch.

Shape suffixes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decoder.experts import MoeBlock
from engine.decoder.step.callbacks import Outside
from engine.decoder.step.places import Places
from engine.decoder.step.tables import Tables, tables_of
from engine.kernels.kernel_choice import COMPILED_MAX_ROWS
from engine.kernels.linear import addresses, as_bfloat16, kernel_form
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight


@dataclass
class Records:
    """Tables and records of one decoder."""

    tables: Tables
    layers: Any
    """The decoder's layers."""
    blocks: dict[int, MoeBlock]
    """Those with experts, by layer."""
    outside: Outside
    places: Places
    x_TD: Tensor
    """The hidden states, which a step overwrites."""
    step: Any
    """Record of `kernels.step.layers.STEP`."""
    text: Any
    """Record of `kernels.step.tokens.TEXT`."""
    embeds: bool
    """Whether the kernels read the embeddings. Otherwise they must lie in x."""
    vocabulary: int
    """V; 0 where the kernels do not compute logits."""
    is_large: bool
    """Whether a layer reads so much that its loops are shared among threads, on average."""
    watched: list[tuple[Tensor, int]]
    """Some weights, and where they lay when the records were made: layers are moved all together or not at all."""

    def are_of(self, norm_D: Tensor) -> bool:
        """Return whether the weights lie where they lay. norm_D: the decoder's last norm."""
        return norm_D is self.watched[0][0] and all(weight.data_ptr() == place for weight, place in self.watched)


def records_of(kernels: Any, decoder: Any) -> Records:
    """Return the records of a `model.Decoder` whose layers the kernels know."""
    config, layers = decoder.config, decoder.layers
    tables, outside = tables_of(kernels, layers), Outside(kernels, layers)
    places = Places(kernels, tables, layers, decoder.rotary)
    with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
        x_TD = as_bfloat16(np.zeros((COMPILED_MAX_ROWS, config.hidden_size), np.uint16))
    scalars, is_centered = (config.norm_epsilon, config.multipliers.residual), config.zero_centered
    functions = outside.functions
    step = kernels.step_record(
        tables.own, x_TD.data_ptr(), tables.layers, scalars, config.hidden_size, functions, zero_centered=is_centered
    )
    embedding, head = decoder.embedding, decoder.head
    embedding_form = _embedding_form(kernels, embedding)
    form = kernel_form(kernels, [head]) if decoder.head_bias_V is None else None
    text = kernels.text_record(
        step,
        (addresses(embedding) if embedding_form else (0, 0), embedding_form or kernels.PLAIN, embedding.shape[0]),
        decoder.norm.data_ptr(),
        (addresses(head) if form else (0, 0), form or kernels.PLAIN, head.shape[0]),
        (decoder.embedding_factor, 1.0 / config.multipliers.logits),
        places.positions_T,
        places.angles,
    )
    norms = [_first_norm(layer) for layer in (layers[0], layers[-1])]
    read = [weight for weight in (decoder.norm, embedding, head, *norms) if isinstance(weight, Tensor)]
    tables.kept.append([embedding, head])
    blocks = {index: layer.feed_forward for index, layer in enumerate(layers) if isinstance(layer.feed_forward, MoeBlock)}
    vocabulary = 0 if form is None else head.shape[0]
    watched = [(weight, weight.data_ptr()) for weight in read]
    is_read = embedding_form is not None
    read_bytes = decoder.bytes_read_per_token([0.0] * len(blocks)) / (len(layers) + 1)
    is_large = read_bytes >= kernels.ONE_THREAD_BYTES
    return Records(tables, layers, blocks, outside, places, x_TD, step, text, is_read, vocabulary, is_large, watched)


def _first_norm(layer: Any) -> Tensor:
    norm: Tensor = layer.feed_forward_norm if layer.attention_norm is None else layer.attention_norm
    return norm


def _embedding_form(kernels: Any, embedding: Weight) -> Any:
    """Return the form in which the kernels read single rows of embeddings; None if they cannot."""
    if isinstance(embedding, LowBitWeight):
        return embedding.widened_form(kernels)
    return kernels.PLAIN if kernel_form(kernels, [embedding]) == kernels.PLAIN else None
