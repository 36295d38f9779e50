"""Options of `compress evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from calibrate.options import CalibrationOptions, Limits
from compress.distillation.recipes import METRICS, PERPLEXITY
from compress.options.distill import DistillOptions
from compress.options.job import JobOptions
from engine.generation.options import OpenOptions, SamplingOptions
from engine.options import changed, check, left_out, like, option, part

if TYPE_CHECKING:
    import torch

MEASURE, TASKS = "What to measure", "Tasks"
ACCURACY = "accuracy"
TextSplit = Literal["held-out", "selection", "report", "calibration", "all"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """One run of `compress evaluate`."""

    model: str = like(JobOptions, "model")
    calibration: CalibrationOptions = part(
        CalibrationOptions,
        data=changed(group="Text"),
        samples=changed(32, group="Text", help="Sequences; for rouge-l and accuracy the most examples, all if not given."),
        sequence_length=changed(group="Text"),
        evaluation_samples=left_out(0),
        windows=changed(group="Text"),
    )
    metric: str = option(
        PERPLEXITY, group=MEASURE, choices=(*METRICS, ACCURACY), help="Figure; for a classifier it is always accuracy."
    )
    probe: bool = option(
        False, group=MEASURE, help="For classifiers: accuracy of a linear classifier trained on the features."
    )
    backend: str = like(OpenOptions, "backend")
    skip_threshold: float = like(OpenOptions, "skip_threshold", help="Skip unneeded experts; 1 for the calibrated rule.")
    skip_min_experts: int = like(OpenOptions, "skip_min_experts")
    skip_rule: str = like(OpenOptions, "skip_rule")
    limits: Limits = part(Limits)
    template: str | None = like(DistillOptions, "template")
    test: str | None = like(
        DistillOptions,
        "test",
        group="Prompts and responses",
        unset=None,
        help="For rouge-l: prompts with responses of which every row is scored, instead of --data and --split.",
    )
    stemming: bool = like(DistillOptions, "stemming")
    seeds: int = option(5, group="Prompts and responses", minimum=1, help="For rouge-l: times to sample responses.")
    sampling: SamplingOptions = part(
        SamplingOptions,
        temperature=changed(
            1.0, group="Prompts and responses", help="For rouge-l: temperature of the sampling; 0 is greedy."
        ),
        top_p=left_out(),
        top_k=left_out(),
        min_p=left_out(),
        top_n_sigma=left_out(),
        repetition_penalty=left_out(),
    )
    tasks: tuple[str, ...] = option(
        (),
        group=TASKS,
        several="commas",
        help="Tasks of lm-evaluation-harness, names or YAML files, instead of a metric.",
    )
    limit: int | None = option(None, group=TASKS, minimum=1, help="Examples per task, the first ones.")
    split: TextSplit = option(
        "held-out",
        group="Text",
        choices=get_args(TextSplit),
        help="Part of the text; calibration never sees 'held-out', whose halves are 'selection' and 'report'.",
    )
    memory_limit: int | None = like(JobOptions, "memory_limit")
    dtype: torch.dtype | None = None
    device: str = like(OpenOptions, "device")

    def __post_init__(self) -> None:
        check(self)
