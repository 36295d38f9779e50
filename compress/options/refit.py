"""Options of the refit: least squares for the down projections of the experts that stay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import OptionError
from engine.options import check, option

REFIT = "Refit"


@dataclass(frozen=True)
class RefitOptions:
    """Whether and how down projections are refitted (compress/refit)."""

    refit: bool = option(
        True,
        group=REFIT,
        off="no-refit",
        help="After hidden units are removed, refit each down projection to the outputs of the whole expert.",
    )
    ridge: float | None = option(
        None,
        group=REFIT,
        metavar="ρ",
        unset="chosen on a part of the calibration text",
        help="Ridge of the refit, relative to the mean square of a hidden unit.",
    )
    correct: bool | None = option(
        None,
        group=REFIT,
        off="no-correct",
        unset="after the refit of hidden units",
        help="Fit what each layer of the result lacks on the smaller model's own hidden states; also where whole experts "
        "leave or are merged.",
    )

    def __post_init__(self) -> None:
        check(self)

    def corrects(self, units_leave: bool) -> bool:
        """Return whether the result is corrected. units_leave: whether it lacks hidden units, not whole experts."""
        return units_leave and self.refit if self.correct is None else self.correct

    def check(self) -> None:
        """Raise OptionError for a ridge with which no refit is possible."""
        if self.ridge is not None and not 0.0 < self.ridge < math.inf:
            raise OptionError(f"ridge is {self.ridge}; it must be a number above 0")
