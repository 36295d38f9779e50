"""Distillation into a student: a teacher's predictions on text or on responses, by recipes (Every Expert Matters)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.instructions import Example
from compress.claims import claims_output
from compress.clock import Clock
from compress.dense_training import recompute_if_large
from compress.distill_inputs import Distillable, DistillOptions, identities, prepare_distillation
from compress.job import Made, check_weights
from compress.losses import head_loss
from compress.pictures import draw_routers, draw_training
from compress.plan import same_plan
from compress.response_distillation import ResponseLoss, Responses, ResponseTeacher, Teaching
from compress.responses import batch_of
from compress.result import carry_out, check_outputs, finished_before
from compress.rouge import rouge_l
from compress.router_report import RouterReport, old_routers, router_report
from compress.student_aware_routing import RouterLoss, RouterTrainer, router_parameters
from compress.teacher_cache import cached_teacher
from compress.training import Trainer, figures
from compress.work_directory import WorkDirectory
from engine import processes
from engine.model import Decoder
from engine.parameters import parameters_on_disk
from engine.progress import Progress, no_progress
from engine.sampling import SamplingOptions
from engine.tokenizer import end_tokens, load_tokenizer


@claims_output
def distill(options: DistillOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Run the job; the figures of the result, with the keys of `compress distill --json`.

    Several processes (engine/processes.py) share training and measuring.
    """
    started = time.monotonic()
    options.check()
    work = WorkDirectory(options.output)
    if (done := finished_before(options, work, lambda: identities(options))) is not None:
        return done
    check_outputs(options)
    prepared = prepare_distillation(options)
    for checkpoint in (prepared.checkpoint, prepared.teacher):
        if checkpoint is not None:
            check_weights(checkpoint, progress)
    return carry_out(options, prepared, work, lambda: _make(options, prepared, work, progress), progress, started)


@dataclass
class Distilled:
    """What training gave."""

    tensors: dict[str, Tensor]
    trainer: Trainer
    clock: Clock
    metrics: tuple[float, float]
    """Before and after, of what tells the best state; lower is better."""
    perplexities: tuple[float, float]
    """Of the responses in the data, before and after."""
    routers: RouterReport | None = None
    """Of a teacher with experts."""


def _train(options: DistillOptions, prepared: Distillable, work: WorkDirectory, progress: Progress) -> Distilled:
    clock, config = Clock(), prepared.checkpoint.config
    student = processes.load_decoder(prepared.checkpoint, prepared.dtype, options.device, options.shard)
    longest = prepared.limit if options.row.student_writes else prepared.length
    part = options.training(prepared.steps, longest, config.hidden_size)
    recompute_if_large(student, part.group_size * longest)
    measure = Measure(options, prepared, student, part.group_size)
    writer = student if options.row.student_writes else None
    responses = Responses(prepared.training, clock, writer, prepared.limit, measure.ends)
    side = _teacher_side(options, prepared, student, responses, work, part.group_size, progress)
    loss = ResponseLoss(student, side.teaching, responses, options.row, options.temperature)
    trainer = Trainer(parameters_on_disk(student), loss, part, len(prepared.training), prepared.length, side.first)
    measured = prepared.measured or prepared.validation
    before = measure.both(measured)

    def validate() -> float:
        with clock.of("validation"):
            return measure(prepared.validation)

    with clock.of("update"):
        tensors = trainer.run(
            state_path=work.path / "distill.safetensors",
            resume=options.resume,
            validate=validate,
            progress=lambda items: progress(items, f"{options.recipe} (steps)"),
        )
    metrics, perplexities = zip(before, measure.both(measured), strict=True)
    return Distilled(tensors, trainer, clock, metrics, perplexities, side.report())


class Measure:
    """How good a student is on examples; lower is better."""

    def __init__(self, options: DistillOptions, prepared: Distillable, student: Decoder, group_size: int) -> None:
        self.student, self.group_size, self.limit = student, group_size, prepared.limit
        self.ends = end_tokens(prepared.checkpoint)
        self._tokenizer = load_tokenizer(prepared.checkpoint) if options.select_by == "rouge-l" else None

    def __call__(self, examples: Sequence[Example]) -> float:
        """What tells the best state: perplexity, or 1 − ROUGE-L of what it writes."""
        if self._tokenizer is None:
            return self.perplexity(examples)
        greedy = SamplingOptions()
        value = 1.0 - rouge_l(self.student, self._tokenizer, examples, self.limit, self.ends, sampling=greedy)
        processes.let_go(self.student)
        return value

    def perplexity(self, examples: Sequence[Example]) -> float:
        """Of the responses in the data."""
        value = response_perplexity(self.student, examples, self.group_size)
        processes.let_go(self.student)
        return value

    def both(self, examples: Sequence[Example]) -> tuple[float, float]:
        """What tells the best state, and perplexity."""
        plain = self.perplexity(examples)
        return (plain if self._tokenizer is None else self(examples)), plain


@dataclass
class _TeacherSide:
    """All that has to do with the teacher; nothing where the recipe has none."""

    teaching: Teaching | None = None
    first: Trainer | None = None
    """Of its routers."""
    report: Callable[[], RouterReport | None] = lambda: None
    """What its routers say at the end."""


