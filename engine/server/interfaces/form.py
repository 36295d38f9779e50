"""Forms of an answer: the events of a stream, and the complete object, made from the chunks of a chat completion.

A complete answer is made by the same methods as a stream, from one chunk that has everything. Both therefore agree.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from engine.server.errors import ApiError

Json = dict[str, Any]


class AnswerForm:
    """The form of chat completions and completions: chunks are the events, and nothing is changed."""

    closing = b"data: [DONE]\n\n"
    """End of a stream."""

    def opening(self) -> Iterator[Json]:
        """Yield the events before the first chunk."""
        yield from ()

    def take(self, chunk: Json) -> Iterator[Json]:
        """Yield the events of a chunk."""
        yield chunk

    def ending(self) -> Iterator[Json]:
        """Yield the events after the last chunk."""
        yield from ()

    def failure(self, error: ApiError) -> Iterator[Json]:
        """Yield the events of an error that ends the stream."""
        yield error.body()

    def whole(self, answer: Json) -> Json:
        """Return the complete answer, from that of the chat."""
        return answer

    def encoded(self, event: Json) -> bytes:
        """Return an event as bytes of the stream."""
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


class ChatForm(AnswerForm):
    """A form made from the parts of a chat's answer: reasoning, text and calls, in the order in which they come.

    Subclasses define what each part becomes. Events are named by their type.
    """

    closing = b""

    def __init__(self, repeated: Json, model: str, prompt_tokens: int) -> None:
        """`repeated`: what `Interface.kept` returned. `prompt_tokens`: tokens of the prompt, which an opening may tell."""
        self._repeated, self._model, self._prompt_tokens = repeated, model, prompt_tokens
        self._usage: Json = {}
        self._finish_reason, self._stop_string = "", None

    def take(self, chunk: Json) -> Iterator[Json]:
        """Yield the events of a chunk."""
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            if delta.get("reasoning_content"):
                yield from self._reasoning(delta["reasoning_content"])
            if delta.get("content") or logprobs:
                yield from self._text(delta.get("content") or "", logprobs)
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self._stop_string = choice.get("stop_reason") or self._stop_string

    def whole(self, answer: Json) -> Json:
        """Return the complete answer, from that of the chat."""
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
        chunk = {"usage": answer["usage"], "choices": [choice | {"delta": message | {"tool_calls": calls}}]}
        for events in (self.opening(), self.take(chunk), self.ending()):
            _consume(events)
        return self._complete()

    def encoded(self, event: Json) -> bytes:
        """Return an event as bytes of the stream, with its name."""
        return f"event: {event['type']}\n".encode() + super().encoded(event)

    def _cached_tokens(self) -> int:
        return int((self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def _reasoning(self, text: str) -> Iterator[Json]:
        raise NotImplementedError

    def _text(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        raise NotImplementedError

    def _call(self, call: Json) -> Iterator[Json]:
        """Yield the events of a piece of a call; the first piece of a call has its id and name."""
        raise NotImplementedError

    def _complete(self) -> Json:
        """Return the complete answer after `ending`."""
        raise NotImplementedError


def _consume(events: Iterable[Json]) -> None:
    deque(events, maxlen=0)
