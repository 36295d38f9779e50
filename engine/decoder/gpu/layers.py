"""The layers of a step of decoding on a GPU: the addresses of their weights, and the launches of their kernels.

A layer's experts run through `TritonExperts`. A shared expert is a further expert with a slot of its own, and the FFN of a
dense layer is a single expert.

Shape suffixes: T tokens, one for each sequence, D hidden, I inputs and O outputs of a product, N experts, S
slots, H query heads, E head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

from engine.decoder.attention import Attention
from engine.decoder.experts import SPARSE_MAX_TOKENS, Expert, MoeBlock
from engine.decoder.gpu.triton_experts import LEAST_PRODUCT, TritonExperts, can_serve, narrowed, programs_for
from engine.decoder.routing import Routing, Selection, Skipping, TopK, select
from engine.families.layer_config import Chunk
from engine.kernels.gpu.launching import normed_rows, power_of_two, step_kernels

PRODUCT = {"ROWS": 4, "COLUMNS": 1024}
"""Block sizes of products with few tokens: outputs, and most inputs that are read at a time."""
PRODUCT_OF_MANY = {"ROWS": 16, "COLUMNS": 256}
PIPELINED_ROWS = 32
"""Most tokens with which a product of many has three reads under way."""
KEYS = 64
"""Keys that are multiplied at a time."""
MOST_SPLITS, PROGRAMS_PER_PROCESSOR = 64, 4
"""Most parts of a text, and programs of attention for each of the GPU's processors, which wait for memory in turn."""
NORMS = {"none": 0, "head": 1, "full": 2}


class Product:
    """x·Wᵀ + b of a few rows with one or several matrices, in one launch, optionally after a norm or with a residual."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._inputs, outputs = weights[0].shape[1], [weight.shape[0] for weight in weights]
        self._has_bias = any(bias is not None for bias in biases)
        own = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
        self._kept = weights, own if self._has_bias else weights
        """Tensors whose addresses the kernels are given."""
        parts = [[part.data_ptr() for part in (*kept, kept[-1], kept[-1])[:3]] for kept in self._kept]
        self._addresses = [*parts[0], *parts[1]]
        self._outputs = sum(outputs)
        starts = [*(sum(outputs[:part]) for part in range(1, len(outputs))), self._outputs, self._outputs]
        self._sizes = {"INPUTS": self._inputs, "OUTPUTS": self._outputs, "SECOND": starts[0], "THIRD": starts[1]}

    def __call__(
        self,
        x_TI: Tensor,
        norm: tuple[Tensor, float] | None = None,
        residual: tuple[Tensor, float] | None = None,
        normed_TI: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the outputs of all matrices side by side, [T, O].

        norm: weight and epsilon of an RMS norm of x. residual: what is added to, [T, O], and the factor of what is added.
        normed_TI: takes the normed x. dtype: of the result; None for that of x.
        """
        y_TO = x_TI.new_empty(x_TI.shape[0], self._outputs, dtype=dtype or x_TI.dtype)
        norm_I, epsilon = (x_TI, 0.0) if norm is None else norm
        residual_TO, factor = (x_TI, 1.0) if residual is None else residual
        given = x_TI, norm_I, x_TI if normed_TI is None else normed_TI, *self._addresses, residual_TO, y_TO
        sizes: dict[str, Any] = self._sizes | {"HAS_NORM": norm is not None}
        sizes |= {"KEEPS_NORMED": normed_TI is not None, "HAS_BIAS": self._has_bias, "HAS_RESIDUAL": residual is not None}
        tokens = x_TI.shape[0]
        if tokens <= SPARSE_MAX_TOKENS:
            grid: tuple[int, ...] = tokens, programs_for(self._outputs, PRODUCT["ROWS"])
            step_kernels().products_of_few[grid](*given, epsilon, factor, **sizes, **narrowed(PRODUCT, self._inputs))
        else:
            sizes["T"] = max(LEAST_PRODUCT, power_of_two(tokens))
            grid = (programs_for(self._outputs, PRODUCT_OF_MANY["ROWS"]),)
            columns = PRODUCT_OF_MANY["COLUMNS"] * 2 // x_TI.itemsize
            sizes |= {"num_stages": 2} if sizes["T"] > PIPELINED_ROWS else {}  # more do not fit into the memory of a program
            sizes |= narrowed(PRODUCT_OF_MANY | {"COLUMNS": columns}, max(LEAST_PRODUCT, self._inputs))
            step_kernels().products_of_many[grid](*given, tokens, epsilon, factor, **sizes)
        return y_TO


