"""Grouped-query attention with rotary positions, optional qk-norm, biases, clipping and sliding window.

Shape suffixes: B batch, L new positions, P all positions so far, H query heads, G key-value heads, E head dimension,
R its rotated dimensions, V a value's dimensions, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.decoder.kv_cache import COMPILED_DTYPES, Kept, KeyValueCache, Scaled
from engine.decoder.norms import rms_norm
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.text_attention import attend_texts, sinks_array, takes_texts, window_number
from engine.families.config import DecoderConfig
from engine.families.layer_config import Chunk
from engine.kernels.kernel_choice import TORCH, KernelChoice
from engine.kernels.linear import as_bfloat16, linear, linears
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight, frozen, frozen_tensor
from engine.kernels.torch_products import is_emulated, multiplies_bfloat16

Cache = KeyValueCache | PagedBatch
Masks = Mapping[int | Chunk | None, Tensor | None]

QUERY_BLOCK = 128
"""Number of queries in one block of attention scores."""
KEY_BLOCK = 1024
"""Number of cached positions converted at a time, for a cache in another dtype."""
MAX_SCORES = 1 << 24
"""Target for the number of scores held at a time: 32 MB in bfloat16. Many keys may need more."""


class Positions(NamedTuple):
    """Position-dependent values that all layers share in one forward pass."""

    cosine: Tensor
    """Cosines of the rotary angles, [B or 1, 1, L, R], in the model's dtype."""
    sine: Tensor
    is_padded: bool
    """Whether some positions are padding."""
    masks: Masks
    """Masks by sliding window or chunk: bool [B or 1, 1, L, P], True where a query may attend; None for a causal mask."""
    one_by_one: bool = False
    """Whether several positions are read together, each with the result of reading it alone."""
    temperature: Tensor | None = None
    """Factors of queries in layers without rotation, [B or 1, 1, L, 1]; None for no factor."""
    real_BL: Tensor | None = None
    """Mask of the new positions that are not padding; None for all."""
    choice: KernelChoice = TORCH
    """Kernels that compute the products of this forward pass."""
    of_kinds: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})
    """Cosines and sines by kind of layer, where each kind rotates in its own way."""
    each: Sequence[Masks] = ()
    """Masks of each sequence of a PagedBatch that reads texts, in place of `masks`."""

    def mask_of(self, row: int, window: int | Chunk | None) -> Tensor | None:
        """Return the mask of one sequence of a PagedBatch."""
        return (self.each[row] if self.each else self.masks)[window]

    def text_kernels(self, query_BHLE: Tensor, key_BGPE: Kept, value_BGPV: Kept, sinks_H: Tensor | None = None) -> Any:
        """Return the compiled kernels if they attend for the new positions with `attend_texts`, otherwise None."""
        if self.is_padded or self.one_by_one or not takes_texts(query_BHLE, key_BGPE, value_BGPV):
            return None
        others = [each for each in (key_BGPE, value_BGPV, sinks_H) if isinstance(each, Tensor)]
        return self.choice.for_attention(query_BHLE, *others)

    def turns(self, kind: str | None) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of a kind of layer, [B or 1, 1, L, R]."""
        return (self.cosine, self.sine) if kind is None else self.of_kinds[kind]


def half_by_half(x_BHLE: Tensor, rotated: int) -> Tensor:
    """Reorder neighboring pairs of the rotated dimensions so that the first half is paired with the second half.

    Scores do not change if queries and keys are both reordered.
    """
    halves = x_BHLE[..., :rotated].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves if rotated == x_BHLE.shape[-1] else torch.cat((halves, x_BHLE[..., rotated:]), dim=-1)


def rotate(x_BHLE: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply the rotary embedding to the first R dimensions; dimension i is paired with dimension i + R/2."""
    rotated = x_BHLE[..., : cosine.shape[-1]]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cosine + torch.cat((-second, first), dim=-1) * sine
    if rotated.shape == x_BHLE.shape:
        return rotated
    return torch.cat((rotated, x_BHLE[..., cosine.shape[-1] :]), dim=-1)


