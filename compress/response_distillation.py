"""Distillation on responses: the student's step, and in student-aware routing the step of the teacher's router before it.

Per response token and mean over them, then over the batch (Every Expert Matters §3):

    student          D(p ‖ q) of the recipe's divergence; cross-entropy on the response where the recipe has no teacher
    router (SAR)     KL(p ‖ q) + β · L_b, gradient through p, L_b = Σ_layers CV(m)² + CV(P)²

p is the teacher's prediction, q the student's. m counts the tokens that the teacher's own rule gives each expert, P sums its
gate probabilities; padding is in neither.

Shape suffixes: B sequences, L positions, T response tokens, D hidden, N experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.instructions import Example
from compress import processes
from compress.divergences import DIVERGENCES, Predictions, forward_kl, weighted_divergence
from compress.losses import head_loss
from compress.recipes import Recipe
from compress.responses import ResponseBatch, batch_of, write_responses
from compress.training import Batch
from engine.model import Decoder, routed_by
from engine.routing import NO_EXPERT, AllExperts, Routing, SampledExperts, Selection, softmax
from engine.sampling import SamplingOptions

SAMPLING = SamplingOptions(temperature=1.0)
"""Of the responses that a student writes (Every Expert Matters, setting)."""


@dataclass(frozen=True)
class KnowledgeAugmentation:
    """How the teacher's gate is sampled (Every Expert Matters, KA)."""

    samples: int = 2
    """M: forwards of the teacher for the same responses, with a step of the student after each."""
    probability: float = 0.05
    """λ: how often N−1 experts are sampled from the gate and not the N−1 largest."""
    per_token: bool = False
    """A draw for each token; otherwise one for each layer and forward."""


@dataclass
class Clock:
    """Seconds of wall time by what they went into."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Add what the `with` takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started


class Responses:
    """The sequences of each group of a step: those of the data, or prompts that the student has continued, once a turn."""

    def __init__(
        self,
        examples: Sequence[Example],
        clock: Clock,
        student: Decoder | None = None,
        max_length: int = 0,
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """student: who writes, until an end token or `max_length` tokens with the prompt; None for the data's responses."""
        self.examples, self.clock, self.student = examples, clock, student
        self.max_length, self.end_tokens = max_length, end_tokens
        self._turn: tuple[int, dict[tuple[int, ...], ResponseBatch]] = (-1, {})

    def __call__(self, batch: Batch) -> ResponseBatch:
        """Of the group. Steps of one turn get the same."""
        rows = tuple(batch.group_G.tolist())
        if self.student is None:
            return batch_of([self.examples[row] for row in rows])
        if self._turn[0] != batch.turn:
            self._turn = (batch.turn, {})
        known = self._turn[1]
        if rows not in known:
            prompts = [self.examples[row].prompt for row in rows]
            with self.clock.of("generation"):
                written = write_responses(self.student, prompts, self.max_length, self.end_tokens, SAMPLING, batch.generator)
                processes.let_go(self.student)
            known[rows] = batch_of(written)
        return known[rows]


class ResponseTeacher:
    """The model that is distilled from, with its gates as the recipe has them."""

    def __init__(self, decoder: Decoder, recipe: Recipe, augmentation: KnowledgeAugmentation, clock: Clock) -> None:
        self.decoder, self.recipe, self.augmentation, self.clock = decoder, recipe, augmentation, clock

    @torch.no_grad()
    def predictions(self, side: ResponseBatch, generator: torch.Generator) -> Predictions:
        """At the places whose next token is of a response."""
        real_T = side.real_BL.flatten().to(self.decoder.embedding_VD.device)
        with self.clock.of("teacher"), routed_by(self.decoder, self.gates(generator, real_T)):
            return _predictions(self.decoder, side)

    def gates(self, generator: torch.Generator, real_T: Tensor | None = None) -> list[Routing]:
        """One for each MoE layer. Sampled ones draw from the generator; of `real_T`'s tokens is what they share."""
        blocks, scales = self.decoder.moe_blocks, weight_scales(self.decoder)
        if self.recipe.gate == "all":
            return [AllExperts(scale) for scale in scales]
        if self.recipe.gate == "sampled":
            own = self.augmentation
            return [SampledExperts(own.probability, generator, own.per_token, scale, real_T) for scale in scales]
        return [block.routing for block in blocks]


def weight_scales(decoder: Decoder) -> list[float]:
    """The factor on routed weights of each MoE layer."""
    return [layer.moe.weight_scale for layer in decoder.config.layers if layer.moe is not None]


