"""Recipes of distillation: who writes the responses, which experts the teacher uses, which divergence.

They are those of Every Expert Matters (§3). `layer-mse` is how a mixture is made dense (Cruz Salinas et al. §3.1):
cross-entropy, and the distance between the outputs of both models' feed-forward blocks, layer by layer.

They differ in nothing else: one loss and one loop serve all of them (response_distillation.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One row of RECIPES."""

    student_writes: bool = False
    """The student samples the responses that both are compared on; otherwise they are the data's."""
    divergence: str | None = None
    """A key of DIVERGENCES; None for cross-entropy on the responses."""
    uses_all_experts: bool = False
    """Every token of the teacher uses all experts, and not only those that its router chooses."""
    samples_experts: bool = False
    """Every token of the teacher uses all experts but one, now and then a sampled one: knowledge augmentation."""
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
        return self.uses_all_experts or self.samples_experts

    @property
    def repeats_itself(self) -> bool:
        """Whether only predictions are compared, and the teacher's are the same in every epoch."""
        return self.divergence is not None and not (self.student_writes or self.needs_experts or self.matches_layers)


RECIPES = {
    "sft": Recipe(),
    "kd": Recipe(divergence="forward-kl"),
    "gkd": Recipe(student_writes=True, divergence="reverse-kl"),
    "all": Recipe(student_writes=True, divergence="reverse-kl", uses_all_experts=True),
    "ka": Recipe(student_writes=True, divergence="reverse-kl", samples_experts=True),
    "sar": Recipe(student_writes=True, divergence="reverse-kl", uses_all_experts=True, trains_router=True),
    "layer-mse": Recipe(matches_layers=True),
}


@dataclass(frozen=True)
class Metric:
    """One row of METRICS: what the best state is chosen by."""

    history: str
    """Key of its values over the steps, in the figures."""
    writes: bool = False
    """The student writes responses to prompts, and higher is better; otherwise it reads those of the data, and lower is."""


PERPLEXITY, ROUGE = "perplexity", "rouge-l"
METRICS = {PERPLEXITY: Metric("validation_perplexity"), ROUGE: Metric("validation_rouge_l", writes=True)}
