"""Options of the refit: least squares for the down projections of experts that lose hidden units."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import OptionError
from engine.options import check, option

UNITS = "Hidden units"


@dataclass(frozen=True)
class RefitOptions:
    """Whether and how down projections are refitted (compress/refit)."""

    refit: bool = option(
        True,
        group=UNITS,
        off="no-refit",
        help="After hidden units are removed, refit each down projection to the outputs of the whole expert.",
    )
    ridge: float | None = option(
        None,
        group=UNITS,
        metavar="ρ",
        unset="chosen on a part of the calibration text",
        help="Ridge of the refit, relative to the mean square of a hidden unit.",
    )

    correct: bool = option(
        True,
        group=UNITS,
        off="no-correct",
        help="After the refit, fit what is left of each layer's error on the smaller model's own hidden states.",
    )

    def __post_init__(self) -> None:
        check(self)

    def check(self) -> None:
        """Raise OptionError for a ridge with which no refit is possible."""
        if self.ridge is not None and not 0.0 < self.ridge < math.inf:
            raise OptionError(f"ridge is {self.ridge}; it must be a number above 0")
