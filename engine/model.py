"""Our decoder: one assembly for every family, from a DecoderConfig and a function that gives tensors by name.

The same layers serve inference (weights mapped from disk), streaming (one layer at a time) and training (parameters that
require gradients); nothing here names a family or reads a file.

Shape suffixes: B batch, L new positions, P all positions so far, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.architectures import (
    DecoderConfig,
    MoeConfig,
    dense_tensor,
    expert_tensor,
    gate_hidden_tensor,
    router_noise_tensor,
    router_tensor,
    shared_gate_tensor,
    shared_tensor,
)
from engine.attention import Attention, Cache, Positions, Rotary, attention_mask, first_seen, rms_norm
from engine.experts import Expert, MoeBlock
from engine.kv_cache import KeyValueCache
from engine.linear import linear
from engine.paged_cache import PagedBatch
from engine.routing import Routing, TopK

TensorSource = Callable[[str], Tensor]


class DecoderLayer(nn.Module):
    """Attention, then the MoE block or the dense FFN, each after its norm and added to the residual."""

    def __init__(self, config: DecoderConfig, layer: int, tensor: TensorSource) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}"
        self.epsilon = config.norm_epsilon
        self.attention_norm = _frozen(tensor(f"{prefix}.input_layernorm.weight"))
        self.attention = Attention(config, layer, tensor)
        self.feed_forward_norm = _frozen(tensor(f"{prefix}.post_attention_layernorm.weight"))
        self.feed_forward: MoeBlock | Expert = _feed_forward(config, layer, tensor)

    def forward(self, x_BLD: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        x_BLD = x_BLD + self.attention(rms_norm(x_BLD, self.attention_norm, self.epsilon), positions, cache)
        normed = rms_norm(x_BLD, self.feed_forward_norm, self.epsilon)
        y_TD: Tensor = self.feed_forward(normed.view(-1, normed.shape[-1]))
        return x_BLD + y_TD.view_as(x_BLD)


class Decoder(nn.Module):
    """A whole language model."""

    def __init__(self, config: DecoderConfig, tensor: TensorSource) -> None:
        super().__init__()
        self.config = config
        self.embedding_VD = _frozen(tensor("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(DecoderLayer(config, index, tensor) for index in range(len(config.layers)))
        self.norm = _frozen(tensor("model.norm.weight"))
        self.head_VD = self.embedding_VD if config.tied_embeddings else _frozen(tensor("lm_head.weight"))
        self.rotary = Rotary(config)
        self.checkpoint_activations = False
        """Recompute each layer in the backward pass, so that only one layer's activations are held at a time."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.embedding_VD.dtype

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they are computed with; tied ones count once."""
        return sum(weight.numel() * weight.element_size() for weight in self.parameters())

    @property
    def moe_blocks(self) -> list[MoeBlock]:
        """The MoE blocks in the order of their layers."""
        return [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoeBlock)]

    def hidden_states(self, tokens_BL: Tensor, real_BP: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Final hidden states after the last norm, [B, L, D].

        real_BP: bool over all positions so far, False at left padding. With a cache, the new tokens follow what it holds.
        """
        x_BLD = F.embedding(tokens_BL, self.embedding_VD)
        if isinstance(cache, PagedBatch):
            positions = paged_positions(self.config, self.rotary, cache, x_BLD)
        else:
            past = cache.length if cache is not None else 0
            read_as = cache.read_as if cache is not None else 0
            positions = positions_for(self.config, self.rotary, tokens_BL, real_BP, past, x_BLD.dtype, read_as)
        for layer in self.layers:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x_BLD = checkpoint(layer, x_BLD, positions, use_reentrant=False)
            else:
                x_BLD = layer(x_BLD, positions, cache)
        if isinstance(cache, KeyValueCache):
            cache.advance(tokens_BL.shape[1])
        return rms_norm(x_BLD, self.norm, self.config.norm_epsilon)

    def forward(self, tokens_BL: Tensor, real_BP: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Logits of every new position, [B, L, V]."""
        return linear(self.hidden_states(tokens_BL, real_BP, cache), self.head_VD)

    def last_logits(self, tokens_BL: Tensor, real_BP: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Logits of the last position only, [B, V]: what generation needs, without L·V logits in memory."""
        return linear(self.hidden_states(tokens_BL, real_BP, cache)[:, -1], self.head_VD)


def positions_for(
    config: DecoderConfig,
    rotary: Rotary,
    tokens_BL: Tensor,
    real_BP: Tensor | None,
    past: int,
    dtype: torch.dtype,
    read_as: int = 0,
) -> Positions:
    """Rotary angles and masks of one forward. Positions count real tokens only, so left padding shifts nothing.

    read_as: the length of the text that they are part of, where it is more than this forward tells.
    """
    new, total = tokens_BL.shape[1], past + tokens_BL.shape[1]
    if real_BP is not None and bool(real_BP.all()):
        real_BP = None
    if real_BP is None:
        index_BL = torch.arange(past, total, device=tokens_BL.device)[None]
    else:
        index_BL = (real_BP.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
    lengths_BL = None
    if rotary.varies and read_as:
        lengths_BL = torch.full_like(index_BL, max(read_as, int(index_BL.max()) + 1))
    cosine, sine = rotary(index_BL, dtype, lengths_BL)
    windows = {layer.window for layer in config.layers}
    return Positions(
        cosine,
        sine,
        real_BP is not None,
        {window: attention_mask(real_BP, new, total, window, tokens_BL.device) for window in windows},
    )


def paged_positions(config: DecoderConfig, rotary: Rotary, cache: PagedBatch, x_BLD: Tensor) -> Positions:
    """The same for sequences of different lengths; what lies before a window is not even among their keys."""
    lengths_BL = cache.lengths_BL if rotary.varies else None
    cosine, sine = rotary(cache.positions_BL.to(x_BLD.device), x_BLD.dtype, lengths_BL)
    windows = {layer.window for layer in config.layers}
    masks: dict[int | None, Tensor | None] = dict.fromkeys(windows)
    if cache.new > 1:
        (past,) = cache.past  # chunks of prompts come alone
        for window in windows:
            total = past + cache.new - first_seen(past, window)
            masks[window] = attention_mask(None, cache.new, total, window, x_BLD.device)
    return Positions(cosine, sine, False, masks)


def own_routing(moe: MoeConfig) -> Routing:
    """The model's own rule."""
    return TopK(moe.experts_per_token, moe.normalise_top_k, moe.weight_scale)


@contextmanager
def routed_by(decoder: Decoder, routings: Sequence[Routing]) -> Iterator[None]:
    """Let the MoE blocks use other Routings, one per MoE layer, inside the `with`."""
    blocks = decoder.moe_blocks
    own = [block.routing for block in blocks]
    for block, routing in zip(blocks, routings, strict=True):
        block.routing = routing
    try:
        yield
    finally:
        for block, routing in zip(blocks, own, strict=True):
            block.routing = routing


def _feed_forward(config: DecoderConfig, layer: int, tensor: TensorSource) -> MoeBlock | Expert:
    row, moe = config.architecture, config.layers[layer].moe
    if moe is None:
        return Expert(*(tensor(dense_tensor(layer, projection)) for projection in range(3)))
    experts = [Expert(*(tensor(expert_tensor(row, layer, i, p)) for p in range(3))) for i in range(moe.experts)]
    shared = [tensor(shared_tensor(row, layer, projection)) for projection in range(3)] if moe.shared_width else []
    return MoeBlock(
        tensor(router_tensor(row, layer)),
        experts,
        own_routing(moe),
        Expert(*shared) if shared else None,
        tensor(shared_gate_tensor(row, layer)) if shared else None,
        tensor(gate_hidden_tensor(row, layer)) if moe.gate_network_width else None,
        tensor(router_noise_tensor(row, layer)) if moe.noise_epsilon is not None else None,
    )


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
