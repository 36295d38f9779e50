"""A draft from a model's own layers for multi-token prediction, for speculative decoding.

Each position that the model has read gives such a layer one more position: the hidden state there and the token after it.
The first token of a round follows from the model's own hidden states, and each later one from the output of the layer at
the position before; these outputs are replaced by the model's own states once it has read the tokens.

Shape suffixes: L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.prediction_layer import PredictionTensors
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.decoder.prediction import PredictionLayer
from engine.errors import OptionError
from engine.kernels.kernel_choice import DECODING, PROMPT, KernelChoice

_POSITIONS_AT_ONCE = 512


def check_predicts(checkpoint: Checkpoint, path: Path) -> None:
    """Raise OptionError or CheckpointError unless a model has a layer for multi-token prediction that can draft."""
    if not checkpoint.prediction_layers:
        raise OptionError(f"{path}: has no layers for multi-token prediction; give a smaller model as the draft, or none")
    reasons = {
        "those of a GGUF file are not read": checkpoint.gguf is not None,
        "layers with a state cannot undo tokens": bool(checkpoint.config.linear_layers),
        "its weights are low-bit": bool(checkpoint.schemes_used),
    }
    if (reason := next((reason for reason, holds in reasons.items() if holds), None)) is not None:
        raise OptionError(
            f"{path}: its layers for multi-token prediction cannot draft, because {reason}; leave out the draft"
        )
    PredictionTensors(checkpoint)


def open_prediction(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> PredictionLayer:
    """Return the first layer for multi-token prediction of a model. Raises the errors of PredictionTensors."""
    tensors = PredictionTensors(checkpoint)
    return PredictionLayer(tensors.config, tensors.source(dtype, device)).eval()


class PredictionReader:
    """Reads a text as `speculative.Reader` does, with the hidden states that the model gives it."""

    def __init__(self, decoder: Decoder, layer: PredictionLayer, capacity: int, dtype: torch.dtype) -> None:
        """capacity: maximum number of positions. dtype: that of the cache."""
        self._decoder, self._layer = decoder, layer
        self.cache = KeyValueCache(layer.config, 1, capacity, dtype, decoder.device)
        """Keys and values of the layer."""
        self._states: list[Tensor] = []
        """Hidden states [L, D] of the model from position `_certain` on."""
        self._certain = 0
        """Number of positions in the cache whose hidden states are the model's own."""
        self._drafted_D: Tensor | None = None
        self.kernels: tuple[KernelChoice, KernelChoice] = PROMPT, DECODING
        """Kernels for many positions, and for one."""

    def watch(self, states_BLD: Tensor) -> None:
        """Take the hidden states of positions that the model has read, after its last norm."""
        self._states.append(states_BLD[0])

    def read(self, text: Sequence[int]) -> Tensor:
        """Return the logits [1, V] of the token after the text. Every token but the last one has been read by the model,
        or was drafted here.
        """
        while self._states:
            self._read_certain(text)
        if self.cache.length < len(text) - 1:
            assert self._drafted_D is not None
            self._drafted_D = self._step(text[-1:], self._drafted_D[None])
        assert self._drafted_D is not None
        return self._layer.logits(self._decoder, self._drafted_D[None], self.kernels[1])

    def _read_certain(self, text: Sequence[int]) -> None:
        """Read positions with the model's own hidden states, some at a time."""
        states_LD = self._states.pop(0)
        begin, end = self._certain, self._certain + states_LD.shape[0]
        self.cache.length = begin
        for start in range(begin, end, _POSITIONS_AT_ONCE):
            stop = min(end, start + _POSITIONS_AT_ONCE)
            self._drafted_D = self._step(text[start + 1 : stop + 1], states_LD[start - begin : stop - begin])
        self._certain = end

    def _step(self, following: Sequence[int], states_LD: Tensor) -> Tensor:
        """Read positions with these hidden states and the tokens after them; return the output of the last one, [D]."""
        tokens_BL = torch.tensor([list(following)], device=self.cache.device)
        choice = self.kernels[int(tokens_BL.shape[1] == 1)]
        output_BLD: Tensor = self._layer(self._decoder, tokens_BL, states_LD[None], self.cache, choice)
        return output_BLD[0, -1]

    def keep(self, length: int) -> None:
        """Forget all positions beyond this number of tokens, which the model has read."""
        states_LD = torch.cat(self._states)[: max(0, length - self._certain)]
        self._states = [states_LD] if states_LD.shape[0] else []
        self.cache.length = min(self.cache.length, self._certain)
