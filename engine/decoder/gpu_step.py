"""Passes through a decoder on a GPU as CUDA graphs, for decoders whose parts the Triton kernels support.

Launched one by one from Python, the kernels of a step take ten times as long as reading the weights. A graph launches all of
them at once. That of a step is recorded once for each number of sequences, and serves any cache and any length: the kernels
read the positions, the blocks of the sequences and the addresses of the cache from memory that a step fills before the graph
runs.

A decoder with an unsupported part runs layer by layer: latent and linear attention, output gates, zero-centered norms, norms
of values and of outputs, rotary angles that depend on the length of the text, low-bit weights, and a cache in another dtype.

Shape suffixes: B sequences (T in a layer), D hidden, M blocks of a sequence, L layers.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from engine.decoder.attention import Cache
from engine.decoder.experts import MoeBlock
from engine.decoder.gpu_layers import (
    AttentionOnGpu,
    FeedForwardOnGpu,
    Places,
    Product,
    serves,
)
from engine.decoder.gpu_prompt import PromptGraphs, serves_prompt
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, embedded
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.routing import Routing, Skipping
from engine.kernels.gpu import power_of_two, step_kernels
from engine.kernels.kernel_choice import DECODING, PROMPT, KernelChoice, wanted_kernels

_log = logging.getLogger(__name__)

MOST_SEQUENCES = 64
"""Maximum number of sequences of a step that runs as a graph."""
TRIAL_LENGTH, TRIAL_STEPS = 24, 4
"""Positions of the prompt, and steps after it, with which a graph is compared with the layers."""
TOLERANCE = 20
"""Largest median of the relative errors of hidden states in a trial, as a multiple of the dtype's rounding."""


