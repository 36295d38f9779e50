"""What `compress distill` starts from: its options, and a pair of models with data that were found to be good."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch
from torch import Tensor

from calibrate.instructions import Example, Instructions, Limits, instructions, is_instructions
from calibrate.options import CalibrationOptions, training_text
from compress.dense.dense_training import TEXT_STEPS, good_rate, warm_up_steps
from compress.distillation.recipes import RECIPES, Recipe
from compress.distillation.response_distillation import KnowledgeAugmentation
from compress.distillation.rouge import scorer
from compress.run.job import JobOptions, Prepared, check_plain, prepare, teacher_identity
from compress.training.divergences import DIVERGENCES
from compress.training.training import TrainingOptions
from engine.checkpoint.checkpoint import Checkpoint, resolve
from engine.checkpoint.tokenizer import check_same_tokens, load_tokenizer
from engine.errors import OptionError
from engine.passes import processes
from engine.passes.memory_budget import sequences_per_batch

METRICS = ("perplexity", "rouge-l")
EXACT = "exact"
"""The teacher's predictions are kept as they are."""
CARE = 0.25
"""How much lower than densify's a learning rate must be where the student is near its teacher already (docs/LOG.md)."""


def careful_rate(hidden_size: int) -> float:
    """A quarter over the hidden size."""
    return CARE * good_rate(hidden_size)


@dataclass(frozen=True, kw_only=True)
class DistillOptions(JobOptions):
    """One run of `compress distill`; `model` is the student."""

    method: str = "distill"
    teacher: str | None = None
    """None only where the recipe has none."""
    recipe: str = "kd"
    divergence: str | None = None
    """A key of DIVERGENCES; None for the recipe's own."""
    steps: int | None = None
    """None for `epochs` of prompts and responses, TEXT_STEPS on text."""
    epochs: int = 10
    learning_rate: float | None = None
    """Of AdamW, at its highest; None for `careful_rate`."""
    router_learning_rate: float = 1e-5
    """Of the teacher's routers, where the recipe trains them."""
    load_balance_weight: float = 0.01
    """β of L_b."""
    temperature: float = 1.0
    """Divides the logits of both before they are compared."""
    teacher_cache: str | None = None
    """Keeps the teacher's predictions on disk: EXACT, or as a number how many tokens of each. None runs it each time."""
    augmentation: KnowledgeAugmentation = field(default_factory=KnowledgeAugmentation)
    limits: Limits = field(default_factory=Limits)
    template: str | None = None
    batch_size: int = 16
    micro_batch_size: int | None = None
    clip_norm: float = 1.0
    select_by: str = "perplexity"
    """Of the responses, on data set aside: "perplexity", or "rouge-l" of those that the student writes."""
    validation_samples: int = 64
    validate_every: int = 50
    save_every: int = 50
    shard: bool = False

    def check(self) -> None:
        """Raise OptionError for what no training can use."""
        if self.shard:
            processes.check_several()
        if self.recipe not in RECIPES:
            raise OptionError(f"recipe is {self.recipe!r}; it must be one of {', '.join(RECIPES)}")
        if self.divergence is not None and RECIPES[self.recipe].divergence is None:
            raise OptionError(f"recipe {self.recipe} compares no predictions; leave out --divergence")
        if self.divergence is not None and self.divergence not in DIVERGENCES:
            raise OptionError(f"divergence is {self.divergence!r}; it must be one of {', '.join(DIVERGENCES)}")
        if self.teacher is None and self.row.needs_teacher:
            raise OptionError(f"recipe {self.recipe} has a teacher; give --teacher, or --recipe sft for none")
        if not 0.0 < self.temperature < math.inf or not 0.0 <= self.load_balance_weight < math.inf:
            raise OptionError("temperature must be above 0, and load-balance-weight at least 0")
        if self.teacher_cache is not None:
            self._check_cache()
        own = self.augmentation
        if own.samples < 1 or not 0.0 <= own.probability <= 1.0:
            raise OptionError("ka-samples must be at least 1, and ka-probability from 0 to 1")
        if self.select_by not in METRICS:
            raise OptionError(f"select-by is {self.select_by!r}; it must be one of {', '.join(METRICS)}")
        if self.validation_samples < 1 or self.validate_every < 1:
            raise OptionError("validation-samples and validate-every must be at least 1: the best state is what is kept")
        self.training(1, 1, 1).check()
        if self.row.trains_router:
            self.router_training(1, 1, 1).check()

    def _check_cache(self) -> None:
        if not self.row.repeats_itself:
            raise OptionError(
                f"recipe {self.recipe} has no teacher's predictions that are the same in every epoch; leave out "
                "--teacher-cache, or take kd"
            )
        if self.teacher_cache != EXACT and not re.fullmatch("[1-9][0-9]{0,8}", str(self.teacher_cache)):
            raise OptionError(
                f"teacher-cache is {self.teacher_cache!r}; it must be {EXACT}, or a number from 1: the tokens kept of each "
                "prediction"
            )

    @property
    def cached_tokens(self) -> int | None:
        """Kept of each of the teacher's predictions; None where it is kept as it is, or none is."""
        return None if self.teacher_cache in (None, EXACT) else int(str(self.teacher_cache))

    @property
    def row(self) -> Recipe:
        """Of the table, with the divergence that was asked for."""
        row = RECIPES[self.recipe]
        return row if self.divergence is None else replace(row, divergence=self.divergence)

    def training(self, steps: int, length: int, hidden_size: int) -> TrainingOptions:
        """Of the student, on sequences of about `length` tokens."""
        turn = self.augmentation.samples if self.row.gate == "sampled" else 1
        return TrainingOptions(
            steps,
            careful_rate(hidden_size) if self.learning_rate is None else self.learning_rate,
            self.batch_size,
            self.micro_batch_size or sequences_per_batch(length),
            warm_up_steps=warm_up_steps(steps),
            clip_norm=self.clip_norm,
            seed=self.calibration.seed,
            save_every=turn * max(1, self.save_every // turn),
            validate_every=self.validate_every,
            steps_per_batch=turn,
        )

    def router_training(self, steps: int, length: int, hidden_size: int) -> TrainingOptions:
        """Of the teacher's routers, a step before each of the student's."""
        return replace(self.training(steps, length, hidden_size), learning_rate=self.router_learning_rate, validate_every=0)


@dataclass
class Distillable(Prepared):
    """Inputs that were found to be good."""

    teacher: Checkpoint | None
    training: Sequence[Example]
    validation: Sequence[Example]
    measured: Sequence[Example]
    """Held-out; of the figures before and after."""
    steps: int
    limit: int
    """Tokens of prompt and response together."""
    prompts_left_out: int = 0
    responses_cut: int = 0

    @property
    def texts(self) -> dict[str, Tensor]:
        """With the training's."""
        own = {"training": self.training, "validation": self.validation, "measured": self.measured}
        return super().texts | {name: _flat(examples) for name, examples in own.items()}

    @property
    def models(self) -> dict[str, str]:
        """With the teacher's."""
        return super().models | teacher_identity(self.teacher)

    @property
    def length(self) -> int:
        """Tokens of the longest training sequence."""
        if isinstance(self.training, TextExamples) or not self.training:
            return self.limit
        return max(len(each.prompt) + len(each.response) for each in self.training)


class TextExamples(Sequence[Example]):
    """Text as prompts and responses: each sequence's first tokens, and what follows them."""

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
    """For a digest."""
    if isinstance(examples, TextExamples):
        return examples.tokens_SL
    return torch.tensor([token for each in examples for token in (*each.prompt, -1, *each.response, -2)])


def _teacher(options: DistillOptions) -> Checkpoint | None:
    return None if options.teacher is None or not options.row.needs_teacher else Checkpoint(resolve(options.teacher))


def identities(options: DistillOptions) -> dict[str, str]:
    """What tells the models of a run from others, before anything else is read."""
    return Checkpoint(resolve(options.model)).identity() | teacher_identity(_teacher(options))


def prepare_distillation(options: DistillOptions) -> Distillable:
    """Open and check every input that the run will need; nothing is written. Raises a CompressError for bad input."""
    student = Checkpoint(resolve(options.model))
    check_plain(student)
    teacher = _teacher(options)
    if teacher is not None:
        check_pair(teacher, student, options.row, options.recipe)
        if (options.cached_tokens or 0) >= teacher.config.vocabulary_size:
            raise OptionError(
                f"teacher-cache is {options.cached_tokens}, and the models have {teacher.config.vocabulary_size} tokens; "
                f"keep fewer of each prediction, or {EXACT}"
            )
    source = options.calibration.data
    if source is not None and is_instructions(source):
        return _of_instructions(options, student, teacher, source)
    if options.template is not None:
        raise OptionError("--prompt-template is for prompts with responses; give --data FILE.jsonl with both")
    if options.select_by == "rouge-l":
        raise OptionError("rouge-l is of responses to prompts; give --data FILE.jsonl with both, or --select-by perplexity")
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
        measured=() if prepared.held_out_SL is None else TextExamples(prepared.held_out_SL, 1),
        steps=steps,
        limit=length,
    )


