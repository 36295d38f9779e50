"""Our decoder: one assembly for every family, from a DecoderConfig and a function that returns tensors by name.

The layers serve inference (memory-mapped weights), streaming (one layer at a time) and training (parameters that
require gradients). Nothing here names a family or reads a file.

Shape suffixes: B batch, L new positions, P all positions so far, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.decoder.attention import Attention, Cache, Masks, Positions, attention_mask, first_seen
from engine.decoder.experts import Expert, MoeBlock, expert_of
from engine.decoder.gated_delta import GatedDelta, SplitGatedDelta
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.latent_attention import LatentAttention
from engine.decoder.lightning_attention import LightningAttention
from engine.decoder.mamba2 import Mamba2
from engine.decoder.norms import BlockNorms, norm
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.recurrence import Recurrence
from engine.decoder.routing import (
    BiasedTopK,
    Gate,
    GroupedTopK,
    Routing,
    ScaledTopK,
    SigmoidTopK,
    SparseMixer,
    TopK,
    UnweightedTopK,
    rule_of,
    sigmoid_shares,
    softmax,
)
from engine.decoder.short_convolution import ShortConvolution
from engine.decoder.step.decode_step import DecodeStep
from engine.errors import UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.layer_config import (
    GatedDeltaConfig,
    LightningConfig,
    LinearConfig,
    Mamba2Config,
    MoeConfig,
    ShortConvolutionConfig,
    SplitGatedDeltaConfig,
)
from engine.families.rotary_embedding import Rotary
from engine.families.tensor_names import (
    BLOCK_NORMS,
    LAYER_SCALAR,
    OUTPUT_NORMS,
    dense_tensor,
    expert_parts,
    expert_tensor,
    ffn_parts,
    gate_hidden_tensor,
    head_tensor,
    input_scale_tensor,
    logit_bias_tensor,
    router_bias_tensor,
    router_noise_tensor,
    router_tensor,
    shared_gate_tensor,
    shared_tensor,
    weight_scale_tensor,
)
from engine.kernels.devices import keep_few_shapes
from engine.kernels.kernel_choice import TORCH, KernelChoice
from engine.kernels.linear import embedding, linear, plain
from engine.kernels.stored.block_weight import RowWeight, frozen_embedding
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight, as_tensor, frozen, frozen_tensor

TensorSource = Callable[[str], Weight]
FINAL_NORM = "model.norm"


class Steps(Protocol):
    """Runs steps of decoding as a whole (engine/decoder/gpu/step.py)."""

    def __call__(
        self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache | None, choice: KernelChoice
    ) -> Tensor | None:
        """Return what `Decoder.hidden_states` returns; None if the layers must run."""

    def logits(self, hidden: Tensor, choice: KernelChoice) -> Tensor | None:
        """Return the head's product with hidden states […, D]; None if torch must compute it."""

    def forget(self) -> None:
        """Read all weights anew."""


