"""Phases of a run: operations and memory of each, and the values from which both are counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from calibrate.collect import held_bytes
from compress.cost.counts import OperationCounts, Passes
from compress.cost.devices import Device
from engine.families.config import DecoderConfig


@dataclass(frozen=True)
class Planned:
    """A model as its config.json describes it."""

    config: DecoderConfig
    dtype: torch.dtype
    """Default dtype of the computation."""
    bytes_per_weight: float
    """Bytes per weight of the layers' matrices in the files."""
    stay_packed: bool
    """Whether low-bit weights are used as stored. Weights in 8- or 4-bit floating point are converted instead."""


@dataclass(frozen=True)
class Phase:
    """One part of a run."""

    name: str
    work: OperationCounts
    memory_bytes: float
    """Bytes beside those that the process holds before the phase."""
    fixed_seconds: float = 0.0


@dataclass(frozen=True)
class Resident:
    """Bytes of weights in memory while a layer, or the whole model, is used."""

    model: Planned
    dtype: torch.dtype
    device: Device

    @property
    def _each(self) -> float:
        """Bytes per weight: as stored if used so, otherwise converted, and on a CPU in addition to the memory map."""
        stored, converted = self.model.bytes_per_weight, float(self.dtype.itemsize)
        if self.model.stay_packed or (stored == converted and self.dtype == self.model.dtype):
            return stored
        return converted + (stored if self.device.maps_weights else 0.0)

    def layer(self, passes: Passes) -> float:
        """Return the bytes of the largest layer, or of the embedding, which is read before the layers."""
        outer = passes.config.vocabulary_size * passes.config.hidden_size
        return self._each * max(outer, *(passes.layer_weights(index) for index in range(len(passes.config.layers))))

    def whole(self, passes: Passes) -> float:
        """Return the bytes of all layers, the embedding and the head."""
        return self._each * passes.weights


@dataclass(frozen=True)
class PassCosts:
    """A text and a model, from which the phases of a method are counted."""

    passes: Passes
    tokens: int
    length: int
    """Number of tokens of a sequence."""
    weights: Resident

    @property
    def streaming_bytes(self) -> float:
        """Return the memory of a pass layer by layer beside the layer's weights: a batch, and hidden states between
        layers.
        """
        return self.passes.batch_bytes(self.tokens, self.length) + self.passes.kept_bytes(self.tokens)


def statistics_phase(name: str, costs: PassCosts) -> Phase:
    """Return the phase of one pass that collects statistics."""
    passes, tokens, length = costs.passes, costs.tokens, costs.length
    # Similarities are computed after all batches, so the two demands never coincide.
    most = max(passes.batch_bytes(tokens, length), held_bytes(passes.config, tokens))
    return Phase(name, passes.statistics(tokens, length), costs.weights.layer(passes) + passes.kept_bytes(tokens) + most)


def perplexity_phase(name: str, costs: PassCosts) -> Phase:
    """Return the phase of one pass that measures perplexity."""
    passes, tokens = costs.passes, costs.tokens
    memory = costs.weights.layer(passes) + costs.streaming_bytes
    return Phase(name, passes.streamed(tokens, costs.length) + passes.head(tokens), memory)


def kept_of(count: int, sparsity: float) -> int:
    """Return the number of experts of a layer that stay, at least one."""
    return max(1, count - round(sparsity * count))
