"""Options of `compress distill` for language models."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from calibrate.options import RESPONSES, CalibrationOptions, Limits
from compress.distillation.recipes import METRICS, RECIPES, Recipe
from compress.options.job import JobOptions
from compress.options.training import TRAINING, StepOptions, TrainingOptions, careful_rate, warm_up_steps
from engine.errors import OptionError
from engine.options import changed, check, declared, left_out, like, option, part, unlisted

TRAIN, PAPER, TEXT_GROUP = "What to train", "Every Expert Matters", "Text"
DIVERGENCE_NAMES = ("forward-kl", "reverse-kl", "skew-forward-kl", "skew-reverse-kl", "jensen-shannon")
"""The keys of DIVERGENCES (compress/training/divergences.py), which needs torch."""
EXACT = "exact"
"""Value of the option that stores the teacher's predictions exactly."""


@dataclass(frozen=True)
class KnowledgeAugmentation:
    """How the teacher's gate is sampled for knowledge augmentation (Every Expert Matters, KA)."""

    samples: int = option(
        2,
        group=PAPER,
        flag="ka-samples",
        help="For ka: forward passes M of the teacher for the same responses, with a step of the student after each.",
    )
    probability: float = option(
        0.05,
        group=PAPER,
        flag="ka-probability",
        help="For ka: how often (λ) N−1 experts are sampled from the gate instead of taking the N−1 largest.",
    )
    per_token: bool = option(
        False,
        group=PAPER,
        flag="ka-draw",
        choices={"layer": False, "token": True},
        help="For ka: draw once for each layer and forward pass, or for each token.",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class DistillOptions(JobOptions, StepOptions):
    """One run of `compress distill`; `model` is the student."""

    model: str = field(
        metadata=declared(
            group=TRAIN, flag="student", help="The model to train: a dense one, or a mixture such as a pruned one."
        )
    )
    teacher: str | None = option(
        None, group=TRAIN, help="The teacher: a directory, a hub id or 'demo'; left out for recipe sft."
    )
    output: Path = like(JobOptions, "output", unset="STUDENT-RECIPE")
    method: str = "distill"
    recipe: str = option(
        "kd",
        group=TRAIN,
        choices=tuple(RECIPES),
        help="On the data's responses: sft without a teacher, kd towards it. On the student's own responses: gkd; with all "
        "experts of the teacher: all; with sampled ones: ka; with its router trained for the student: sar. layer-mse: the "
        "output of each block. For classifiers: sft, kd, srrl, or the student as a mixture of experts: moe-kd.",
    )
    divergence: str | None = option(
        None,
        group=TRAIN,
        choices=DIVERGENCE_NAMES,
        unset="the recipe's own",
        help="Divergence between the predictions of teacher and student.",
    )
    steps: int | None = option(
        None, group=TRAINING, minimum=1, unset="what --epochs says; on text 600", help="Steps of training."
    )
    epochs: int = option(10, group=TRAINING, minimum=1, help="Passes over prompts with responses.")
    learning_rate: float | None = option(
        None,
        group=TRAINING,
        unset="1/4 over the hidden size, at most 1/640",
        help="Highest learning rate of AdamW.",
    )
    teacher_experts: int | None = option(
        None,
        group=PAPER,
        minimum=1,
        several="commas",
        metavar="K",
        unset="the teacher's own number",
        help="For kd, gkd and layer-mse: experts that the teacher uses for each token. Several make a sweep: a student for "
        "each, and a table and a plot of them.",
    )
    router_learning_rate: float = option(1e-5, group=PAPER, help="For sar: learning rate of the teacher's routers.")
    load_balance_weight: float = option(
        0.01, group=PAPER, help="For sar: weight β of the loss L_b that balances the load of the experts."
    )
    temperature: float = option(
        1.0, group=TRAINING, help="Divisor of the logits of teacher and student before they are compared."
    )
    teacher_cache: str | None = option(
        None,
        group=TRAINING,
        metavar="exact|K",
        help="For kd: run the teacher once over all training data and keep its predictions on disk, as they are or the K "
        "most probable tokens of each.",
    )
    augmentation: KnowledgeAugmentation = part(KnowledgeAugmentation)
    limits: Limits = part(Limits)
    template: str | None = option(
        None,
        group=RESPONSES,
        flag="prompt-template",
        unset="### Instruction: …",
        help="Text that a prompt is put into, at {prompt}.",
    )
    train: str | None = option(
        None,
        group=TEXT_GROUP,
        unset="a part of --data",
        help="Prompts with responses to train on, instead of a part of --data.",
    )
    validation: str | None = option(
        None,
        group=TEXT_GROUP,
        unset="a part of --data",
        help="Prompts with responses that the best state is chosen by, all of them.",
    )
    test: str | None = option(
        None,
        group=TEXT_GROUP,
        unset="a part of --data",
        help="Prompts with responses for the figures before and after, all of them.",
    )
    response_dtype: str = option(
        "auto",
        group=RESPONSES,
        choices=("auto", "own"),
        help="Dtype of the weights that write responses, those of rouge-l too. auto: bfloat16 if compiled kernels run on "
        "this processor, several times as fast; own: the dtype of training.",
    )
    stemming: bool = option(False, group=RESPONSES, help="For rouge-l: compare the Porter stems of words, as MiniLLM does.")
    select_by: str = option(
        "perplexity",
        group=TRAINING,
        choices=tuple(METRICS),
        help="Figure of the responses, on data set aside, that the best state is chosen by.",
    )
    calibration: CalibrationOptions = part(
        CalibrationOptions,
        data=changed(
            group=TEXT_GROUP,
            unset=None,
            help="Prompts with responses (.jsonl or .json), or text: a file, a folder, rows, 'stdlib' or a dataset id.",
        ),
        samples=changed(group=TEXT_GROUP, help="Sequences that skip tables of a mixture are made from."),
        sequence_length=changed(group=TEXT_GROUP, help="Tokens per sequence of text."),
        evaluation_samples=changed(64, group=TEXT_GROUP, help="Held-out sequences or examples of the figures."),
        windows=left_out(),
    )
    statistics: Path | None = unlisted(JobOptions, "statistics")
    plan_output: Path | None = unlisted(JobOptions, "plan_output")
    memory_limit: int | None = unlisted(JobOptions, "memory_limit")

    def check(self) -> None:
        """Raise OptionError for values with which no training is possible."""
        if self.shard:
            from engine.passes import processes

            processes.check_several()
        if self.divergence is not None and RECIPES[self.recipe].divergence is None:
            raise OptionError(f"recipe {self.recipe} compares no predictions; leave out --divergence")
        if self.teacher is None and self.row.needs_teacher:
            raise OptionError(f"recipe {self.recipe} has a teacher; give --teacher, or --recipe sft for none")
        if self.teacher_experts is not None and (self.row.needs_experts or not self.row.needs_teacher):
            raise OptionError(
                f"recipe {self.recipe} chooses the teacher's experts itself or has no teacher; leave out --teacher-experts"
            )
        if not 0.0 < self.temperature < math.inf or not 0.0 <= self.load_balance_weight < math.inf:
            raise OptionError("temperature must be above 0, and load-balance-weight at least 0")
        if self.teacher_cache is not None:
            self._check_cache()
        if self.stemming and not METRICS[self.select_by].writes:
            raise OptionError("--stemming is for rouge-l; leave it out, or give --select-by rouge-l")
        self._check_files()
        own = self.augmentation
        if own.samples < 1 or not 0.0 <= own.probability <= 1.0:
            raise OptionError("ka-samples must be at least 1, and ka-probability from 0 to 1")
        if self.validation_samples < 1 or self.validate_every < 1:
            raise OptionError("validation-samples and validate-every must be at least 1: the best state is kept")
        self.training(1, 1, 1).check()
        if self.row.trains_router:
            self.router_training(1, 1, 1).check()

    def _check_files(self) -> None:
        data, files = self.calibration.data, list(self.files.values())
        if data is not None and None not in files:
            raise OptionError("--train, --validation and --test are all given, so --data has no part; leave it out")
        if data is None and any(files) and None in files[:2]:
            raise OptionError("--train and --validation are both needed without --data; give both, or one file to split")

    @property
    def files(self) -> dict[str, str | None]:
        """Return the file of each split; None for a part of the data. Training and validation come first."""
        return {"training": self.train, "validation": self.validation, "held-out": self.test}

    def _check_cache(self) -> None:
        if not self.row.repeats_itself:
            raise OptionError(
                f"recipe {self.recipe} has no teacher's predictions that are the same in every epoch; leave out "
                "--teacher-cache, or take kd"
            )
        if self.teacher_cache != EXACT and not re.fullmatch("[1-9][0-9]{0,8}", str(self.teacher_cache)):
            raise OptionError(
                f"teacher-cache is {self.teacher_cache!r}; it must be {EXACT}, or a number from 1: the tokens kept of each "
                "prediction"
            )

    @property
    def cached_tokens(self) -> int | None:
        """Number of tokens that are stored of each of the teacher's predictions; None for all tokens, or without a cache."""
        return None if self.teacher_cache in (None, EXACT) else int(str(self.teacher_cache))

    @property
    def row(self) -> Recipe:
        """Return the row of the recipe, with the requested divergence."""
        row = RECIPES[self.recipe]
        return row if self.divergence is None else replace(row, divergence=self.divergence)

    def training(self, steps: int, length: int, hidden_size: int) -> TrainingOptions:
        """Return the options of the student's training, on sequences of about `length` tokens."""
        from engine.passes.memory_budget import UNLIMITED

        turn = self.augmentation.samples if self.row.samples_experts else 1
        return TrainingOptions(
            steps,
            careful_rate(hidden_size) if self.learning_rate is None else self.learning_rate,
            self.batch_size,
            self.micro_batch_size or UNLIMITED.sequences_per_batch(length),
            warm_up_steps=self.warm_up_steps or warm_up_steps(steps),
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            seed=self.calibration.seed,
            save_every=turn * max(1, self.save_every // turn),
            validate_every=self.validate_every,
            steps_per_batch=turn,
        )

    def router_training(self, steps: int, length: int, hidden_size: int) -> TrainingOptions:
        """Return the options of the training of the teacher's routers, which step before the student."""
        return replace(self.training(steps, length, hidden_size), learning_rate=self.router_learning_rate, validate_every=0)
