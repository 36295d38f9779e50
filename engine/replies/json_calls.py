"""Calls whose arguments are JSON: they are given on piece by piece, while the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Literal

from engine.replies.events import Arguments, CallBegun, CallEnded, MalformedError, Steps
from engine.replies.source import Source

_NOT_PLAIN = re.compile(r"[^\s\w:,.+\-]")
_IN_STRING = re.compile(r'["\\]')
_LITERAL = re.compile(r"[\w.+-]*")
_MOST_LITERAL = 400
_NAMES, _ARGUMENTS, _IDS = ("name",), ("arguments", "parameters"), ("id",)
_OTHERS = ("type",)


class JsonEnd:
    """Searches for the end of a JSON object, list or string in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def scan(self, text: str) -> tuple[int, Literal["open", "ended", "broken"]]:
        """Return how much of the next piece belongs to the value, and whether it goes on, ends there, or cannot go on."""
        place = 0
        while place < len(text):
            if self._escaped:
                self._escaped, place = False, place + 1
                continue
            found = (_IN_STRING if self._quoted else _NOT_PLAIN).search(text, place)
            if found is None:
                break
            place, character = found.end(), found[0]
            if character == "\\" and self._quoted:
                self._escaped = True
            elif character == '"':
                self._quoted = not self._quoted
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            else:
                return place - 1, "broken"
            if self._depth == 0 and not self._quoted:
                return place, "ended"
        return len(text), "open"


def call_in_json(source: Source, known: Container[str] | None = None) -> Steps[None]:
    """Read `{"name": …, "arguments": {…}}`, or with `parameters`, in either order.

    known: names of tools; if it is given, any other name or key is no call. Raises MalformedError.
    """
    yield from source.expect("{")
    name = call_id = ""
    arguments: str | None = None
    begun = False
    yield from source.space()
    while True:
        key = _string((yield from raw_value(source, '"')))
        yield from source.expect(":")
        yield from source.space()
        if key in _ARGUMENTS and name and not begun and (yield from source.peek()) == "{":
            yield from begin_call(source, name, call_id)
            begun = True
        else:
            value = yield from raw_value(source)
            if key in _NAMES:
                name = _name(value, known)
            elif key in _ARGUMENTS and not begun:
                arguments = value
            elif key in _IDS and value.startswith('"'):
                call_id = _string(value)
            elif known is not None and key not in (*_OTHERS, *_IDS):
                raise MalformedError
        if (yield from source.expect(",", "}")) == "}":
            break
        yield from source.space()
    if not name:
        raise MalformedError
    if not begun:
        yield from whole_call(source, name, _object(arguments), call_id)


def begin_call(source: Source, name: str, call_id: str = "") -> Steps[None]:
    """Read the JSON object that comes next as the arguments of a call. Raises MalformedError if none begins here."""
    if (yield from source.peek()) != "{":
        raise MalformedError
    yield CallBegun(name, call_id)
    source.commit()
    end = JsonEnd()
    while True:
        count, state = end.scan(source.unread)
        if count:
            yield Arguments(source.take(count))
            source.commit()
        if state != "open" or source.ended:
            break
        yield None
    yield CallEnded()
    if state != "ended":
        raise MalformedError  # what comes next is read as content


def whole_call(source: Source, name: str, arguments: str, call_id: str = "") -> Steps[None]:
    """Yield a call that was read completely."""
    yield CallBegun(name, call_id)
    yield Arguments(arguments)
    yield CallEnded()
    source.commit()


def raw_value(source: Source, first: str = "") -> Steps[str]:
    """Return the JSON text of the value that comes next. Raises MalformedError; `first`: its only possible beginning."""
    character = yield from source.peek()
    if first and character != first:
        raise MalformedError
    if character and character in '"{[':
        text, end = "", JsonEnd()
        while True:
            count, state = end.scan(source.unread)
            text += source.take(count)
            if state == "ended":
                return _checked(text)
            if state == "broken":
                raise MalformedError
            yield from source.more()
    while True:
        found = _LITERAL.match(source.unread)
        assert found is not None
        if found.end() > _MOST_LITERAL:
            raise MalformedError
        if found.end() < len(source.unread):
            return _checked(source.take(found.end()))
        yield from source.more()


def _checked(text: str) -> str:
    """Return JSON text that is valid. Raises MalformedError."""
    parsed(text, MalformedError)
    return text


def parsed(text: str, error: Callable[[], Exception]) -> object:
    """Return the value of JSON text; raises `error` if the text is invalid, or nested more deeply than is read."""
    try:
        return json.loads(text, parse_constant=_no_constant, strict=False)
    except (ValueError, RecursionError):
        raise error() from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _name(value: str, known: Container[str] | None) -> str:
    name = _string(value)
    if not name or (known is not None and name not in known):
        raise MalformedError
    return name


def _string(value: str) -> str:
    found = json.loads(value, strict=False)
    if not isinstance(found, str):
        raise MalformedError
    return found


def _object(text: str | None) -> str:
    """Return arguments as the text of an object. Models also write none, null, or the object as a string."""
    value = None if text is None else parsed(text, MalformedError)
    if isinstance(value, str):
        text, value = value, parsed(value, MalformedError)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise MalformedError
    assert text is not None
    return text


def in_sections(
    opening: str, closing: str, call: Callable[[Source], Steps[None]], *firsts: str
) -> Callable[[Source], Steps[None]]:
    """Return a parser of sections that have one or more calls between two marks; text around them is content.

    firsts: how a call may begin where the opening is missing, as models sometimes write it.
    """

    def steps(source: Source) -> Steps[None]:
        while mark := (yield from source.text_until(opening, *firsts)):
            source.mark(mark, again=mark != opening)
            try:
                yield from _section(source, closing, call)
            except MalformedError:
                yield from source.give_back()

    return steps


def _section(source: Source, closing: str, call: Callable[[Source], Steps[None]]) -> Steps[None]:
    yield from call(source)
    source.commit()
    while True:
        yield from source.space()
        if source.ended and not source.unread:
            return
        if (yield from source.starts(closing)):
            break
        yield from call(source)
        source.commit()
    yield from source.space()
