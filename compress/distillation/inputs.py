"""Checked inputs of `compress distill`: teacher, student and data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor

from calibrate.batches import training_text
from calibrate.instructions import (
    Example,
    ExampleMaker,
    Instructions,
    instructions,
    instructions_of,
    is_instructions,
)
from calibrate.options import CalibrationOptions
from compress.distillation.recipes import METRICS, Recipe
from compress.distillation.rouge import scorer
from compress.options.distill import EXACT, DistillOptions
from compress.options.training import TEXT_STEPS
from compress.run.job import Prepared, check_plain, prepare, teacher_identity
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import check_same_tokens, load_tokenizer
from engine.errors import OptionError
from engine.families.layer_config import MoeConfig
from engine.passes import processes

COUNTS = ("rows_left_out", "prompts_left_out", "prompts_cut", "responses_cut")
"""Fields of Instructions that the figures of a run add up."""


@dataclass
class Distillable(Prepared):
    """Inputs that have passed all checks."""

    teacher: Checkpoint | None
    training: Sequence[Example]
    validation: Sequence[Example]
    measured: Sequence[Example]
    """Held-out examples for the figures before and after."""
    steps: int
    limit: int
    """Maximum number of tokens of prompt and response together."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    """Numbers of rows, prompts and responses that are not used as they are, by the names in COUNTS."""
    evaluation: str | None = None
    """Description of the prompts with responses in `measured`; None for text."""

    @property
    def texts(self) -> dict[str, Tensor]:
        """Return every text that the result depends on, the training text included."""
        own = {"training": self.training, "validation": self.validation, "measured": self.measured}
        return super().texts | {name: _flat(examples) for name, examples in own.items()}

    @property
    def models(self) -> dict[str, str]:
        """Return the identity of the student and the teacher."""
        return super().models | teacher_identity(self.teacher)

    @property
    def length(self) -> int:
        """Number of tokens of the longest training sequence."""
        if isinstance(self.training, TextExamples) or not self.training:
            return self.limit
        return max(len(each.prompt) + len(each.response) for each in self.training)


class TextExamples(Sequence[Example]):
    """Text as prompts and responses: the first tokens of each sequence are the prompt, the others the response."""

    def __init__(self, tokens_SL: Tensor, prompt: int) -> None:
        self.tokens_SL, self.prompt = tokens_SL, prompt

    def __len__(self) -> int:
        return len(self.tokens_SL)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> TextExamples: ...
    def __getitem__(self, index: int | slice) -> Example | TextExamples:
        if isinstance(index, slice):
            return TextExamples(self.tokens_SL[index], self.prompt)
        tokens = self.tokens_SL[index].tolist()
        return Example(tokens[: self.prompt], tokens[self.prompt :])


def _flat(examples: Sequence[Example]) -> Tensor:
    """Return all tokens as one tensor, for a digest."""
    if isinstance(examples, TextExamples):
        return examples.tokens_SL
    return torch.tensor([token for each in examples for token in (*each.prompt, -1, *each.response, -2, *_others(each))])


def _others(example: Example) -> Iterator[int]:
    """Yield the bytes of all references but the first, which is the response."""
    return (byte for text in example.references[1:] for byte in (-3, *text.encode()))


def _teacher(options: DistillOptions) -> Checkpoint | None:
    return None if options.teacher is None or not options.row.needs_teacher else Checkpoint(resolve(options.teacher))


def identities(options: DistillOptions) -> dict[str, str]:
    """Return the identities of the models of a run, before anything else is read."""
    return Checkpoint(resolve(options.model)).identity() | teacher_identity(_teacher(options))


def prepare_distillation(options: DistillOptions) -> Distillable:
    """Open and check every input of the run, and write nothing. Raises a CompressError for invalid input."""
    student = Checkpoint(resolve(options.model))
    check_plain(student)
    teacher = _teacher(options)
    if teacher is not None:
        check_pair(teacher, student, options.row, options.recipe)
        check_teacher_experts(teacher, options.teacher_experts)
        if (options.cached_tokens or 0) >= teacher.config.vocabulary_size:
            raise OptionError(
                f"teacher-cache is {options.cached_tokens}, and the models have {teacher.config.vocabulary_size} tokens; "
                f"keep fewer of each prediction, or {EXACT}"
            )
    source = options.calibration.data
    if any(options.files.values()) or (source is not None and is_instructions(source)):
        return _of_instructions(options, student, teacher)
    if options.template is not None:
        raise OptionError("--prompt-template is for prompts with responses; give --data FILE.jsonl with both")
    if METRICS[options.select_by].writes:
        raise OptionError(
            "rouge-l compares responses to prompts; give --data FILE.jsonl with both, or --select-by perplexity"
        )
    prepared = prepare(options, student)
    steps = TEXT_STEPS if options.steps is None else options.steps
    wanted = steps * options.batch_size * processes.count()
    tokenizer = load_tokenizer(student)
    texts = training_text(prepared.calibration, tokenizer, wanted, options.validation_samples)
    length = texts[0].shape[1]
    if teacher is not None and length > teacher.config.max_positions:
        raise OptionError(f"sequence length is {length}; the teacher takes up to {teacher.config.max_positions}")
    prompt = max(1, min(options.limits.prompt, length // 2)) if options.row.student_writes else 1
    training, validation = TextExamples(texts[0], prompt), TextExamples(texts[1], 1)
    return Distillable(
        **vars(prepared),
        teacher=teacher,
        training=training,
        validation=validation,
        measured=() if prepared.held_out is None else TextExamples(prepared.held_out.tokens_SL, 1),
        steps=steps,
        limit=length,
    )


def check_pair(teacher: Checkpoint, student: Checkpoint, recipe: Recipe, name: str) -> None:
    """Raise OptionError unless the teacher and the student suit this recipe."""
    if recipe.needs_experts and not teacher.config.moe_layers:
        raise OptionError(f"{teacher.directory}: has no experts, and recipe {name} is about them; take kd or gkd")
    shapes = [(len(each.config.layers), each.config.hidden_size) for each in (teacher, student)]
    if recipe.matches_layers and shapes[0] != shapes[1]:
        raise OptionError(
            f"{teacher.directory} has {shapes[0][0]} layers of width {shapes[0][1]}, {student.directory} {shapes[1][0]} of "
            f"{shapes[1][1]}; recipe {name} compares them one by one, so take kd or a student of the teacher's shape"
        )
    check_same_tokens(teacher, student)


def check_teacher_experts(teacher: Checkpoint, count: int | None) -> None:
    """Raise OptionError unless a token of the teacher can use so many experts; None is the teacher's own number."""
    if count is None:
        return
    moes = [layer.moe for layer in teacher.config.layers if layer.moe is not None]
    if not moes:
        raise OptionError(f"{teacher.directory}: has no experts; leave out --teacher-experts")
    most = min(_reachable_experts(moe) for moe in moes)
    if count > most:
        raise OptionError(
            f"teacher-experts is {count}; a token of {teacher.directory} can use {most} in every layer, so give at most that"
        )


