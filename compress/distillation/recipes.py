"""Recipes of distillation: the source of the responses, the experts that the teacher uses, and the divergence.

Most are those of Every Expert Matters (§3). `layer-mse` makes a mixture dense (Cruz Salinas et al. §3.1): its loss is
cross-entropy and the distance between the outputs of both models' feed-forward blocks, layer by layer.

Recipes differ in nothing else: one loss and one loop serve all of them (response_distillation.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One row of RECIPES."""

    student_writes: bool = False
    """Whether the student samples the responses on which both models are compared; otherwise the data has them."""
    divergence: str | None = None
    """A key of DIVERGENCES; None for cross-entropy on the responses."""
    uses_all_experts: bool = False
    """Whether every token of the teacher uses all experts, and not only those that its router selects."""
    samples_experts: bool = False
    """Whether every token of the teacher uses N−1 of its N experts, the largest or sampled ones (knowledge augmentation).
    """
    trains_router: bool = False
    """Whether the teacher's router takes a step towards the student before each step of the student."""
    matches_layers: bool = False
    """Whether each feed-forward block is trained on the output of the teacher's block at the same place."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the recipe has a teacher."""
        return self.divergence is not None or self.matches_layers

    @property
    def needs_experts(self) -> bool:
        """Whether the teacher must be a mixture."""
        return self.uses_all_experts or self.samples_experts

    @property
    def repeats_itself(self) -> bool:
        """Whether only predictions are compared, and the teacher's are equal in every epoch, so that they can be cached."""
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
    """One row of METRICS: the metric by which the best state is selected."""

    history: str
    """Key of the metric's values over the steps, in the figures."""
    writes: bool = False
    """Whether the metric is of responses that the student writes, where higher is better; otherwise of the data's, where
    lower is.
    """


PERPLEXITY, ROUGE = "perplexity", "rouge-l"
METRICS = {PERPLEXITY: Metric("validation_perplexity"), ROUGE: Metric("validation_rouge_l", writes=True)}