class DecoderLayer(nn.Module):
    """Attention, then the MoE block or the dense FFN, each after its norm and with a residual connection.

    Either of the two may be missing, together with its norm.
    """

    def __init__(self, config: DecoderConfig, layer: int, tensor: TensorSource) -> None:
        super().__init__()
        keep_few_shapes()
        prefix, own = f"model.layers.{layer}", config.layers[layer]
        self.epsilon, self.zero_centered = config.norm_epsilon, config.zero_centered
        self.residual = config.multipliers.residual
        self.residuals = own.residuals
        self.attention: nn.Module | None = None
        self.attention_norm, self.attention_norm_bias = None, None
        if own.attends:
            self.attention_norm, self.attention_norm_bias = _norm(config, f"{prefix}.input_layernorm", tensor)
            self.attention = _attention(config, layer, tensor)
        self.feed_forward: MoeBlock | Expert | None = None
        self.feed_forward_norm, self.feed_forward_norm_bias = None, None
        if own.feeds:
            self.feed_forward_norm, self.feed_forward_norm_bias = _norm(config, f"{prefix}.post_attention_layernorm", tensor)
            self.feed_forward = _feed_forward(config, layer, tensor)
        names = [f"{prefix}.{name}.weight" for name in OUTPUT_NORMS] if config.output_norms else []
        self.output_norms = nn.ParameterList(frozen_tensor(tensor(name)) for name in names) if names else None
        scalar_1 = as_tensor(tensor(f"{prefix}.{LAYER_SCALAR}")) if config.output_norms else None
        self.scalar_1 = None if scalar_1 is None else nn.Buffer(scalar_1, persistent=False)

    def forward(self, x_BLD: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        """Map [B, L, D] to [B, L, D]."""
        choice = positions.choice
        if self.attention is not None and self.attention_norm is not None:
            normed = self._normed(x_BLD, self.attention_norm, self.attention_norm_bias, choice)
            x_BLD = self._added(0, x_BLD, normed, self._normed_output(0, self.attention(normed, positions, cache), choice))
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x_BLD
        normed = self._normed(x_BLD, self.feed_forward_norm, self.feed_forward_norm_bias, choice)
        has_own_norms = isinstance(self.feed_forward, MoeBlock) and self.feed_forward.own_norms is not None
        hidden = (x_BLD.view(-1, x_BLD.shape[-1]),) if has_own_norms else ()
        y_TD: Tensor = self.feed_forward(normed.view(-1, normed.shape[-1]), choice, *hidden)
        x_BLD = self._added(1, x_BLD, normed, self._normed_output(1, y_TD.view_as(x_BLD), choice))
        return x_BLD if self.scalar_1 is None else x_BLD * self.scalar_1

    def _normed_output(self, part: int, y_BLD: Tensor, choice: KernelChoice) -> Tensor:
        """Return what attention (0) or the feed-forward block (1) adds."""
        return y_BLD if self.output_norms is None else self._normed(y_BLD, self.output_norms[part], None, choice)

    def _normed(self, x_BLD: Tensor, weight_D: Tensor, bias_D: Tensor | None, choice: KernelChoice) -> Tensor:
        return norm(x_BLD, weight_D, bias_D, self.epsilon, choice, self.zero_centered)

    @property
    def feed_forward_weight(self) -> float:
        """Factor of the feed-forward block's output in the layer's output."""
        return self.residual if self.residuals is None else self.residuals[1].beta

    def _added(self, part: int, x_BLD: Tensor, normed_BLD: Tensor, y_BLD: Tensor) -> Tensor:
        """Add the output of attention (0) or of the feed-forward block (1) to the residual."""
        if self.residuals is None:
            return x_BLD + times(y_BLD, self.residual)
        return times(normed_BLD, self.residuals[part].alpha) + times(y_BLD, self.residuals[part].beta)


class Decoder(nn.Module):
    """A complete language model."""

    states_BLD: Tensor | None = None
    """Always None: losses are given hidden states, not logits (passes/layerwise.Head)."""

    def __init__(
        self, config: DecoderConfig, tensor: TensorSource, made: Callable[[int, DecoderLayer], None] | None = None
    ) -> None:
        """made: called with each layer and its index before the next layer is made."""
        super().__init__()
        self.config = config
        self.embedding = frozen_embedding(tensor("model.embed_tokens.weight"))
        self.layers = nn.ModuleList()
        for index in range(len(config.layers)):
            layer = DecoderLayer(config, index, tensor)
            self.layers.append(layer)
            if made is not None:
                made(index, layer)
        self.norm, self.norm_bias = _norm(config, FINAL_NORM, tensor)
        self.head = self.embedding if config.tied_embeddings else frozen(tensor("lm_head.weight"))
        self.head_bias_V = frozen_tensor(tensor("lm_head.bias")) if config.head_bias else None
        self.rotary = Rotary(config)
        self._step = DecodeStep(self)
        self.gpu_step: Steps | None = None
        """Runs steps of decoding on a GPU in place of the layers, if it can."""
        self.watch: Callable[[Tensor], None] | None = None
        """Called with the hidden states [B, L, D] of each forward pass after the last norm."""
        self.checkpoint_activations = False
        """Recompute each layer in the backward pass, so that only one layer's activations are in memory at a time."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.device

    @property
    def embedding_VD(self) -> nn.Parameter:
        """Embeddings of a decoder whose embeddings are plain."""
        assert isinstance(self.embedding, nn.Parameter)
        return self.embedding

    @property
    def head_VD(self) -> Tensor:
        """Output head as a plain matrix; a low-bit head is dequantized at each access."""
        return plain(self.head, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.norm.dtype

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of the weights in the compute dtype, low-bit weights as stored; tied weights count once."""
        return _weights_bytes(self)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """All weights and buffers."""
        return *self.parameters(), *self.buffers()

    def bytes_read_per_token(self, skipped_shares: Sequence[float]) -> float:
        """Return the bytes of weights read for one token alone: from a layer's experts only those chosen and not skipped.

        skipped_shares: one for each MoE layer. Embeddings count as one row, tied embeddings completely, as the head.
        """
        read: float = _weights_bytes(self)
        if not self.config.tied_embeddings:
            read -= self.embedding.nbytes * (1.0 - 1.0 / self.embedding.shape[0])
        moes = [layer.moe for layer in self.config.layers if layer.moe is not None]
        for block, moe, skipped in zip(self.moe_blocks, moes, skipped_shares, strict=True):
            used = min(moe.experts_per_token, moe.experts) * (1.0 - skipped)
            read -= _weights_bytes(block.experts) * (1.0 - used / moe.experts)
        return read

    def kernels_needed(self, kernels: Any) -> list[Any]:
        """Return the compiled kernels that decode this model; kernels: the module of compiled kernels."""
        low_bit = sorted({module.kind for module in self.modules() if isinstance(module, LowBitWeight)}, key=str)
        mixers = sorted({module.kernel for module in self.modules() if isinstance(module, Recurrence)})
        is_whole, centered = self._step.serves(kernels), self.config.zero_centered
        rules = [rule_of(block.routing) for block in self.moe_blocks]
        attends_to_latents = self.config.latent is not None
        further = {
            "choose_with_bias": any(isinstance(rule, SigmoidTopK | BiasedTopK) for rule in rules),
            "scale_chosen": any(isinstance(rule, ScaledTopK) for rule in rules),
            "attend_latent": attends_to_latents,
            "latent_layer": attends_to_latents and is_whole,
            "recurrent_layer": bool(mixers) and is_whole,
        }
        mixers += [name for name, is_needed in further.items() if is_needed]
        low_bit += [kernels.WIDE[0]] if any(block.router_in_float32 for block in self.moe_blocks) else []
        needed: list[Any] = kernels.needed(low_bit, is_whole=is_whole, mixers=mixers, zero_centered=centered)
        return needed

    def weights_changed(self) -> None:
        """Make the next compiled step read all weights anew. It is needed after weights were changed in place."""
        self._step.forget()
        if self.gpu_step is not None:
            self.gpu_step.forget()

    @property
    def moe_blocks(self) -> list[MoeBlock]:
        """MoE blocks in the order of their layers."""
        return [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoeBlock)]

    def hidden_states(
        self,
        tokens_BL: Tensor,
        real_BP: Tensor | None = None,
        cache: Cache | None = None,
        choice: KernelChoice = TORCH,
        *,
        one_by_one: bool = False,
    ) -> Tensor:
        """Return the hidden states after the last norm, [B, L, D], as the head's input.

        real_BP: bool over all positions so far, False at left padding. With a cache, the new tokens follow its content.
        choice: kernels that compute the products. one_by_one: whether rotary scalings treat each token as the last one
        of its text.
        """
        if self.gpu_step is not None and (final_BLD := self.gpu_step(tokens_BL, real_BP, cache, choice)) is not None:
            return final_BLD
        if (made := self._stepped(tokens_BL, real_BP, cache, choice, one_by_one)) is not None:
            return made[0]
        return self._by_layers(tokens_BL, real_BP, cache, choice, one_by_one)

    def _by_layers(
        self,
        tokens_BL: Tensor,
        real_BP: Tensor | None,
        cache: Cache | None,
        choice: KernelChoice,
        one_by_one: bool = False,
    ) -> Tensor:
        """Return what `hidden_states` returns, layer after layer."""
        x_BLD = self.embedded(tokens_BL)
        positions = self.positions(tokens_BL, real_BP, cache, one_by_one)._replace(choice=choice)
        for layer in self.layers:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x_BLD = checkpoint(layer, x_BLD, positions, use_reentrant=False)
            else:
                x_BLD = layer(x_BLD, positions, cache)
        if isinstance(cache, KeyValueCache):
            cache.advance(tokens_BL.shape[1])
        return self._normed(x_BLD, choice)

    def _stepped(
        self,
        tokens_BL: Tensor,
        real_BP: Tensor | None,
        cache: Cache | None,
        choice: KernelChoice,
        one_by_one: bool = False,
        with_logits: bool = False,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the hidden states and the logits of a compiled step; None if the layers must run."""
        if not choice.may_compile or not (real_BP is None or bool(real_BP.all())):
            return None
        made = self._step(tokens_BL, cache, choice, one_by_one, with_logits)
        if made is None:
            return None
        if isinstance(cache, KeyValueCache):
            cache.advance(tokens_BL.shape[1])
        if self.watch is not None:
            self.watch(made[0])
        return made

    def check_length(self, length: int) -> None:
        """Raise UnsupportedError for a text that is so long that the model's attention is sparse."""
        _check_dense(self.config, length)

    def embedded(self, tokens_BL: Tensor) -> Tensor:
        """Return the first layer's input, [B, L, D]."""
        return embedded(self.config, tokens_BL, self.embedding, self.dtype)

    @property
    def embedding_factor(self) -> float:
        """Factor of the embeddings."""
        return embedding_factor(self.config, self.dtype)

    def positions(
        self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache | None, one_by_one: bool = False
    ) -> Positions:
        """Return the angles and masks of one forward pass; arguments are those of `hidden_states`."""
        if isinstance(cache, PagedBatch):
            return paged_positions(self.config, self.rotary, cache, self.dtype, self.device)
        past, read_as = (cache.length, cache.read_as) if cache is not None else (0, 0)
        return positions_for(self.config, self.rotary, tokens_BL, real_BP, past, self.dtype, read_as, one_by_one)

    def _normed(self, x_BLD: Tensor, choice: KernelChoice) -> Tensor:
        """Return the hidden states after the last norm, which are shown to `watch`."""
        x_BLD = final_norm(self.config, x_BLD, self.norm, self.norm_bias, choice)
        if self.watch is not None:
            self.watch(x_BLD)
        return x_BLD

    def read_by_layer(self, tokens_BL: Tensor, cache: KeyValueCache, choice: KernelChoice, piece: int) -> Tensor:
        """Read new tokens `piece` positions at a time, all of them through one layer before the next one.

        Returns the hidden states of the last piece, [B, ≤ piece, D], as `hidden_states` of the pieces in turn does. A layer
        whose experts do not stay in memory is thus read once, and the hidden states of all positions are held.
        """
        past = cache.length
        starts = [past + start for start in range(0, tokens_BL.shape[1], piece)]
        states, places = list[Tensor](), list[Positions]()
        for start, own_BL in zip(starts, tokens_BL.split(piece, dim=1), strict=True):
            states.append(embedded(self.config, own_BL, self.embedding, self.dtype))
            positions = positions_for(self.config, self.rotary, own_BL, None, start, states[-1].dtype, cache.read_as)
            places.append(positions._replace(choice=choice))
        for layer in self.layers:
            for number, (start, positions) in enumerate(zip(starts, places, strict=True)):
                cache.length = start  # the layer appends there
                states[number] = layer(states[number], positions, cache)
        cache.length = past + tokens_BL.shape[1]
        return self._normed(states[-1], choice)

    def forward(
        self,
        tokens_BL: Tensor,
        real_BP: Tensor | None = None,
        cache: Cache | None = None,
        choice: KernelChoice = TORCH,
    ) -> Tensor:
        """Return the logits of every new position, [B, L, V]."""
        return self.logits(self.hidden_states(tokens_BL, real_BP, cache, choice), choice)

    def last_logits(
        self,
        tokens_BL: Tensor,
        real_BP: Tensor | None = None,
        cache: Cache | None = None,
        choice: KernelChoice = TORCH,
    ) -> Tensor:
        """Return the logits of the last position only, [B, V]; L·V logits would take much memory."""
        if self.gpu_step is None and tokens_BL.shape[1] == 1:
            made = self._stepped(tokens_BL, real_BP, cache, choice, with_logits=True)
            hidden_BLD, logits_BLV = made or (self._by_layers(tokens_BL, real_BP, cache, choice), None)
            if logits_BLV is not None:
                return capped(logits_BLV[:, 0], self.logit_cap)
        else:
            hidden_BLD = self.hidden_states(tokens_BL, real_BP, cache, choice)
        return self.logits(hidden_BLD[:, -1], choice)

    def step_logits(self, tokens_BL: Tensor, cache: KeyValueCache, choice: KernelChoice = TORCH) -> Tensor:
        """Return the logits [B, L, V] of new tokens that are read together, each with the result of reading it alone."""
        return self.logits(self.hidden_states(tokens_BL, None, cache, choice, one_by_one=True), choice)

    def logits(self, hidden: Tensor, choice: KernelChoice = TORCH) -> Tensor:
        """Return the logits […, V] of hidden states […, D] after the last norm."""
        if self.gpu_step is not None and (logits := self.gpu_step.logits(hidden, choice)) is not None:
            return capped(logits, self.logit_cap)
        return capped(linear(hidden, self.head, self.head_bias_V, choice), self.logit_cap)

    @property
    def logit_cap(self) -> float | None:
        """c, if logits l become c · tanh(l / c)."""
        return self.config.logit_cap


def _weights_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in (*module.parameters(), *module.buffers()))


