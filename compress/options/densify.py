"""Options of `compress densify`."""

from __future__ import annotations

from dataclasses import dataclass

from compress.options.job import JobOptions
from compress.options.training import DenseTrainingOptions
from engine.options import option, part, unlisted

KEEP = "What to keep"
SELECTIONS = ("usage", "reap", "average", "random")
"""The keys of SELECTION_RULES (compress/dense/dense_plan.py), which needs torch."""


@dataclass(frozen=True, kw_only=True)
class DensifyOptions(JobOptions):
    """One run of `compress densify`."""

    method: str = "densify"
    ffns: int | None = option(
        None, group=KEEP, unset="experts per token", help="Experts K of each layer that its one FFN is made of."
    )
    select: str = option(
        "usage",
        group=KEEP,
        choices=SELECTIONS,
        help="Which experts: the most used, those of the highest REAP score, the mean of all, or random ones.",
    )
    training: DenseTrainingOptions = part(DenseTrainingOptions)
    memory_limit: int | None = unlisted(JobOptions, "memory_limit")
