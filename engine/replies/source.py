"""The text of a reply as parsers read it: it comes in pieces, and whoever needs more text waits for it.

A parser is a generator over a Source. It yields events as soon as the text so far decides them, and None to wait:

    def steps(source: Source) -> Steps[None]:
        while (yield from source.text_until("<tool_call>")):
            source.mark("<tool_call>")
            try:
                ...  # reads the call, and raises MalformedError where the text has another form
            except MalformedError:
                yield from source.give_back()  # what was read since the mark becomes content, or is read again
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.replies.events import Event, MalformedError, Steps, Text, Thought

MOST_NAME = 128
"""Characters of the longest name of a tool or parameter that is waited for."""
MOST_MALFORMED = 50
"""Malformed calls in a reply after which all of it is content: each is read again, which takes time."""
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[\w.:/-]*")


class Source:
    """The unread text of a reply. Methods that may have to wait are generators."""

    def __init__(self) -> None:
        self.unread = ""
        self.ended = False
        """Whether no more text will come."""
        self._since: str | None = None
        """Text that was read since the mark; None without a mark."""
        self._malformed = 0
        self._opening = 0
        """How much of it becomes content if it is given back."""

    def take(self, count: int) -> str:
        """Return the next characters, which must have come, and move on."""
        taken, self.unread = self.unread[:count], self.unread[count:]
        if self._since is not None:
            self._since += taken
        return taken

    def mark(self, opening: str, *, again: bool = False) -> None:
        """Remember an opening that was just read, and all that is read after it. again: the opening is to be read again."""
        self._since, self._opening = opening, len(opening)
        if again:
            self._since, self.unread = "", opening + self.unread

    def commit(self) -> None:
        """Forget what was read since the mark: it has become a call. A later `give_back` begins here."""
        self._since, self._opening = "", 0

    def give_back(self) -> Steps[None]:
        """Make the opening content, and all that was read after it unread again."""
        self._malformed += 1
        text, self._since = (self._since or "") + self.unread, None
        self.unread = text[self._opening :]
        if self._opening:
            yield Text(text[: self._opening])

    def more(self) -> Steps[None]:
        """Wait for more text. Raises MalformedError if none will come."""
        if self.ended:
            raise MalformedError
        yield None

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        while not self.unread and not self.ended:
            yield None
        return self.unread[:1]

    def space(self) -> Steps[None]:
        """Skip white space."""
        while True:
            found = _SPACE.match(self.unread)
            assert found is not None
            self.take(found.end())
            if self.unread or self.ended:
                return
            yield None

    def starts(self, *marks: str) -> Steps[str]:
        """Read the mark that comes next and return it; empty if none of them does."""
        while True:
            for mark in marks:
                if self.unread.startswith(mark):
                    return self.take(len(mark))
            if self.ended or not any(mark.startswith(self.unread) for mark in marks):
                return ""
            yield None

    def comes(self, mark: str) -> Steps[str]:
        """Return the mark if it comes next, without reading it; empty if it does not."""
        while mark.startswith(self.unread) and self.unread != mark and not self.ended:
            yield None
        return mark if self.unread.startswith(mark) else ""

    def expect(self, *marks: str) -> Steps[str]:
        """Read one of the marks after white space and return it. Raises MalformedError if none comes next."""
        yield from self.space()
        found = yield from self.starts(*marks)
        if not found:
            raise MalformedError
        return found

    def word(self) -> Steps[str]:
        """Return a name of letters, digits and `_ . : / -` after white space. Raises MalformedError if there is none."""
        yield from self.space()
        while True:
            found = _WORD.match(self.unread)
            assert found is not None
            if found.end() > MOST_NAME:
                raise MalformedError
            if found.end() < len(self.unread) or self.ended:
                break
            yield None
        if not found.end():
            raise MalformedError
        return self.take(found.end())

    def until(self, mark: str, most: int | None = None) -> Steps[str]:
        """Return the text before a mark and read both. Raises MalformedError if none comes within `most` characters."""
        searched = 0
        while True:
            place = self.unread.find(mark, max(0, searched - len(mark)))
            if most is not None and (place > most or (place < 0 and len(self.unread) > most + len(mark))):
                raise MalformedError
            if place >= 0:
                found = self.take(place)
                self.take(len(mark))
                return found
            searched = len(self.unread)
            yield from self.more()

    def text_until(self, *marks: str, kind: Callable[[str], Text | Thought] = Text, strips: bool = False) -> Steps[str]:
        """Yield text up to the first of the marks, then read and return the mark; empty at the end of all text.

        Text that may be the beginning of a mark is held back. strips: leave out white space before the mark.
        """
        self._since = None
        marks = marks if self._malformed < MOST_MALFORMED else ()
        while True:
            places = [(place, -len(mark), mark) for mark in marks if (place := self.unread.find(mark)) >= 0]
            place, _, mark = min(places, default=(self._plain(marks), 0, ""))
            whole = self.unread[:place]
            text = whole.rstrip() if strips and (mark or not self.ended) else whole
            if text:
                yield kind(text)
            self.take(place if mark else len(text))
            if mark:
                return self.take(len(mark))
            if self.ended:
                return ""
            yield None

    def _plain(self, marks: tuple[str, ...]) -> int:
        """Return the length of the unread text without an ending that may begin a mark."""
        if self.ended:
            return len(self.unread)
        longest = min(max((len(mark) for mark in marks), default=1) - 1, len(self.unread))
        for held in range(longest, 0, -1):
            if any(mark.startswith(self.unread[-held:]) for mark in marks):
                return len(self.unread) - held
        return len(self.unread)


class Parser:
    """A parser of one reply, which takes the text in pieces."""

    def __init__(self, steps: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = steps(self._source)

    def feed(self, text: str) -> list[Event]:
        """Return what a piece of text decides."""
        self._source.unread += text
        return self._events()

    def finish(self) -> list[Event]:
        """Return what is left when no more text comes."""
        self._source.ended = True
        return self._events()

    def _events(self) -> list[Event]:
        events: list[Event] = []
        event: Any = None
        while (event := next(self._steps, None)) is not None:
            events.append(event)
        return events