@dataclass(frozen=True)
class Places:
    """Where the sequences of a step lie, in memory that every step of a graph reads."""

    past_T: Tensor
    """Positions in the cache."""
    first_T: Tensor
    """The first of them that is no padding."""
    block_size_1: Tensor
    blocks_TM: Tensor
    """Indices of the blocks of each sequence."""
    caches_L3: Tensor
    """Addresses of each layer's keys and values, and the distance of two groups in elements."""
    turns: dict[str | None, tuple[Tensor, Tensor]]
    """Cosines and sines of the rotary angles by kind of layer, [T, R]."""


class AttentionOnGpu:
    """Attention of one layer: the norm before it, its products, and the residual after it."""

    def __init__(self, attention: Attention, norm_D: Tensor, factor: float) -> None:
        self._own, self._norm, self._factor = attention, (norm_D, attention.epsilon), factor
        weights: Any = [attention.query, attention.key, attention.value]
        self._projections = Product(weights, [attention.query_bias, attention.key_bias, attention.value_bias])
        output: Any = attention.output
        self._output = Product([output], [attention.output_bias])

    def __call__(self, x_TD: Tensor, places: Places) -> Tensor:
        """Return x plus the output of attention, [T, D]; the new keys and values are in the cache then."""
        own, made, tokens = self._own, step_kernels(), x_TD.shape[0]
        x_TX = self._projections(x_TD, self._norm)
        cosine_TR, sine_TR = places.turns[own.kind] if own.rotates else (x_TX, x_TX)
        splits = _splits(tokens * own.key_heads, x_TD.device)
        shape = tokens, own.query_heads, splits
        largest, sums = x_TX.new_empty(shape, dtype=torch.float32), x_TX.new_empty(shape, dtype=torch.float32)
        mixed = x_TX.new_empty((*shape, own.head_dimension), dtype=torch.float32)
        norms = [x_TX if norm is None else norm for norm in (own.query_norm, own.key_norm)]
        wide = max(LEAST_PRODUCT, power_of_two(own.head_dimension))
        sizes = {"H": own.query_heads, "E": own.head_dimension, "S": splits, "WIDE": wide}
        made.attend_next[tokens, own.key_heads, splits](
            x_TX,
            *norms,
            cosine_TR,
            sine_TR,
            places.past_T,
            places.first_T,
            places.blocks_TM,
            places.caches_L3[own.layer],
            places.block_size_1,
            mixed,
            largest,
            sums,
            own.epsilon,
            own.scale,
            places.blocks_TM.shape[1],
            **sizes,
            G=own.key_heads,
            R=cosine_TR.shape[1] if own.rotates else 0,
            WINDOW=own.window if isinstance(own.window, int) else 0,
            CHUNK=own.window.size if isinstance(own.window, Chunk) else 0,
            NORM=NORMS[own.qk_norm],
            HEADS=max(LEAST_PRODUCT, power_of_two(own.query_heads // own.key_heads)),
            ALL_QUERIES=power_of_two(own.query_heads * own.head_dimension),
            ALL_KEYS=power_of_two(own.key_heads * own.head_dimension),
            BLOCK=KEYS,
        )
        y_TX = x_TX.new_empty(tokens, own.query_heads * own.head_dimension)
        sinks = x_TX if own.sinks is None else own.sinks
        made.join_splits[(tokens * own.query_heads,)](
            mixed, largest, sums, sinks, y_TX, **sizes, HAS_SINKS=own.sinks is not None
        )
        return self._output(y_TX, residual=(x_TD, self._factor))


@cache
def _splits(programs: int, device: torch.device) -> int:
    """Return into how many parts each text is split, a power of two, given the number of programs for one part."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return min(MOST_SPLITS, power_of_two(max(1, processors * PROGRAMS_PER_PROCESSOR // programs) // 2 + 1))


class FeedForwardOnGpu:
    """The MoE block or the FFN of one layer, with the norm before it and the residual after it."""

    def __init__(self, ffn: MoeBlock | Expert, norm: tuple[Tensor, float], factor: float) -> None:
        self._norm, self._factor = norm, factor
        self.block = ffn if isinstance(ffn, MoeBlock) else None
        self._experts, self._launches = list(experts_of(ffn)), TritonExperts()
        self.seen: tuple[Tensor, Tensor, Selection] | None = None
        """The block's last input, logits and choice, for its observer."""
        if isinstance(ffn, MoeBlock):
            self._router, self._logits = _router(ffn), len(ffn.experts)

    def __call__(self, x_TD: Tensor, routing: Routing | None) -> Tensor:
        """Return x plus the block's output, [T, D]. routing: that of an MoE block."""
        if self.block is None or routing is None:
            normed_TD, tokens = normed_rows(x_TD, *self._norm), x_TD.shape[0]
            once = torch.zeros(tokens, 1, dtype=torch.int64, device=x_TD.device)
            selection = Selection(once, torch.ones(tokens, 1, device=x_TD.device))
        else:
            normed_TD = torch.empty_like(x_TD)
            dtype = torch.float32 if self.block.router_in_float32 else None
            logits_TO = self._router(x_TD, self._norm, normed_TI=normed_TD, dtype=dtype)
            selection = self._selection(self.block, routing, normed_TD, logits_TO)
        return self._launches.added(x_TD, self._factor, normed_TD, selection, self._experts)

    def _selection(self, block: MoeBlock, routing: Routing, normed_TD: Tensor, logits_TO: Tensor) -> Selection:
        """Return the chosen experts, and the shared expert as the last one."""
        tokens, count = logits_TO.shape[0], self._logits
        logits_TN = logits_TO[:, :count]
        rule, skipping = (routing.base, routing) if _can_skip(routing) else (routing, None)
        if type(rule) is not TopK:
            selection = select(routing, normed_TD, logits_TN)
            self.seen = normed_TD, logits_TN, selection
            return selection if block.shared is None else _with_shared(selection, logits_TO, count)
        slots = min(rule.experts_per_token, count)
        shared = 0 if block.shared is None else 1 if block.shared_gate_1D is None else 2
        total = slots + (shared > 0)
        experts_TS = torch.empty(tokens, total, dtype=torch.int64, device=logits_TO.device)
        weights_TS = torch.empty(tokens, total, device=logits_TO.device)
        gammas = (weights_TS, weights_TS) if skipping is None else (skipping.gamma1_K, skipping.gamma2_NN)
        step_kernels().choose[(tokens,)](
            logits_TO,
            *gammas,
            experts_TS,
            weights_TS,
            rule.scale,
            0.0 if skipping is None else float(skipping.threshold),
            N=count,
            OUTPUTS=logits_TO.shape[1],
            K=slots,
            SHARED=shared,
            NORMALISES=rule.normalise,
            SKIPS=skipping is not None and bool(skipping.threshold),
            KEEP=1 if skipping is None else skipping.keep,
            RESTORES=skipping is not None and skipping.normalise,
            WIDE=power_of_two(count),
            WIDE_K=power_of_two(total),
        )
        self.seen = normed_TD, logits_TN, Selection(experts_TS[:, :slots], weights_TS[:, :slots])
        return Selection(experts_TS, weights_TS)


def experts_of(ffn: MoeBlock | Expert) -> Sequence[Expert]:
    """Return the experts that the kernels compute together: the routed ones and the shared one, or a dense layer's FFN."""
    if isinstance(ffn, Expert):
        return [ffn]
    routed: list[Any] = list(ffn.experts)
    return routed if ffn.shared is None else [*routed, ffn.shared]


def _router(block: MoeBlock) -> Product:
    """Return the product that makes a block's logits, and that of the shared expert's gate after them."""
    rows, bias = [block.router_ND.detach()], block.logit_bias_N
    if block.shared_gate_1D is not None:
        rows.append(block.shared_gate_1D.detach())
        bias = None if bias is None else torch.cat([bias.detach(), bias.new_zeros(1)])  # type: ignore[assignment]
    return Product([torch.cat(rows)], [bias])


def _can_skip(routing: Routing) -> TypeGuard[Skipping]:
    """Return whether the kernel of the choice also skips: its tables are in float32, and no token is protected."""
    if not isinstance(routing, Skipping) or routing.importance_1 is not None or isinstance(routing.threshold, Tensor):
        return False
    gammas = routing.gamma1_K, routing.gamma2_NN
    return all(gamma.dtype == torch.float32 and gamma.is_contiguous() for gamma in gammas)


def _with_shared(selection: Selection, logits_TO: Tensor, count: int) -> Selection:
    """Return a choice with the shared expert as a further slot, whose gate is the logit after the experts', if any."""
    shared_T1 = selection.experts.new_full((len(logits_TO), 1), count)
    gated = logits_TO.shape[1] > count
    weight_T1 = logits_TO[:, count:].float().sigmoid() if gated else torch.ones_like(shared_T1, dtype=torch.float32)
    weights_TS = torch.cat([selection.weights.float(), weight_T1], dim=1)
    return Selection(torch.cat([selection.experts, shared_T1], dim=1), weights_TS)


def serves(layer: Any) -> bool:
    """Return whether the kernels support all parts of a DecoderLayer."""
    attention, ffn = layer.attention, layer.feed_forward
    if type(attention) is not Attention or ffn is None:
        return False
    if layer.attention_norm_bias is not None or layer.feed_forward_norm_bias is not None or layer.zero_centered:
        return False
    if layer.residuals is not None or layer.output_norms is not None or layer.scalar_1 is not None:
        return False
    norm = layer.attention_norm
    return _serves_attention(attention, norm) and _serves_feed_forward(ffn, norm)


def _serves_attention(attention: Attention, norm: Tensor) -> bool:
    if attention.has_gate or attention.value is None or attention.value_norm or attention.pairs:
        return False
    if attention.unit_norm or attention.clip is not None or attention.zero_centered:
        return False
    weights = [attention.query, attention.key, attention.value, attention.output]
    biases = [attention.query_bias, attention.key_bias, attention.value_bias, attention.output_bias]
    extras = [part for part in (*biases, attention.query_norm, attention.key_norm) if part is not None]
    if not all(is_plain(weight, norm.dtype) for weight in weights) or any(part.dtype != norm.dtype for part in extras):
        return False
    starts = attention.query_heads * attention.head_dimension, attention.key_heads * attention.head_dimension
    return math.gcd(*starts) % max(PRODUCT["ROWS"], PRODUCT_OF_MANY["ROWS"]) == 0


def is_plain(weight: Any, dtype: torch.dtype) -> bool:
    """Return whether the kernels read this matrix beside activations of this dtype."""
    known = dtype in (torch.bfloat16, torch.float16, torch.float32) and isinstance(weight, Tensor) and weight.dtype == dtype
    return known and weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.numel() < 2**31


def _serves_feed_forward(ffn: MoeBlock | Expert, norm: Tensor) -> bool:
    experts = experts_of(ffn)
    if not can_serve(experts) or experts[0].up_FD.dtype != norm.dtype:
        return False
    if isinstance(ffn, Expert):
        return True
    plain = ffn.gate_hidden_HD is None and ffn.own_norms is None and not ffn.scales_inputs and ffn.residency is None
    return plain and is_plain(ffn.router_ND, norm.dtype)
