"""`compress distill` of language models: a student learns a teacher's predictions on text or responses (Every Expert
Matters).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from calibrate.instructions import Example
from compress.dense.dense_training import recompute_if_large
from compress.distillation.inputs import Distillable, identities, prepare_distillation
from compress.distillation.recipes import METRICS
from compress.distillation.response_distillation import ResponseLoss, Responses, ResponseTeacher, Teaching
from compress.distillation.response_perplexity import response_losses
from compress.distillation.rouge import rouge_l
from compress.distillation.router_report import (
    RouterReport,
    draw_routers,
    old_routers,
    router_drift,
    router_report,
)
from compress.distillation.student_aware_routing import RouterLoss, RouterTrainer, router_parameters
from compress.distillation.teacher_cache import cached_teacher
from compress.distillation.writer import Writer
from compress.options.distill import DistillOptions
from compress.plans.plan import same_plan
from compress.report.figures import DistillationFigures, DistillFigures
from compress.report.pictures import draw_training
from compress.run.claims import claims_output
from compress.run.clock import Clock
from compress.run.job import Made, Run, check_weights
from compress.run.losses import Losses, before_and_after
from compress.run.result import carry_out, check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from compress.training.training import Trainer, figures
from engine.checkpoint.tokenizer import end_tokens, load_tokenizer
from engine.decoder.model import Decoder
from engine.decoder.parameters import parameters_on_disk
from engine.generation.options import SamplingOptions
from engine.passes import processes
from engine.progress import Progress, no_progress


@claims_output
def distill(options: DistillOptions, progress: Progress = no_progress) -> DistillFigures:
    """Run the job; return the figures of the result, with the keys of `compress distill --json`.

    Several processes (engine/passes/processes.py) share training and evaluation.
    """
    started = time.monotonic()
    options.check()
    work = WorkDirectory(options.output)
    if (done := finished_before(options, work, lambda: identities(options))) is not None:
        return cast(DistillFigures, done)
    check_outputs(options)
    prepared = prepare_distillation(options)
    for checkpoint in (prepared.checkpoint, prepared.teacher):
        if checkpoint is not None:
            check_weights(checkpoint, progress)
    run = Run(options, prepared, work, progress, started)
    return cast(DistillFigures, carry_out(run, lambda: _make(run)))


DistillRun = Run[DistillOptions, Distillable]


@dataclass
class Distilled:
    """The result of a training."""

    tensors: dict[str, Tensor]
    trainer: Trainer
    clock: Clock
    metrics: tuple[float, float]
    """Values before and after of the metric that selects the best state; lower is better."""
    losses: tuple[Losses, Losses]
    """Losses before and after on the responses in the data."""
    response_dtype: str | None
    """Dtype of the weights that wrote responses; None if none were written."""
    routers: RouterReport | None = None
    """Report on the teacher's routers; None for a dense teacher."""
    teacher_metric: float | None = None
    """Value of the metric for the teacher with another number of experts; None unless one is asked for."""


def _train(run: DistillRun) -> Distilled:
    options, prepared = run.options, run.prepared
    clock, config = Clock(), prepared.checkpoint.config
    student = processes.load_decoder(prepared.checkpoint, prepared.dtype, options.device, options.shard)
    longest = prepared.limit if options.row.student_writes else prepared.length
    part = options.training(prepared.steps, longest, config.hidden_size)
    recompute_if_large(student, part.group_size * longest)
    measure = Measure(options, prepared, student, part.group_size)
    writer = (measure.writer or _writer(options, student)) if options.row.student_writes else None
    responses = Responses(prepared.training, clock, writer, prepared.limit, measure.ends)
    side = _teacher_side(run, student, responses, part.group_size)
    loss = ResponseLoss(student, side.teaching, responses, options.row, options.temperature)
    trainer = Trainer(parameters_on_disk(student), loss, part, len(prepared.training), prepared.length, side.first)
    measured = prepared.measured or prepared.validation
    before = measure.both(measured)

    def validate() -> float:
        with clock.of("validation"):
            return measure(prepared.validation)

    with clock.of("update"):
        tensors = trainer.run(
            state_path=run.work.path / "distill.safetensors",
            resume=options.resume,
            validate=validate,
            progress=run.bar(f"{options.recipe} (steps)"),
        )
    after = measure.both(measured)
    metrics, losses = (before[0], after[0]), (before[1], after[1])
    writes = writer or measure.writer
    dtype = None if writes is None else str(writes.dtype).removeprefix("torch.")
    return Distilled(tensors, trainer, clock, metrics, losses, dtype, side.report(), side.metric)