def embedded(
    config: DecoderConfig, tokens_BL: Tensor, embedding_VD: Tensor | RowWeight, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the first layer's input, [B, L, D]. dtype: that of rows in blocks."""
    rows_BLD = embedding(tokens_BL, embedding_VD, dtype or torch.float32)
    return times(rows_BLD, embedding_factor(config, rows_BLD.dtype))


def embedding_factor(config: DecoderConfig, dtype: torch.dtype) -> float:
    """Return the factor of embeddings that have this dtype."""
    factor = config.multipliers.embedding
    return float(torch.tensor(factor, dtype=dtype)) if config.multipliers.rounds_embedding else factor


def final_norm(
    config: DecoderConfig, x_BLD: Tensor, weight_D: Tensor, bias_D: Tensor | None, choice: KernelChoice = TORCH
) -> Tensor:
    """Return the head's input from the last layer's output. The divisor of the logits is applied here, to fewer numbers."""
    normed_BLD = norm(x_BLD, weight_D, bias_D, config.norm_epsilon, choice, config.zero_centered)
    return times(normed_BLD, 1.0 / config.multipliers.logits)


class Outer:
    """The modules after the last layer, for code that runs layers one by one."""

    states_BLD: Tensor | None = None
    """Always None: losses are given hidden states, not logits (passes/layerwise.Head)."""

    def __init__(self, config: DecoderConfig, tensor: TensorSource) -> None:
        self._config = config
        self._norm, self._norm_bias = _norm(config, FINAL_NORM, tensor)
        self.head_VD = as_tensor(tensor(head_tensor(config)))
        self.head_bias_V = as_tensor(tensor("lm_head.bias")) if config.head_bias else None

    def hidden_states(self, x_BLD: Tensor) -> Tensor:
        """Return the hidden states after the last norm, [B, L, D], as `Decoder.hidden_states` does."""
        return final_norm(self._config, x_BLD, self._norm, self._norm_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits […, V] of hidden states […, D] after the last norm."""
        return capped(linear(hidden, self.head_VD, self.head_bias_V), self.logit_cap)

    @property
    def logit_cap(self) -> float | None:
        """c, if logits l become c · tanh(l / c)."""
        return self._config.logit_cap


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap · tanh(logits / cap); the logits themselves where there is no cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


HeadParts = tuple[Tensor, Tensor | None, float | None]
"""head_VD, its bias [V] if it has one, and `logit_cap`."""


def head_of(model: Decoder | Outer) -> HeadParts:
    """Return everything that makes logits of hidden states after the last norm."""
    return model.head_VD, model.head_bias_V, model.logit_cap


def times(x: Tensor, factor: float) -> Tensor:
    """Return factor · x."""
    return x if factor == 1.0 else x * factor


def positions_for(
    config: DecoderConfig,
    rotary: Rotary,
    tokens_BL: Tensor,
    real_BP: Tensor | None,
    past: int,
    dtype: torch.dtype,
    read_as: int = 0,
    one_by_one: bool = False,
) -> Positions:
    """Return rotary angles and masks of one forward pass. Positions count real tokens only, so padding shifts nothing.

    read_as: length of the text that the positions belong to, if it is longer than this forward pass shows.
    """
    new, total = tokens_BL.shape[1], past + tokens_BL.shape[1]
    _check_dense(config, total if real_BP is None else int(real_BP.sum(-1).max()))
    if real_BP is not None and bool(real_BP.all()):
        real_BP = None
    if real_BP is None:
        index_BL = torch.arange(past, total, device=tokens_BL.device)[None]
    else:
        index_BL = (real_BP.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
    lengths_BL = index_BL + 1 if one_by_one else None
    if lengths_BL is None and rotary.varies and read_as:
        lengths_BL = torch.full_like(index_BL, max(read_as, int(index_BL.max()) + 1))
    cosine, sine = rotary(index_BL, dtype, lengths_BL)
    windows = {layer.window for layer in config.layers}
    return Positions(
        cosine,
        sine,
        real_BP is not None,
        {window: attention_mask(real_BP, new, total, window, tokens_BL.device) for window in windows},
        one_by_one,
        _temperatures(config, index_BL, dtype),
        None if real_BP is None else real_BP[:, past:total],
        of_kinds=rotary.of_kinds(index_BL, dtype),
    )


def _check_dense(config: DecoderConfig, length: int) -> None:
    """Raise UnsupportedError for a text that is so long that the model's attention is sparse."""
    if config.dense_positions is not None and length > config.dense_positions:
        raise UnsupportedError(
            f"a text has {length} tokens, and a {config.architecture.model_type} attends to {config.dense_positions} "
            "positions that an indexer selects, which the engine does not have; take shorter texts"
        )


def _temperatures(config: DecoderConfig, positions_BL: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the factors of queries without rotation, [B or 1, 1, L, 1]; None for no factors."""
    if config.temperature is None:
        return None
    steps_BL = torch.floor((positions_BL.float() + 1.0) / config.temperature.floor)
    return (torch.log1p(steps_BL) * config.temperature.slope + 1.0).to(dtype)[:, None, :, None]


def paged_positions(
    config: DecoderConfig, rotary: Rotary, cache: PagedBatch, dtype: torch.dtype, device: torch.device
) -> Positions:
    """Return the Positions of sequences of different lengths; keys before a window are excluded already."""
    _check_dense(config, max(past + new for past, new in zip(cache.past, cache.new, strict=True)))
    lengths_BL = cache.lengths_BL if rotary.varies else None
    positions_BL = cache.positions_BL.to(device)
    cosine, sine = rotary(positions_BL, dtype, lengths_BL)
    windows = {layer.window for layer in config.layers}

    def masks(past: int, new: int) -> Masks:
        totals = {window: past + new - first_seen(past, window) for window in windows}
        return {window: attention_mask(None, new, total, window, device) for window, total in totals.items()}

    pieces = [] if cache.is_step else list(zip(cache.past, cache.new, strict=True))
    made = {piece: masks(*piece) for piece in set(pieces)}
    each = [made[piece] for piece in pieces]
    temperature = _temperatures(config, positions_BL, dtype)
    of_kinds = rotary.of_kinds(positions_BL, dtype)
    return Positions(cosine, sine, False, dict.fromkeys(windows), temperature=temperature, of_kinds=of_kinds, each=each)


def own_routing(moe: MoeConfig, bias_N: Tensor | None = None, factors_N: Tensor | None = None) -> Routing:
    """Return the model's own Routing.

    bias_N: the selection bias of a router that has one (router_bias_tensor). factors_N: those of experts' weights.
    """
    groups = tuple(tuple(e for e, own in enumerate(moe.groups) if own == group) for group in sorted(set(moe.groups)))
    if moe.scales_inputs:
        return UnweightedTopK(moe.experts_per_token)
    if moe.scores == "sigmoid":
        assert bias_N is not None
        rule = moe.experts_per_token, moe.normalise_top_k, bias_N, moe.weight_scale, groups, moe.groups_per_token
        return SigmoidTopK(*rule, moe.added_to_sum)
    if groups:
        return GroupedTopK(moe.experts_per_token, groups, moe.groups_per_token, moe.weight_scale)
    if bias_N is not None:
        return BiasedTopK(moe.experts_per_token, bias_N, moe.least_sum)
    if moe.mixer_jitter is not None:
        return SparseMixer(moe.experts_per_token, moe.mixer_jitter)
    if factors_N is not None:
        return ScaledTopK(moe.experts_per_token, moe.normalise_top_k, moe.weight_scale, factors_N=factors_N)
    return TopK(moe.experts_per_token, moe.normalise_top_k, moe.weight_scale)


def gate_of(moe: MoeConfig) -> Gate:
    """Return the function from router logits to shares that sum to one."""
    return sigmoid_shares if moe.scores == "sigmoid" else softmax


def own_routings(config: DecoderConfig, tensor: TensorSource) -> list[Routing]:
    """Return the model's own Routing of every MoE layer; `tensor` provides their biases, if they have any."""
    moes = {layer: config.layers[layer].moe for layer in config.moe_layers}
    return [_own_routing(config, layer, moe, tensor) for layer, moe in moes.items() if moe is not None]


def _own_routing(config: DecoderConfig, layer: int, moe: MoeConfig, tensor: TensorSource) -> Routing:
    row = config.architecture
    names = router_bias_tensor(row, layer), weight_scale_tensor(row, layer)
    return own_routing(moe, *(None if name is None else as_tensor(tensor(name)).flatten() for name in names))


class Routed(Protocol):
    """A model whose MoE layers have Routings."""

    @property
    def moe_blocks(self) -> Sequence[MoeBlock]:
        """MoE blocks in the order of their layers."""


@contextmanager
def routed_by(decoder: Routed, routings: Sequence[Routing]) -> Iterator[None]:
    """Make the MoE blocks use other Routings, one per MoE layer, during the body."""
    blocks = decoder.moe_blocks
    own = [block.routing for block in blocks]
    for block, routing in zip(blocks, routings, strict=True):
        block.routing = routing
    try:
        yield
    finally:
        for block, routing in zip(blocks, own, strict=True):
            block.routing = routing


_LINEAR: dict[type[LinearConfig], Callable[[DecoderConfig, int, TensorSource], nn.Module]] = {
    LightningConfig: LightningAttention,
    GatedDeltaConfig: GatedDelta,
    Mamba2Config: Mamba2,
    ShortConvolutionConfig: ShortConvolution,
    SplitGatedDeltaConfig: SplitGatedDelta,
}


def _attention(config: DecoderConfig, layer: int, tensor: TensorSource) -> nn.Module:
    if (linear := config.layers[layer].linear) is not None:
        return _LINEAR[type(linear)](config, layer, tensor)
    return (Attention if config.latent is None else LatentAttention)(config, layer, tensor)


def _feed_forward(config: DecoderConfig, layer: int, tensor: TensorSource) -> MoeBlock | Expert:
    row, moe = config.architecture, config.layers[layer].moe
    if moe is None:
        return expert_of(tensor(dense_tensor(layer, projection)) for projection in ffn_parts(row))
    experts = [
        expert_of((tensor(expert_tensor(row, layer, i, p)) for p in expert_parts(row)), moe.swiglu)
        for i in range(moe.experts)
    ]
    shared = [tensor(shared_tensor(row, layer, projection)) for projection in ffn_parts(row)] if moe.shared_width else []
    shared_gate = shared_gate_tensor(row, layer) if shared else None
    logit_bias = logit_bias_tensor(row, layer)
    return MoeBlock(
        as_tensor(tensor(router_tensor(row, layer))),
        experts,
        _own_routing(config, layer, moe, tensor),
        expert_of(shared, moe.swiglu) if shared else None,
        None if shared_gate is None else as_tensor(tensor(shared_gate)),
        as_tensor(tensor(gate_hidden_tensor(row, layer))) if moe.gate_network_width else None,
        as_tensor(tensor(router_noise_tensor(row, layer))) if moe.noise_epsilon is not None else None,
        moe.router_in_float32,
        None if logit_bias is None else as_tensor(tensor(logit_bias)),
        moe.scales_inputs,
        _block_norms(config, layer, tensor) if moe.own_norms else None,
    )


def _block_norms(config: DecoderConfig, layer: int, tensor: TensorSource) -> BlockNorms:
    names = (
        input_scale_tensor(config.architecture, layer),
        *(f"model.layers.{layer}.{name}.weight" for name in BLOCK_NORMS),
    )
    router, shared, after_shared, after_routed = (frozen_tensor(tensor(name)) for name in names if name is not None)
    return BlockNorms((router, shared, after_shared, after_routed), config.norm_epsilon)


def _norm(config: DecoderConfig, name: str, tensor: TensorSource) -> tuple[nn.Parameter, nn.Parameter | None]:
    bias = frozen_tensor(tensor(f"{name}.bias")) if config.layer_norm else None
    return frozen_tensor(tensor(f"{name}.weight")), bias
