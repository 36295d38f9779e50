"""One reply of a model, taken apart as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.replies.events import CallBegun, Event, Steps, Text
from engine.replies.source import Parser, Source
from engine.replies.table import NONE, REASONING_FORMS, TOOL_FORMS, call_id


@dataclass(frozen=True)
class ReplyForm:
    """How the replies to a request are taken apart. All of it is JSON, for another process."""

    tools: str = NONE
    """Name of the form of calls; NONE leaves calls in the content."""
    reasoning: str = NONE
    """Name of the form of reasoning; NONE leaves it in the content."""
    inside: bool = False
    """Whether the reply begins with reasoning whose opening is in the prompt."""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments of each tool, by the tool's name."""
    parallel: bool = True
    """Whether a reply may have more than one call; otherwise the first counts."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of special tokens that the parsers need."""
        tools, reasoning = TOOL_FORMS.get(self.tools), REASONING_FORMS.get(self.reasoning)
        return tuple(dict.fromkeys((*(tools.marks if tools else ()), *(reasoning.marks if reasoning else ()))))

    @property
    def new_id(self) -> Callable[[], str]:
        """Maker of ids for calls without an id."""
        form = TOOL_FORMS.get(self.tools)
        return form.new_id if form else call_id


class Reply:
    """The parsers of one reply: reasoning first, then calls in what is left.

    White space before the first content is left out if calls follow it.
    """

    def __init__(self, form: ReplyForm) -> None:
        self._reasoning = self._tools = Parser(_passed)
        if reasoning := REASONING_FORMS.get(form.reasoning):
            inside = form.inside or reasoning.begins_inside
            self._reasoning = Parser(lambda source: reasoning.parse(source, inside))
        if tools := TOOL_FORMS.get(form.tools):
            self._tools = Parser(lambda source: tools.parse(source, form.schemas))
        self._space = ""
        self._said = False

    def feed(self, text: str) -> list[Event]:
        """Return what a piece of text decides."""
        return self._through(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        """Return what is left when no more text comes."""
        events = self._through(self._reasoning.finish())
        events += self._content(self._tools.finish())
        return [*events, Text(self._space)] if self._space else events

    def _through(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._content(self._tools.feed(event.text)) if isinstance(event, Text) else [event]
        return found

    def _content(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if isinstance(event, CallBegun):
                self._space = ""
            if isinstance(event, Text) and not self._said:
                self._space += event.text
                if not self._space.strip():
                    continue
                event, self._space, self._said = Text(self._space), "", True
            found.append(event)
        return found


def _passed(source: Source) -> Steps[None]:
    yield from source.text_until()
