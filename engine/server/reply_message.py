"""The message of a chat's answer: its content, reasoning and calls, whole and in the pieces of a stream."""

from __future__ import annotations

from typing import Any

from engine.replies.events import Arguments, CallBegun, Event, Text, Thought
from engine.replies.reply import Reply, ReplyForm

Json = dict[str, Any]


class ReplyMessage:
    """One reply in OpenAI's form, so far."""

    def __init__(self, form: ReplyForm) -> None:
        self._reply, self._form = Reply(form), form
        self.text = self.thought = ""
        self.calls: list[Json] = []
        """Calls in the form of a whole answer."""
        self._left_out = False

    def add(self, text: str, *, ended: bool) -> tuple[str, str, list[Json]]:
        """Take a piece of the reply, which may be the last; return the content, reasoning and parts of calls that it adds.

        A part of a call has its `index`; the first also has its id, type and name. There is one part for each index.
        """
        content, thought, parts = "", "", dict[int, Json]()
        for event in [*self._reply.feed(text), *(self._reply.finish() if ended else ())]:
            if isinstance(event, Text):
                content += event.text
            elif isinstance(event, Thought):
                thought += event.text
            else:
                self._add_to_calls(event, parts)
        self.text += content
        self.thought += thought
        return content, thought, list(parts.values())

    def _add_to_calls(self, event: Event, parts: dict[int, Json]) -> None:
        if isinstance(event, CallBegun):
            self._left_out = bool(self.calls) and not self._form.parallel
            if not self._left_out:
                parts[len(self.calls)] = {"index": len(self.calls), **self._begin(event)}
        elif isinstance(event, Arguments) and not self._left_out:
            place = len(self.calls) - 1
            part = parts.setdefault(place, {"index": place, "function": {"arguments": ""}})
            part["function"]["arguments"] += event.text
            self.calls[place]["function"]["arguments"] += event.text

    def _begin(self, event: CallBegun) -> Json:
        """Add a call and return its first part. An id that is missing, or that another call has, is made here."""
        taken = {call["id"] for call in self.calls}
        own = event.call_id if event.call_id and event.call_id not in taken else self._form.new_id()
        self.calls.append({"id": own, "type": "function", "function": {"name": event.name, "arguments": ""}})
        return {"id": own, "type": "function", "function": {"name": event.name, "arguments": ""}}
