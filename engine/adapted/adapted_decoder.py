"""A whole model of transformers in memory, with the interface of our decoder: tokens, padding and a cache in, logits out.

The layers, the states and the cache are those of transformers. Our expert kernels compute the experts, so that only chosen
experts are read, and a Routing may skip some of them. A prompt is read in one piece: layers with a state read further tokens
one by one. Sequences of different lengths have caches of their own, without padding, and so have sequences with images.

Shape suffixes: B batch, L new positions, P all positions so far, R rows of one cache, K positions with logits, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.adapted.adapted_block import KernelBlock
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.expert_layers import probe, replaced_forwards, same_shape
from engine.adapted.experts_implementation import CHOICE, StackedExperts, prepare
from engine.adapted.low_bit_layers import LowBitLayers
from engine.adapted.low_bit_weights import LowBitLinear, LowBitStack
from engine.errors import UnsupportedError
from engine.kernels.kernel_choice import prepare_decoding
from engine.kernels.stored.quantized_weight import LowBitWeight
from engine.progress import Progress, no_progress
from engine.transformers_models.image_sequence import ImageSequence
from engine.transformers_models.transformers_model import quiet_transformers

MEASURED = 128
"""Number of positions of the text by which the size of a cache is measured."""


class Counter(Protocol):
    """Counts of what the MoE blocks choose."""

    counted_T: Tensor | None
    """Bool [T], False for tokens of the next forward that do not count; None counts all."""


class AdaptedDecoder:
    """A model of a family without a row, run by transformers on the CPU."""

    device = torch.device("cpu")

    def __init__(self, checkpoint: AdaptedCheckpoint, dtype: torch.dtype, progress: Progress = no_progress) -> None:
        """Load all weights: memory-mapped where they are stored in this dtype and in the form that transformers has.

        Low-bit weights stay as they are stored.

        Raises the errors of AdaptedCheckpoint.
        """
        self.config, self.dtype, self.model_type = checkpoint.config, dtype, checkpoint.model_type
        self._build = partial(checkpoint.build, checkpoint.raw_config, dtype)
        self._load_rest = partial(checkpoint.load_rest, dtype=dtype, device=self.device)
        self._rest_bytes: int | None = None
        self.model, low_bit = self._build(), LowBitLayers(checkpoint, CHOICE)
        for layer in progress([None, *range(checkpoint.found.count)], "loading (layers)"):
            low_bit.put_into(self.model, layer, dtype)
            checkpoint.load(self.model, layer, dtype, self.device, low_bit.names(layer))
        pairs = zip(checkpoint.found.experts, checkpoint.routings, strict=True)
        self.moe_blocks = [KernelBlock(self.model, layer, own) for layer, own in pairs]
        """MoE blocks in the order of their layers."""
        self.counter: Counter | None = None
        """Counter whose tokens are selected row by row, if rows run by themselves."""
        self._running = ExitStack()
        for block in self.moe_blocks:
            self._running.enter_context(block.running())
        self._keeps_some = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def load_images(self) -> None:
        """Load the parts of the model that text does not reach, such as the one that reads images, once.

        Raises CheckpointError for one that is damaged or not there.
        """
        if self._rest_bytes is None:
            text = self.weights_bytes
            self._load_rest(self.model)
            self._rest_bytes = self.weights_bytes - text

    @cached_property
    def cache_sizes(self) -> tuple[int, int]:
        """Bytes of the cache for each position of a sequence, and for its states, whatever its length.

        They are those of texts without weights, up to MEASURED positions; positions that leave a longer window count too.
        """
        model = self._build()
        experts = {model.get_submodule(block.layer.experts): same_shape for block in self.moe_blocks}

        def measured(positions: int) -> int:
            with replaced_forwards(experts):
                past = _empty_cache(model)
                made = probe(model, positions, past_key_values=past, use_cache=True)
            return sum(part.nbytes for part in cached_tensors(made.past_key_values))

        half, whole = measured(MEASURED // 2), measured(MEASURED)
        each = max(1, -(-(whole - half) // (MEASURED // 2)))
        return each, max(0, whole - each * MEASURED)

    def prepare(self) -> None:
        """Load the kernels that compute the experts."""
        for block in self.moe_blocks:
            prepare(block.module)
        linears = {module.stored.kind for module in self.model.modules() if isinstance(module, LowBitLinear)}
        if linears:
            kinds = sorted(linears, key=str)
            prepare_decoding(self.dtype, self.device, lambda kernels: kernels.needed(kinds, is_whole=False))

    @property
    def weights(self) -> list[Tensor]:
        """All weights in memory, low-bit ones as stored; parts that text does not reach are loaded for images only."""
        found = [weight for weight in self.model.parameters() if not weight.is_meta]
        low_bit = [module for module in self.model.modules() if isinstance(module, LowBitWeight)]
        stacks = (part for block in self.moe_blocks for part in StackedExperts(block.module).weights)
        low_bit += [matrix for part in stacks if isinstance(part, LowBitStack) for matrix in part.matrices]
        return found + [buffer for weight in low_bit for buffer in weight.buffers()]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in memory; tied weights count once."""
        return sum(weight.nbytes for weight in self.weights)

    def bytes_read_per_token(self, skipped_shares: Sequence[float]) -> float:
        """Return the bytes of weights read for one token alone: from a layer's experts only those chosen and not skipped.

        skipped_shares: one for each MoE layer. Embeddings count as one row, tied embeddings completely, as the head.
        """
        read: float = self.weights_bytes - (self._rest_bytes or 0)
        embedding_VD, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings()
        if head is None or head._parameters.get("weight") is not embedding_VD:
            read -= embedding_VD.nbytes - embedding_VD[0].nbytes
        for block, skipped in zip(self.moe_blocks, skipped_shares, strict=True):
            used = block.layer.per_token * (1.0 - skipped)
            read -= sum(weight.nbytes for weight in StackedExperts(block.module).weights) * (1.0 - used / block.layer.count)
        return read

    def new_cache(self) -> AdaptedCache:
        """Return an empty cache for a batch of any size, which grows with its sequences."""
        return AdaptedCache()

    def __call__(self, tokens_BL: Tensor, real_BP: Tensor | None = None, cache: AdaptedCache | None = None) -> Tensor:
        """Return the logits of every new position, [B, L, V]; those of padding are zero."""
        return self._logits(tokens_BL, real_BP, self.new_cache() if cache is None else cache, tokens_BL.shape[1])

    def last_logits(self, tokens_BL: Tensor, real_BP: Tensor | None = None, cache: AdaptedCache | None = None) -> Tensor:
        """Return the logits of the last position only, [B, V]."""
        return self._logits(tokens_BL, real_BP, self.new_cache() if cache is None else cache, 1)[:, 0]

    def _logits(self, tokens_BL: Tensor, real_BP: Tensor | None, cache: AdaptedCache, keep: int) -> Tensor:
        """Return the logits of the last `keep` positions, [B, K, V]. real_BP: False for padding, which is at the left."""
        batch, new = tokens_BL.shape
        if cache.length and new > 1 and not all(_reads_several(part.past) for part in cache.parts):
            pieces = [self._logits(tokens_B1, None, cache, 1) for tokens_B1 in tokens_BL.split(1, dim=1)]
            return torch.cat(pieces[-keep:], dim=1)
        lengths = [new] * batch if cache.parts or real_BP is None else real_BP[:, -new:].sum(-1).tolist()
        if not cache.parts:
            cache.parts = self._new_parts(lengths, cache.images)
        made: list[Tensor] = []
        for place, (rows, past, images) in enumerate(cache.parts):
            length = lengths[rows[0]]
            with self._counting(rows, tokens_BL.shape, length):
                logits_RKV, kept = self._forward(tokens_BL[rows, new - length :], past, images, min(keep, length))
            cache.parts[place] = _Part(rows, kept, images)
            made.append(logits_RKV)
        cache.length += new
        if len(made) == 1:
            return made[0]
        made_BKV = made[0].new_zeros(batch, keep, made[0].shape[-1])
        for (rows, *_), logits_RKV in zip(cache.parts, made, strict=True):
            made_BKV[rows, keep - logits_RKV.shape[1] :] = logits_RKV
        return made_BKV

    def _new_parts(self, lengths: Sequence[int], images: Sequence[Mapping[str, Tensor]]) -> list[_Part]:
        """Return the parts of an empty cache. lengths: of the sequences. images: their inputs; empty without images."""
        if not images:
            return [_Part(rows, _empty_cache(self.model)) for rows in _rows_by(lengths)]
        self.load_images()
        sequences = [ImageSequence(self.model, inputs, _empty_cache(self.model)) for inputs in images]
        return [_Part([row], each.past, each) for row, each in enumerate(sequences)]

    @contextmanager
    def _counting(self, rows: list[int], shape: tuple[int, ...], length: int) -> Iterator[None]:
        """Let the counter see only the last tokens of these rows during the body. shape: of the whole batch, [B, L]."""
        counter = self.counter
        counted_T = None if counter is None else counter.counted_T
        if counter is None or counted_T is None:
            yield
            return
        counter.counted_T = counted_T.view(shape)[rows, shape[1] - length :].flatten()
        try:
            yield
        finally:
            counter.counted_T = counted_T

    @torch.no_grad()
    def _forward(self, tokens_RL: Tensor, past: Any, images: ImageSequence | None, keep: int) -> tuple[Tensor, Any]:
        """Run the model; return the logits of the last positions, [R, K, V], and the cache after them."""
        options = {"logits_to_keep": keep} if self._keeps_some else {}
        if images is not None:
            return images.read(tokens_RL, **options)[:, -keep:], images.past
        with quiet_transformers():
            made = self.model(input_ids=tokens_RL, past_key_values=past, use_cache=True, **options)
        kept = getattr(made, "past_key_values", None)
        if kept is None:
            raise UnsupportedError(
                f"a model of the family {self.model_type} returns no cache of its positions, so it cannot generate text"
            )
        return made.logits[:, -keep:], kept