def _teacher_side(
    options: DistillOptions,
    prepared: Distillable,
    student: Decoder,
    responses: Responses,
    work: WorkDirectory,
    group_size: int,
    progress: Progress,
) -> _TeacherSide:
    if prepared.teacher is None:
        return _TeacherSide()
    decoder = Decoder(prepared.teacher.config, prepared.teacher.weights(prepared.dtype, options.device))
    old, examples = old_routers(decoder), prepared.measured or prepared.validation

    def report() -> RouterReport | None:
        return router_report(decoder, old, examples, group_size) if decoder.moe_blocks else None

    if options.teacher_cache is None:
        first = _router_trainer(options, prepared, decoder, student, responses) if options.row.trains_router else None
        teaching = ResponseTeacher(decoder, options.row, options.augmentation, responses.clock)
        return _TeacherSide(teaching, first, report)
    cached = cached_teacher(
        decoder,
        prepared.training,
        work.path,
        responses.clock,
        group_size=group_size,
        count=options.cached_tokens,
        temperature=options.temperature,
        progress=lambda rows: progress(rows, "teacher's predictions (sequences)"),
    )
    # The teacher's body is let go of: its routers say at the end what they say now.
    reported = report()
    prepared.teacher.release()
    return _TeacherSide(cached, report=lambda: reported)


def _router_trainer(
    options: DistillOptions, prepared: Distillable, teacher: Decoder, student: Decoder, responses: Responses
) -> Trainer:
    """Of the teacher's router weights; nothing else of it is trained."""
    teacher.checkpoint_activations = True
    loss = RouterLoss(teacher, student, responses, options.load_balance_weight, options.temperature)
    part = options.router_training(prepared.steps, prepared.limit, teacher.config.hidden_size)
    return RouterTrainer(router_parameters(teacher), loss, part, len(prepared.training), prepared.length)


@torch.no_grad()
def response_perplexity(decoder: Decoder, examples: Sequence[Example], group_size: int) -> float:
    """exp of the mean negative log-likelihood of all response tokens; NaN where the model gives no number."""
    total, count, device = 0.0, 0, decoder.embedding_VD.device
    for start in range(0, len(examples), group_size):
        side = batch_of([examples[place] for place in range(start, min(start + group_size, len(examples)))])
        targets_T = side.targets_T.to(device)
        hidden_TD = decoder.hidden_states(side.tokens_BL.to(device))[side.asked_BL.to(device)]

        def measure(logits_TV: Tensor, part: slice, targets_T: Tensor = targets_T) -> Tensor:
            return F.cross_entropy(logits_TV, targets_T[part], reduction="sum")

        total += float(head_loss(hidden_TD, decoder.head_VD, measure, decoder.head_bias_V))
        count += len(targets_T)
    return math.exp(min(total / count, 700.0)) if math.isfinite(total) else math.nan


def _make(options: DistillOptions, prepared: Distillable, work: WorkDirectory, progress: Progress) -> Made:
    done = _train(options, prepared, work, progress)
    own = _figures(options, prepared, done)
    history = {options.recipe: (done.trainer.history, done.trainer.validations)}
    return Made(
        same_plan(prepared.checkpoint.config.experts_by_layer),
        f"distill-{options.recipe}",
        done.tensors,
        own,
        f"{options.model}, distilled",
        tuple(_card(options, own)),
        draw=lambda directory: [
            *draw_training(directory, options.output.name, history, options.select_by),
            *draw_routers(directory, str(options.teacher), done.routers, done.trainer.first is not None),
        ],
    )


def _figures(options: DistillOptions, prepared: Distillable, done: Distilled) -> dict[str, Any]:
    own, first = figures(done.trainer), done.trainer.first
    if first is not None:
        own["router"] = {"loss_first": first.history[0]["loss"], "loss_last": first.history[-1]["loss"]}
    by_rouge = options.select_by == "rouge-l"
    if by_rouge:
        own["validation_rouge_l"] = [[step, 1.0 - value] for step, value in own.pop("validation_perplexity")]
    metrics = [1.0 - value if by_rouge else value for value in done.metrics]
    return {
        "teacher": None if prepared.teacher is None else options.teacher,
        "recipe": options.recipe,
        "divergence": options.row.divergence,
        **own,
        "metric_name": options.select_by,
        "metric_before": metrics[0],
        "metric_after": metrics[1],
        "response_perplexity_before": done.perplexities[0],
        "response_perplexity_after": done.perplexities[1],
        "time_share": done.clock.shares,
        "teacher_unselected_share_per_layer": list(done.routers.unselected.values()) if done.routers else None,
        "router_divergence_per_layer": list(done.routers.moved.values()) if first is not None and done.routers else None,
        "prompts_left_out": prepared.prompts_left_out,
        "responses_cut": prepared.responses_cut,
    }


def _card(options: DistillOptions, own: dict[str, Any]) -> list[str]:
    whom = "on the text alone" if not options.row.needs_teacher else f"from `{options.teacher}`"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in own["time_share"].items())
    return [
        f"Distilled {whom} by recipe `{options.recipe}`: {own['steps']} steps, loss {own['loss_first']:.3f} to",
        f"{own['loss_last']:.3f}; {own['metric_name']} of responses from {own['metric_before']:.3f} to",
        f"{own['metric_after']:.3f}.",
        f"Time: {shares}.",
        "",
    ]
