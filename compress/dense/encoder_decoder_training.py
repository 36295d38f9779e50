"""Training and evaluation of an encoder-decoder on pairs: layer distillation, then fine-tuning (Cruz Salinas et al. §3).

L = λ_sup·CE + λ_L·Σ_l MSE(LN(y_l^T), LN(y_l^S)) + λ_p·KL(p^T ‖ p^S) over the layers l of both stacks: all of them, as in the
paper's figure 1 ("each Transformer layer"), or the sparse ones alone. y_l is the output of a layer's MoE block or dense FFN.
The last term is an addition of this project (layer_distillation.py). No term includes padding. The model stays in eval mode,
without dropout, so that a resumed training has bit-identical results.

Shape suffixes: B pairs of a batch, L positions, V vocabulary, T tokens without padding, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.pairs import PADDING, Pairs
from compress.dense.dense_training import train_parts
from compress.dense.encoder_decoder import GROUP, all_layers, dense_row, logits, without_padding
from compress.options.training import DenseTrainingOptions, LossWeights
from compress.run.losses import Losses, drawn_means, summed_by_owner
from compress.training.divergences import forward_kl
from compress.training.layer_distillation import outputs_of
from compress.training.losses import layer_distance
from compress.training.training import Batch, Trained, Validated
from engine.progress import Progress, no_progress
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint

TOKEN_ACCURACY = "token_accuracy"
"""Name of the figure of each validation that the paper's figure 3 shows."""


@dataclass(frozen=True)
class Measured:
    """Quality of a model under teacher forcing, over all target tokens without padding; for each pair, float64, [P]."""

    summed_P: Tensor
    """Summed negative log-likelihood of the target, in nats."""
    right_P: Tensor
    """Number of tokens whose most probable prediction is correct."""
    tokens_P: Tensor
    """Number of target tokens."""

    @property
    def losses(self) -> Losses:
        """The losses, with each pair as a document of its own."""
        return Losses(self.summed_P, self.tokens_P)

    @property
    def perplexity(self) -> float:
        """Perplexity; NaN where the model's outputs are."""
        return self.losses.perplexity

    @property
    def token_accuracy(self) -> float:
        """Share of tokens whose most probable prediction is correct."""
        return float(self.right_P.sum() / self.tokens_P.sum())

    @property
    def token_accuracy_error(self) -> float | None:
        """The standard error of the accuracy over pairs; None with a single one."""
        means_R = drawn_means(self.right_P, self.tokens_P, self.pairs_P)
        return None if means_R is None else float(means_R.std(correction=0))

    @property
    def pairs_P(self) -> Tensor:
        """The number of each pair: a document of its own."""
        return torch.arange(len(self.tokens_P))


@torch.no_grad()
def measure(model: nn.Module, pairs: Pairs, config: Any) -> Measured:
    """Return the quality on pairs."""
    found: list[tuple[Tensor, ...]] = []
    for batch in pairs.split(GROUP):
        logits_TV, targets_T = predictions(model, batch, config)
        owners_T = (batch.target_PM != PADDING).nonzero()[:, 0]
        losses_T = F.cross_entropy(logits_TV, targets_T, reduction="none")
        right_T = logits_TV.argmax(-1) == targets_T
        parts = (losses_T, right_T, torch.ones_like(losses_T))
        found.append(tuple(summed_by_owner(part_T, owners_T, len(batch)) for part_T in parts))
    return Measured(*(torch.cat(each) for each in zip(*found, strict=True)))


def predictions(model: nn.Module, pairs: Pairs, config: Any) -> tuple[Tensor, Tensor]:
    """Return (logits [T, V] in float32, targets [T]) of the target tokens without padding."""
    kept_BL = pairs.target_PM != PADDING
    logits_BLV = logits(model, pairs, config)
    return logits_BLV[kept_BL.to(logits_BLV.device)].float(), pairs.target_PM[kept_BL].to(logits_BLV.device)


DISTILLED: dict[str, Callable[[EncoderDecoderCheckpoint], list[str]]] = {
    "all": all_layers,
    "sparse": lambda checkpoint: list(checkpoint.experts),
}
"""The layers whose outputs are distilled, by the value of the option."""


