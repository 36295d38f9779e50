"""Recovery of all weights after pruning: the smaller mixture is distilled from the full one, on text (recipe kd).

Unlike recover.py, which trains routers and norms, this training includes the experts, and needs memory for gradients and
moments of every remaining weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from compress.dense.dense_training import recompute_if_large
from compress.distillation.inputs import TextExamples
from compress.distillation.recipes import RECIPES
from compress.distillation.response_distillation import ResponseLoss, Responses, ResponseTeacher
from compress.distillation.response_perplexity import response_perplexity
from compress.options.distill import KnowledgeAugmentation
from compress.options.training import WholeRecoveryOptions
from compress.plans.apply import planned_decoder
from compress.plans.plan import Plan
from compress.run.clock import Clock
from compress.training.training import Trained, Trainer, figures
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.decoder.parameters import parameters_on_disk

NAME, RECIPE = "distill", RECIPES["kd"]


def recover_all(
    plan: Plan,
    checkpoint: Checkpoint,
    recovered: Mapping[str, Tensor],
    training_SL: Tensor,
    validation_VL: Tensor,
    options: WholeRecoveryOptions,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    state_path: Path | None = None,
    resume: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Trained:
    """Train the result of `plan`, which starts with the tensors in `recovered`, if any; the training can be resumed."""
    student, clock = planned_decoder(plan, checkpoint, dtype, device), Clock()
    hidden_size = checkpoint.config.hidden_size
    training = options.training(hidden_size)
    part = training.part(training.parts[NAME], training_SL.shape[1], hidden_size)
    recompute_if_large(student, part.group_size * training_SL.shape[1])
    examples, held = TextExamples(training_SL, 1), TextExamples(validation_VL, 1)
    teacher = Decoder(checkpoint.config, checkpoint.weights(dtype, device))
    taught = ResponseTeacher(teacher, RECIPE, KnowledgeAugmentation(), clock)
    loss = ResponseLoss(student, taught, Responses(examples, clock), RECIPE)
    trainer = Trainer(parameters_on_disk(student), loss, part, *training_SL.shape)
    trainer.take_whole(recovered)
    tensors = trainer.run(
        state_path=state_path,
        resume=resume,
        validate=lambda: response_perplexity(student, held, part.group_size),
        progress=progress,
    )
    return Trained(tensors, {NAME: figures(trainer)}, {NAME: (trainer.history, trainer.validations)})
