"""Calls without marks: a reply that begins with JSON or a list of Python calls, of tools that the request has."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from engine.replies.events import Arguments, CallBegun, CallEnded, MalformedError, Schemas, Steps
from engine.replies.json_calls import call_in_json
from engine.replies.source import Source

OPENINGS, CLOSING = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"
"""Marks that may stand around such calls."""
MOST_PYTHON = 100_000
"""Characters of the longest list of Python calls that is read."""
Calls = Callable[[Source, Schemas], Steps[None]]


def json_calls(source: Source, schemas: Schemas) -> Steps[None]:
    """Parse `{"name": …, "parameters": {…}}`; several follow each other, or have `;` between them."""
    yield from _at_the_beginning(source, schemas, _in_json)


def python_calls(source: Source, schemas: Schemas) -> Steps[None]:
    """Parse `[name(key="value", …), …]`."""
    yield from _at_the_beginning(source, schemas, _in_python)


def _at_the_beginning(source: Source, schemas: Schemas, calls: Calls) -> Steps[None]:
    """Parse calls at the beginning of a reply, and after a mark."""
    source.mark("")
    mark: str | None = None
    while mark is None or mark:
        try:
            yield from source.space()
            if mark is None:
                yield from source.starts(*OPENINGS)
            yield from calls(source, schemas)
            source.commit()
            yield from source.space()
            yield from source.starts(CLOSING)
            yield from source.space()
        except MalformedError:
            yield from source.give_back()
        mark = yield from source.text_until(*OPENINGS)
        source.mark(mark)


def _in_json(source: Source, schemas: Schemas) -> Steps[None]:
    while True:
        yield from call_in_json(source, schemas)
        source.commit()
        yield from source.space()
        separated = yield from source.starts(";")
        yield from source.space()
        if not separated and (yield from source.peek()) != "{":
            return


def _in_python(source: Source, schemas: Schemas) -> Steps[None]:
    """Read a list of calls. Raises MalformedError as soon as the text is no list of calls of known tools."""
    yield from source.expect("[")
    name = yield from source.word()
    if name not in schemas or (yield from source.peek()) != "(":
        raise MalformedError
    text, depth, quote, place = f"[{name}", 1, "", 0
    while depth:
        while place == len(source.unread):
            yield from source.more()
        character = source.unread[place]
        place += 1
        if place > MOST_PYTHON:
            raise MalformedError
        if quote:
            if character == "\\":
                place += 1
                while place > len(source.unread):
                    yield from source.more()
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
    for called, arguments in _calls(text + source.take(place), schemas):
        yield CallBegun(called)
        yield Arguments(arguments)
        yield CallEnded()


def _calls(text: str, schemas: Schemas) -> list[tuple[str, str]]:
    """Return the calls in a Python list, with their arguments as JSON. Raises MalformedError for any other Python."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise MalformedError from None
    if not isinstance(tree, ast.List):
        raise MalformedError
    return [_call(each, schemas) for each in tree.elts]


def _call(node: ast.expr, schemas: Schemas) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise MalformedError
    name = ast.unparse(node.func)
    if name not in schemas:
        raise MalformedError
    try:
        values = {str(each.arg): _plain(ast.literal_eval(each.value)) for each in node.keywords}
        return name, json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise MalformedError from None


def _plain(value: Any) -> Any:
    """Return a value that JSON has. Raises TypeError for any other."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError
