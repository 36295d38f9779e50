"""Adaptive expert skipping with a threshold for each token, and counts of evaluated and skipped experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.model import Decoder, routed_by
from engine.decoder.routing import Skipping
from engine.decoder.skip_tables import load_skip_tables, skipping_routings
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.generation.report import SkipCounter


class TokenSkipping:
    """The routings of an engine's MoE layers, set for each forward pass by its tokens' thresholds."""

    def __init__(self, engine: Engine, decoder: Decoder | AdaptedDecoder) -> None:
        """`decoder`: the engine's decoder. Raises CheckpointError for damaged skip tables."""
        self._decoder, self._device = decoder, engine.device
        self._engine_counter = engine.skip_counter
        config = engine.checkpoint.config
        own = [block.routing for block in decoder.moe_blocks]
        self._plain = [routing.base if isinstance(routing, Skipping) else routing for routing in own]
        self._skipping = [routing for routing in own if isinstance(routing, Skipping)]
        self._always_plain = not self._skipping and engine.skip_counter is None
        """Whether the blocks keep their plain routings and have no observer."""
        self.own_threshold = _number(self._skipping[0].threshold) if self._skipping else 0.0
        """Threshold for requests that give none."""
        if not self._skipping and own and (tables := load_skip_tables(engine.checkpoint.directory, config)) is not None:
            made = skipping_routings(config, tables, 1.0, device=engine.device, own=self._plain, rule=engine.skip_rule)
            self._skipping = [routing for routing in made if isinstance(routing, Skipping)]
        layers = [layer.moe for layer in config.layers if layer.moe is not None]
        self._slots = [min(moe.experts_per_token, moe.experts) for moe in layers]
        self._tokens = 0
        """Number of tokens in forward passes without skipping."""
        self._counter = SkipCounter(decoder.moe_blocks, engine.device)

    def check(self, threshold: float | None) -> None:
        """Raise OptionError for a threshold that this model does not support."""
        if threshold is None:
            return
        if not 0 <= threshold < float("inf"):
            raise OptionError(f"skip threshold is {threshold}; it must be 0 (off) or more, 1 is the calibrated rule")
        if threshold and not self._skipping:
            raise OptionError(
                f"a skip threshold above 0 needs a model with experts and its {FILE_NAME}; "
                "`compress prune` calibrates and stores it"
            )

    @contextmanager
    def applied(self, thresholds: Sequence[float]) -> Iterator[None]:
        """Apply a threshold to each token of the forward pass in the body, and count experts."""
        if not any(thresholds):
            self._tokens += len(thresholds)
            if self._always_plain:
                yield
                return
            with routed_by(self._decoder, self._plain), self._counted(None):
                yield
            return
        # One number fits any part of the pass: a decoder may run its tokens in several calls.
        is_one = len(set(thresholds)) == 1
        threshold = thresholds[0] if is_one else torch.tensor(thresholds, device=self._device)
        routings = [replace(routing, threshold=threshold) for routing in self._skipping]
        with routed_by(self._decoder, routings), self._counted(self._counter):
            yield

    @contextmanager
    def _counted(self, counter: SkipCounter | None) -> Iterator[None]:
        """Make one counter observe the blocks during the body, in place of the engine's own."""
        others = [each for each in (self._engine_counter,) if each is not None]
        for other in others:
            other.detach()
        if counter is not None:
            counter.attach()
        try:
            yield
        finally:
            if counter is not None:
                counter.detach()
            for other in others:
                other.attach()

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of evaluated experts and of skipped experts for each MoE layer, summed over tokens."""
        filled, skipped = self._counter.filled_per_layer, self._counter.skipped_per_layer
        plain = [self._tokens * slots for slots in self._slots]
        return tuple(a + b for a, b in zip(filled, plain, strict=True)), tuple(skipped)


def _number(threshold: object) -> float:
    assert isinstance(threshold, float | int), "an engine's own threshold is one number"
    return float(threshold)