def attention_mask(
    real_BP: Tensor | None, new: int, total: int, window: int | Chunk | None, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Return the attention mask: causal, within the sliding window or the chunk, and hiding padding.

    real_BP: bool [B, P], False at padding; None if there is none. Returns bool [B or 1, 1, L, P], or None if no more
    than "new positions are causal among themselves" is needed (the kernel's own causal mask is then enough).
    """
    narrow = window is not None and total > (window.size if isinstance(window, Chunk) else window)
    if real_BP is None and not narrow and (new == 1 or new == total):
        return None
    key = torch.arange(total, device=device)
    query = torch.arange(total - new, total, device=device)[:, None]
    allowed_LP = key <= query
    if isinstance(window, Chunk):
        # Chunks count real positions, so padding shifts them.
        counted_BP = key[None] if real_BP is None else (real_BP.long().cumsum(-1) - 1).clamp_min(0)
        chunks_BP = counted_BP // window.size
        allowed_LP = allowed_LP & (chunks_BP[:, None, :] == chunks_BP[:, total - new :, None])
    elif window is not None:
        allowed_LP = allowed_LP & (key > query - window)
    if real_BP is None and allowed_LP.dim() == 3:
        return allowed_LP[:, None]
    if real_BP is None:
        return allowed_LP[None, None]
    # A padding query attends to nothing real; attending to itself keeps its softmax finite.
    return (allowed_LP & real_BP[:, None, :])[:, None] | (key == query)[None, None]


def first_seen(past: int, window: int | Chunk | None) -> int:
    """Return the first position to which a new position, after `past` others, may attend."""
    if isinstance(window, Chunk):
        return past // window.size * window.size
    return 0 if window is None else max(0, past + 1 - window)


class Attention(nn.Module):
    """Grouped-query self-attention of one layer."""

    def __init__(self, config: DecoderConfig, layer: int, tensor: Callable[[str], Weight]) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.window = config.layers[layer].window
        self.rotates, self.unit_norm = config.layers[layer].rotates, config.layers[layer].unit_norm
        self.key_heads, self.head_dimension, self.shares_projection = config.heads_of(layer)
        self.pairs, self.rotated, self.kind = config.rotary_pairs, config.rotary_dimension, config.layers[layer].kind
        self.scale = config.multipliers.attention or self.head_dimension**-0.5
        self.query_heads, self.value_norm = config.attention_heads, config.value_norm
        self.clip = config.clip_qkv
        self.epsilon = config.norm_epsilon
        self.qk_norm, self.zero_centered = config.qk_norm, config.zero_centered
        self.has_gate = config.output_gate

        def weight(name: str) -> nn.Parameter | LowBitWeight:
            return frozen(tensor(f"{prefix}.{name}"))

        def optional(name: str, present: bool) -> nn.Parameter | None:
            return frozen_tensor(tensor(f"{prefix}.{name}")) if present else None

        self.query, self.key = weight("q_proj.weight"), weight("k_proj.weight")
        self.value = None if self.shares_projection else weight("v_proj.weight")
        self.output = weight("o_proj.weight")
        self.query_bias = optional("q_proj.bias", config.qkv_bias)
        self.key_bias = optional("k_proj.bias", config.qkv_bias)
        self.value_bias = optional("v_proj.bias", config.qkv_bias and not self.shares_projection)
        self.output_bias = optional("o_proj.bias", config.output_bias)
        self.query_norm = optional("q_norm.weight", self.qk_norm != "none")
        self.key_norm = optional("k_norm.weight", self.qk_norm != "none")
        self.sinks = optional("sinks", config.has_sinks)

    def forward(self, x_BLD: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        """Map [B, L, D] to [B, L, D]; with a cache, attend to its content and append the new positions."""
        choice = positions.choice
        projected, gate = self._projected(x_BLD, choice), None
        if self.has_gate:
            projected[0], gate = self._without_gate(projected[0])
        query = self._paired(self._heads(projected[0], self.query_norm, self.query_heads, choice))
        key = self._paired(self._heads(projected[1], self.key_norm, self.key_heads, choice))
        value = self._heads(projected[2], None, self.key_heads, choice)
        if self.value_norm:
            value = self._without_length(value.transpose(1, 2), choice).transpose(1, 2)  # contiguous, as the kernels need
        if (kernels := self._kernels(query, positions, cache)) is not None:
            assert cache is not None
            angles = positions.turns(self.kind)
            if not self.rotates or self.unit_norm:  # the kernel does nothing but rotate
                query, key = (x.contiguous() for x in self._placed(query, key, positions))
                angles = query.new_empty(1, 1, query.shape[2], 0), query.new_empty(1, 1, query.shape[2], 0)
            return self._finished(self._attend_compiled(kernels, (query, key, value, *angles), cache), gate, choice)
        query, key = self._placed(query, key, positions)
        if isinstance(cache, PagedBatch):
            cache.append(self.layer, key, value)
            mixed = self._attend_each(query, positions, cache)
        else:
            kept: tuple[Kept, Kept] = (key, value) if cache is None else cache.append(self.layer, key, value)
            mixed = self._attend(query, kept, positions, positions.masks[self.window])
        batch, _, length, _ = query.shape
        return self._finished(mixed.transpose(1, 2).reshape(batch, length, -1), gate, choice)

    def _projected(self, x_BLD: Tensor, choice: KernelChoice) -> list[Tensor]:
        """Return the projections that queries, keys and values are made from, [B, L, ...]."""
        weights, biases = (self.query, self.key), (self.query_bias, self.key_bias)
        if self.value is None:
            query, key = linears(x_BLD, weights, biases, choice)
            return [query, key, key]
        return linears(x_BLD, (*weights, self.value), (*biases, self.value_bias), choice)

    def _without_length(self, x: Tensor, choice: KernelChoice) -> Tensor:
        """Return heads divided by their root mean square."""
        return rms_norm(x, x.new_ones(self.head_dimension), self.epsilon, choice)

    def _without_gate(self, projected_BLX: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries of all heads, and the logits of their outputs' gates, which are stored head by head."""
        query_BLHE, gate_BLHE = projected_BLX.unflatten(-1, (self.query_heads, -1)).chunk(2, dim=-1)
        return query_BLHE.flatten(2), gate_BLHE.flatten(2)

    def _finished(self, mixed_BLX: Tensor, gate_BLX: Tensor | None, choice: KernelChoice) -> Tensor:
        """Return the output of attention from those of its heads."""
        if gate_BLX is not None:
            mixed_BLX = mixed_BLX * gate_BLX.sigmoid()
        return linear(mixed_BLX, self.output, self.output_bias, choice)

    def _placed(self, query: Tensor, key: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Apply the position-dependent operations to queries and keys."""
        if not self.rotates:
            return (query if positions.temperature is None else query * positions.temperature), key
        query, key = (rotate(x, *positions.turns(self.kind)) for x in (query, key))
        if not self.unit_norm:
            return query, key
        return self._without_length(query, positions.choice), self._without_length(key, positions.choice)

    @property
    def sources_P(self) -> Tensor | None:
        """The column of the projections that each column of queries, keys, values and gates is, int64; None if the same."""
        if not self.has_gate and not self.shares_projection and not self.pairs:
            return None
        queries = self.query_heads * self.head_dimension * (2 if self.has_gate else 1)
        keys = self.key_heads * self.head_dimension
        split = [queries, keys] if self.shares_projection else [queries, keys, keys]
        query, key, *value = torch.arange(sum(split))[None, None].split(split, dim=-1)
        query, gate = self._without_gate(query) if self.has_gate else (query, query[..., :0])
        heads = (each.unflatten(-1, (-1, self.head_dimension)).transpose(1, 2) for each in (query, key))
        paired = [self._paired(each).transpose(1, 2) for each in heads]
        return torch.cat([part.flatten() for part in (*paired, *(value or [key]), gate)])

    def _paired(self, x_BHLE: Tensor) -> Tensor:
        if not self.pairs:
            return x_BHLE
        # Stored position by position like the projections' outputs: the kernels read all heads of a position
        # contiguously.
        return half_by_half(x_BHLE.transpose(1, 2), self.rotated).transpose(1, 2)

    def _attend_each(self, query_BHLE: Tensor, positions: Positions, cache: PagedBatch) -> Tensor:
        """Attend sequence by sequence, because each sequence has its own number and location of keys."""
        mixed = []
        for row, (query, past) in enumerate(zip(cache.split(query_BHLE, 2), cache.past, strict=True)):
            first = first_seen(past, self.window)
            kept = cache.of_sequence(self.layer, row, first)
            mixed.append(self._attend(query, kept, positions, positions.mask_of(row, self.window), first))
        return cache.joined(mixed, 2)

    def _attend(
        self, query_BHLE: Tensor, kept: tuple[Kept, Kept], positions: Positions, mask: Tensor | None, first: int = 0
    ) -> Tensor:
        """Attend from the new positions of texts to keys and values in place. first: number of the first key's position."""
        if (kernels := positions.text_kernels(query_BHLE, *kept, self.sinks)) is not None:
            return attend_texts(kernels, query_BHLE, *kept, self.scale, self.window, first, self.sinks)
        return attend(query_BHLE, *kept, mask, self.scale, self.sinks)

    def _kernels(self, query: Tensor, positions: Positions, cache: Cache | None) -> Any:
        """Return the compiled kernels if they can attend for the next few positions of a few sequences, otherwise None."""
        if cache is None or positions.is_padded or query.dtype != torch.bfloat16 or cache.dtype not in COMPILED_DTYPES:
            return None
        return positions.choice.for_few(query.shape[0] * query.shape[2], positions.cosine)

    def _attend_compiled(self, kernels: Any, parts: tuple[Tensor, ...], cache: Cache) -> Tensor:
        """Attend position by position: each attends to the previous ones, with the result of reading it alone.

        parts: query, key, value, cosine and sine.
        """
        places = cache.places(self.layer)
        if parts[0].shape[2] == 1:
            return self._attend_next(kernels, parts, cache, places)
        blocks, filled, block_size, repeats = places
        # The kernels read all heads of a position contiguously, which a rotation in torch may have changed.
        steps = enumerate(zip(*([each.contiguous() for each in part.split(1, dim=2)] for part in parts), strict=True))
        mixed = [
            self._attend_next(kernels, step, cache, (blocks, filled + done, block_size, repeats)) for done, step in steps
        ]
        return torch.cat(mixed, dim=1)

    def _attend_next(
        self, kernels: Any, parts: tuple[Tensor, ...], cache: Cache, places: tuple[Any, Any, int, bool]
    ) -> Tensor:
        *query_key_value, cosine, sine = parts
        batch, heads, _, size = query_key_value[0].shape
        angles = [angle.expand(batch, 1, 1, -1).contiguous() for angle in (cosine, sine)]
        mixed = kernels.attend(
            [tensor.data_ptr() for tensor in (*query_key_value, *angles)],
            [tensor.stride(0) for tensor in query_key_value],
            cache.addresses(self.layer),
            (batch, heads, self.key_heads, size, angles[0].shape[-1]),
            cache.group_stride(self.layer),
            places,
            window_number(self.window),
            self.scale,
            sinks_array(self.sinks),
        )
        return as_bfloat16(mixed).view(batch, 1, -1)

    def _heads(self, projected: Tensor, norm: Tensor | None, heads: int, choice: KernelChoice) -> Tensor:
        if norm is not None and self.qk_norm == "full":
            projected = rms_norm(projected, norm, self.epsilon, choice, self.zero_centered)
        if self.clip is not None:
            projected = projected.clamp(-self.clip, self.clip)
        split = projected.view(*projected.shape[:2], heads, self.head_dimension)
        if norm is not None and self.qk_norm == "head":
            split = rms_norm(split, norm, self.epsilon, choice, self.zero_centered)
        return split.transpose(1, 2)


def attend(
    query_BHLE: Tensor,
    key_BGPE: Kept,
    value_BGPV: Kept,
    mask: Tensor | None,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return softmax attention of H query heads over G key-value heads, [B, H, L, V]. `scale`: of scores; None for 1/√E.

    sinks_H: one additional score per head, whose share of the softmax is dropped.
    """
    if isinstance(key_BGPE, Scaled) or isinstance(value_BGPV, Scaled) or key_BGPE.dtype != query_BHLE.dtype:
        widened = query_BHLE.float() if is_emulated(query_BHLE) else query_BHLE
        if sinks_H is not None:
            return attend_with_sinks(widened, key_BGPE, value_BGPV, mask, scale, sinks_H).to(query_BHLE.dtype)
        return attend_in_blocks(widened, key_BGPE, value_BGPV, mask, scale).to(query_BHLE.dtype)
    reads_once = query_BHLE.dtype == torch.float16 and query_BHLE.shape[2] == 1  # widening would cost more than emulation
    if is_emulated(query_BHLE) and not reads_once:
        wide = (query_BHLE.float(), key_BGPE.float(), value_BGPV.float())
        return attend(*wide, mask, scale, sinks_H).to(query_BHLE.dtype)
    if sinks_H is not None:
        return attend_with_sinks(query_BHLE, key_BGPE, value_BGPV, mask, scale, sinks_H)
    batch, heads, length, size = query_BHLE.shape
    groups = key_BGPE.shape[1]
    if length == 1:
        # The query heads of one group become its query positions, so no key or value is copied or expanded.
        grouped = query_BHLE.reshape(batch, groups, heads // groups, size)
        mixed = F.scaled_dot_product_attention(grouped, key_BGPE, value_BGPV, attn_mask=mask, scale=scale)
        return mixed.reshape(batch, heads, 1, -1)
    if multiplies_bfloat16(query_BHLE) and not torch.is_grad_enabled():
        return attend_in_blocks(query_BHLE, key_BGPE, value_BGPV, mask, scale)
    if heads != groups and mask is None and _reads_groups(query_BHLE):
        return F.scaled_dot_product_attention(
            query_BHLE, key_BGPE, value_BGPV, is_causal=True, scale=scale, enable_gqa=True
        )  # the kernels for GPUs read each group once
    if heads != groups:
        key_BGPE = key_BGPE.repeat_interleave(heads // groups, dim=1)
        value_BGPV = value_BGPV.repeat_interleave(heads // groups, dim=1)
    return F.scaled_dot_product_attention(
        query_BHLE, key_BGPE, value_BGPV, attn_mask=mask, is_causal=mask is None, scale=scale
    )


def _reads_groups(query: Tensor) -> bool:
    """Return whether torch's attention reads each group of heads once without holding all scores: its flash kernels do."""
    if not query.is_cuda or torch.is_grad_enabled() or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def attend_in_blocks(
    query_BHLE: Tensor, key_BGPE: Kept, value_BGPV: Kept, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Return `attend` for a processor with bfloat16 products, three times as fast as torch's own kernel at 512 positions.

    A block of queries is multiplied only with the keys that it may attend to, and all query heads of a group are in one
    product. Scores are rounded to bfloat16 between the two products, as in transformers' eager attention, and the
    softmax is computed in float32.
    """
    batch, heads, length, size = query_BHLE.shape
    (groups, total), value_size = _plain(key_BGPE).shape[1:3], _plain(value_BGPV).shape[-1]
    scale = size**-0.5 if scale is None else scale
    mixed_BHLV = query_BHLE.new_empty(batch, heads, length, value_size)
    for start, end, seen in query_blocks(batch * heads, length, total):
        query = (query_BHLE[:, :, start:end] * scale).reshape(batch, groups, -1, size)
        scores = scores_of(query, key_BGPE, seen).view(batch, heads, end - start, seen)
        if mask is None:  # causal without a past: masked positions lie in the square on the block's diagonal
            allowed = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).tril_()
            scores[..., start:].masked_fill_(~allowed, -torch.inf)
        else:
            scores.masked_fill_(~mask[:, :, start:end, :seen], -torch.inf)
        probabilities = scores.softmax(-1).view(batch, groups, -1, seen)
        mixed_BHLV[:, :, start:end] = mixture_of(probabilities, value_BGPV, seen).view(batch, heads, end - start, -1)
    return mixed_BHLV


def attend_with_sinks(
    query_BHLE: Tensor, key_BGPE: Kept, value_BGPE: Kept, mask: Tensor | None, scale: float | None, sinks_H: Tensor
) -> Tensor:
    """Return `attend` with sinks, computed in blocks of queries; differentiable."""
    batch, heads, length, size = query_BHLE.shape
    groups, total = _plain(key_BGPE).shape[1:3]
    mixed = []
    for start, end, seen in query_blocks(batch * heads, length, total):
        query = (query_BHLE[:, :, start:end] * (scale or size**-0.5)).reshape(batch, groups, -1, size)
        scores = scores_of(query, key_BGPE, seen).view(batch, heads, end - start, seen)
        if mask is None:
            place = torch.arange(seen, device=scores.device)
            allowed = place <= place[seen - (end - start) :, None]
        else:
            allowed = mask[:, :, start:end, :seen]
        scores = scores.masked_fill(~allowed, -torch.inf)
        sinks = sinks_H.to(scores.dtype)[:, None, None].expand(batch, heads, end - start, 1)
        shares = torch.cat((scores, sinks), dim=-1).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        shares = shares[..., :-1].to(query.dtype).reshape(batch, groups, -1, seen)
        mixed.append(mixture_of(shares, value_BGPE, seen).view(batch, heads, -1, size))
    return torch.cat(mixed, dim=2)


def scores_of(query_BGLE: Tensor, key_BGPE: Kept, seen: int) -> Tensor:
    """Return products with the first keys, [B, G, L, seen]; keys in another dtype are converted in blocks.

    For keys in 8 bits, q·(s·k) = s·(q·k): the integers are exact in any float, and the scores are scaled.
    """
    if not isinstance(key_BGPE, Scaled) and key_BGPE.dtype == query_BGLE.dtype:
        return query_BGLE @ key_BGPE.transpose(2, 3)[..., :seen]
    scores = query_BGLE.new_empty((*query_BGLE.shape[:3], seen))
    for place, block, scales in key_blocks(key_BGPE, seen, query_BGLE.dtype):
        products = query_BGLE @ block.transpose(2, 3)
        scores[..., place] = products if scales is None else products * scales[:, :, None]
    return scores


def mixture_of(probabilities_BGLP: Tensor, value_BGPE: Kept, seen: int) -> Tensor:
    """Return the sum of values weighted by probabilities, [B, G, L, E]; for 8 bits, p·(s·v) = (p·s)·v."""
    if not isinstance(value_BGPE, Scaled) and value_BGPE.dtype == probabilities_BGLP.dtype:
        return probabilities_BGLP @ value_BGPE[:, :, :seen]
    mixed: Tensor | None = None
    for place, block, scales in key_blocks(value_BGPE, seen, probabilities_BGLP.dtype):
        weights = probabilities_BGLP[..., place]
        weights = weights if scales is None else (weights * scales[:, :, None]).to(block.dtype)
        products = (weights @ block).float()
        mixed = products if mixed is None else mixed.add_(products)
    assert mixed is not None
    return mixed.to(probabilities_BGLP.dtype)


def _plain(kept: Kept) -> Tensor:
    return kept.integers if isinstance(kept, Scaled) else kept


def key_blocks(kept: Kept, seen: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield blocks of positions: their slice, their content in `dtype`, and for 8 bits their scales [B, G, positions]."""
    whole, scales = kept if isinstance(kept, Scaled) else (kept, None)
    for start in range(0, seen, KEY_BLOCK):
        place = slice(start, min(start + KEY_BLOCK, seen))
        yield place, whole[:, :, place].to(dtype), None if scales is None else scales[:, :, place]


def query_blocks(rows: int, length: int, total: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last + 1, number of visible keys) for blocks of queries; more keys give smaller blocks, down to 16.

    rows: sequences times heads. The new positions are the last `length` of `total`.
    """
    size = min(QUERY_BLOCK, max(16, MAX_SCORES // (rows * total)))
    for start in range(0, length, size):
        end = min(start + size, length)
        yield start, end, total - length + end
