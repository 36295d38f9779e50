"""Layers for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, Section 2.2): each drafts one more token.

h'_i = M [norm(Emb(t_{i+1})); norm(h_i)] goes through a layer of the decoder and a norm, and the decoder's own head gives
the logits of t_{i+2} (equations 21 to 23). h_i is the decoder's hidden state after its last norm for the first drafted
token, and this layer's own output for the following ones. The paper writes the embedding second; in the published files,
which call M `eh_proj`, it comes first.

Shape suffixes: B batch, L new positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.decoder.attention import Positions
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, DecoderLayer, TensorSource, embedded, positions_for
from engine.decoder.norms import norm
from engine.families.config import DecoderConfig
from engine.families.tensor_names import PREDICTION_NORMS, PREDICTION_PROJECTION
from engine.kernels.kernel_choice import TORCH, KernelChoice
from engine.kernels.linear import linear
from engine.kernels.stored.quantized_weight import frozen, frozen_tensor

_PREFIX = "model.layers.0"


class PredictionLayer(nn.Module):
    """One such layer. Its attention and its experts are of the sizes of the last layer with experts."""

    def __init__(self, config: DecoderConfig, tensor: TensorSource) -> None:
        """config, tensor: those of engine/checkpoint/prediction_layer.py."""
        super().__init__()
        self.config = config
        norms = (frozen_tensor(tensor(f"{_PREFIX}.{name}")) for name in PREDICTION_NORMS)
        self.embedding_norm, self.state_norm, self.final_norm = norms
        self.projection = frozen(tensor(f"{_PREFIX}.{PREDICTION_PROJECTION}"))
        self.layer = DecoderLayer(config, 0, tensor)

    def inputs(self, embedded_BLD: Tensor, states_BLD: Tensor, is_first: bool, choice: KernelChoice = TORCH) -> Tensor:
        """Return the layer's input [B, L, D]. embedded_BLD: the embedding of the token after each position, as the decoder's
        first layer reads it. states_BLD: the hidden state of each. is_first: whether position 0 is the first of them.
        """
        if is_first:  # as vLLM and SGLang do
            embedded_BLD = torch.cat([torch.zeros_like(embedded_BLD[:, :1]), embedded_BLD[:, 1:]], dim=1)
        first_BLD = self._normed(embedded_BLD, self.embedding_norm, choice)
        second_BLD = self._normed(states_BLD, self.state_norm, choice)
        return linear(torch.cat([first_BLD, second_BLD], dim=-1), self.projection, None, choice)

    def run(self, x_BLD: Tensor, positions: Positions, cache: KeyValueCache | None = None) -> Tensor:
        """Return the layer's output of each position, [B, L, D], from `inputs`."""
        output_BLD: Tensor = self.layer(x_BLD, positions, cache)
        return output_BLD

    def forward(
        self,
        decoder: Decoder,
        tokens_BL: Tensor,
        states_BLD: Tensor,
        cache: KeyValueCache,
        choice: KernelChoice = TORCH,
    ) -> Tensor:
        """Read more positions and return the layer's output of each, [B, L, D].

        tokens_BL: the token after each position. states_BLD: the hidden state of each. cache: of `config`, with all
        positions before them.
        """
        past = cache.length
        embedded_BLD = embedded(decoder.config, tokens_BL, decoder.embedding, decoder.dtype)
        x_BLD = self.inputs(embedded_BLD, states_BLD, not past, choice)
        positions = positions_for(self.config, decoder.rotary, tokens_BL, None, past, x_BLD.dtype, cache.read_as)
        output_BLD = self.run(x_BLD, positions._replace(choice=choice), cache)
        cache.advance(tokens_BL.shape[1])
        return output_BLD

    def logits(self, decoder: Decoder, output: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the logits […, V] of the token after the next one, from this layer's outputs […, D]."""
        return decoder.logits(self._normed(output, self.final_norm, choice), choice)

    def _normed(self, x: Tensor, weight_D: Tensor, choice: KernelChoice) -> Tensor:
        return norm(x, weight_D, None, self.config.norm_epsilon, choice, self.config.zero_centered)
