"""Options of every training: steps and rates, and what is trained after a model was made smaller."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import OptionError
from engine.options import check, option

TRAINING, RECOVERY = "Training", "Recovery"
WARM_UP_SHARE = 0.05
HIGHEST_RATE = 1.0 / 160
"""Good for the demo model, whose hidden size that is; twice as much was too much."""
CARE = 0.25
"""How much lower than densify's a learning rate must be where the student is near its teacher already (docs/LOG.md)."""
TEXT_STEPS = 600
"""Default number of steps of distillation on plain text."""


def good_rate(hidden_size: int) -> float:
    """1 over the hidden size, at most HIGHEST_RATE."""
    return min(HIGHEST_RATE, 1.0 / hidden_size)


def careful_rate(hidden_size: int) -> float:
    """A quarter over the hidden size."""
    return CARE * good_rate(hidden_size)


def warm_up_steps(steps: int) -> int:
    """Steps in which the learning rate rises, in a training of so many."""
    return max(10, round(WARM_UP_SHARE * steps))


@dataclass(frozen=True)
class TrainingOptions:
    """How long a training is, how fast, and on how much at once."""

    steps: int
    learning_rate: float
    batch_size: int = 16
    """Sequences a step, of each process."""
    group_size: int = 16
    """Sequences in memory at a time; gradients of a step's groups are added up."""
    warm_up_steps: int = 10
    clip_norm: float = math.inf
    """Longest gradient, over all parameters together."""
    weight_decay: float = 0.0
    seed: int = 0
    earlier_steps: int = 0
    """Steps of an earlier training on the same sequences: this one goes on in their order."""
    steps_per_batch: int = 1
    """Steps on the same sequences, one after another; states are saved between them only."""
    save_every: int = 25
    validate_every: int = 0
    """0 never: training ends with its last state."""

    def check(self) -> None:
        """Raise OptionError for what no training can use."""
        if self.steps < 0 or self.batch_size < 1 or not 0.0 < self.learning_rate < math.inf or not self.clip_norm > 0.0:
            raise OptionError(
                "steps must be at least 0, batch-size at least 1, the learning rate and the gradient's length positive"
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
    """One of the two parts of training a dense result."""

    steps: int
    earlier_steps: int
    """Steps of the part before."""
    weights: LossWeights


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The steps of every training that makes a new model."""

    batch_size: int = option(16, group=TRAINING, minimum=1, help="Sequences per step and process.")
    micro_batch_size: int | None = option(
        None,
        group=TRAINING,
        minimum=1,
        unset="about 4,096 tokens",
        help="Sequences in memory at a time; their gradients add up to those of the step.",
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
    """Steps of both parts, and what they have in common."""

    distill_steps: int = option(
        0, group=TRAINING, minimum=0, help="Steps on text in which each layer's output learns that of MODEL."
    )
    finetune_steps: int = option(0, group=TRAINING, minimum=0, help="Further steps on text alone.")
    lambda_supervised: float = option(0.0, group=TRAINING, help="Weight of the loss on the text's own next tokens.")
    """The paper's is above 0. Beside the teacher's predictions it did harm (docs/LOG.md)."""
    lambda_layer: float = option(1.0, group=TRAINING, help="Weight of the loss on the layers' outputs.")
    lambda_prediction: float = option(1.0, group=TRAINING, help="Weight of the distance to MODEL's next-token predictions.")
    """The paper's loss does not have this term."""
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
        """The steps of both parts."""
        return self.distill_steps + self.finetune_steps

    def check(self) -> None:
        """Raise OptionError for what no training can use."""
        for part in self.parts.values():
            self.part(part, 1, 1).check()
        weights = (self.lambda_supervised, self.lambda_layer, self.lambda_prediction)
        if not all(0.0 <= weight < math.inf for weight in weights) or not sum(weights):
            raise OptionError(
                "lambda-supervised, lambda-layer and lambda-prediction must be at least 0, and one of them above it"
            )

    @property
    def parts(self) -> dict[str, DensePart]:
        """Distillation, then fine-tuning, by the names of their figures."""
        weights = LossWeights(self.lambda_supervised, self.lambda_layer, self.lambda_prediction)
        return {
            "distill": DensePart(self.distill_steps, 0, weights),
            "finetune": DensePart(self.finetune_steps, self.distill_steps, LossWeights(1.0, 0.0, 0.0)),
        }

    def part(self, part: DensePart, length: int, hidden_size: int) -> TrainingOptions:
        """Options of one part, for sequences of `length` tokens."""
        from engine.passes.memory_budget import sequences_per_batch

        return TrainingOptions(
            part.steps,
            good_rate(hidden_size) if self.learning_rate is None else self.learning_rate,
            self.batch_size,
            self.micro_batch_size or sequences_per_batch(length),
            warm_up_steps=warm_up_steps(part.steps),
            clip_norm=self.clip_norm,
            seed=self.seed,
            earlier_steps=part.earlier_steps,
            save_every=self.save_every,
            validate_every=self.validate_every if self.validation_samples else 0,
        )


@dataclass(frozen=True)
class RecoverOptions:
    """How long routers and norms are trained after pruning, and how fast; 0 steps train nothing."""

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
    """Sequences a step."""
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)

    def check(self) -> None:
        """Raise OptionError for what no training can use."""
        if self.steps < 0 or self.batch_size < 1 or not 0.0 < self.learning_rate < math.inf:
            raise OptionError("recover-steps must be at least 0, batch-size at least 1 and the learning rate positive")


@dataclass(frozen=True)
class WholeRecoveryOptions:
    """How long all weights are trained after pruning, and how fast."""

    steps: int = 0
    """0 trains nothing."""
    learning_rate: float | None = None
    """None as in `compress distill`."""
    batch_size: int = 16
    validation_samples: int = 64
    seed: int = 0

    def training(self, hidden_size: int) -> DenseTrainingOptions:
        """As options of a training from start to end."""
        rate = careful_rate(hidden_size) if self.learning_rate is None else self.learning_rate
        return DenseTrainingOptions(self.steps, learning_rate=rate, batch_size=self.batch_size, seed=self.seed)

    def check(self) -> None:
        """Raise OptionError for what no training can use."""
        self.training(1).check()
