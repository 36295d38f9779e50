"""Prompts with responses for decoders: the data of distillation and its evaluation.

A source is a file of rows of any form of rows.py. Prompts are laid out in sections, as in the text of such rows, unless a
template is given. The response follows and ends with the end token. A source is used whole, in its order, or split: each
example then belongs to one split, which never changes (pairs.py). Rows without a prompt or a response, which published data
sets have, are left out and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.options import Limits
from calibrate.pairs import by_split, half_of
from calibrate.rows import TEXT_FIELD, Row, first_object, form_of, has_rows, read_objects, read_row
from engine.errors import DataError, OptionError

PLACEHOLDER = "{prompt}"
SPLITS = ("training", "validation", "held-out")
WHOLE = "all"
"""Name of the split that has every row."""


@dataclass(frozen=True)
class Example:
    """One prompt and its response as token ids; each has at least one token."""

    prompt: list[int]
    response: list[int]
    references: tuple[str, ...] = ()
    """Alternative responses as text, none of them cut; the first is `response`. Empty for text without prompts."""


@dataclass
class Instructions:
    """Examples, and the numbers of those that were left out or cut."""

    examples: list[Example] = field(default_factory=list)
    prompts_left_out: int = 0
    """Number of prompts that were longer than the limit, and left out."""
    prompts_cut: int = 0
    """Number of prompts that were longer than the limit, and cut to it."""
    responses_cut: int = 0
    rows_left_out: int = 0
    """Number of rows without a prompt or a response."""
    rows: int = 0
    """Number of rows of the source that have both, in all parts of it."""

    def __len__(self) -> int:
        return len(self.examples)


def is_instructions(source: str) -> bool:
    """Whether the first row of a source has a prompt and a response; otherwise the source is text.

    The rows of a .jsonl file without `text` are meant as prompts and responses even if their form is unknown.
    """
    path = Path(source).expanduser()
    if not has_rows(path):
        return False
    row = first_object(path)
    return isinstance(row, dict) and TEXT_FIELD not in row and (path.suffix == ".jsonl" or form_of(row) is not None)


@dataclass(frozen=True)
class ExampleMaker:
    """Makes examples from rows."""

    tokenizer: Any
    limits: Limits
    template: str | None = None
    """Layout of the prompt, which contains `{prompt}`."""
    keeps_long_prompts: bool = False
    """Whether longer prompts are cut to their first tokens, as MiniLLM evaluates them; otherwise they are left out."""

    def __post_init__(self) -> None:
        if self.template is not None and PLACEHOLDER not in self.template:
            raise OptionError(f"the prompt template has no {PLACEHOLDER}; put it where the prompt belongs")

    def examples(self, rows: Iterable[Row], name: str) -> Instructions:
        """Return the examples of all rows. Raises DataError where none is left; `name` is what the rows are, for errors."""
        made = Instructions()
        for row in rows:
            self._add(row, made)
        if not made.examples:
            longer = f"; {made.prompts_left_out} have prompts longer than {self.limits.prompt} tokens"
            raise DataError(
                f"{name} has no example{longer if made.prompts_left_out else ''}; give more, or raise --max-prompt-length"
            )
        return made

    def _add(self, row: Row, made: Instructions) -> None:
        prompt = self._ids(row.prompt if self.template is None else self.template.replace(PLACEHOLDER, row.contents))
        if not prompt:
            raise DataError("the tokenizer gives no tokens for a prompt; leave that row out")
        if len(prompt) > self.limits.prompt:
            if not self.keeps_long_prompts:
                made.prompts_left_out += 1
                return
            made.prompts_cut += 1
            prompt = prompt[: self.limits.prompt]
        end = self.tokenizer.eos_token_id
        response = self._ids(row.response) + ([] if end is None else [end])
        room = self.limits.length - len(prompt)
        made.responses_cut += len(response) > room
        made.examples.append(Example(prompt, response[:room], row.responses))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def read_rows(source: str) -> tuple[list[Row], int]:
    """Return the rows of a source that have a prompt and a response, and the number of other rows.

    Raises DataError for an unreadable source, a malformed row, and where no row has both.
    """
    path = Path(os.path.expanduser(source))
    if not has_rows(path):
        raise DataError(f"{source}: is no file of prompts with responses; give a .jsonl or .json file, or a folder of .json")
    rows, left_out, first = [], 0, ""
    for found, where in read_objects(path):
        row = read_row(found, where)
        if row.missing is None:
            rows.append(row)
        else:
            left_out += 1
            first = first or f"{where}: has no {row.missing}"
    if not rows:
        raise DataError(f"{first or f'{source}: holds no row'}; give rows with a prompt and a response")
    return rows, left_out


def instructions(
    source: str, maker: ExampleMaker, *, seed: int = 0, wanted: Sequence[str] = SPLITS
) -> dict[str, Instructions]:
    """Return the examples of the wanted splits, by split.

    Raises DataError for malformed rows, and where one of the splits has no example left.
    """
    rows, left_out = read_rows(source)
    splits = by_split(rows, source, seed, lambda row: row.question)
    # nothing is calibrated, so the calibration split joins the training split
    splits["training"] = splits.pop("calibration") + splits["training"]
    made = {split: maker.examples(splits[split], f"{source}: its {split} part") for split in wanted}
    made[wanted[0]].rows_left_out = left_out
    return made


def instructions_of(source: str, maker: ExampleMaker, split: str = WHOLE, *, seed: int = 0) -> Instructions:
    """Return the examples of one part of a source: every row in the source's order, or the held-out part, or the others.

    split: `all`, `held-out` or one of its halves `selection` and `report`, or `calibration` for everything that is not held
    out.
    """
    rows, left_out = read_rows(source)
    count = len(rows)
    if split != WHOLE:
        splits = by_split(rows, source, seed, lambda row: row.question)
        held_out = splits.pop("held-out")
        if split == "calibration":
            rows = [row for own in splits.values() for row in own]
        else:
            rows = [row for row in held_out if split in ("held-out", half_of(row.question))]
    made = maker.examples(rows, source if split == WHOLE else f"{source}: its {split} part")
    made.rows_left_out, made.rows = left_out, count
    return made
