"""Options of `compress distill` for classifiers of images or texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from calibrate.options import CalibrationOptions, Limits
from compress.classifiers.recipes import ABLATIONS, AUGMENTATIONS, CLASSIFIER_RECIPES, Ablation, ClassifierTeaching
from compress.options.distill import DistillOptions
from compress.options.job import JobOptions
from compress.options.training import TrainingOptions
from engine.errors import OptionError
from engine.options import changed, left_out, like, option, part, unlisted

CLASSIFIERS = "Classifiers"
OPTIMISERS = {"sgd": True, "adamw": False}
"""Whether each optimizer has momentum: stochastic gradient descent has; AdamW has not."""

FALLS = (5 / 8, 6 / 8, 7 / 8)
"""Default shares of the training after which the rate is divided by 10: epochs 150, 180 and 210 of 240."""


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(JobOptions):
    """One run of `compress distill` on classifiers. `model` is the student. Defaults are MoE-KD's on CIFAR-100 (§5.1)."""

    model: str = like(DistillOptions, "model")
    output: Path = like(DistillOptions, "output")
    method: str = "distill"
    teacher: str | None = like(DistillOptions, "teacher")
    recipe: str = like(DistillOptions, "recipe", choices=tuple(CLASSIFIER_RECIPES), models="classifiers")
    ablation: str | None = option(
        None,
        group=CLASSIFIERS,
        choices=tuple(ABLATIONS),
        help="For moe-kd, one change to the method: uniform gate (i), its classifier (ii) or the prototypes (iii) from "
        "scratch, hard means (iv), the teacher's prediction for the E-step (v).",
    )
    temperature: float = like(DistillOptions, "temperature", 4.0)
    feature_weight: float = option(
        1.0,
        group=CLASSIFIERS,
        minimum=0,
        help="For srrl: weight of the distance of projected features to the teacher's.",
    )
    epochs: int = like(DistillOptions, "epochs", 240)
    batch_size: int = like(DistillOptions, "batch_size", 64)
    optimiser: str = option("sgd", group=CLASSIFIERS, choices=tuple(OPTIMISERS), help="Optimizer; adamw suits encoders.")
    learning_rate: float = like(DistillOptions, "learning_rate", 0.05)
    momentum: float = option(0.9, group=CLASSIFIERS, help="Momentum of gradient descent.")
    milestones: tuple[int, ...] = option(
        (),
        group=CLASSIFIERS,
        several="commas",
        metavar="EPOCHS",
        minimum=1,
        help="Epochs after which the rate is divided by 10, such as 30,60,90; without any, 5/8, 6/8 and 7/8 of all epochs.",
    )
    weight_decay: float = option(5e-4, group=CLASSIFIERS, help="Weight decay of all parameters.")
    augment: str = option(
        "none",
        group=CLASSIFIERS,
        choices=tuple(AUGMENTATIONS),
        help="Random changes of the images in training: crops of a padded image, or resized crops, and mirror images.",
    )
    max_length: int = like(Limits, "length")
    evaluation_samples: int | None = like(CalibrationOptions, "evaluation_samples", None)
    """Number of held-out examples for the figures; None for all."""
    probe: str | None = option(
        None, group=CLASSIFIERS, metavar="DATA", help="Other examples, to probe the features on linearly."
    )
    save_every: int = like(DistillOptions, "save_every", 200)
    calibration: CalibrationOptions = part(
        CalibrationOptions,
        samples=left_out(),
        sequence_length=left_out(),
        evaluation_samples=changed(64),
        windows=left_out(),
    )
    statistics: Path | None = unlisted(JobOptions, "statistics")
    plan_output: Path | None = unlisted(JobOptions, "plan_output")
    memory_limit: int | None = unlisted(JobOptions, "memory_limit")

    def check(self) -> None:
        """Raise OptionError for values with which no training is possible."""
        from engine.passes import processes

        if processes.started_together():
            raise OptionError(
                "classifiers are distilled in one process, because norms are over whole batches; run without torchrun"
            )
        row = CLASSIFIER_RECIPES[self.recipe]
        if self.ablation is not None and not row.has_prototypes:
            raise OptionError(f"ablations are of recipe moe-kd; leave out --ablation, or take that for {self.recipe}")
        if (self.teacher is None) == row.has_teacher:
            raise OptionError("recipe sft has no teacher, and all others have one: give --teacher or --recipe sft")
        if (
            not 0.0 < self.temperature < math.inf
            or not 0.0 <= self.momentum < 1.0
            or not all(0.0 <= weight < math.inf for weight in (self.weight_decay, self.feature_weight))
        ):
            raise OptionError(
                "temperature must be above 0, momentum from 0 to below 1, weight-decay and feature-weight at least 0"
            )
        if self.epochs < 1 or self.batch_size < 2 or (self.evaluation_samples is not None and self.evaluation_samples < 1):
            raise OptionError("epochs and evaluation-samples must be at least 1, and batch-size 2, for norms of a batch")
        if list(self.milestones) != sorted(set(self.milestones)) or max(self.milestones, default=0) >= self.epochs:
            given = ", ".join(map(str, self.milestones))
            raise OptionError(f"milestones are {given}; they must ascend and be below the {self.epochs} epochs")
        self.training(1).check()

    def falls(self, steps: int) -> list[float]:
        """Return the numbers of steps, of all `steps`, after which the learning rate is divided by 10."""
        return [epoch * steps / self.epochs for epoch in self.milestones] or [share * steps for share in FALLS]

    def training(self, steps: int) -> TrainingOptions:
        """Return the options of the training loop."""
        return TrainingOptions(
            steps,
            self.learning_rate,
            self.batch_size,
            self.batch_size,
            weight_decay=self.weight_decay,
            seed=self.calibration.seed,
            save_every=self.save_every,
        )

    @property
    def teaching(self) -> ClassifierTeaching:
        """Return the recipe, the ablation and the augmentation."""
        ablation = Ablation("") if self.ablation is None else ABLATIONS[self.ablation]
        recipe, augmentation = CLASSIFIER_RECIPES[self.recipe], AUGMENTATIONS[self.augment]
        return ClassifierTeaching(recipe, self.temperature, ablation, augmentation, self.feature_weight)
