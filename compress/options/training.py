"""Options of every training: steps, rates and batch sizes, for distillation and for training after compression."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import OptionError
from engine.options import check, option

TRAINING, RECOVERY = "Training", "Recovery"
WARM_UP_SHARE = 0.05
SCHEDULE_NAMES = ("cosine", "linear", "constant")
"""The keys of SCHEDULES (compress/training/training.py), which needs torch."""
HIGHEST_RATE = 1.0 / 160
"""Highest default rate. It suits the demo model, which has hidden size 160; twice the rate was too high."""
CARE = 0.25
"""Factor on densify's learning rate for students that are already close to their teacher (docs/LOG.md)."""
TEXT_STEPS = 600
"""Default number of steps of distillation on plain text."""


def good_rate(hidden_size: int) -> float:
    """Return the default learning rate, 1 over the hidden size, at most HIGHEST_RATE."""
    return min(HIGHEST_RATE, 1.0 / hidden_size)


def careful_rate(hidden_size: int) -> float:
    """Return a quarter of `good_rate`."""
    return CARE * good_rate(hidden_size)


def warm_up_steps(steps: int) -> int:
    """Return the number of steps in which the learning rate rises."""
    return max(10, round(WARM_UP_SHARE * steps))


@dataclass(frozen=True)
class TrainingOptions:
    """Length, learning rate and batch size of a training."""

    steps: int
    learning_rate: float
    batch_size: int = 16
    """Sequences per step, for each process."""
    group_size: int = 16
    """Sequences in memory at a time; the gradients of a step's groups are accumulated."""
    warm_up_steps: int = 10
    schedule: str = "cosine"
    """A key of SCHEDULES (compress/training/training.py): how the learning rate falls after its warm-up."""
    clip_norm: float = math.inf
    """Maximum norm of the gradient of all parameters together."""
    weight_decay: float = 0.0
    seed: int = 0
    earlier_steps: int = 0
    """Number of steps of an earlier training on the same sequences; this training continues in their order."""
    steps_per_batch: int = 1
    """Number of consecutive steps on the same sequences; states are saved only between batches."""
    save_every: int = 25
    validate_every: int = 0
    """Steps between validations; 0 for none, and the training then ends with its last state."""

    def check(self) -> None:
        """Raise OptionError for values with which no training is possible."""
        if self.steps < 0 or self.batch_size < 1 or not 0.0 < self.learning_rate < math.inf or not self.clip_norm > 0.0:
            raise OptionError(
                "steps must be at least 0, batch-size at least 1, the learning rate and the gradient's norm positive"
            )
        if self.steps_per_batch < 1 or self.save_every % self.steps_per_batch:
            raise OptionError(
                f"save-every is {self.save_every}; as {self.steps_per_batch} steps share a batch, make it a multiple"
            )


@dataclass(frozen=True)
class LossWeights:
    """The weight λ of each term of the loss."""

    supervised: float
    layer: float
    prediction: float

    @property
    def needs_teacher(self) -> bool:
        """Whether a term needs a teacher."""
        return bool(self.layer or self.prediction)


