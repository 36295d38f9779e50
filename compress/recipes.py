"""Recipes of distillation: who writes the responses, what the teacher's gate is, which divergence (Every Expert Matters §3).

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
    """A key of DIVERGENCES; None for cross-entropy on the text alone, without a teacher."""
    gate: str = "own"
    """Of the teacher: its "own", "all" experts, or all but one, now and then "sampled"."""
    trains_router: bool = False
    """The teacher's router takes a step towards the student before each of the student's."""

    @property
    def needs_experts(self) -> bool:
        """Whether the teacher must be a mixture."""
        return self.gate != "own"


RECIPES = {
    "sft": Recipe(False, None),
    "kd": Recipe(False, "forward-kl"),
    "gkd": Recipe(True, "reverse-kl"),
    "all": Recipe(True, "reverse-kl", "all"),
    "ka": Recipe(True, "reverse-kl", "sampled"),
    "sar": Recipe(True, "reverse-kl", "all", trains_router=True),
}
