"""Options of `compress plan-run`, which decide the cost of a run of `compress prune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.options import CalibrationOptions
from compress.options.job import JobOptions
from compress.options.prune import DiepOptions, PruneOptions
from compress.plans.selection import Budget
from engine.errors import OptionError
from engine.options import check, left_out, like, option, part

if TYPE_CHECKING:
    import torch

DEVICE_NAMES = ("cpu", "h100", "h200", "a100", "a800", "l40s", "rtx4090")
"""This processor, and the keys of DEVICES (compress/cost/devices.py), which needs torch."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that decide the cost of a run; names and defaults are those of `compress prune`."""

    model: str = like(JobOptions, "model")
    device: str = option("cpu", group="Machine", choices=DEVICE_NAMES, help="Where the run would compute.")
    method: str = like(PruneOptions, "method", several=None, help="Criterion.")
    sparsity: float = like(Budget, "sparsity", 0.5)
    calibration: CalibrationOptions = part(CalibrationOptions, data=left_out(), windows=left_out())
    diep: DiepOptions = part(
        DiepOptions,
        batch_size=left_out(),
        learning_rate=left_out(),
        alpha_learning_rate=left_out(),
        beta_learning_rate=left_out(),
        recenter=left_out(),
        fixed_beta=left_out(),
        reconstruction_weight=left_out(),
        pressure=left_out(),
        score=left_out(),
    )
    naee_limit: int = like(PruneOptions, "naee_limit")
    memory_limit: int | None = like(
        JobOptions,
        "memory_limit",
        help="Also predict the tokens per second of text from MODEL within so much memory, such as 8GB: experts that do not "
        "fit are read from the disk.",
    )
    statistics: Path | None = like(
        JobOptions,
        "statistics",
        help="Statistics file of `compress calibrate`, whose tokens choose the experts for --memory-limit; without it, the "
        "choice is random.",
    )
    disk_speed: int | None = option(
        None,
        group="Machine",
        is_size=True,
        minimum=1,
        unset="measured on MODEL's files",
        help="Bytes that the disk reads in a second, such as 3GB, for --memory-limit.",
    )
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check(self)

    def check(self) -> None:
        """Raise OptionError for values that no run can have."""
        if not 0.0 < self.sparsity < 1.0:
            raise OptionError(f"sparsity is {self.sparsity}; it must lie strictly between 0 and 1")
        if self.memory_limit is None:
            for flag, value in (("--statistics", self.statistics), ("--disk-speed", self.disk_speed)):
                if value is not None:
                    raise OptionError(f"{flag} is for --memory-limit; give both, or leave it out")
        elif self.device != "cpu":
            raise OptionError(
                f"--memory-limit is the memory of a processor, and --device is {self.device}; give --device cpu"
            )
