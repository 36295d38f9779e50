"""An exported encoder-decoder in onnxruntime: one call reads a source, and further calls generate its target.

Shape suffixes: B batch, S source positions, L new target positions, H heads, E head dimension, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.kinds import DECODER_NAME, ENCODER_NAME
from engine.errors import CheckpointError
from engine.onnx.runtime import DATA_NAME, TYPES, session


@dataclass
class TargetState:
    """State of a batch of targets during generation."""

    states_BSD: Tensor
    """Encoder's hidden states of the source."""
    real_BS: Tensor
    past: dict[str, Tensor]
    """Cached keys or values [B, H, positions, E], by the decoder's input name."""


class OnnxEncoderDecoder:
    """Both graphs of an exported encoder-decoder, on the CPU."""

    def __init__(self, directory: Path, config: Any, threads: int | None = None) -> None:
        """`config`: of transformers. Raises CheckpointError if the graphs do not match it."""
        threads = threads or torch.get_num_threads()
        self._config = config
        self._encoder, self._decoder = (session(directory / name, threads) for name in (ENCODER_NAME, DECODER_NAME))
        self._check(directory)
        self.dtype = TYPES[self._encoder.get_outputs()[0].type]
        """Dtype of hidden states, cache and logits."""
        self.weights_bytes = (directory / DATA_NAME).stat().st_size
        """Bytes of the weights as stored."""

    def _past_names(self) -> list[str]:
        layers, kinds = range(self._config.num_decoder_layers), ("decoder", "encoder")
        return [f"past_key_values.{layer}.{kind}.{part}" for layer in layers for kind in kinds for part in ("key", "value")]

    def _check(self, directory: Path) -> None:
        config = self._config
        inputs, outputs = (
            {each.name: each.shape for each in values}
            for values in (self._decoder.get_inputs(), self._decoder.get_outputs())
        )
        past = {name: shape for name, shape in inputs.items() if name.startswith("past")}
        fits = (
            set(past) == set(self._past_names())
            and all((shape[1], shape[3]) == (config.num_heads, config.d_kv) for shape in past.values())
            and set(inputs) - set(past) == {"input_ids", "encoder_attention_mask", "encoder_hidden_states"}
            and {each.name for each in self._encoder.get_inputs()} == {"input_ids", "attention_mask"}
            and [each.shape[-1] for each in self._encoder.get_outputs()] == [config.d_model]
            and outputs.get("logits", [0])[-1] == config.vocab_size
        )
        if not fits:
            raise CheckpointError(
                f"{directory}: the graphs' inputs and outputs are not those of the model that config.json describes; "
                "export it again"
            )

    def read(self, tokens_BS: Tensor, real_BS: Tensor) -> TargetState:
        """Read sources and return the state of their targets. `real_BS` is 0 at padding."""
        inputs = {"input_ids": tokens_BS.numpy(), "attention_mask": real_BS.long().numpy()}
        (states_BSD,) = self._encoder.run(None, inputs)
        shape = (len(tokens_BS), self._config.num_heads, 0, self._config.d_kv)
        past = {name: torch.empty(shape, dtype=self.dtype) for name in self._past_names()}
        return TargetState(torch.from_numpy(states_BSD), real_BS, past)

    def write(self, tokens_BL: Tensor, target: TargetState) -> Tensor:
        """Append tokens to the targets, updating `target`, and return the logits of the next tokens, [B, L, V]."""
        inputs = {
            "input_ids": tokens_BL,
            "encoder_attention_mask": target.real_BS.long(),
            "encoder_hidden_states": target.states_BSD,
        }
        # The first call outputs the source's keys and values; all later calls take them unchanged.
        known = next(iter(target.past.values())).shape[2] > 0
        grown = [name for name in target.past if not (known and ".encoder." in name)]
        names = ["logits", *(name.replace("past_key_values", "present") for name in grown)]
        outputs = self._decoder.run(names, {name: tensor.numpy() for name, tensor in (inputs | target.past).items()})
        logits_BLV, *present = (torch.from_numpy(output) for output in outputs)
        target.past |= dict(zip(grown, present, strict=True))
        return logits_BLV
