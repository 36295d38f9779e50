"""Recipes of distillation: who writes the responses, what the teacher's gate is, which divergence (Every Expert Matters §3).

`layer-mse` is that of making a mixture dense (Cruz Salinas et al. §3.1): cross-entropy, and the distance between the outputs
of both models' feed-forward blocks, layer by layer.

They differ in nothing else: one loss and one loop serve all of them (response_distillation.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """One row of the table."""

    student_writes: bool
    """The student samples the responses that both are compared on; otherwise they are the data's."""
    divergence: str | None
    """A key of DIVERGENCES; None for cross-entropy on the responses."""
    gate: str = "own"
    """Of the teacher: its "own", "all" experts, or all but one, now and then "sampled"."""
    trains_router: bool = False
    """The teacher's router takes a step towards the student before each of the student's."""
    matches_layers: bool = False
    """Each feed-forward block learns the output of the teacher's at the same place."""

    @property
    def needs_teacher(self) -> bool:
        """Whether there is one."""
        return self.divergence is not None or self.matches_layers

    @property
    def needs_experts(self) -> bool:
        """Whether the teacher must be a mixture."""
        return self.gate != "own"

    @property
    def repeats_itself(self) -> bool:
        """Whether only predictions are compared, and the teacher's are the same in every epoch."""
        return self.divergence is not None and not (self.student_writes or self.needs_experts or self.matches_layers)


RECIPES = {
    "sft": Recipe(False, None),
    "kd": Recipe(False, "forward-kl"),
    "gkd": Recipe(True, "reverse-kl"),
    "all": Recipe(True, "reverse-kl", "all"),
    "ka": Recipe(True, "reverse-kl", "sampled"),
    "sar": Recipe(True, "reverse-kl", "all", trains_router=True),
    "layer-mse": Recipe(False, None, matches_layers=True),
}
