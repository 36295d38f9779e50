"""The runner for models that transformers runs: each sequence has its own cache, because states are not paged."""

from __future__ import annotations

from torch import Tensor

from engine.adapted.adapted_decoder import AdaptedCache, AdaptedDecoder
from engine.batching.request_state import RequestState
from engine.batching.sequence_runner import SequenceRunner
from engine.batching.token_skipping import TokenSkipping
from engine.generation.generate import Engine, torch_products


class AdaptedRunner(SequenceRunner[AdaptedCache]):
    """Runner for a model of a family without a row."""

    def __init__(self, engine: Engine, decoder: AdaptedDecoder, kv_cache_bytes: int, block_size: int) -> None:
        """Raises CheckpointError for damaged skip tables."""
        position, _ = engine.cache_sizes
        super().__init__(lambda capacity: decoder.new_cache(), position * block_size, kv_cache_bytes, block_size)
        self._decoder, self._skipping = decoder, TokenSkipping(engine, decoder)
        engine.prepare()

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._skipping.counts

    def check(self, threshold: float | None) -> None:
        self._skipping.check(threshold)

    def piece_end(self, state: RequestState, end: int) -> int:
        """Read the prompt in one piece, and then the tokens that were generated before a preemption."""
        return len(state.request.prompt) if state.table.length < len(state.request.prompt) else end

    def _logits(self, state: RequestState, tokens_1L: Tensor, cache: AdaptedCache, every: bool) -> Tensor:
        threshold, decoder = state.request.skip_threshold, self._decoder
        if not cache.length and state.request.images:
            cache.images = [state.request.images]
        thresholds = [self._skipping.own_threshold if threshold is None else threshold] * tokens_1L.shape[1]
        with self._skipping.applied(thresholds), torch_products(tokens_1L.shape[1], decoder.dtype, decoder.device):
            return decoder(tokens_1L, None, cache)[0] if every else decoder.last_logits(tokens_1L, None, cache)
