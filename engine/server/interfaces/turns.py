"""Messages of a chat, put together from the items or blocks of another interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.server.errors import ApiError

Json = dict[str, Any]
Content = str | list[Json]


class Turns:
    """Messages in the order in which they are added; reasoning, text and calls of one assistant turn become one message."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._called: set[str] = set()

    def say(self, role: str, content: Content) -> None:
        """Add text or parts. An assistant message continues the reasoning before it."""
        if role == "assistant" and (turn := self._open_turn()) is not None and not {"content", "tool_calls"} & turn.keys():
            turn["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def think(self, text: str) -> None:
        """Add reasoning; it begins an assistant turn unless it follows other reasoning."""
        turn = self._open_turn()
        if turn is not None and turn.keys() == {"role", "reasoning_content"}:
            turn["reasoning_content"] += text
        else:
            self.messages.append({"role": "assistant", "reasoning_content": text})

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call to the assistant turn before it, or as a turn of its own. `arguments`: JSON."""
        turn = self._open_turn()
        if turn is None:
            turn = {"role": "assistant"}
            self.messages.append(turn)
        self._called.add(call_id)
        made = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn.setdefault("tool_calls", []).append(made)

    def answer(self, call_id: str, content: Content, place: str) -> None:
        """Add the result of a call. Raises ApiError, with the `place` of its id in the body, if no call has this id."""
        if call_id not in self._called:
            message = f"{place} is {call_id!r:.80}, and no call before it has this id; send the call as well"
            raise ApiError(400, message, param=place)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _open_turn(self) -> Json | None:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None


def text_part(text: str) -> Json:
    """Return a text as a part of a message's content."""
    return {"type": "text", "text": text}


def image_part(url: str) -> Json:
    """Return an image as a part of a message's content."""
    return {"type": "image_url", "image_url": {"url": url}}


def joined_parts(parts: Sequence[Json], separator: str) -> Content:
    """Return parts as one text, or as they are if there are images among them."""
    if any(part["type"] != "text" for part in parts):
        return list(parts)
    return separator.join(part["text"] for part in parts)
