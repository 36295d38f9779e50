"""Distillation into a student: a teacher's predictions on text or on responses, by recipes (Every Expert Matters)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.instructions import Example
from compress import processes
from compress.clock import Clock
from compress.dense_training import recompute_if_large
from compress.distill_inputs import Distillable, DistillOptions, prepare_distillation
from compress.job import Made
from compress.losses import head_loss
from compress.pictures import draw_routers, draw_training
from compress.plan import Plan, pruning_plan
from compress.response_distillation import ResponseLoss, Responses, ResponseTeacher, Teaching
from compress.responses import batch_of
from compress.result import carry_out, check_outputs, finished_before
from compress.rouge import rouge_l
from compress.router_report import RouterReport, old_routers, router_report
from compress.student_aware_routing import RouterLoss, RouterTrainer, router_parameters
from compress.teacher_cache import CachedTeacher, cached_teacher
from compress.training import Trainer, figures
from compress.work_directory import WorkDirectory
from engine.checkpoint import Checkpoint, end_tokens, load_tokenizer
from engine.model import Decoder
from engine.parameters import parameters_on_disk
from engine.progress import Progress, no_progress
from engine.sampling import SamplingOptions


def distill(options: DistillOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Run the job; the figures of the result, with the keys of `compress distill --json`.

    One of several processes (processes.py) takes part in the training; the first does all else, and has the figures alone.
    """
    started = time.monotonic()
    options.check()
    work = WorkDirectory(options.output)
    if not processes.is_first():
        prepared = prepare_distillation(options)
        if processes.told() is not None:
            _train(options, prepared, work, no_progress)
        return {}
    if (done := finished_before(options, work)) is not None:
        processes.told()
        return done
    check_outputs(options)
    prepared = prepare_distillation(options)
    for checkpoint in (prepared.checkpoint, prepared.teacher):
        if checkpoint is not None:
            checkpoint.check_finite(lambda names: progress(names, "checking weights"))
    return carry_out(options, prepared, work, lambda: _make(options, prepared, work, progress), progress, started)


@dataclass
class Distilled:
    """What training gave."""

    tensors: dict[str, Tensor]
    trainer: Trainer
    clock: Clock
    metric_before: float
    metric_after: float
    routers: RouterReport | None = None
    """Of a teacher with experts."""


def _train(options: DistillOptions, prepared: Distillable, work: WorkDirectory, progress: Progress) -> Distilled:
    clock, config = Clock(), prepared.checkpoint.config
    student = Decoder(config, prepared.checkpoint.source(prepared.dtype, "cpu" if options.shard else options.device))
    if options.shard:
        processes.shard(student, options.device)
    longest = prepared.limit if options.row.student_writes else prepared.length
    part = options.training(prepared.steps, longest, config.hidden_size)
    recompute_if_large(student, part.group_size * longest)
    ends = end_tokens(prepared.checkpoint)
    writer = student if options.row.student_writes else None
    responses = Responses(prepared.training, clock, writer, prepared.limit, ends)
    measured = prepared.measured or prepared.validation
    teacher: Teaching | None = None
    decoder, first, report = None, None, None
    if prepared.teacher is not None:
        decoder = Decoder(prepared.teacher.config, prepared.teacher.source(prepared.dtype, options.device))
        old = old_routers(decoder)
        if options.row.trains_router:
            first = _router_trainer(options, prepared, decoder, student, responses)
        teacher = ResponseTeacher(decoder, options.row, options.augmentation, clock)
        if options.teacher_cache is not None:
            teacher = _from_cache(options, prepared, decoder, work, part.group_size, clock, progress)
            report, decoder = _report(decoder, old, measured, part.group_size), None
            prepared.teacher.release()
    loss = ResponseLoss(student, teacher, responses, options.row, options.temperature)
    trainer = Trainer(parameters_on_disk(student), loss, part, len(prepared.training), prepared.length, first)

    tokenizer = load_tokenizer(prepared.checkpoint) if options.select_by == "rouge-l" else None

    def measure(examples: Sequence[Example]) -> float:
        """Lower is better."""
        if tokenizer is not None:
            value = 1.0 - rouge_l(student, tokenizer, examples, prepared.limit, ends, sampling=SamplingOptions())
        else:
            value = response_perplexity(student, examples, part.group_size)
        processes.let_go(student)
        return value

    before = measure(measured)

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
    if decoder is not None:
        report = _report(decoder, old, measured, part.group_size)
    return Distilled(tensors, trainer, clock, before, measure(measured), report)


def _report(
    teacher: Decoder, old: Mapping[int, Sequence[Tensor]], examples: Sequence[Example], group_size: int
) -> RouterReport | None:
    return router_report(teacher, old, examples, group_size) if teacher.moe_blocks else None


def _from_cache(
    options: DistillOptions,
    prepared: Distillable,
    decoder: Decoder,
    work: WorkDirectory,
    group_size: int,
    clock: Clock,
    progress: Progress,
) -> CachedTeacher:
    return cached_teacher(
        decoder,
        prepared.training,
        work.path,
        clock,
        group_size=group_size,
        count=options.cached_tokens,
        temperature=options.temperature,
        progress=lambda rows: progress(rows, "teacher's predictions (sequences)"),
    )


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

        total += float(head_loss(hidden_TD, decoder.head_VD, measure))
        count += len(targets_T)
    return math.exp(min(total / count, 700.0)) if math.isfinite(total) else math.nan


def same_plan(checkpoint: Checkpoint) -> Plan:
    """Every expert stays."""
    return pruning_plan({layer: range(experts) for layer, experts in checkpoint.config.experts_by_layer.items()})


def _make(options: DistillOptions, prepared: Distillable, work: WorkDirectory, progress: Progress) -> Made:
    processes.told(True)
    done = _train(options, prepared, work, progress)
    own = _figures(options, prepared, done)
    history = {options.recipe: (done.trainer.history, done.trainer.validations)}
    return Made(
        same_plan(prepared.checkpoint),
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
    return {
        "teacher": None if prepared.teacher is None else options.teacher,
        "recipe": options.recipe,
        "divergence": options.row.divergence,
        **own,
        "metric_name": options.select_by,
        "metric_before": 1.0 - done.metric_before if by_rouge else done.metric_before,
        "metric_after": 1.0 - done.metric_after if by_rouge else done.metric_after,
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
