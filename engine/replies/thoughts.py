"""Reasoning before an answer, between tags or in a channel of its own. The answer passes as content, calls included."""

from __future__ import annotations

from collections.abc import Callable

from engine.replies.events import MalformedError, Steps, Text, Thought
from engine.replies.marked_calls import CHANNEL, MESSAGE, MESSAGE_ENDS, MOST_HEADER, START, header_parts
from engine.replies.source import Source

NOT_RECIPIENTS = ("", "all", "assistant", "user")


def tagged_thoughts(opening: str, closing: str) -> Callable[[Source, bool], Steps[None]]:
    """Return a parser of reasoning between tags at the beginning of a reply; white space around it is left out.

    Its second argument says whether the prompt ends with the opening, so that the reply begins inside. A reply that ends
    inside is reasoning only. Tags after the beginning are content.
    """

    def steps(source: Source, inside: bool) -> Steps[None]:
        source.mark("")
        yield from source.space()
        opened = yield from source.starts(opening)
        if opened or inside:
            source.commit()
            yield from source.space()
            yield from source.text_until(closing, kind=Thought, strips=True)
            yield from source.space()
        else:
            yield from source.give_back()
        yield from source.text_until()

    return steps


def channel_thoughts(source: Source, inside: bool) -> Steps[None]:
    """Parse messages in channels: analysis is reasoning, what is for a tool passes as it is, and the rest is content."""
    mark = yield from source.starts(START, CHANNEL, " to=", "to=")
    while True:
        if not mark:
            mark = yield from source.text_until(START, CHANNEL)
        if not mark:
            return
        source.mark(mark)
        try:
            header = mark + (yield from source.until(MESSAGE, MOST_HEADER))
            channel, recipient = header_parts(header)
        except MalformedError:
            yield from source.give_back()
        else:
            passes = recipient not in NOT_RECIPIENTS
            if passes:
                yield Text(header + MESSAGE)
            kind = Thought if channel == "analysis" and not passes else Text
            end = yield from source.text_until(*MESSAGE_ENDS, kind=kind)
            if passes and end:
                yield Text(end)
        mark = ""
