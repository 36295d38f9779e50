"""Training of a dense model made from a mixture's experts: distillation, then fine-tuning (Cruz Salinas et al. §3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.dense.dense_student import dense_student, scales, student_parameters
from compress.options.training import DenseTrainingOptions, LossWeights
from compress.plans.plan import Plan
from compress.training.layer_distillation import DistillationLoss, Teacher, decoder_perplexity
from compress.training.training import Loss, Trained, Trainer, Validation, figures
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.passes import processes
from engine.progress import Progress, no_progress

MOST_ACTIVATION_BYTES = 1 << 30
"""Limit of activation memory, above which each layer is recomputed in the backward pass."""


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
    """Distill from the mixture, then fine-tune; return the trained tensors and figures.

    `directory`: where states are saved, from which `resume` continues. `student`: the model to train, where its initial
    weights are not those of the plan (dense_student.py).
    """
    if options.shard:
        assert student is None, "a model in pieces is made here"
        made = partial(dense_student, plan, checkpoint, dtype, device)
        student = processes.sharded(checkpoint, made, device, scales)
    else:
        student = student or dense_student(plan, checkpoint, dtype, device)
    sizes = tokens_SL.shape[1], student.config.hidden_size
    group = options.part(options.parts["distill"], *sizes).group_size
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
    validate: Validation,
    directory: Path | None,
    resume: bool,
    progress: Progress,
) -> Trained:
    """Distill, then fine-tune. A part without steps is skipped. Each part saves its states in the directory.

    sequences: number of training sequences, of about `length` tokens.
    """
    made = Trained()
    for name, own in options.parts.items():
        if not own.steps:
            continue
        part = options.part(own, length, hidden_size)
        trainer = Trainer(parameters, loss_of(own.weights), part, sequences, length)
        trainer.take_whole(made.tensors)  # the first part's result, which was rounded to the model's dtype during that part
        made.tensors = trainer.run(
            state_path=None if directory is None else directory / f"{name}.safetensors",
            resume=resume,
            validate=validate,
            progress=lambda items, name=name: progress(items, f"{name} (steps)"),  # type: ignore[misc]
        )
        made.parts[name] = figures(trainer)
        made.histories[name] = trainer.history, trainer.validations
        made.further[name] = trainer.further
    return made


def _perplexity(student: Decoder, tokens_SL: Tensor, group_size: int) -> float:
    value = decoder_perplexity(student, tokens_SL, group_size)
    processes.let_go(student)
    return value


def recompute_if_large(model: Decoder, tokens: int, *, every_expert: bool = False) -> None:
    """Enable recomputation of layers in the backward pass where the activations of this many tokens exceed the limit."""
    model.checkpoint_activations = activation_bytes(model, tokens, every_expert) > MOST_ACTIVATION_BYTES


def activation_bytes(model: Decoder, tokens: int, every_expert: bool = False) -> int:
    """Return the approximate bytes that a forward pass of this many tokens keeps for its backward pass.

    every_expert: whether each token is given to all experts of a layer.
    """
    config = model.config
    widths = [
        layer.dense_width
        if layer.moe is None
        else (layer.moe.experts if every_expert else layer.moe.experts_per_token) * layer.moe.expert_width
        + layer.moe.shared_width
        for layer in config.layers
    ]
    per_token = sum(16 * config.hidden_size + 4 * width for width in widths)
    return tokens * per_token * model.embedding_VD.element_size()
