"""What a method may read: its options, and the checked inputs of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from compress.methods import DEFAULT_METHOD
from compress.methods.relaxations import DiepOptions
from compress.plans.plan import Plan
from compress.plans.selection import Budget
from compress.run.job import JobOptions, Prepared, Run

SUBSET_LIMIT = 10_000
"""Up to this many subsets NAEE searches a layer exhaustively: 8 experts always, 16 when 12 stay, and not when 8 do."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions(JobOptions):
    """Options that decide which experts stay or are merged."""

    budget: Budget | None
    """None with a ready-made plan."""
    method: str = DEFAULT_METHOD
    merge: str = "none"
    """What becomes of pruned experts, a key of REMOVED_EXPERTS: "none" drops them, "cka" merges each into its most similar
    kept one."""
    naee_limit: int = SUBSET_LIMIT
    diep: DiepOptions = field(default_factory=DiepOptions)
    shard: bool = False
    """Spread the model over the processes where the method needs all of it."""


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
        """With the training's."""
        return super().texts | {"training_text": self.training_SL, "validation_text": self.validation_VL}


MethodRun = Run[MethodOptions, Prunable]