def _writer(options: DistillOptions, decoder: Decoder) -> Writer:
    """Return what writes responses with a model's weights."""
    return Writer(decoder, torch.bfloat16 if options.response_dtype == "auto" else None)


class Measure:
    """Metrics of a model on examples; lower is better."""

    def __init__(self, options: DistillOptions, prepared: Distillable, student: Decoder, group_size: int) -> None:
        self.student, self.group_size, self.limit = student, group_size, prepared.limit
        self.ends, self.stemming = end_tokens(prepared.checkpoint), options.stemming
        writes = METRICS[options.select_by].writes
        self._tokenizer = load_tokenizer(prepared.checkpoint) if writes else None
        self.writer = _writer(options, student) if writes else None

    def __call__(self, examples: Sequence[Example]) -> float:
        """Return the metric that selects the best state: perplexity, or 1 − ROUGE-L of the student's own responses."""
        if self.writer is None:
            return self.perplexity(examples)
        greedy = SamplingOptions()
        value = 1.0 - rouge_l(
            self.writer, self._tokenizer, examples, self.limit, self.ends, sampling=greedy, stemming=self.stemming
        )
        processes.let_go(self.student)
        return value

    def perplexity(self, examples: Sequence[Example]) -> float:
        """Return the perplexity of the responses in the data; NaN where the model's outputs are."""
        return self.losses(examples).perplexity

    def losses(self, examples: Sequence[Example]) -> Losses:
        """Return the losses on the responses in the data."""
        found = response_losses(self.student, examples, self.group_size)
        processes.let_go(self.student)
        return found

    def both(self, examples: Sequence[Example]) -> tuple[float, Losses]:
        """Return the metric that selects the best state, and the losses on the responses in the data."""
        losses = self.losses(examples)
        return (losses.perplexity if self.writer is None else self(examples)), losses


@dataclass
class _TeacherSide:
    """The teacher and everything that depends on it; empty where the recipe has none."""

    teaching: Teaching | None = None
    first: Trainer | None = None
    """The training of the teacher's routers."""
    report: Callable[[], RouterReport | None] = lambda: None
    """Returns the report on the routers at the end."""
    metric: float | None = None
    """The teacher's own figure, where it uses another number of experts."""


def _teacher_side(run: DistillRun, student: Decoder, responses: Responses, group_size: int) -> _TeacherSide:
    options, prepared = run.options, run.prepared
    if prepared.teacher is None:
        return _TeacherSide()
    config, metric = prepared.teacher.config, None
    if options.teacher_experts is not None:
        config = config.with_experts_per_token(options.teacher_experts)
    decoder = Decoder(config, prepared.teacher.weights(prepared.dtype, options.device))
    old, examples = old_routers(decoder), prepared.measured or prepared.validation
    if options.teacher_experts is not None:
        metric = Measure(options, prepared, decoder, group_size)(examples)

    def report() -> RouterReport | None:
        return router_report(decoder, old, examples, group_size) if decoder.moe_blocks else None

    if options.teacher_cache is None:
        teaching = ResponseTeacher(decoder, options.row, options.augmentation, responses.clock)
        if not options.row.trains_router:
            return _TeacherSide(teaching, report=report, metric=metric)
        gates = teaching.gates(torch.Generator())

        def report_with_drift() -> RouterReport:
            drift = router_drift(decoder, old, examples, group_size, gates)
            return replace(router_report(decoder, old, examples, group_size), drift=drift)

        return _TeacherSide(teaching, _router_trainer(options, prepared, decoder, student, responses), report_with_drift)
    cached = cached_teacher(
        decoder,
        prepared.training,
        run.work.path,
        responses.clock,
        group_size=group_size,
        count=options.cached_tokens,
        temperature=options.temperature,
        progress=run.bar("teacher's predictions (sequences)"),
    )
    # The teacher's body is released, so the report on its routers is made now and returned at the end.
    reported = report()
    prepared.teacher.release()
    return _TeacherSide(cached, report=lambda: reported, metric=metric)


