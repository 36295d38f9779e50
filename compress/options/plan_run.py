"""Options of `compress plan-run`, which decide the cost of a run of `compress prune`."""

from __future__ import annotations

from dataclasses import dataclass
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
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check(self)

    def check(self) -> None:
        """Raise OptionError for values that no run can have."""
        if not 0.0 < self.sparsity < 1.0:
            raise OptionError(f"sparsity is {self.sparsity}; it must lie strictly between 0 and 1")
