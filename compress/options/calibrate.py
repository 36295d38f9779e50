"""Options of `compress calibrate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from calibrate.options import CalibrationOptions
from compress.options.job import OUTPUT, JobOptions
from engine.options import declared, left_out, part, unlisted


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(JobOptions):
    """One run of `compress calibrate`, which writes a model's statistics to a file."""

    output: Path = field(metadata=declared(group=OUTPUT, short="-o", help="Statistics file to write."))
    method: str = "calibrate"
    calibration: CalibrationOptions = part(CalibrationOptions, evaluation_samples=left_out(0), windows=left_out())
    statistics: Path | None = unlisted(JobOptions, "statistics")
    plan_output: Path | None = unlisted(JobOptions, "plan_output")