class _Part(NamedTuple):
    """Sequences of a batch that have one cache of transformers."""

    rows: list[int]
    past: Any
    images: ImageSequence | None = None
    """The one sequence, if its prompt has images."""


class AdaptedCache:
    """The caches and states of a batch, as transformers keeps them: one for all sequences of the same length."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.images: Sequence[Mapping[str, Tensor]] = ()
        """Inputs of the prompt of each sequence beside its tokens, set before the first forward; empty without images."""
        self.length = 0
        """Number of positions, with those of padding."""
        self.capacity = sys.maxsize
        """Number of positions that there is room for."""
        self.read_as = 0
        """Without effect: rotary scalings of transformers depend on the positions read so far."""

    def extend(self, capacity: int) -> None:
        """Do nothing: the cache grows by itself."""

    @property
    def bytes(self) -> int:
        """Bytes of what is kept now."""
        return sum(tensor.nbytes for part in self.parts for tensor in cached_tensors(part.past))


def _empty_cache(model: Any) -> Any:
    """Return the cache that transformers' own generation begins with; None where the model makes its own."""
    from transformers import DynamicCache

    if not model._supports_default_dynamic_cache():
        return None
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def cached_tensors(past: Any) -> Iterator[Tensor]:
    """Yield what a cache of transformers holds: keys and values, or a convolution's inputs and a state."""
    for layer in () if past is None else past.layers:
        for value in vars(layer).values():
            yield from (
                part for part in (value.values() if isinstance(value, dict) else [value]) if isinstance(part, Tensor)
            )


def _reads_several(past: Any) -> bool:
    """Return whether layers with this cache can read several tokens after others: attention without a state of its own."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in past.layers)


def _rows_by(lengths: Iterable[int]) -> list[list[int]]:
    """Return the rows of each length."""
    found: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        found.setdefault(length, []).append(row)
    return list(found.values())
