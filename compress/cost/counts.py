"""Costs of passes over a decoder, counted from its config: operations, bytes, and memory beside the weights.

Matrix products are counted exactly, as 2·rows·columns for each input row. Operations between products are counted as the
tensors that they read and write: a few for each vector of hidden size, given as constants here.

Letters in comments: T tokens, L length, D hidden, F expert width, N experts, K experts of a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from calibrate.collect import SIMILARITY_TOKENS
from compress.cost.devices import Device
from engine.families.config import DecoderConfig
from engine.families.layer_config import MoeConfig
from engine.families.tensor_shapes import expected_tensors, expert_shapes, layer_tensors
from engine.passes.memory_budget import UNLIMITED
from engine.passes.streaming import chunk_tokens

RESIDUAL_VECTORS, SLOT_VECTORS, WIDTH_VECTORS, HEAD_VECTORS, SCORE_PASSES = 30, 10, 6, 10, 6
"""Elements that a layer's forward pass reads and writes between its products.

The constants are for each token's vector of hidden size (two norms, two sums), for each of its slots (gather, weight, sum),
for each slot's hidden units (silu, product), for each of its queries and keys (rotate, copy), and for each score.
"""
GRADIENT_PASSES = 4
"""Number of such reads and writes in a pass with gradients: forward, recomputation, and twice in the backward pass."""
LAYER_CALLS, EXPERT_CALLS = 60, 12
"""Number of operations of a layer, and of an expert, however small."""
GRAM_PASSES = 12
"""Elements in float64 that similarities read and write, for each entry of a Gram matrix."""


@dataclass(frozen=True)
class OperationCounts:
    """Counts of operations and bytes of a computation; they can be added and multiplied."""

    flops: float = 0.0
    """Floating-point operations of products in the model's dtype."""
    single_flops: float = 0.0
    """Operations of products in float32, and the next field in float64, whatever the model's dtype."""
    double_flops: float = 0.0
    weight_bytes: float = 0.0
    """Bytes of weights that products read from memory."""
    moved_bytes: float = 0.0
    """Bytes read and written between products."""
    read_bytes: float = 0.0
    """Bytes read from the checkpoint's files."""
    written_bytes: float = 0.0
    """Bytes written to the result's files."""
    draws: float = 0.0
    """Probabilities of the distributions from which tokens are sampled."""
    calls: float = 0.0

    def __add__(self, other: OperationCounts) -> OperationCounts:
        return OperationCounts(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def __mul__(self, times: float) -> OperationCounts:
        return OperationCounts(**{name: value * times for name, value in vars(self).items()})

    @property
    def all_flops(self) -> float:
        """Operations of products in all dtypes."""
        return self.flops + self.single_flops + self.double_flops

    @property
    def all_bytes(self) -> float:
        """Bytes that pass through memory and files."""
        return self.weight_bytes + self.moved_bytes + self.read_bytes + self.written_bytes

    def seconds(self, device: Device, dtype: torch.dtype) -> float:
        """Return the seconds on a device: the longer of products and the reading of their weights, plus everything else."""
        return (
            max(self.flops / device.rate(dtype), self.weight_bytes / device.bandwidth)
            + self.single_flops / device.rate(torch.float32)
            + self.double_flops / device.rate(torch.float64)
            + self.moved_bytes / (device.bandwidth * device.bandwidth_efficiency)
            + self.read_bytes / device.read_bytes_per_second
            + self.written_bytes / device.write_bytes_per_second
            + self.draws / device.draws_per_second
            + self.calls * device.call_seconds
        )


@dataclass(frozen=True)
class Passes:
    """Counts of passes over one model: `tokens` in sequences of `length`, in batches of about UNLIMITED.tokens_per_batch."""

    config: DecoderConfig
    bytes_per_element: int
    """Bytes of one element in the dtype of the computation."""
    bytes_per_weight: float
    """Bytes per weight of the layers' matrices in the files."""

    @cached_property
    def _parameters(self) -> list[tuple[int, int]]:
        """Return the number of parameters of each layer, and of its matrices alone."""
        layers = [layer_tensors(self.config, index).values() for index in range(len(self.config.layers))]
        return [(sum(map(prod, own)), sum(prod(shape) for shape in own if len(shape) == 2)) for own in layers]

    def layer_weights(self, index: int) -> int:
        """Return the number of parameters of a layer."""
        return self._parameters[index][0]

    @cached_property
    def weights(self) -> int:
        """Return the number of parameters of the model."""
        return sum(map(prod, expected_tensors(self.config).values()))

    def token_flops(self, index: int, length: int, slots: int | None = None) -> float:
        """Return the operations of one token in a layer: 2 for each weight that processes it, and its share of the scores.

        slots: number of experts that process it, if that is not the model's own K.
        """
        config, layer = self.config, self.config.layers[index]
        active: float = self._parameters[index][1]
        if layer.moe is not None:
            idle = layer.moe.experts - (layer.moe.experts_per_token if slots is None else slots)
            active -= idle * _expert_weights(config, index)
        return 2.0 * (active + self._heads(index) * sum(self._head_sizes(index)) * self.keys(index, length))

    def keys(self, index: int, length: int) -> float:
        """Return the mean number of positions that a token attends to, its own included, over a sequence.

        With linear attention this is the number of positions that cost as much.
        """
        if not self.config.layers[index].attends:
            return 0.0
        if (linear := self.config.layers[index].linear) is not None:
            return linear.positions(length)
        window = self.config.layers[index].window
        if window is None or (size := window if isinstance(window, int) else window.size) >= length:
            return (length + 1) / 2
        if isinstance(window, int):
            return (size * (size + 1) / 2 + (length - size) * size) / length
        return (size + 1) / 2

    def _heads(self, index: int) -> int:
        linear = self.config.layers[index].linear
        return self.config.attention_heads if linear is None else linear.heads

    def _head_sizes(self, index: int) -> tuple[int, int]:
        if (linear := self.config.layers[index].linear) is not None:
            return linear.key_dimension, linear.value_dimension
        latent, size = self.config.latent, self.config.heads_of(index).size
        return size, size if latent is None else latent.value_dimension

    def layer_moved(self, index: int, length: int, slots: int | None = None) -> float:
        """Return the bytes per token that a layer's forward pass moves between its products."""
        config, hidden = self.config, self.config.hidden_size
        width, met = _slots(config, index, slots)
        linear = config.layers[index].linear
        own = config.heads_of(index)
        heads = (config.attention_heads + 2 * own.groups) * own.size
        heads = heads * config.layers[index].attends if linear is None else linear.projected
        scores = self._heads(index) * self.keys(index, length)
        elements = RESIDUAL_VECTORS * hidden + SLOT_VECTORS * met * hidden + WIDTH_VECTORS * met * width
        return self.bytes_per_element * (elements + HEAD_VECTORS * heads + SCORE_PASSES * scores)

    def layer(self, index: int, tokens: int, length: int, slots: int | None = None) -> OperationCounts:
        """Return the counts of a layer's forward pass over all tokens."""
        moe, batches = self.config.layers[index].moe, _batches(tokens, length)
        experts = 1 if moe is None else moe.experts
        return OperationCounts(
            flops=tokens * self.token_flops(index, length, slots),
            weight_bytes=batches * self.layer_weights(index) * self.bytes_per_element,
            moved_bytes=tokens * self.layer_moved(index, length, slots),
            calls=batches * (LAYER_CALLS + experts * EXPERT_CALLS),
        )

    def forward(self, tokens: int, length: int, slots: Mapping[int, int] | None = None) -> OperationCounts:
        """Return the counts of a forward pass of all layers."""
        return self.sum_layers(lambda index: self.layer(index, tokens, length, None if slots is None else slots.get(index)))

    def streamed(self, tokens: int, length: int) -> OperationCounts:
        """Return the counts of a forward pass of all layers that reads them from the files one by one."""
        return self.forward(tokens, length) + OperationCounts(read_bytes=self.file_bytes)

    @property
    def file_bytes(self) -> float:
        """Return the bytes of the checkpoint's files."""
        return self.weights * self.bytes_per_weight

    def gradient(self, tokens: int, length: int, slots: Mapping[int, int] | None = None) -> OperationCounts:
        """Return the counts of a pass with gradients of activations alone: forward, recomputation, backward.

        Weights are frozen.
        """
        once = self.forward(tokens, length, slots)
        return replace(once * 3, moved_bytes=GRADIENT_PASSES * once.moved_bytes)

    def head(self, tokens: int, products: int = 1) -> OperationCounts:
        """Return the counts of the logits of all tokens: one product, or two with the gradient."""
        elements = self.config.vocabulary_size * tokens
        flops = 2.0 * elements * self.config.hidden_size * products
        return OperationCounts(flops=flops, moved_bytes=elements * (self.bytes_per_element + 4 * 4) * products)

    def sampling(self, tokens: int) -> OperationCounts:
        """Return the counts of sampling one token from the model's prediction at each position."""
        return self.head(tokens) + OperationCounts(draws=self.config.vocabulary_size * tokens)

    def statistics(self, tokens: int, length: int) -> OperationCounts:
        """Return the counts of `calibrate.collect`: a streamed pass, every expert on a sample, and similarities of
        outputs.
        """
        sample = min(SIMILARITY_TOKENS, tokens)
        return self.streamed(tokens, length) + self.sum_layers(lambda index: self._layer_statistics(index, sample))

    def _layer_statistics(self, index: int, sample: int) -> OperationCounts:
        moe, hidden = self.config.layers[index].moe, self.config.hidden_size
        if moe is None:
            return OperationCounts()
        count, before = moe.experts, self._experts_before(index)
        products = 2 * 2.0 * count * sample**2 * hidden + 2 * 2.0 * count**2 * sample**2
        grams = GRAM_PASSES * 8 * count * sample**2 + 10 * 8 * count * sample * hidden
        return self.all_experts(index, sample) + OperationCounts(
            double_flops=products, single_flops=2.0 * count * before * sample**2, moved_bytes=grams
        )

    def all_experts(self, index: int, tokens: int) -> OperationCounts:
        """Return the counts of every expert of a layer on the same tokens."""
        moe, hidden = self.config.layers[index].moe, self.config.hidden_size
        assert moe is not None
        return OperationCounts(
            flops=2.0 * tokens * moe.experts * _expert_weights(self.config, index),
            weight_bytes=moe.experts * _expert_weights(self.config, index) * self.bytes_per_element,
            moved_bytes=self.bytes_per_element
            * tokens
            * moe.experts
            * (WIDTH_VECTORS * moe.mean_width + SLOT_VECTORS * hidden),
            calls=moe.experts * EXPERT_CALLS,
        )

    def unit_moments(self, tokens: int, length: int) -> OperationCounts:
        """Return the counts of the moments of hidden units: a streamed pass in which experts run on their tokens twice."""
        return self.streamed(tokens, length) + self.sum_layers(lambda index: self._layer_moments(index, tokens))

    def _layer_moments(self, index: int, tokens: int) -> OperationCounts:
        moe = self.config.layers[index].moe
        if moe is None:
            return OperationCounts()
        slots, width = tokens * moe.experts_per_token, moe.expert_width
        return OperationCounts(
            flops=2.0 * slots * 2 * width * self.config.hidden_size,
            single_flops=2.0 * slots * width**2,
            written_bytes=8.0 * moe.experts * width**2,
            calls=moe.experts * EXPERT_CALLS,
        )

    def brain_surgeon(self) -> OperationCounts:
        """Return the counts of the ranking by compress/methods/unit_obs.py: an inverse of each expert's F × F moments, which
        is then reduced block by block.
        """
        widths = [layer.moe.widths for layer in self.config.layers if layer.moe is not None]
        flops = sum(5 / 3 * width**3 for own in widths for width in own)
        return OperationCounts(double_flops=flops, calls=sum(map(len, widths)))

    def refit(self, kept: float, ridges: int) -> OperationCounts:
        """Return the counts of the refit of every expert (compress/methods/least_squares.py).

        kept: share of hidden units that stay. ridges: number of ridges that are tried.
        """
        return self.sum_layers(lambda index: self._layer_refit(index, kept, ridges))

    def _layer_refit(self, index: int, kept: float, ridges: int) -> OperationCounts:
        moe, hidden = self.config.layers[index].moe, self.config.hidden_size
        if moe is None:
            return OperationCounts()
        width, gone = kept * moe.expert_width, (1.0 - kept) * moe.expert_width
        right_sides, shares = 5 * 2.0 * width * gone * hidden, 2.0 * (moe.expert_width**2 + gone**2) * hidden
        return OperationCounts(
            single_flops=moe.experts * shares,
            double_flops=moe.experts * (right_sides + _least_squares_flops(width, hidden, ridges)),
            read_bytes=4 * 8.0 * moe.experts * moe.expert_width**2,
            calls=moe.experts,
        )

    def correction(self, tokens: int, length: int, kept: float, ridges: int) -> OperationCounts:
        """Return the counts of the correction after the refit (compress/refit/correction.py).

        kept: share of hidden units that stay. ridges: number of ridges that are tried. Both models run once, and the
        smaller one is counted like the full one.
        """
        forward = self.streamed(tokens, length) + self.streamed(tokens, length)
        return forward + self.sum_layers(lambda index: self._layer_correction(index, tokens, kept, ridges))

    def _layer_correction(self, index: int, tokens: int, kept: float, ridges: int) -> OperationCounts:
        moe, hidden = self.config.layers[index].moe, self.config.hidden_size
        if moe is None:
            return OperationCounts()
        slots, width = tokens * moe.experts_per_token, kept * moe.expert_width
        return OperationCounts(
            flops=2.0 * slots * 4 * width * hidden,
            single_flops=2.0 * slots * width * (width + 2 * hidden),
            double_flops=moe.experts * _least_squares_flops(width, hidden, ridges),
            calls=2 * moe.experts * EXPERT_CALLS,
        )

    def _experts_before(self, index: int) -> int:
        before = [layer for layer in self.config.moe_layers if layer < index]
        return self.config.experts_by_layer[before[-1]] if before else 0

    def sum_layers(self, of_layer: Callable[[int], OperationCounts]) -> OperationCounts:
        """Return the sum over all layers of the counts that `of_layer` returns for a layer's index."""
        total = OperationCounts()
        for index in range(len(self.config.layers)):
            total += of_layer(index)
        return total

    # Memory beside the weights

    def batch_bytes(self, tokens: int, length: int, slots: int | None = None) -> float:
        """Return the bytes of a layer's forward pass over a batch: residual stream, slots and hidden units."""
        batch, hidden = _in_batch(tokens, length), self.config.hidden_size
        widest = max(self._batch_elements(index, slots) for index in range(len(self.config.layers)))
        return self.bytes_per_element * batch * (6 * hidden + widest)

    def _batch_elements(self, index: int, slots: int | None) -> float:
        width, met = _slots(self.config, index, slots)
        experts = 1 if (moe := self.config.layers[index].moe) is None else moe.experts
        return 5 * met * self.config.hidden_size + 3 * met * width / experts * 2

    def kept_bytes(self, tokens: int) -> float:
        """Return the bytes of the hidden states between layers; beyond a limit they are stored in a file."""
        whole = self.bytes_per_element * tokens * self.config.hidden_size
        in_file = self.bytes_per_element * UNLIMITED.tokens_per_batch * self.config.hidden_size
        return whole if whole <= UNLIMITED.kept_bytes else in_file

    def gradient_bytes(self, tokens: int, length: int, slots: Mapping[int, int] | None = None) -> float:
        """Return the bytes of a pass with gradients: each layer's input, the activations of one layer, and logits."""
        batch, hidden = _in_batch(tokens, length), self.config.hidden_size
        kept = 0.0
        for index in range(len(self.config.layers)):
            width, met = _slots(self.config, index, None if slots is None else slots.get(index))
            heads = 4 * self.config.attention_heads * self.config.heads_of(index).size
            kept = max(kept, 10 * hidden + heads + met * (6 * hidden + 6 * width))
        logits = (
            chunk_tokens(self.config.vocabulary_size) * self.config.vocabulary_size * (4 * 3 + 2 * self.bytes_per_element)
        )
        return self.bytes_per_element * batch * (len(self.config.layers) * hidden + kept) + logits


def _slots(config: DecoderConfig, index: int, slots: int | None) -> tuple[float, float]:
    """Return (hidden units of an expert, experts per token) of a layer; the shared expert counts as a fraction of an
    expert.
    """
    layer = config.layers[index]
    moe: MoeConfig | None = layer.moe
    if moe is None:
        return layer.dense_width, 1.0
    met = moe.experts_per_token if slots is None else slots
    return moe.mean_width, met + moe.shared_width / moe.mean_width


def _expert_weights(config: DecoderConfig, index: int) -> float:
    """Return the number of weights of a layer's expert of mean width."""
    moe = config.layers[index].moe
    assert moe is not None
    matrices = (shape for shape in expert_shapes(config, index).values() if len(shape) == 2)
    return sum(map(prod, matrices)) * moe.mean_width / moe.expert_width


def _in_batch(tokens: int, length: int) -> int:
    return min(tokens, UNLIMITED.sequences_per_batch(length) * length)


def _batches(tokens: int, length: int) -> int:
    return -(-tokens // _in_batch(tokens, length))


def _least_squares_flops(width: float, hidden: int, ridges: int) -> float:
    """Return the operations of one expert's least squares: with each ridge a solution and its error, and then the result."""
    solution, judged = width**3 / 3 + 2.0 * hidden * width**2, 2.0 * hidden * width**2
    return (ridges + 1) * solution + ridges * judged