class GpuStep:
    """The steps of one decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        config, factor = decoder.config, decoder.config.multipliers.residual
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
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._routings: list[Routing] = []
        self._rules: list[tuple[Any, ...]] = []
        """What the graphs depend on in the routings, whose tensors they read."""
        self._caches_L3 = torch.zeros(len(config.layers), 3, dtype=torch.int64, device=decoder.device)
        self._cache_at: list[list[int]] = []
        self._prompts: PromptGraphs | None = None
        self.failed: set[str] = set()
        """What failed on this GPU, and runs layer by layer since: "decoding", "prompts"."""

    def __call__(
        self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache | None, choice: KernelChoice
    ) -> Tensor | None:
        """Return the hidden states after the last norm, [B, L, D]; None if the layers must run.

        A step reads the next position of each sequence. Otherwise, one text's first tokens are read. Arguments are those of
        `Decoder.hidden_states`.
        """
        what = "decoding" if tokens_BL.shape[1] == 1 else "prompts"
        if cache is None or what in self.failed or not self._knows(cache, choice):
            return None
        if what == "prompts":
            return self._prompt(tokens_BL, real_BP, cache, choice)
        if not self._knows_step(tokens_BL, cache, choice):
            return None
        self._follow_routings()
        self._take_addresses(cache)
        located = _located(cache, real_BP)
        graph = self._graph(len(tokens_BL), power_of_two(located.blocks_BM.shape[1]))
        try:
            hidden_BD = graph.step(tokens_BL[:, 0], located)
        except Exception as error:  # raised by Triton, the driver, or torch while it records
            self._fail(what, error)
            return None
        if isinstance(cache, KeyValueCache):
            cache.advance(1)
        for _, ffn in self._layers:
            if ffn.block is not None and ffn.block.observer is not None and graph.seen:
                ffn.block.observer(*graph.seen[ffn])
        return hidden_BD[:, None]

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return the head's product with hidden states […, D] of a step, [… , V]; None if torch must compute it."""
        rows = hidden.numel() // hidden.shape[-1]
        if "decoding" in self.failed or torch.is_grad_enabled() or not 1 <= rows <= MOST_SEQUENCES:
            return None
        return self._head(hidden.reshape(rows, -1).contiguous()).view(*hidden.shape[:-1], -1)

    def _knows(self, cache: Cache, choice: KernelChoice) -> bool:
        """Return whether a forward pass into this cache may be a graph."""
        if not choice.may_compile or torch.is_grad_enabled():
            return False
        if cache.dtype != self._decoder.dtype or self._decoder.watch is not None:
            return False
        return not any(_is_dynamic(block) for block in self._decoder.moe_blocks)

    def _knows_step(self, tokens_BL: Tensor, cache: Cache, choice: KernelChoice) -> bool:
        """Return whether this forward pass is a step of so many sequences."""
        if isinstance(cache, PagedBatch) and (not cache.is_step or cache.places(0)[3]):
            return False
        return 1 <= len(tokens_BL) <= min(choice.max_few_rows, MOST_SEQUENCES)

    def _prompt(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: Cache, choice: KernelChoice) -> Tensor | None:
        """Return the hidden states of a text's first tokens; None if the layers must run."""
        is_counted = any(block.observer is not None for block in self._decoder.moe_blocks)
        if choice.max_few_rows or is_counted or not serves_prompt(tokens_BL, real_BP, cache):
            return None
        self._follow_routings()
        if self._prompts is None:
            config, dtype, device = self._decoder.config, self._decoder.dtype, self._decoder.device
            self._prompts = PromptGraphs(
                partial(self._by_layers, choice), lambda length: KeyValueCache(config, 1, length, dtype, device)
            )
        try:
            return self._prompts(tokens_BL, cache)
        except Exception as error:  # as in a step
            self._fail("prompts", error)
            return None

    def _by_layers(self, choice: KernelChoice, tokens_1L: Tensor, cache: KeyValueCache) -> Tensor:
        decoder = self._decoder
        decoder.gpu_step = None
        try:
            return decoder.hidden_states(tokens_1L, None, cache, choice)
        finally:
            decoder.gpu_step = self

    def _fail(self, what: str, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        _log.warning("%s: the layers run one by one, because a graph failed on this GPU (%s)", what, reason)
        self.failed.add(what)

    def _follow_routings(self) -> None:
        """Forget the graphs of other routings."""
        routings = [block.routing for block in self._decoder.moe_blocks]
        rules = list(map(_rule, routings))
        if rules != self._rules:
            self._routings, self._rules, self._graphs, self._prompts = routings, rules, {}, None

    def _take_addresses(self, cache: Cache) -> None:
        rows = [[*cache.addresses(layer), cache.group_stride(layer)] for layer in range(len(self._layers))]
        if rows != self._cache_at:
            self._cache_at = rows
            self._caches_L3.copy_(torch.tensor(rows))

    def _graph(self, batch: int, blocks: int) -> _Graph:
        if (batch, blocks) not in self._graphs:
            self._graphs[batch, blocks] = _Graph(self, batch, blocks)
        return self._graphs[batch, blocks]

    def compute(self, tokens_B: Tensor, places: Places, positions_B: Tensor) -> Tensor:
        """Return the hidden states after the last norm, [B, D]."""
        decoder, routings = self._decoder, iter(self._routings)
        x_BD = embedded(decoder.config, tokens_B, decoder.embedding, decoder.dtype)
        for kind in self._kinds:
            turns = decoder.rotary.of_kind(kind)(positions_B[:, None], decoder.dtype)
            places.turns[kind] = (turns[0].flatten(1), turns[1].flatten(1))
        for attention, ffn in self._layers:
            x_BD = attention(x_BD, places)
            x_BD = ffn(x_BD, None if ffn.block is None else next(routings))
        y_BD = torch.empty_like(x_BD)
        hidden, own = x_BD.shape[1], decoder.config
        step_kernels().norm_rows[(len(x_BD),)](
            x_BD, decoder.norm, y_BD, own.norm_epsilon, INPUTS=hidden, WIDE=power_of_two(hidden)
        )
        return y_BD if own.multipliers.logits == 1.0 else y_BD * (1.0 / own.multipliers.logits)

    def record(self, compute: Any) -> torch.cuda.CUDAGraph | None:
        """Return what `compute` launches, as a graph. It has to have run once before.

        None where Triton interprets the kernels on a CPU, as tests do: they are then launched one by one.
        """
        if self._decoder.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            compute()
        return graph

    @property
    def caches_L3(self) -> Tensor:
        """Addresses of each layer's keys and values, and the distance of two groups in elements."""
        return self._caches_L3

    @property
    def seen(self) -> dict[Any, Any]:
        """What each MoE block computed last: its input, logits and choice."""
        return {ffn: ffn.seen for _, ffn in self._layers if ffn.seen is not None}


class _Located(NamedTuple):
    """Where the sequences of a step lie, as the host knows it. The fields are those of gpu_layers.Places."""

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


class _Graph:
    """The step of one number of sequences."""

    def __init__(self, step: GpuStep, batch: int, blocks: int) -> None:
        self._step, self._batch, self._blocks = step, batch, blocks
        device = step.caches_L3.device
        self._tokens_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self._first_B = torch.zeros_like(self._tokens_B)
        self._numbers = torch.zeros(1 + batch + batch * blocks, dtype=torch.int64, device=device)
        """The block size, the positions in the cache, and the blocks, so that one copy fills them."""
        size_1, self._past_B, blocks_T = self._numbers.split([1, batch, batch * blocks])
        self._places = Places(self._past_B, self._first_B, size_1, blocks_T.view(batch, blocks), step.caches_L3, {})
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_ready = False
        self._hidden_BD = self._tokens_B
        self._follows: tuple[ReferenceType[Any], int] | None = None
        """The cache of the last step, and its length after it: the next step needs no new positions."""
        self.seen: dict[Any, Any] = {}
        """What each MoE block computes: its input, logits and choice."""

    def step(self, tokens_B: Tensor, own: _Located) -> Tensor:
        """Return the hidden states, [B, D]."""
        self._tokens_B.copy_(tokens_B)
        self._fill(own)
        if not self._is_ready:
            self._compute()  # compiles the kernels, and writes what the graph will write again
            self._follows = None
            self._fill(own)
            self._graph = self._step.record(self._compute)
            self._is_ready = True
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        if isinstance(own.cache, KeyValueCache):
            self._follows = ref(own.cache), own.cache.length + 1
        return self._hidden_BD.clone()

    def _compute(self) -> None:
        self._hidden_BD = self._step.compute(self._tokens_B, self._places, self._past_B - self._first_B)
        self.seen = self._step.seen
        self._past_B += 1

    def _fill(self, own: _Located) -> None:
        """Write where the sequences lie."""
        if own.first_B is not None:
            self._first_B.copy_(own.first_B)
        follows = self._follows is not None and self._follows[0]() is own.cache
        if follows and isinstance(own.cache, KeyValueCache) and self._follows[1] == own.cache.length:  # type: ignore[index]
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


def _is_dynamic(block: MoeBlock) -> bool:
    """Return whether a block does in this pass what a graph cannot repeat."""
    routing = block.routing
    return block.is_observed or (isinstance(routing, Skipping) and isinstance(routing.threshold, Tensor))


def can_step(decoder: Decoder) -> bool:
    """Return whether the kernels support the whole decoder."""
    config = decoder.config
    if decoder.norm_bias is not None or config.temperature is not None or config.dense_positions is not None:
        return False
    if decoder.rotary.varies or not config.rotary_dimension or config.zero_centered or not all(map(serves, decoder.layers)):
        return False
    if not isinstance(decoder.embedding, Tensor) or not isinstance(decoder.head, Tensor) or decoder.head.data_ptr() % 16:
        return False
    heads = {(own.attention.key_heads, own.attention.head_dimension) for own in decoder.layers}  # type: ignore[union-attr]
    return len(heads) == 1  # the blocks of a cache are counted in all of a layer's groups


def use_gpu_steps(decoder: Decoder) -> None:
    """Let steps of decoding run as CUDA graphs, if the kernels support the decoder, and are correct and faster than torch.

    If they fail, one line of the log gives the reason, and the layers run one by one.

    Raises:
        OptionError: `COMPRESS_KERNELS` has an unknown value.
    """
    wanted = wanted_kernels()
    if wanted == "torch" or not can_step(decoder):
        return
    try:
        step = GpuStep(decoder)
        if _pays(decoder, step, wanted == "auto"):
            decoder.gpu_step = step
    except ImportError:
        return  # use_triton has said it
    except Exception as error:  # raised by Triton, its C compiler, ptxas or the driver, none of which torch needs
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        _log.warning("decoding runs layer by layer: its step failed on this GPU (%s)", reason)


@torch.inference_mode()
def _pays(decoder: Decoder, step: GpuStep, is_timed: bool) -> bool:
    """Return whether the graphs give the layers' hidden states, and are faster."""
    generator = torch.Generator().manual_seed(0)
    tokens_1P = torch.randint(decoder.config.vocabulary_size, (1, TRIAL_LENGTH + TRIAL_STEPS), generator=generator)
    tokens_1P = tokens_1P.to(decoder.device)
    made, seconds = [], []
    for own in (None, step):
        decoder.gpu_step = own
        cache = KeyValueCache(decoder.config, 1, tokens_1P.shape[1] + TRIAL_STEPS, decoder.dtype, decoder.device)
        states = [decoder.hidden_states(tokens_1P[:, :TRIAL_LENGTH], None, cache, PROMPT)[:, -1:]]
        for token_11 in tokens_1P[:, TRIAL_LENGTH:].split(1, dim=1):
            started = time.perf_counter()
            states.append(decoder.hidden_states(token_11, None, cache, DECODING))
            _wait(decoder)
            took = time.perf_counter() - started
        made.append(torch.cat(states)[:, 0].float())
        seconds.append(took)
    decoder.gpu_step = None
    if step.failed:
        return False
    # The median, because a token whose experts are nearly equal may take another one.
    error = float(((made[1] - made[0]).norm(dim=1) / made[0].norm(dim=1)).median())
    if not error <= TOLERANCE * torch.finfo(decoder.dtype).eps:  # also refuses NaN
        _log.warning("decoding runs layer by layer: its kernels have an error of %.1e", error)
        return False
    return not is_timed or seconds[1] < seconds[0]


def _wait(decoder: Decoder) -> None:
    if decoder.device.type == "cuda":
        torch.cuda.synchronize()
