"""The scheduler's runner for exported models: each sequence runs alone, with its own contiguous KV cache.

A graph's attention needs the positions of a sequence in one contiguous tensor, and its products of several rows may
differ in the last bits from products of one row. Running each sequence alone makes a request's result independent of
the other requests.

Shape suffixes: L positions, T tokens, M MoE layers, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batching.request_state import RequestState
from engine.batching.sequence_runner import SequenceRunner
from engine.decoder.kv_cache import KeyValueCache, position_bytes
from engine.errors import OptionError
from engine.families.rotary_embedding import Rotary
from engine.onnx.runtime import OnnxDecoder


class OnnxRunner(SequenceRunner[KeyValueCache]):
    """Runner for a model exported to ONNX."""

    def __init__(self, decoder: OnnxDecoder, kv_cache_bytes: int, block_size: int) -> None:
        config = decoder.config
        super().__init__(
            lambda capacity: KeyValueCache(config, 1, capacity, decoder.dtype),
            position_bytes(config, decoder.dtype) * block_size,
            kv_cache_bytes,
            block_size,
        )
        self._decoder = decoder
        self._switch = Rotary(config).switch
        self._slots = [layer.moe.experts_per_token for layer in config.layers if layer.moe is not None]
        self._tokens, self._skipped_M = 0, torch.zeros(len(self._slots), dtype=torch.int64)

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        skipped = self._skipped_M.tolist()
        return tuple(self._tokens * each - own for each, own in zip(self._slots, skipped, strict=True)), tuple(skipped)

    def check(self, threshold: float | None) -> None:
        baked = self._decoder.skip_threshold
        if threshold is not None and threshold != baked:
            own = "a threshold that its compression.json does not name" if baked is None else f"{baked:g}"
            raise OptionError(
                f"skip_threshold is {threshold}, and skipping is baked into the graph of an exported model, which skips by "
                f"{own}; leave the parameter out, or export the model with --skip-threshold {threshold}"
            )

    def piece_end(self, state: RequestState, end: int) -> int:
        """Keep a piece on one side of the rotary switch: one call uses the angles of its last position."""
        if self._switch is None or state.table.length > self._switch:
            return end
        if len(state.request.prompt) > self._switch:
            return max(end, self._switch + 1)
        return min(end, self._switch) if state.table.length < self._switch else end

    def _logits(self, state: RequestState, tokens_1L: Tensor, cache: KeyValueCache, every: bool) -> Tensor:
        before, self._decoder.observer = self._decoder.observer, self._count
        self._tokens += tokens_1L.shape[1]
        try:
            return self._decoder(tokens_1L, None, cache)[0] if every else self._decoder.last_logits(tokens_1L, None, cache)
        finally:
            self._decoder.observer = before

    def _count(self, skipped_TM: Tensor) -> None:
        self._skipped_M += skipped_TM.sum(dim=0)