def check_pair(teacher: Checkpoint, student: Checkpoint, recipe: Recipe, name: str) -> None:
    """Raise OptionError unless the one can teach the other by this recipe."""
    if recipe.needs_experts and not teacher.config.moe_layers:
        raise OptionError(f"{teacher.directory}: has no experts, and recipe {name} is about them; take kd or gkd")
    shapes = [(len(each.config.layers), each.config.hidden_size) for each in (teacher, student)]
    if recipe.matches_layers and shapes[0] != shapes[1]:
        raise OptionError(
            f"{teacher.directory} has {shapes[0][0]} layers of width {shapes[0][1]}, {student.directory} {shapes[1][0]} of "
            f"{shapes[1][1]}; recipe {name} compares them one by one, so take kd or a student of the teacher's shape"
        )
    check_same_tokens(teacher, student)


def _of_instructions(options: DistillOptions, student: Checkpoint, teacher: Checkpoint | None, source: str) -> Distillable:
    if options.calibration.evaluation_samples < 0 or options.calibration.sequence_length is not None:
        raise OptionError(
            "evaluation-samples must not be negative, and --sequence-length is for text: --max-length is that of responses"
        )
    seed, limits, tokenizer = options.calibration.seed, options.limits, load_tokenizer(student)
    limits.check(min(each.config.max_positions for each in (student, teacher) if each is not None))
    if options.select_by == "rouge-l":
        scorer()
    found: dict[str, Instructions] = instructions(source, tokenizer, limits, template=options.template, seed=seed)
    training = found["training"].examples
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
        found["validation"].examples[: options.validation_samples],
        found["held-out"].examples[: options.calibration.evaluation_samples],
        steps,
        limits.length,
        sum(own.prompts_left_out for own in found.values()),
        sum(own.responses_cut for own in found.values()),
    )