class PairLoss:
    """The loss of a student as its terms; without a teacher, the loss of plain fine-tuning."""

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None,
        checkpoint: EncoderDecoderCheckpoint,
        pairs: Pairs,
        weights: LossWeights,
        layers: str = "all",
    ) -> None:
        """Create the loss. checkpoint: the mixture. layers: those whose outputs are compared, "all" or "sparse"."""
        self.student, self.teacher, self.checkpoint, self.pairs = student, teacher, checkpoint, pairs
        self.weights = weights
        self.names = DISTILLED[layers](checkpoint)
        self._taught = [checkpoint.block(name) for name in self.names]
        self._own = [checkpoint.block(name, dense_row(checkpoint.row)) for name in self.names]

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Return the group's part of the means over the step.

        The means are of cross-entropy per token, of squared distance per element, and of divergence per token.
        """
        step, group, weights = self.pairs.take(batch.rows_B), self.pairs.take(batch.group_G), self.weights
        targets, taught_TV = self._teach(group)
        with outputs_of({index: self.student.get_submodule(self._own[index]) for index in targets}) as outputs:
            logits_TV, targets_T = predictions(self.student, group, self.checkpoint.config)
        terms, tokens = {}, int((step.target_PM != PADDING).sum())
        if weights.supervised:
            terms["supervised"] = weights.supervised * F.cross_entropy(logits_TV, targets_T, reduction="sum") / tokens
        if weights.layer and targets:
            distances = [self._distance(self.names[i], targets[i], outputs[i], group, step) for i in targets]
            terms["layers"] = weights.layer * torch.stack(distances).sum()
        if weights.prediction and taught_TV is not None:
            divergence_T = forward_kl(taught_TV.log_softmax(-1), logits_TV.log_softmax(-1))
            terms["predictions"] = weights.prediction * divergence_T.sum() / tokens
        return terms

    @torch.no_grad()
    def _teach(self, group: Pairs) -> tuple[dict[int, Tensor], Tensor | None]:
        """Return y_l^T, [B, L, D], by position of the layer in `names`, and the teacher's logits [T, V]."""
        if self.teacher is None:
            return {}, None
        with outputs_of({i: self.teacher.get_submodule(block) for i, block in enumerate(self._taught)}) as outputs:
            logits_TV, _ = predictions(self.teacher, group, self.checkpoint.config)
        return outputs, logits_TV

    def _distance(self, name: str, teacher_BLD: Tensor, student_BLD: Tensor, group: Pairs, step: Pairs) -> Tensor:
        """Return the group's share of the step's mean distance."""
        ids_PL = step.source_PS if name.startswith("encoder.") else step.target_PM
        teacher_TD, student_TD = (without_padding(y_BLD, name, group) for y_BLD in (teacher_BLD, student_BLD))
        return layer_distance(teacher_TD, student_TD) * len(teacher_TD) / int((ids_PL != PADDING).sum())


def train(
    student: nn.Module,
    teacher: nn.Module,
    checkpoint: EncoderDecoderCheckpoint,
    training: Pairs,
    validation: Pairs,
    options: DenseTrainingOptions,
    *,
    directory: Path | None = None,
    resume: bool = False,
    progress: Progress = no_progress,
) -> Trained:
    """Distill from the mixture, then fine-tune. `directory`: where states are saved, from which `resume` continues."""

    def loss_of(weights: LossWeights) -> PairLoss:
        own_teacher = teacher if weights.needs_teacher else None
        return PairLoss(student, own_teacher, checkpoint, training, weights, options.distill_layers or "all")

    return train_parts(
        dict(student.named_parameters()),
        loss_of,
        options,
        len(training),
        max(1, training.tokens // len(training)),
        checkpoint.config.d_model,
        validate=lambda: _validated(measure(student, validation, checkpoint.config)),
        directory=directory,
        resume=resume,
        progress=progress,
    )


def _validated(found: Measured) -> Validated:
    return Validated(found.perplexity, {TOKEN_ACCURACY: found.token_accuracy})
