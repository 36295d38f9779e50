"""The loss of a student that is distilled on responses.

The loss is D(p ‖ q), the recipe's divergence with p the teacher's prediction and q the student's, or cross-entropy where
the recipe has no divergence. It is averaged over each response's tokens and then over the batch (Every Expert Matters §3).
With matched layers, Σ_l MSE(LN(y_l^T), LN(y_l^S)) is added, averaged over all tokens of a sequence (layer_distillation.py).

Shape suffixes: B sequences, L positions, T response tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.instructions import Example
from compress.distillation.recipes import Recipe
from compress.distillation.responses import ResponseBatch, batch_of
from compress.distillation.writer import Writer
from compress.options.distill import KnowledgeAugmentation
from compress.run.clock import Clock
from compress.training.divergences import DIVERGENCES, Predictions, weighted_divergence
from compress.training.layer_distillation import Taught, feed_forwards, outputs_of
from compress.training.losses import head_loss, layer_distance
from compress.training.training import Batch
from engine.decoder.model import Decoder, gate_of, head_of, routed_by
from engine.decoder.routing import AllExperts, Routing, SampledExperts, factor_of
from engine.generation.options import SamplingOptions
from engine.passes import processes

SAMPLING = SamplingOptions(temperature=1.0)
"""Sampling of the responses that a student writes (Every Expert Matters, setting)."""


class Responses:
    """The sequences of each group of a step: from the data, or prompts that the student continues once per batch."""

    def __init__(
        self,
        examples: Sequence[Example],
        clock: Clock,
        writer: Writer | None = None,
        max_length: int = 0,
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """Create the responses.

        writer: the student that writes, until an end token or `max_length` tokens with the prompt; None for the data's
        responses.
        """
        self.examples, self.clock, self.writer = examples, clock, writer
        self.max_length, self.end_tokens = max_length, end_tokens
        self._turn: tuple[int, dict[tuple[int, ...], ResponseBatch]] = (-1, {})

    def __call__(self, batch: Batch) -> ResponseBatch:
        """Return the sequences of the group. Steps on the same batch get the same sequences."""
        rows = tuple(batch.group_G.tolist())
        if self.writer is None:
            return batch_of([self.examples[row] for row in rows])
        if self._turn[0] != batch.turn:
            self._turn = (batch.turn, {})
        known = self._turn[1]
        if rows not in known:
            prompts = [self.examples[row].prompt for row in rows]
            with self.clock.of("generation"):
                written = self.writer(prompts, self.max_length, self.end_tokens, SAMPLING, batch.generator)
                processes.let_go(self.writer.decoder)
            known[rows] = batch_of(written)
        return known[rows]


class Teaching(Protocol):
    """The source of a student's targets."""

    def teach(self, batch: Batch, side: ResponseBatch) -> Taught:
        """Return the targets for the group's sequences, which are `side`."""
        ...


class ResponseTeacher:
    """The teacher model, with gates as the recipe defines them."""

    def __init__(self, decoder: Decoder, recipe: Recipe, augmentation: KnowledgeAugmentation, clock: Clock) -> None:
        self.decoder, self.recipe, self.augmentation, self.clock = decoder, recipe, augmentation, clock

    @torch.no_grad()
    def teach(self, batch: Batch, side: ResponseBatch) -> Taught:
        """Return predictions at positions before response tokens, and outputs of blocks where layers are matched."""
        real_T = side.real_BL.flatten().to(self.decoder.embedding_VD.device)
        with self.clock.of("teacher"), routed_by(self.decoder, self.gates(batch.generator, real_T)):
            with blocks_of(self.decoder, self.recipe.matches_layers) as blocks:
                own = predictions(self.decoder, side)
            return Taught(blocks, own)

    def gates(self, generator: torch.Generator, real_T: Tensor | None = None) -> list[Routing]:
        """Return one routing per MoE layer.

        Sampled routings draw from the generator; a draw for the whole call uses the mean over the tokens marked in
        `real_T`.
        """
        moes = [layer.moe for layer in self.decoder.config.layers if layer.moe is not None]
        factors = [factor_of(block.own_routing) for block in self.decoder.moe_blocks]
        if self.recipe.uses_all_experts:
            return [AllExperts(factor, gate_of(moe)) for factor, moe in zip(factors, moes, strict=True)]
        if self.recipe.samples_experts:
            own = self.augmentation
            return [
                SampledExperts(own.probability, generator, own.per_token, factor, real_T, gate_of(moe))
                for factor, moe in zip(factors, moes, strict=True)
            ]
        return [block.routing for block in self.decoder.moe_blocks]


@contextmanager
def blocks_of(decoder: Decoder, wanted: bool) -> Iterator[dict[int, Tensor]]:
    """Record the outputs of all feed-forward blocks inside `with`, [T, D] by layer; nothing unless `wanted`."""
    with outputs_of(feed_forwards(decoder) if wanted else {}) as outputs:
        yield outputs


class ResponseLoss:
    """The student's loss."""

    def __init__(
        self,
        student: Decoder,
        teacher: Teaching | None,
        responses: Responses,
        recipe: Recipe,
        temperature: float = 1.0,
    ) -> None:
        """Create the loss. teacher: None where the recipe needs none."""
        self.student, self.teacher, self.responses, self.recipe = student, teacher, responses, recipe
        self.temperature = temperature

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Return the group's part of the mean over the step's sequences."""
        side, sequences = self.responses(batch), len(batch.rows_B)
        weights_T = side.weights_BL[side.asked_BL].to(self.student.embedding_VD.device) / sequences
        taught = Taught({}, None) if self.teacher is None else self.teacher.teach(batch, side)
        with blocks_of(self.student, self.recipe.matches_layers) as blocks:
            own = predictions(self.student, side)
        terms = {}
        if self.recipe.divergence is None:
            terms["supervised"] = _cross_entropy(own, side, weights_T)
        elif taught.predictions is not None:
            measure = DIVERGENCES[self.recipe.divergence]
            terms["divergence"] = weighted_divergence(
                measure, taught.predictions, own, weights_T, temperature=self.temperature
            )
        if blocks:
            tokens_T = (side.real_BL / side.real_BL.sum(1, keepdim=True)).flatten().to(weights_T.device) / sequences
            terms["layers"] = torch.stack(
                [layer_distance(taught.blocks[index], own_TD, tokens_T) for index, own_TD in blocks.items()]
            ).sum()
        return terms


def predictions(decoder: Decoder, side: ResponseBatch) -> Predictions:
    """Return a model's predictions of the response tokens of a batch."""
    device = decoder.embedding_VD.device
    hidden_BLD = decoder.hidden_states(side.tokens_BL.to(device))
    return Predictions(hidden_BLD[side.asked_BL.to(device)], *head_of(decoder))


def _cross_entropy(own: Predictions, side: ResponseBatch, weights_T: Tensor) -> Tensor:
    targets_T = side.targets_T.to(weights_T.device)

    def measure(logits_TV: Tensor, part: slice) -> Tensor:
        return (weights_T[part] * F.cross_entropy(logits_TV, targets_T[part], reduction="none")).sum()

    return head_loss(own.hidden_TD, own.head_VD, measure, own.head_bias_V, own.logit_cap)
