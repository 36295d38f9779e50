"""Calls whose name and JSON arguments stand between marks, most of which are special tokens."""

from __future__ import annotations

import re

from engine.replies.events import MalformedError, Steps
from engine.replies.json_calls import begin_call, call_in_json, in_sections
from engine.replies.source import Source

TOOL_CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
LIST_OF_CALLS = "<|tool_call|>"
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
NUMBERED_SECTION, NUMBERED_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
NUMBERED, NUMBERED_ARGUMENTS, NUMBERED_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MOST_HEADER = 300
"""Characters of the longest header of a message in a channel."""
_FENCE, _FUNCTION, _TOOLS = "```", "function", "functions."
_TO = r"(?:\s*to=(?P<{}>[\w.:-]+))?"
_HEADER = re.compile(
    rf"(?:<\|start\|>(?:assistant)?)?{_TO.format('early')}(?:<\|channel\|>\s*(?P<channel>analysis|commentary|final))?{_TO.format('late')}"
    r"\s*(?:<\|constrain\|>)?\s*(?:json|code|text)?\s*"
)
_NAME_OF_ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")


def listed_calls(source: Source, opening: str = TOOL_CALLS) -> Steps[None]:
    """Parse `[TOOL_CALLS][{…}, {…}]`, and `[TOOL_CALLS]name[ARGS]{…}` for each call; `opening`: another mark before them."""
    while (yield from source.text_until(opening)):
        source.mark(opening)
        try:
            yield from source.space()
            character = yield from source.peek()
            if character == "[":
                source.take(1)
                while True:
                    yield from call_in_json(source)
                    source.commit()
                    if (yield from source.expect(",", "]")) == "]":
                        break
            elif character == "{":
                yield from call_in_json(source)
            else:
                yield from _named(source)
            source.commit()
            yield from source.space()
        except MalformedError:
            yield from source.give_back()


def _named(source: Source) -> Steps[None]:
    name, call_id = (yield from source.word()), ""
    if (yield from source.starts(CALL_ID)):
        call_id = yield from source.word()
    yield from source.starts(ARGUMENTS)
    yield from source.space()
    yield from begin_call(source, name, call_id)


def _separated(source: Source) -> Steps[None]:
    """Read `name<sep>{…}`, or `function<sep>name` with the arguments in a fence."""
    yield from source.expect(CALL)
    name = yield from source.word()
    yield from source.expect(SEPARATOR)
    yield from source.space()
    fenced = (yield from source.peek()) != "{"
    if fenced:
        if name != _FUNCTION:
            raise MalformedError
        name = yield from source.word()
        yield from source.expect(_FENCE)
        yield from source.starts("json")
        yield from source.space()
    yield from begin_call(source, name)
    if fenced:
        yield from source.expect(_FENCE)
    yield from source.expect(CALL_END)


separated_calls = in_sections(SECTION, SECTION_END, _separated, CALL)
"""Parser of calls with a separator between name and arguments."""


def _numbered(source: Source) -> Steps[None]:
    """Read `functions.name:0`, which is the call's id, and its arguments."""
    yield from source.expect(NUMBERED)
    call_id = yield from source.word()
    named = _NAME_OF_ID.fullmatch(call_id)
    if named is None:
        raise MalformedError
    yield from source.expect(NUMBERED_ARGUMENTS)
    yield from source.space()
    yield from begin_call(source, named[1], call_id)
    yield from source.expect(NUMBERED_END)


numbered_calls = in_sections(NUMBERED_SECTION, NUMBERED_SECTION_END, _numbered, NUMBERED)
"""Parser of calls that are numbered in their ids."""


def channel_calls(source: Source) -> Steps[None]:
    """Parse messages in channels that are for `functions.name`."""
    while mark := (yield from source.text_until(START, CHANNEL, f" to={_TOOLS}")):
        source.mark(mark)
        try:
            _, recipient = header_parts(mark + (yield from source.until(MESSAGE, MOST_HEADER)))
            if not recipient.startswith(_TOOLS):
                raise MalformedError
            yield from source.space()
            yield from begin_call(source, recipient.removeprefix(_TOOLS))
            yield from source.space()
            yield from source.starts(*MESSAGE_ENDS)
        except MalformedError:
            yield from source.give_back()


def header_parts(header: str) -> tuple[str, str]:
    """Return the channel of a message in channels, and whom it is for; each may be empty.

    Raises MalformedError for a header of another form.
    """
    found = _HEADER.fullmatch(header)
    if found is None:
        raise MalformedError
    return found["channel"] or "", found["early"] or found["late"] or ""
