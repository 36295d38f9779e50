"""Opening a decoder whose experts are read when they are needed, within a limit of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.miss_costs import miss_costs_in
from engine.decoder.experts import MoeBlock
from engine.decoder.model import Decoder
from engine.decoder.routing import Selection, probabilities
from engine.errors import OptionError, UnsupportedError
from engine.expert_cache.cache import ExpertCache
from engine.expert_cache.places import FileMemories
from engine.kernels.expert_places import DISTANCES
from engine.kernels.kernel_choice import DECODING
from engine.kernels.stored.quantized_weight import Weight
from engine.passes.library_pages import release_library_pages
from engine.passes.memory_need import MemoryDemand, batch_bytes

MOST_TOKENS = 512
"""Tokens that go through a layer together."""
BY_LAYER_TOKENS = 8192
"""Tokens of a prompt that go through a layer before the next one, so that its experts are read once for all of them."""


class Residency:
    """Asks the cache for the experts of one MoE block, and predicts those of the next ones."""

    def __init__(
        self, cache: ExpertCache, layer: int, block: MoeBlock, following: Sequence[tuple[int, MoeBlock | None]]
    ) -> None:
        """following: the next layers with experts, the nearest first; None where no prediction can be made."""
        self._cache, self._layer, self._block, self._following = cache, layer, block, following
        self.places_N, self.awaits_1 = cache.places[layer], cache.awaits[layer]
        own = [-1 if each is None else number for number, each in following]
        self.following_K = np.array([*own, *(-1,) * (DISTANCES - len(own))], np.int64)

    def __call__(self, x_TD: Tensor, selection: Selection, logits_TN: Tensor) -> Selection:
        """Bring the chosen experts into memory. Returns the selection with which the block goes on."""
        if self._layer == self._cache.first:
            self.begin_step()
        slots = selection.experts.shape[1]
        predicted_KM = (self._predicted(x_TD, slots, each) for each in self._following)  # after the choices are asked for
        if self._cache.miss_threshold == 0:
            self.require(selection.experts.numpy(), None, predicted_KM, lambda: logits_TN)
            return selection
        experts, weights = selection.experts.clone(), selection.weights.float().clone()
        self.require(experts.numpy(), weights.numpy(), predicted_KM, lambda: logits_TN)
        return Selection(experts, weights.to(selection.weights.dtype))

    def begin_step(self) -> None:
        """Begin a step of all layers."""
        self._cache.begin_step()

    def require(self, chosen_TS: Any, weights_TS: Any, predicted_KM: Any, logits: Callable[[], Tensor]) -> None:
        """As `__call__`, on arrays of NumPy, which a miss threshold changes in place.

        predicted_KM: experts that each of `following_K` will probably choose, int64, negative for none. logits: returns the
        router's logits [T, N]; called only where a miss threshold needs them.
        """
        self._cache.require(self._layer, chosen_TS, weights_TS, lambda: self._probabilities(logits()))
        for distance, (layer, predicted_M) in enumerate(zip(self.following_K.tolist(), predicted_KM, strict=False), 1):
            numbers = sorted({number for number in predicted_M.tolist() if number >= 0})
            if numbers:
                self._cache.expect(layer, numbers, distance)

    def note(self, chosen_TS: Any) -> None:
        """Note the choices of a step that found all of them in memory, and therefore did not ask."""
        self._cache.note(self._layer, chosen_TS)

    def _predicted(self, x_TD: Tensor, slots: int, following: tuple[int, MoeBlock | None]) -> Any:
        """Return the experts of a following layer with the largest logits on this layer's input; none where none are
        awaited.
        """
        layer, block = following
        if block is None or not self._cache.awaits[layer][0]:
            return np.empty(0, np.int64)
        slots, logits_TN = min(slots, len(block.experts)), block.logits(x_TD, DECODING).float().numpy()
        return np.argpartition(logits_TN, -slots)[:, -slots:].ravel()

    def _probabilities(self, logits_TN: Tensor) -> Any:
        return probabilities(self._block.routing, logits_TN).float().numpy()


def check_limited(checkpoint: object, device: torch.device, *, predicts: bool) -> None:
    """Raise OptionError or UnsupportedError for a model that cannot be read within a limit.

    predicts: whether its own layers draft.
    """
    if device.type != "cpu":
        raise OptionError("--memory-limit is for models on the CPU; leave it out, or give --device cpu")
    if not isinstance(checkpoint, Checkpoint) or not checkpoint.has_own_decoder:
        raise UnsupportedError(
            "transformers runs this model, and it holds all weights in memory; leave out --memory-limit, or prune the model"
        )
    if predicts:
        raise OptionError("layers for multi-token prediction are not read within a limit; leave out the draft, or the limit")


def open_limited(
    checkpoint: Checkpoint,
    weights: Callable[[str], Weight],
    limit: int,
    *,
    dtype: torch.dtype,
    miss_threshold: float = 0.0,
    **options: Any,
) -> tuple[Decoder, ExpertCache]:
    """Return a decoder and the cache of its experts. weights: Checkpoint.weights, for the CPU.

    Raises OptionError for a limit that is too low and for a model without experts, UnsupportedError for experts that are
    converted when they are read, and CheckpointError.
    """
    if not checkpoint.config.moe_layers:
        raise OptionError(
            f"{checkpoint.directory}: has no experts, so that nothing can leave memory; leave out --memory-limit"
        )
    costs = miss_costs_in(checkpoint.directory, checkpoint.provenance)
    memories = FileMemories(checkpoint, weights)
    decoder = Decoder(checkpoint.config, weights).eval()
    activations = batch_bytes(checkpoint, MemoryDemand(dtype, MOST_TOKENS), MOST_TOKENS)
    activations += min(BY_LAYER_TOKENS, checkpoint.config.max_positions) * checkpoint.config.hidden_size * dtype.itemsize
    release_library_pages()  # what is resident now counts as needed from here on
    cache = ExpertCache(memories, limit, activation_bytes=activations, miss_threshold=miss_threshold, **options)
    cache.miss_costs = costs
    blocks = list(zip(checkpoint.config.moe_layers, decoder.moe_blocks, strict=True))
    for place, (layer, block) in enumerate(blocks):
        later = blocks[place + 1 : place + 1 + DISTANCES]
        following = [(number, each if each.own_norms is None else None) for number, each in later]
        block.residency = Residency(cache, layer, block, following)
    return decoder, cache