def _router_trainer(
    options: DistillOptions, prepared: Distillable, teacher: Decoder, student: Decoder, responses: Responses
) -> Trainer:
    """Return the training of the teacher's router weights; its other weights are frozen."""
    loss = RouterLoss(teacher, student, responses, options.load_balance_weight, options.temperature)
    part = options.router_training(prepared.steps, prepared.limit, teacher.config.hidden_size)
    recompute_if_large(teacher, part.group_size * prepared.limit, every_expert=True)
    return RouterTrainer(router_parameters(teacher), loss, part, len(prepared.training), prepared.length)


def _make(run: DistillRun) -> Made:
    options, prepared, done = run.options, run.prepared, _train(run)
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
            *draw_routers(directory, str(options.teacher), done.routers),
        ],
    )


def _figures(options: DistillOptions, prepared: Distillable, done: Distilled) -> DistillationFigures:
    own: dict[str, Any] = {**figures(done.trainer)}
    first = done.trainer.first
    if first is not None:
        own["router"] = {"loss_first": first.history[0]["loss"], "loss_last": first.history[-1]["loss"]}
    drift = None if done.routers is None else done.routers.drift
    metric = METRICS[options.select_by]
    metrics = [*done.metrics, done.teacher_metric]
    if metric.writes:  # the minimized metric is 1 − ROUGE-L
        own[metric.history] = [[step, 1.0 - value] for step, value in own.pop("validation_perplexity")]
        metrics = [None if value is None else 1.0 - value for value in metrics]
    return cast(
        DistillationFigures,
        {
            "teacher": None if prepared.teacher is None else options.teacher,
            "recipe": options.recipe,
            "divergence": options.row.divergence,
            **own,
            "metric_name": options.select_by,
            "metric_before": metrics[0],
            "metric_after": metrics[1],
            "teacher_experts": options.teacher_experts,
            "teacher_metric": metrics[2],
            **before_and_after("response_perplexity", *done.losses, torch.arange(len(done.losses[0].summed_S))),
            "response_dtype": done.response_dtype,
            "time_share": done.clock.shares,
            "teacher_unselected_share_per_layer": list(done.routers.unselected.values()) if done.routers else None,
            "router_divergence_per_layer": list(done.routers.moved.values()) if drift and done.routers else None,
            "router_drift_mean_per_layer": list(drift.mean.values()) if drift else None,
            "router_drift_max_per_layer": list(drift.largest.values()) if drift else None,
            **prepared.counts,
            "examples": len(prepared.measured or prepared.validation),
            **({} if prepared.evaluation is None else {"evaluation": prepared.evaluation}),
        },
    )


def _card(options: DistillOptions, own: DistillationFigures) -> list[str]:
    whom = "on the text alone" if not options.row.needs_teacher else f"from `{options.teacher}`"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in own["time_share"].items())
    return [
        f"Distilled {whom} by recipe `{options.recipe}`: {own['steps']} steps, loss {own['loss_first']:.3f} to",
        f"{own['loss_last']:.3f}; {own['metric_name']} of responses from {own['metric_before']:.3f} to",
        f"{own['metric_after']:.3f}.",
        f"Time: {shares}.",
        "",
    ]
