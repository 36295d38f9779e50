"""Training of a dense model made from a mixture's experts: distillation, then fine-tuning (Cruz Salinas et al. §3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.dense.dense_student import dense_student, scales, student_parameters
from compress.plans.plan import Plan
from compress.training.layer_distillation import DistillationLoss, LossWeights, Teacher, decoder_perplexity
from compress.training.training import Loss, Trained, Trainer, TrainingOptions, figures
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import OptionError
from engine.passes import processes
from engine.passes.memory_budget import sequences_per_batch
from engine.progress import Progress, no_progress

WARM_UP_SHARE = 0.05
HIGHEST_RATE = 1.0 / 160
"""Good for the demo model, whose hidden size that is; twice as much was too much."""
TEXT_STEPS = 600
"""Steps of distillation on plain text unless given."""
MOST_ACTIVATION_BYTES = 1 << 30
"""Above this, each layer is computed again in the backward pass instead of keeping what it made."""


def good_rate(hidden_size: int) -> float:
    """1 over the hidden size, at most HIGHEST_RATE."""
    return min(HIGHEST_RATE, 1.0 / hidden_size)


def warm_up_steps(steps: int) -> int:
    """Of a training of so many."""
    return max(10, round(WARM_UP_SHARE * steps))


@dataclass(frozen=True)
class DenseTrainingOptions:
    """Steps of both parts, and what they have in common."""

    distill_steps: int = 0
    finetune_steps: int = 0
    lambda_supervised: float = 0.0
    """Of the text's own next tokens; the paper's is above 0. Beside the teacher's predictions it did harm (docs/LOG.md)."""
    lambda_layer: float = 1.0
    lambda_prediction: float = 1.0
    """Of the distance to the teacher's next-token predictions, which the paper's loss does not have."""
    learning_rate: float | None = None
    """Of AdamW, at its highest; None for 1 over the hidden size, by which good rates go, and at most HIGHEST_RATE."""
    batch_size: int = 16
    """Sequences a step, of each process."""
    micro_batch_size: int | None = None
    """Sequences in memory at a time; None for as many as calibration has."""
    clip_norm: float = 1.0
    validation_samples: int = 32
    validate_every: int = 50
    save_every: int = 50
    offload_teacher: bool = False
    shard: bool = False
    """Spread the student over the processes (FSDP2); each runs a teacher of its own."""
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of both parts."""
        return self.distill_steps + self.finetune_steps

    def check(self) -> None:
        """Raise OptionError for what no training can use."""
        self.part("distill", 1, 1).check()
        self.part("finetune", 1, 1).check()
        weights = (self.lambda_supervised, self.lambda_layer, self.lambda_prediction)
        if not all(0.0 <= weight < math.inf for weight in weights) or not sum(weights):
            raise OptionError(
                "lambda-supervised, lambda-layer and lambda-prediction must be at least 0, and one of them above it"
            )
        counts = (self.validation_samples, self.validate_every, self.micro_batch_size or 0)
        if min(counts) < 0 or self.save_every < 1 or self.micro_batch_size == 0:
            raise OptionError("validation must not be negative, save-every and micro-batch-size at least 1")

    def weights(self, name: str) -> LossWeights:
        """Of "distill" or "finetune"."""
        if name == "finetune":
            return LossWeights(supervised=1.0, layer=0.0, prediction=0.0)
        return LossWeights(self.lambda_supervised, self.lambda_layer, self.lambda_prediction)

    def part(self, name: str, length: int, hidden_size: int) -> TrainingOptions:
        """Options of "distill" or "finetune", for sequences of `length` tokens."""
        steps = self.distill_steps if name == "distill" else self.finetune_steps
        return TrainingOptions(
            steps,
            good_rate(hidden_size) if self.learning_rate is None else self.learning_rate,
            self.batch_size,
            self.micro_batch_size or sequences_per_batch(length),
            warm_up_steps=warm_up_steps(steps),
            clip_norm=self.clip_norm,
            seed=self.seed,
            earlier_steps=0 if name == "distill" else self.distill_steps,
            save_every=self.save_every,
            validate_every=self.validate_every if self.validation_samples else 0,
        )


def train_dense(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    validation_VL: Tensor,
    options: DenseTrainingOptions,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    directory: Path | None = None,
    resume: bool = False,
    student: Decoder | None = None,
    progress: Progress = no_progress,
) -> Trained:
    """Distil from the mixture, then fine-tune. `directory`: where states are kept, which `resume` goes on from.

    `student`: what to train, where it is not to begin as the plan has it (dense_student.py).
    """
    if options.shard:
        assert student is None, "a model in pieces is made here"
        made = partial(dense_student, plan, checkpoint, dtype, device)
        student = processes.sharded(checkpoint, made, device, scales)
    else:
        student = student or dense_student(plan, checkpoint, dtype, device)
    sizes = tokens_SL.shape[1], student.config.hidden_size
    group = options.part("distill", *sizes).group_size
    recompute_if_large(student, group * tokens_SL.shape[1])

    def loss_of(weights: LossWeights) -> DistillationLoss:
        teacher = None
        if weights.needs_teacher:
            teacher = Teacher(checkpoint, dtype, device, options.offload_teacher, predicts=weights.prediction > 0.0)
        return DistillationLoss(student, teacher, tokens_SL, weights)

    return train_parts(
        student_parameters(student),
        loss_of,
        options,
        len(tokens_SL),
        *sizes,
        validate=lambda: _perplexity(student, validation_VL, group),
        directory=directory,
        resume=resume,
        progress=progress,
    )


def train_parts(
    parameters: Mapping[str, nn.Parameter],
    loss_of: Callable[[LossWeights], Loss],
    options: DenseTrainingOptions,
    sequences: int,
    length: int,
    hidden_size: int,
    *,
    validate: Callable[[], float],
    directory: Path | None,
    resume: bool,
    progress: Progress,
) -> Trained:
    """Distillation, then fine-tuning, of whichever there is; each keeps its states in the directory.

    sequences: how many there are to train on, of about `length` tokens.
    """
    made = Trained()
    for name, steps in (("distill", options.distill_steps), ("finetune", options.finetune_steps)):
        if not steps:
            continue
        part = options.part(name, length, hidden_size)
        trainer = Trainer(parameters, loss_of(options.weights(name)), part, sequences, length)
        trainer.take_whole(made.tensors)  # the first part's, which were rounded to the model's dtype on their way through it
        made.tensors = trainer.run(
            state_path=None if directory is None else directory / f"{name}.safetensors",
            resume=resume,
            validate=validate,
            progress=lambda items, name=name: progress(items, f"{name} (steps)"),  # type: ignore[misc]
        )
        made.parts[name] = figures(trainer)
        made.histories[name] = trainer.history, trainer.validations
    return made


def _perplexity(student: Decoder, tokens_SL: Tensor, group_size: int) -> float:
    value = decoder_perplexity(student, tokens_SL, group_size)
    processes.let_go(student)
    return value


def recompute_if_large(student: Decoder, tokens: int) -> None:
    """Let layers be computed again in the backward pass where keeping what so many tokens make would be too much."""
    student.checkpoint_activations = activation_bytes(student, tokens) > MOST_ACTIVATION_BYTES


def activation_bytes(student: Decoder, tokens: int) -> int:
    """About what a forward pass of so many tokens keeps for its backward pass."""
    config = student.config
    widths = [
        layer.dense_width
        if layer.moe is None
        else layer.moe.experts_per_token * layer.moe.expert_width + layer.moe.shared_width
        for layer in config.layers
    ]
    per_token = sum(16 * config.hidden_size + 4 * width for width in widths)
    return tokens * per_token * student.embedding_VD.element_size()
