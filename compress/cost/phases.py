"""Phases of a run: operations, memory, and what both are counted from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from calibrate.collect import held_bytes
from compress.cost.counts import OperationCounts, Passes
from compress.cost.devices import Device
from engine.families.config import DecoderConfig


@dataclass(frozen=True)
class Planned:
    """A model as its config.json has it."""

    config: DecoderConfig
    dtype: torch.dtype
    """That its weights are computed in unless another is asked for."""
    bytes_per_weight: float
    """In the files, of the layers' matrices."""
    stay_packed: bool
    """Low-bit weights are computed with as they are stored; those in 8- or 4-bit floating point are widened."""


@dataclass(frozen=True)
class Phase:
    """One part of a run."""

    name: str
    work: OperationCounts
    memory_bytes: float
    """Beside what the process has before."""
    fixed_seconds: float = 0.0


@dataclass(frozen=True)
class Resident:
    """Bytes of weights in memory while a layer, or the whole model, is computed with."""

    model: Planned
    dtype: torch.dtype
    device: Device

    @property
    def _each(self) -> float:
        """Of a weight: as stored where that is computed with, converted otherwise, on a processor beside the map."""
        stored, converted = self.model.bytes_per_weight, float(self.dtype.itemsize)
        if self.model.stay_packed or (stored == converted and self.dtype == self.model.dtype):
            return stored
        return converted + (stored if self.device.maps_weights else 0.0)

    def layer(self, passes: Passes) -> float:
        """The largest of them, or the embedding, which is read before."""
        outer = passes.config.vocabulary_size * passes.config.hidden_size
        return self._each * max(outer, *(passes.layer_weights(index) for index in range(len(passes.config.layers))))

    def whole(self, passes: Passes) -> float:
        """All layers, embedding and head."""
        return self._each * passes.weights


@dataclass(frozen=True)
class PassCosts:
    """A text and a model, from which the phases of a method are counted."""

    passes: Passes
    tokens: int
    length: int
    """Tokens of a sequence."""
    weights: Resident

    @property
    def streaming_bytes(self) -> float:
        """Memory of a pass layer by layer, beside the layer's weights: a batch, and the hidden states between layers."""
        return self.passes.batch_bytes(self.tokens, self.length) + self.passes.kept_bytes(self.tokens)


def statistics_phase(name: str, costs: PassCosts) -> Phase:
    """One pass that collects statistics."""
    passes, tokens, length = costs.passes, costs.tokens, costs.length
    # Similarities wait until the batches are through, and their memory is the larger or the smaller of the two.
    most = max(passes.batch_bytes(tokens, length), held_bytes(passes.config, tokens))
    return Phase(name, passes.statistics(tokens, length), costs.weights.layer(passes) + passes.kept_bytes(tokens) + most)


def perplexity_phase(name: str, costs: PassCosts) -> Phase:
    """One pass that measures perplexity."""
    passes, tokens = costs.passes, costs.tokens
    memory = costs.weights.layer(passes) + costs.streaming_bytes
    return Phase(name, passes.streamed(tokens, costs.length) + passes.head(tokens), memory)


def kept_of(count: int, sparsity: float) -> int:
    """Experts of a layer that stay; at least one."""
    return max(1, count - round(sparsity * count))