@dataclass(frozen=True)
class DensePart:
    """One of the two parts of the training of a dense result."""

    steps: int
    earlier_steps: int
    """Number of steps of the part before."""
    weights: LossWeights


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of the steps of every training that makes a new model."""

    batch_size: int = option(16, group=TRAINING, minimum=1, help="Sequences per step and process.")
    micro_batch_size: int | None = option(
        None,
        group=TRAINING,
        minimum=1,
        unset="about 4,096 tokens",
        help="Sequences in memory at a time; their gradients add up to those of the step.",
    )
    schedule: str = option(
        "cosine",
        group=TRAINING,
        choices=SCHEDULE_NAMES,
        help="The learning rate after its warm-up: constant, or how it falls to zero.",
    )
    warm_up_steps: int | None = option(
        None,
        group=TRAINING,
        minimum=1,
        unset="5 % of the steps, at least 10",
        help="Steps in which the learning rate rises to its highest value.",
    )
    clip_norm: float = option(1.0, group=TRAINING, help="Norm that longer gradients are scaled down to.")
    validation_samples: int = option(
        32, group=TRAINING, minimum=0, help="Sequences set aside to choose the best state by; 0 keeps the last state."
    )
    validate_every: int = option(50, group=TRAINING, minimum=0, help="Steps between validations; 0 for none.")
    save_every: int = option(50, group=TRAINING, minimum=1, help="Steps between saved states.")
    shard: bool = option(
        False, group=TRAINING, help="Spread the model in training over the processes (FSDP2); each has its own teacher."
    )


@dataclass(frozen=True)
class DenseTrainingOptions(StepOptions):
    """Steps of both parts of a dense training, and their common options."""

    distill_steps: int = option(
        0, group=TRAINING, minimum=0, help="Steps on text in which each layer's output learns that of MODEL."
    )
    finetune_steps: int = option(0, group=TRAINING, minimum=0, help="Further steps on text alone.")
    lambda_supervised: float = option(0.0, group=TRAINING, help="Weight of the loss on the text's own next tokens.")
    """Default 0: the paper's weight is positive, but beside the teacher's predictions this term did harm (docs/LOG.md)."""
    lambda_layer: float = option(1.0, group=TRAINING, help="Weight of the loss on the layers' outputs.")
    distill_layers: str | None = option(
        None,
        group=TRAINING,
        choices=("all", "sparse"),
        unset="all",
        help="Layers of an encoder-decoder whose outputs are distilled: all, or those of experts only.",
    )
    """A decoder's dense layers are never distilled, because the option is refused there."""
    lambda_prediction: float = option(1.0, group=TRAINING, help="Weight of the distance to MODEL's next-token predictions.")
    """The weight of a term that the paper's loss does not have."""
    learning_rate: float | None = option(
        None,
        group=TRAINING,
        unset="1 over the hidden size, at most 1/160",
        help="Highest learning rate of AdamW.",
    )
    offload_teacher: bool = option(
        False, group=TRAINING, help="Read MODEL's layers one at a time for each batch, with less memory but slower."
    )
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)

    @property
    def steps(self) -> int:
        """Number of steps of both parts."""
        return self.distill_steps + self.finetune_steps

    def check(self) -> None:
        """Raise OptionError for values with which no training is possible."""
        for part in self.parts.values():
            self.part(part, 1, 1).check()
        weights = (self.lambda_supervised, self.lambda_layer, self.lambda_prediction)
        if not all(0.0 <= weight < math.inf for weight in weights) or not sum(weights):
            raise OptionError(
                "lambda-supervised, lambda-layer and lambda-prediction must be at least 0, and one of them above it"
            )

    @property
    def parts(self) -> dict[str, DensePart]:
        """Return the parts, distillation and then fine-tuning, by the names of their figures."""
        weights = LossWeights(self.lambda_supervised, self.lambda_layer, self.lambda_prediction)
        return {
            "distill": DensePart(self.distill_steps, 0, weights),
            "finetune": DensePart(self.finetune_steps, self.distill_steps, LossWeights(1.0, 0.0, 0.0)),
        }

    def part(self, part: DensePart, length: int, hidden_size: int) -> TrainingOptions:
        """Return the options of one part, for sequences of `length` tokens."""
        from engine.passes.memory_budget import UNLIMITED

        return TrainingOptions(
            part.steps,
            good_rate(hidden_size) if self.learning_rate is None else self.learning_rate,
            self.batch_size,
            self.micro_batch_size or UNLIMITED.sequences_per_batch(length),
            warm_up_steps=self.warm_up_steps or warm_up_steps(part.steps),
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            seed=self.seed,
            earlier_steps=part.earlier_steps,
            save_every=self.save_every,
            validate_every=self.validate_every if self.validation_samples else 0,
        )


@dataclass(frozen=True)
class RecoverOptions:
    """Length and learning rate of the training of routers and norms after pruning; 0 steps for no training."""

    steps: int = option(
        0,
        group=RECOVERY,
        flag="recover-steps",
        minimum=0,
        help="Then train the remaining router rows and norms for so many steps towards MODEL's predictions.",
    )
    learning_rate: float = option(
        5e-3, group=RECOVERY, flag="recover-learning-rate", help="Learning rate of AdamW in that training."
    )
    batch_size: int = 16
    """Sequences per step."""
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)

    def check(self) -> None:
        """Raise OptionError for values with which no training is possible."""
        if self.steps < 0 or self.batch_size < 1 or not 0.0 < self.learning_rate < math.inf:
            raise OptionError("recover-steps must be at least 0, batch-size at least 1 and the learning rate positive")


@dataclass(frozen=True)
class WholeRecoveryOptions:
    """Length and learning rate of the training of all weights after pruning."""

    steps: int = 0
    """Number of steps; 0 for no training."""
    learning_rate: float | None = None
    """Learning rate; None for the default of `compress distill`."""
    batch_size: int = 16
    validation_samples: int = 64
    seed: int = 0

    def training(self, hidden_size: int) -> DenseTrainingOptions:
        """Return the options of the training loop."""
        rate = careful_rate(hidden_size) if self.learning_rate is None else self.learning_rate
        return DenseTrainingOptions(self.steps, learning_rate=rate, batch_size=self.batch_size, seed=self.seed)

    def check(self) -> None:
        """Raise OptionError for values with which no training is possible."""
        self.training(1).check()