class ResponseLoss:
    """The student's loss."""

    def __init__(
        self,
        student: Decoder,
        teacher: ResponseTeacher | None,
        responses: Responses,
        divergence: str | None,
        temperature: float = 1.0,
    ) -> None:
        """divergence: a key of DIVERGENCES; None, or no teacher, for cross-entropy."""
        self.student, self.teacher, self.responses = student, teacher, responses
        self.divergence = None if divergence is None else DIVERGENCES[divergence]
        self.temperature = temperature

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """The group's part of the mean over the step's sequences."""
        side, sequences = self.responses(batch), len(batch.rows_B)
        weights_T = side.weights_BL[side.asked_BL].to(self.student.embedding_VD.device) / sequences
        if self.divergence is None or self.teacher is None:
            return {"supervised": _cross_entropy(_predictions(self.student, side), side, weights_T)}
        taught = self.teacher.predictions(side, batch.generator)
        own = _predictions(self.student, side)
        return {"divergence": weighted_divergence(self.divergence, taught, own, weights_T, temperature=self.temperature)}


class RouterLoss:
    """KL(p ‖ q) + β · L_b of the teacher's router on the student's responses (Every Expert Matters, SAR); q is constant."""

    def __init__(
        self,
        teacher: Decoder,
        student: Decoder,
        responses: Responses,
        clock: Clock,
        balance: float,
        temperature: float = 1.0,
    ) -> None:
        """balance: β. All experts are the teacher's gate from now on: its backward pass may compute layers again."""
        self.teacher, self.student, self.responses, self.clock, self.balance = teacher, student, responses, clock, balance
        self.temperature = temperature
        self._rules = [block.routing for block in teacher.moe_blocks]
        self._seen: dict[int, Tensor] = {}
        for place, (block, scale) in enumerate(zip(teacher.moe_blocks, weight_scales(teacher), strict=True)):
            block.routing = Watched(AllExperts(scale), self._seen, place)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """The group's part of the mean over the step's sequences; of L_b the mean over groups."""
        side, sequences = self.responses(batch), len(batch.rows_B)
        weights_T = side.weights_BL[side.asked_BL].to(self.teacher.embedding_VD.device) / sequences
        with torch.no_grad():
            own = _predictions(self.student, side)
        with self.clock.of("router"):
            self._seen.clear()
            taught = _predictions(self.teacher, side)
            divergence = weighted_divergence(
                forward_kl, taught, own, weights_T, temperature=self.temperature, teacher_learns=True
            )
            balance = load_balance(self._rules, self._seen, side.real_BL.flatten())
        return {"divergence": divergence, "balance": self.balance * balance * len(batch.group_G) / sequences}


@dataclass(frozen=True)
class Watched:
    """A Routing whose logits are kept; those of the first call, for a layer may be computed again in the backward pass."""

    base: Routing
    seen: dict[int, Tensor]
    place: int

    def __call__(self, logits_TN: Tensor) -> Selection:
        self.seen.setdefault(self.place, logits_TN)
        return self.base(logits_TN)


def load_balance(rules: Sequence[Routing], logits: Mapping[int, Tensor], real_T: Tensor) -> Tensor:
    """L_b = CV(m)² + CV(P)², summed over layers. Only P carries a gradient.

    rules: by which each layer gives tokens to experts; logits: [T, N] by place of the layer; real_T: False at padding.
    """
    terms = []
    for place, logits_TN in logits.items():
        real_TN = logits_TN[real_T.to(logits_TN.device)]
        chosen = rules[place](real_TN.detach()).experts
        counts_N = torch.bincount(chosen[chosen != NO_EXPERT], minlength=real_TN.shape[1])
        terms += [squared_variation(counts_N.float()), squared_variation(softmax(real_TN).sum(0))]
    return torch.stack(terms).sum()


def squared_variation(values_N: Tensor) -> Tensor:
    """CV² = σ²/μ², σ² the mean squared distance from the mean."""
    return values_N.var(correction=0) / values_N.mean().square()


def _predictions(decoder: Decoder, side: ResponseBatch) -> Predictions:
    device = decoder.embedding_VD.device
    hidden_BLD = decoder.hidden_states(side.tokens_BL.to(device))
    return Predictions(hidden_BLD[side.asked_BL.to(device)], decoder.head_VD)


def _cross_entropy(own: Predictions, side: ResponseBatch, weights_T: Tensor) -> Tensor:
    targets_T = side.targets_T.to(weights_T.device)

    def measure(logits_TV: Tensor, part: slice) -> Tensor:
        return (weights_T[part] * F.cross_entropy(logits_TV, targets_T[part], reduction="none")).sum()

    return head_loss(own.hidden_TD, own.head_VD, measure)
