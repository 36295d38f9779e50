"""Passes through a decoder on a GPU as CUDA graphs, for decoders whose parts the Triton kernels support.

Launched one by one from Python, the kernels of a step take ten times as long as reading the weights. A graph launches all of
them at once. That of a step is recorded once for each number of sequences and each power of two of the blocks of the longest
sequence. It serves any cache and any length: the kernels read the positions, the blocks of the sequences and the addresses
of the cache from memory that a step fills before the graph runs. That of a prompt is in prompt.py.

A decoder that `can_step` refuses runs layer by layer, and so does a pass that `GpuStep` refuses.

Shape suffixes: B sequences (T in a layer), L positions or layers, D hidden, M blocks of a sequence.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from engine.decoder.attention import Cache
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.gpu.layers import AttentionOnGpu, FeedForwardOnGpu, Places, Product, is_plain, serves
from engine.decoder.gpu.prompt import PromptGraphs, serves_prompt
from engine.decoder.gpu.trial import pays
from engine.decoder.gpu.triton_experts import TritonExperts
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, embedded, times
from engine.decoder.routing import Routing, Selection, Skipping
from engine.kernels.gpu.launching import normed_rows, power_of_two, recorded, step_kernels
from engine.kernels.kernel_choice import KernelChoice, wanted_kernels

_log = logging.getLogger(__name__)

MOST_SEQUENCES = 64
"""Maximum number of sequences of a step that runs as a graph."""
MOST_RULES = 4
"""Number of routings, such as thresholds of skipping, whose graphs are kept."""


@dataclass
class _Recorded:
    """The graphs of one set of routings."""

    routings: list[Routing]
    steps: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    prompts: PromptGraphs | None = None


class GpuStep:
    """The passes of one decoder that are graphs."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder: ReferenceType[Decoder] = ref(decoder)  # the decoder holds this object
        self._caches_L3 = torch.zeros(len(decoder.layers), 3, dtype=torch.int64, device=decoder.device)
        self.failed: set[Any] = set()
        """Names of passes that failed on this GPU and run layer by layer since: "prompts", "head", or a step's sizes."""
        self.forget()

    def forget(self) -> None:
        """Read all weights anew: some were copied, and others may have moved."""
        decoder, factor = self.decoder, self.decoder.config.multipliers.residual
        self._first = decoder.norm.data_ptr()
        self._layers = []
        for layer in decoder.layers:
            own: Any = layer
            norm = own.feed_forward_norm, own.epsilon
            self._layers.append(
                (AttentionOnGpu(own.attention, own.attention_norm, factor), FeedForwardOnGpu(own.feed_forward, norm, factor))
            )
        self._head = Product([decoder.head], [decoder.head_bias_V])  # type: ignore[list-item]
        attentions: list[Any] = [layer.attention for layer in decoder.layers]
        self._kinds: set[str | None] = {own.kind for own in attentions if own.rotates}
        self._by_rule: OrderedDict[tuple[Any, ...], _Recorded] = OrderedDict()
        self._cache_at: list[list[int]] = []
        self._pool = torch.cuda.graph_pool_handle() if decoder.device.type == "cuda" else None

    @property
    def decoder(self) -> Decoder:
        """The decoder whose passes these are."""
        decoder = self._decoder()
        assert decoder is not None, "the decoder was deleted"
        return decoder

    def __call__(
        self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache | None, choice: KernelChoice
    ) -> Tensor | None:
        """Return the hidden states after the last norm, [B, L, D]; None if the layers must run.

        A step reads the next position of each sequence. Otherwise, one text's first tokens are read. Arguments are those of
        `Decoder.hidden_states`.
        """
        if cache is None or not self._knows(cache, choice):
            return None
        if tokens_BL.shape[1] > 1:
            return self._prompt(tokens_BL, real_BP, cache, choice)
        return self._step(tokens_BL, real_BP, cache, choice)

    def logits(self, hidden: Tensor, choice: KernelChoice) -> Tensor | None:
        """Return the head's product with hidden states […, D] of a few positions, […, V]; None if torch must compute it."""
        rows = hidden.numel() // hidden.shape[-1]
        if "head" in self.failed or not choice.may_compile or torch.is_grad_enabled() or not 1 <= rows <= MOST_SEQUENCES:
            return None
        if hidden.dtype != self.decoder.dtype:
            return None
        try:
            return self._head(hidden.reshape(rows, -1).contiguous()).view(*hidden.shape[:-1], -1)
        except Exception as error:  # raised by Triton or the driver
            self._fail("head", error)
            return None

    def _step(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache, choice: KernelChoice) -> Tensor | None:
        if not 1 <= len(tokens_BL) <= min(choice.max_few_rows, MOST_SEQUENCES) or not _has_room(cache):
            return None
        located = _located(cache, real_BP)
        key = len(tokens_BL), power_of_two(located.blocks_BM.shape[1])
        if key in self.failed:
            return None
        own = self._recorded()
        self._take_addresses(cache)
        try:
            if key not in own.steps:
                own.steps[key] = _Graph(partial(self._compute, own.routings), *key, self._caches_L3, self._pool)
            hidden_BD = own.steps[key].step(tokens_BL[:, 0], located)
        except Exception as error:  # raised by Triton, the driver, or torch while it records
            own.steps.pop(key, None)
            self._fail(key, error)
            return None
        if isinstance(cache, KeyValueCache):
            cache.advance(1)
        for block, seen in own.steps[key].seen:
            if block.observer is not None:
                x_TD, logits_TN, selection = seen
                block.observer(x_TD.clone(), logits_TN.clone(), Selection(*(part.clone() for part in selection)))
        return hidden_BD[:, None]

    def _prompt(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache, choice: KernelChoice) -> Tensor | None:
        decoder = self.decoder
        if choice.max_few_rows or "prompts" in self.failed or not serves_prompt(tokens_BL, real_BP, cache):
            return None
        if not all(map(_never_waits, decoder.moe_blocks)):
            return None
        own = self._recorded()
        if own.prompts is None:
            new_cache = partial(_new_cache, decoder.config, decoder.dtype, decoder.device)
            own.prompts = PromptGraphs(partial(_by_layers, self._decoder, choice), new_cache, self._pool)
        try:
            return own.prompts(tokens_BL, cache)
        except Exception as error:  # as in a step
            self._fail("prompts", error)
            return None

    def _knows(self, cache: Cache, choice: KernelChoice) -> bool:
        """Return whether a forward pass into this cache may be a graph, whose memory belongs to inference mode."""
        decoder = self.decoder
        if not choice.may_compile or choice.observer is not None or not torch.is_inference_mode_enabled():
            return False
        if cache.dtype != decoder.dtype or decoder.watch is not None:
            return False
        if decoder.norm.data_ptr() != self._first:  # weights are moved all together or not at all
            self.forget()
        return not any(_is_dynamic(layer.feed_forward) for layer in decoder.layers)

    def _fail(self, what: Any, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        name = what if isinstance(what, str) else f"steps of {what[0]} sequences"
        _log.warning("%s: torch computes them layer by layer, because a graph failed on this GPU (%s)", name, reason)
        self.failed.add(what)

    def _recorded(self) -> _Recorded:
        """Return the graphs of the current routings."""
        routings = [block.routing for block in self.decoder.moe_blocks]
        rules = tuple(map(_rule, routings))
        if rules not in self._by_rule:
            self._by_rule[rules] = _Recorded(routings)
        self._by_rule.move_to_end(rules)
        if len(self._by_rule) > MOST_RULES:
            self._by_rule.popitem(last=False)
        return self._by_rule[rules]

    def _take_addresses(self, cache: Cache) -> None:
        rows = [[*cache.addresses(layer)[:2], cache.group_stride(layer)] for layer in range(len(self._layers))]
        if rows != self._cache_at:
            self._cache_at = rows
            self._caches_L3.copy_(torch.tensor(rows))

    def _compute(
        self, routings: list[Routing], tokens_B: Tensor, places: Places, positions_B: Tensor
    ) -> tuple[Tensor, list[tuple[MoeBlock, Any]]]:
        """Return the hidden states after the last norm, [B, D], and what each MoE block's observer sees."""
        decoder, own_routings, seen = self.decoder, iter(routings), []
        x_BD = embedded(decoder.config, tokens_B, decoder.embedding, decoder.dtype)
        for kind in self._kinds:
            turns = decoder.rotary.of_kind(kind)(positions_B[:, None], decoder.dtype)
            places.turns[kind] = (turns[0].flatten(1), turns[1].flatten(1))
        for attention, ffn in self._layers:
            x_BD = attention(x_BD, places)
            x_BD = ffn(x_BD, None if ffn.block is None else next(own_routings))
            if ffn.block is not None:
                seen.append((ffn.block, ffn.seen))
        y_BD = normed_rows(x_BD, decoder.norm, decoder.config.norm_epsilon)
        return times(y_BD, 1.0 / decoder.config.multipliers.logits), seen


class _Located(NamedTuple):
    """Where the sequences of a step lie, as the host knows it. The fields are those of layers.Places."""

    blocks_BM: Any
    past_B: Any
    block_size: int
    first_B: Tensor | None
    """None for zeros."""
    cache: Cache


def _located(cache: Cache, real_BP: Tensor | None) -> _Located:
    blocks_BM, past_B, block_size, _ = cache.places(0)
    first_B = None if real_BP is None else real_BP.shape[1] - real_BP.sum(dim=-1)
    return _Located(blocks_BM, past_B, block_size, first_B, cache)


def _has_room(cache: Cache) -> bool:
    """Return whether a cache is that of a step, and has room for its new positions."""
    if isinstance(cache, KeyValueCache):
        return cache.length < cache.capacity
    return cache.is_step and not cache.places(0)[3] and cache.has_room


def _new_cache(config: Any, dtype: torch.dtype, device: torch.device, capacity: int) -> KeyValueCache:
    return KeyValueCache(config, 1, capacity, dtype, device)


def _by_layers(own: ReferenceType[Decoder], choice: KernelChoice, tokens_1L: Tensor, cache: KeyValueCache) -> Tensor:
    """Return the hidden states of a text's first tokens without a graph."""
    decoder = own()
    assert decoder is not None
    step, decoder.gpu_step = decoder.gpu_step, None
    try:
        return decoder.hidden_states(tokens_1L, None, cache, choice)
    finally:
        decoder.gpu_step = step


class _Graph:
    """The step of one number of sequences."""

    def __init__(self, compute: Callable[..., Any], batch: int, blocks: int, caches_L3: Tensor, pool: Any) -> None:
        """compute: GpuStep._compute. caches_L3: the addresses of the cache."""
        self._compute_step, self._batch, self._blocks, self._pool = compute, batch, blocks, pool
        self._tokens_B = torch.zeros(batch, dtype=torch.int64, device=caches_L3.device)
        self._first_B = torch.zeros_like(self._tokens_B)
        self._numbers = torch.zeros(1 + batch + batch * blocks, dtype=torch.int64, device=caches_L3.device)
        """The block size, the positions in the cache, and the blocks, so that one copy fills them."""
        size_1, self._past_B, blocks_T = self._numbers.split([1, batch, batch * blocks])
        self._places = Places(self._past_B, self._first_B, size_1, blocks_T.view(batch, blocks), caches_L3, {})
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_ready = False
        self._hidden_BD = self._tokens_B
        self._follows: tuple[ReferenceType[Any], int, int] | None = None
        """The cache of the last step, its length after it, and its capacity: the next step needs no new positions."""
        self.seen: list[tuple[MoeBlock, Any]] = []
        """Each MoE block with its input, logits and choice."""

    def step(self, tokens_B: Tensor, own: _Located) -> Tensor:
        """Return the hidden states, [B, D]."""
        self._tokens_B.copy_(tokens_B)
        self._fill(own)
        if not self._is_ready:
            self._compute()  # compiles the kernels, and writes what the graph will write again
            self._follows = None
            self._fill(own)
            self._graph = recorded(self._compute, self._pool) if self._tokens_B.is_cuda else None
            self._is_ready = True
        self._follows = None
        if self._graph is None:  # Triton interprets the kernels on a CPU, as tests do
            self._compute()
        else:
            self._graph.replay()
        if isinstance(own.cache, KeyValueCache):
            self._follows = ref(own.cache), own.cache.length + 1, own.cache.capacity
        return self._hidden_BD.clone()

    def _compute(self) -> None:
        positions_B = self._past_B - self._first_B
        self._hidden_BD, self.seen = self._compute_step(self._tokens_B, self._places, positions_B)
        self._past_B += 1

    def _fill(self, own: _Located) -> None:
        """Write where the sequences lie."""
        if own.first_B is not None:
            self._first_B.copy_(own.first_B)
        if isinstance(own.cache, KeyValueCache) and self._follows is not None:
            cache, length, capacity = self._follows
            if cache() is own.cache and (length, capacity) == (own.cache.length, own.cache.capacity):
                return
        if own.first_B is None:
            self._first_B.zero_()
        blocks_BM = np.zeros((self._batch, self._blocks), np.int64)
        blocks_BM[:, : own.blocks_BM.shape[1]] = own.blocks_BM
        numbers = np.concatenate([[own.block_size], own.past_B, blocks_BM.ravel()])
        self._numbers.copy_(torch.from_numpy(numbers))


def _rule(routing: Routing) -> tuple[Any, ...]:
    """Return what tells two routings apart. The server makes new ones for each step, of the same tensors."""
    if not isinstance(routing, Skipping):
        return (id(routing),)
    tensors = routing.base, routing.gamma1_K, routing.gamma2_NN, routing.importance_1
    return (*map(id, tensors), routing.threshold, routing.normalise, routing.keep)


def _is_dynamic(ffn: Any) -> bool:
    """Return whether a block does in this pass what a graph cannot repeat, or not record."""
    if isinstance(ffn, Expert):
        return ffn.unit_observer is not None
    routing = ffn.routing
    if isinstance(routing, Skipping):
        if isinstance(routing.threshold, Tensor):
            return True
        routing = routing.base
    in_groups = bool(getattr(routing, "groups", ()))  # their indices are copied from the host
    return in_groups or ffn.is_observed or (ffn.shared is not None and ffn.shared.unit_observer is not None)


def _never_waits(block: MoeBlock) -> bool:
    """Return whether a block reads many tokens without waiting for the host, and tells nobody about its padding."""
    return block.observer is None and isinstance(block.on_gpu, TritonExperts) and block.on_gpu.serves_many


def can_step(decoder: Decoder) -> bool:
    """Return whether the kernels support the whole decoder: all of its layers, its embedding, head and rotation."""
    config = decoder.config
    if decoder.norm_bias is not None or config.temperature is not None or config.dense_positions is not None:
        return False
    if decoder.rotary.varies or not config.rotary_dimension or config.zero_centered or not all(map(serves, decoder.layers)):
        return False
    if not isinstance(decoder.embedding, Tensor) or not is_plain(decoder.head, decoder.dtype):
        return False
    heads = {(own.attention.key_heads, own.attention.head_dimension) for own in decoder.layers}  # type: ignore[union-attr]
    return len(heads) == 1  # the blocks of a cache are counted in all of a layer's groups


def use_gpu_steps(decoder: Decoder) -> None:
    """Let passes of a decoder run as CUDA graphs, if the kernels support it, and are correct and faster than its layers.

    If they fail, one line of the log gives the reason, and the layers run one by one.

    Raises:
        OptionError: `COMPRESS_KERNELS` has an unknown value.
    """
    wanted = wanted_kernels()
    if wanted == "torch" or not can_step(decoder):
        return
    try:
        step_kernels()
        step = GpuStep(decoder)
        decoder.gpu_step = step if pays(decoder, step, wanted == "auto") else None
    except ImportError:
        return  # use_triton has said it
    except Exception as error:  # raised by Triton, its C compiler, ptxas or the driver, none of which torch needs
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        _log.warning("decoding runs layer by layer: its trial failed on this GPU (%s)", reason)