def _reachable_experts(moe: MoeConfig) -> int:
    """Return the number of experts from which a token's router chooses, at least."""
    if not moe.groups:
        return moe.experts
    return sum(sorted(Counter(moe.groups).values())[: moe.groups_per_token])


def _parts(options: DistillOptions, tokenizer: Any) -> dict[str, Instructions]:
    """Return the examples by split: all of a file where the options name one, else a part of the data, if there is any.

    A prompt that is too long is left out of the data and of the training file. The other files are used whole, so that it
    is cut.
    """
    maker = ExampleMaker(tokenizer, options.limits, options.template)
    data, calibration = options.calibration.data, options.calibration
    wanted = [split for split, file in options.files.items() if file is None]
    found = {} if data is None else instructions(data, maker, seed=calibration.seed, wanted=wanted)
    for split, count in (("validation", options.validation_samples), ("held-out", calibration.evaluation_samples)):
        if split in found:
            found[split].examples = found[split].examples[:count]
    for split, file in options.files.items():
        if file is not None:
            found[split] = instructions_of(file, replace(maker, keeps_long_prompts=split != "training"))
    return found


def _of_instructions(options: DistillOptions, student: Checkpoint, teacher: Checkpoint | None) -> Distillable:
    if options.calibration.evaluation_samples < 0:
        raise OptionError(f"--evaluation-samples is {options.calibration.evaluation_samples}; give 0 or more")
    if options.calibration.sequence_length is not None:
        raise OptionError("--sequence-length is for text, and the data are prompts with responses; give --max-length")
    seed, limits, tokenizer = options.calibration.seed, options.limits, load_tokenizer(student)
    limits.check(min(each.config.max_positions for each in (student, teacher) if each is not None))
    if METRICS[options.select_by].writes:
        scorer()
    found = _parts(options, tokenizer)
    training = found["training"].examples
    measured = found["held-out"].examples if "held-out" in found else []
    source = str(options.train or options.calibration.data)
    per_turn = min(options.batch_size * processes.count(), len(training))
    turns = math.ceil(options.epochs * len(training) / per_turn)
    steps = turns * options.training(1, 1, 1).steps_per_batch if options.steps is None else options.steps
    sample = [token for each in training for token in (*each.prompt, *each.response)][: 16 * limits.length]
    length = min(limits.length, len(sample))
    calibration = CalibrationOptions(source, len(sample) // length, length, options.calibration.evaluation_samples, seed)
    return Distillable(
        student,
        calibration,
        torch.tensor(sample[: len(sample) // length * length]).view(-1, length),
        None,
        None,
        options.dtype or student.model_dtype,
        teacher,
        training,
        found["validation"].examples,
        measured,
        steps,
        limits.length,
        {name: sum(getattr(own, name) for own in found.values()) for name in COUNTS},
        _measured_on(options, len(measured) or len(found["validation"])),
    )


def _measured_on(options: DistillOptions, count: int) -> str:
    """Return a description of the examples on which a run with prompts and responses is measured."""
    if options.test is not None:
        return f"{count} examples of {options.test}"
    if options.calibration.data is not None and options.calibration.evaluation_samples:
        return f"{count} held-out examples of {options.calibration.data}"
    return f"{count} validation examples of {options.validation or options.calibration.data}"
