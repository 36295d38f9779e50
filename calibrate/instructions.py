"""Prompts with responses for decoders: the data of distillation and its evaluation.

A source is a .jsonl file with the keys `instruction`, `input` and `output`, or `messages` (the last message is the
response), or `source` and `target`. Prompts are laid out in sections, as text.py lays out whole rows, unless a template
is given. The response follows and ends with the end token. Each example belongs to one split, which never changes
(pairs.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.options import Limits
from calibrate.pairs import TextPair, text_pairs
from calibrate.text import row_sections
from engine.errors import DataError, OptionError

PLACEHOLDER = "{prompt}"
SPLITS = ("training", "validation", "held-out")


@dataclass(frozen=True)
class Example:
    """One prompt and its response as token ids; each has at least one token."""

    prompt: list[int]
    response: list[int]


@dataclass
class Instructions:
    """The examples of one split."""

    examples: list[Example] = field(default_factory=list)
    prompts_left_out: int = 0
    """Number of prompts that were longer than the limit."""
    responses_cut: int = 0

    def __len__(self) -> int:
        return len(self.examples)


def is_instructions(source: str) -> bool:
    """Whether the first row of a source has a prompt and a response; otherwise the source is text."""
    path = Path(source).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            row = json.loads(next((line for line in file if line.strip()), ""))
    except (OSError, ValueError, RecursionError):
        return False  # reading the source as text reports the error
    return isinstance(row, dict) and "text" not in row


def instructions(
    source: str, tokenizer: Any, limits: Limits, *, template: str | None = None, seed: int = 0
) -> dict[str, Instructions]:
    """Return the examples by split. Raises DataError for malformed rows, and where a split has no example left.

    template: the layout of the prompt, which contains `{prompt}`.
    """
    if template is not None and PLACEHOLDER not in template:
        raise OptionError(f"the prompt template has no {PLACEHOLDER}; put it where the prompt belongs")
    made = {split: Instructions() for split in SPLITS}
    for split, pairs in text_pairs(source, seed, _asked).items():
        # nothing is calibrated, so the calibration split joins the training split
        own = made.get(split, made["training"])
        for asked, response in pairs:
            prompt = _prompt(json.loads(asked), template)
            _add(own, _ids(tokenizer, prompt), _ids(tokenizer, response), tokenizer.eos_token_id, limits)
    for split, own in made.items():
        if not own.examples:
            longer = f"; {own.prompts_left_out} have prompts longer than {limits.prompt} tokens"
            raise DataError(
                f"{source}: its {split} part has no example{longer if own.prompts_left_out else ''}; give more, or raise "
                "--max-prompt-length"
            )
    return made


def _add(own: Instructions, prompt: list[int], response: list[int], end: int | None, limits: Limits) -> None:
    if not prompt:
        raise DataError("the tokenizer gives no tokens for a prompt; leave that row out")
    if len(prompt) > limits.prompt:
        own.prompts_left_out += 1
        return
    whole = response + ([] if end is None else [end])
    room = limits.length - len(prompt)
    own.responses_cut += len(whole) > room
    own.examples.append(Example(prompt, whole[:room]))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _asked(row: dict[str, Any], where: str) -> TextPair:
    """Return the pair (question, answer) that decides the split of a row.

    The question is all sections but the last and the title of the last one, as JSON; the answer is the content of the
    last. The split of an example therefore does not depend on the layout of its prompt.
    """
    *asked, (title, response) = row_sections(row, where)
    prompted = any(content.strip() for _, content in asked)
    if not prompted or not response.strip():
        raise DataError(f"{where}: has no {'response' if prompted else 'prompt'}; give rows with both")
    return json.dumps([*asked, [title, ""]]), response


def _prompt(sections: list[list[str]], template: str | None) -> str:
    """Return the prompt up to the response, laid out as text.py lays out rows, or by a template."""
    if template is not None:
        return template.replace(PLACEHOLDER, "\n".join(content for _, content in sections[:-1]))
    return "\n\n".join(f"### {name}:\n{content}" for name, content in sections)
