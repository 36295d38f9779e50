"""Checked inputs of a pruning or merging run, and the run that a method takes as its argument."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compress.options.prune import PruneOptions
from compress.plans.plan import Plan
from compress.plans.selection import Budget
from compress.run.job import Prepared, Run


@dataclass
class Prunable(Prepared):
    """Inputs that have passed all checks, with those that only pruning needs."""

    plan: Plan | None
    """A ready-made plan; None where a method makes the plan."""
    budget: Budget | None
    """The budget with its defaults filled in; None with a ready-made plan."""
    training_SL: Tensor
    """Text on which all weights are trained, with `validation_VL`; both have no rows where that training was not requested.
    """
    validation_VL: Tensor

    @property
    def texts(self) -> dict[str, Tensor]:
        """Return every text that the result depends on, by name."""
        return super().texts | {"training_text": self.training_SL, "validation_text": self.validation_VL}


MethodRun = Run[PruneOptions, Prunable]
