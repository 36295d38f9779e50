"""The checked inputs of a run that a method reads, and the run itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compress.options.prune import PruneOptions
from compress.plans.plan import Plan
from compress.plans.selection import Budget
from compress.run.job import Prepared, Run


@dataclass
class Prunable(Prepared):
    """Inputs that were found to be good, with what pruning needs besides."""

    plan: Plan | None
    """A ready-made one; None where a method makes it."""
    budget: Budget | None
    """With its defaults filled in; None with a ready-made plan."""
    training_SL: Tensor
    """With `validation_VL`: text to train all weights on, without a sequence where that was not asked for."""
    validation_VL: Tensor

    @property
    def texts(self) -> dict[str, Tensor]:
        """Every text that the result is made from, by name."""
        return super().texts | {"training_text": self.training_SL, "validation_text": self.validation_VL}


MethodRun = Run[PruneOptions, Prunable]
