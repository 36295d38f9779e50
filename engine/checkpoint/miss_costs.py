"""The cost of doing without experts that are not in memory (`--miss-threshold`), as an artifact records it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.checkpoint.artifact import FILE_NAME
from engine.errors import CheckpointError
from engine.files.json_file import shown

KEY = "miss_costs"
"""Key of the rows among the figures of an artifact."""


@dataclass(frozen=True)
class MissCost:
    """Reads that a miss threshold saves, and perplexity that it costs, with room for a share of each layer's experts."""

    memory_share: float
    """Share of the experts that there is room for."""
    threshold: float
    experts_read_per_token: float
    reads_saved: float | None
    """Share of the reads that the threshold saves; None where nothing is read without it."""
    perplexity: float
    perplexity_ratio: float
    """Perplexity over that of the model with all experts in memory."""


def miss_costs_in(directory: Path, provenance: Mapping[str, Any] | None) -> list[MissCost]:
    """Return the costs in an artifact's provenance; none where nothing was measured.

    Raises CheckpointError for damaged ones.
    """
    figures = (provenance or {}).get("figures")
    rows = figures.get(KEY, []) if isinstance(figures, dict) else []
    if not isinstance(rows, list) or not all(map(_is_cost, rows)):
        raise CheckpointError(
            f"{directory / FILE_NAME}: {KEY} is {shown(rows)} and has to be a list of objects with the numbers "
            f"{', '.join(field.name for field in fields(MissCost))}; the file is damaged, write the layout again"
        )
    return [MissCost(**row) for row in rows]


def cost_of(costs: Iterable[MissCost], threshold: float, memory_share: float) -> MissCost | None:
    """Return the measured cost that is nearest to a threshold and to the share of experts in memory; None without any."""
    return min(costs, key=lambda own: (abs(own.threshold - threshold), abs(own.memory_share - memory_share)), default=None)


def _is_cost(row: Any) -> bool:
    names = {field.name for field in fields(MissCost)}
    if not isinstance(row, dict) or row.keys() != names:
        return False
    numbers = [value for name, value in row.items() if name != "reads_saved" or value is not None]
    return all(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in numbers)
