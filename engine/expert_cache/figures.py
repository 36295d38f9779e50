"""Figures of an expert cache: where each layer's experts were when a step asked for them, and what their reading took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class LayerFigures:
    """Counts of one layer. An expert counts once for each step that uses it, however many tokens do."""

    layer: int
    uses: int = 0
    """Experts that steps used."""
    hits: int = 0
    """Experts that were in memory, read ahead or not."""
    late: int = 0
    """Experts that were being read ahead, and had to be waited for."""
    read: int = 0
    """Experts that were read when they were asked for."""
    left_out: int = 0
    """Slots of tokens that the miss threshold emptied."""
    replaced: int = 0
    """Slots of tokens in which an expert in memory took the place of one that was not, as the miss threshold allows."""
    read_ahead: int = 0
    """Experts that were read before the layer was reached."""
    wasted: int = 0
    """Experts among them that the layer did not use."""
    read_bytes: int = 0
    waited_seconds: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts that were in memory; None before any use."""
        return self.hits / self.uses if self.uses else None


COUNTS = tuple(field.name for field in fields(LayerFigures) if field.name != "layer")


def totals(layers: Iterable[LayerFigures]) -> LayerFigures:
    """Return the sums over layers, with the number -1."""
    every = list(layers)
    return LayerFigures(-1, **{name: sum(getattr(own, name) for own in every) for name in COUNTS})


def report(layers: Iterable[LayerFigures], tokens: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a run as JSON. tokens: those that were read and written; seconds: the time that they took."""
    every = list(layers)
    whole = totals(every)
    return {
        "expert_hit_rate": whole.hit_rate,
        "expert_hit_rate_per_layer": [own.hit_rate for own in every],
        "expert_bytes_read_per_token": whole.read_bytes / tokens if tokens else None,
        "waiting_for_experts_share": whole.waited_seconds / seconds if seconds > 0 else None,
        "waiting_for_experts_seconds_per_layer": [own.waited_seconds for own in every],
        "experts_read_ahead": whole.read_ahead,
        "experts_read_ahead_late": whole.late,
        "experts_read_ahead_wasted": whole.wasted,
        "expert_slots_left_out": whole.left_out,
        "expert_slots_replaced": whole.replaced,
    }
