"""Layers for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, Section 2.2): each drafts one more token.

h'_i = M [norm(Emb(t_{i+1})); norm(h_i)] goes through a layer of the decoder and a norm, and the decoder's own head gives
the logits of t_{i+2} (equations 21 to 23). h_i is the decoder's hidden state after its last norm for the first drafted
token, and this layer's own output for the following ones. The paper writes the embedding second; in the published files,
which call M `eh_proj`, it comes first.

Shape suffixes: B batch, L new positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, DecoderLayer, TensorSource, embedded, positions_for
from engine.decoder.norms import norm
from engine.families.config import DecoderConfig
from engine.families.tensor_names import PREDICTION_NORMS, PREDICTION_PROJECTION
from engine.families.tensor_shapes import layer_tensors
from engine.kernels.kernel_choice import TORCH, KernelChoice
from engine.kernels.linear import linear
from engine.kernels.quantized_weight import frozen, frozen_tensor

_PREFIX = "model.layers.0"


class PredictionLayer(nn.Module):
    """One such layer. Its attention and its experts are of the sizes of the last layer with experts."""

    def __init__(self, config: DecoderConfig, tensor: TensorSource) -> None:
        """config: `prediction_config`. tensor: returns the layer's tensors, by the names of `prediction_tensors`."""
        super().__init__()
        self.config = config
        norms = (frozen_tensor(tensor(f"{_PREFIX}.{name}")) for name in PREDICTION_NORMS)
        self.embedding_norm, self.state_norm, self.final_norm = norms
        self.projection = frozen(tensor(f"{_PREFIX}.{PREDICTION_PROJECTION}"))
        self.layer = DecoderLayer(config, 0, tensor)

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
        past, epsilon = cache.length, self.config.norm_epsilon
        embedded_BLD = embedded(decoder.config, tokens_BL, decoder.embedding, decoder.dtype)
        if not past:  # as vLLM and SGLang do: nothing is before the first position, which is never drafted from alone
            embedded_BLD = torch.cat([torch.zeros_like(embedded_BLD[:, :1]), embedded_BLD[:, 1:]], dim=1)
        first_BLD = norm(embedded_BLD, self.embedding_norm, None, epsilon, choice)
        second_BLD = norm(states_BLD, self.state_norm, None, epsilon, choice)
        x_BLD = linear(torch.cat([first_BLD, second_BLD], dim=-1), self.projection, None, choice)
        positions = positions_for(self.config, decoder.rotary, tokens_BL, None, past, x_BLD.dtype, cache.read_as)
        output_BLD: Tensor = self.layer(x_BLD, positions._replace(choice=choice), cache)
        cache.advance(tokens_BL.shape[1])
        return output_BLD

    def logits(self, decoder: Decoder, output: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the logits […, V] of the token after the next one, from this layer's outputs […, D]."""
        return decoder.logits(norm(output, self.final_norm, None, self.config.norm_epsilon, choice), choice)


def prediction_config(config: DecoderConfig) -> DecoderConfig:
    """Return the config of a decoder of one layer, which is as a model's layers for multi-token prediction."""
    return replace(config, layers=(config.layers[config.moe_layers[-1]],))


def prediction_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one such layer with their shapes, named as those of layer 0; config: `prediction_config`."""
    hidden = config.hidden_size
    own: dict[str, tuple[int, ...]] = {f"{_PREFIX}.{name}": (hidden,) for name in PREDICTION_NORMS}
    return own | {f"{_PREFIX}.{PREDICTION_PROJECTION}": (hidden, 2 * hidden)} | layer_tensors(config, 0)


def prediction_name(name: str, layer: int) -> str:
    """Return the name in the files of such a tensor. layer: the index of its layer there."""
    return name.replace(f"{_PREFIX}.", f"model.layers.{layer}.", 1)
