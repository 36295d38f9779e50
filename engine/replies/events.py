"""The parts of a reply, as parsers give them, in the order of the text."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Text:
    """Content of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """Beginning of a call of a tool. Its arguments follow, and then CallEnded."""

    name: str
    call_id: str = ""
    """The model's own id of the call; empty if its form has none."""


@dataclass(frozen=True)
class Arguments:
    """The next piece of a call's arguments, which together are a JSON object."""

    text: str


@dataclass(frozen=True)
class CallEnded:
    """End of a call."""


Event = Text | Thought | CallBegun | Arguments | CallEnded
Result = TypeVar("Result")
Steps = Generator[Event | None, None, Result]
"""A parser's work: it yields events, and None where it needs more text."""
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments of each tool, by the tool's name."""


class MalformedError(Exception):
    """The text is not in the form that a parser reads. It becomes content."""
