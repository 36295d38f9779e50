"""Options of `compress layout`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from calibrate.options import CalibrationOptions
from compress.options.job import OUTPUT, JobOptions
from engine.options import changed, declared, left_out, option, part, unlisted

CO_USE, PLAIN = "co-use", "plain"
ORDERS = (CO_USE, PLAIN)


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(JobOptions):
    """One run of `compress layout`, which writes a model with its experts in another order on the disk."""

    output: Path = field(metadata=declared(group=OUTPUT, short="-o", unset="MODEL-layout", help="Directory of the result."))
    method: str = "layout"
    order: str | None = option(
        None,
        group=OUTPUT,
        choices=ORDERS,
        unset=f"{CO_USE} with --data or --statistics, else {PLAIN}",
        help="Order of a layer's experts on disk. co-use: experts that tokens use together lie near each other. "
        "plain: by their numbers, and no text is read.",
    )
    calibration: CalibrationOptions = part(
        CalibrationOptions,
        samples=changed(32),
        evaluation_samples=changed(
            8,
            help="Held-out sequences on which the cost of miss thresholds is measured, with --order co-use; each is read 16 "
            "times. 0 for none.",
        ),
        windows=left_out(),
    )
    plan_output: Path | None = unlisted(JobOptions, "plan_output")

    @property
    def way(self) -> str:
        """Return the order, one of ORDERS."""
        has_text = self.calibration.data is not None or self.statistics is not None
        return self.order or (CO_USE if has_text else PLAIN)
