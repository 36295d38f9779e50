"""Answers of OpenAI's Responses interface: the events of a stream, and the Response object."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from engine.server.errors import ApiError
from engine.server.interfaces.form import ChatForm, Json

FIXED: Json = {
    "background": False,
    "error": None,
    "incomplete_details": None,
    "max_tool_calls": None,
    "object": "response",
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
"""Fields of a Response that this server always has at these values, unless the answer fails."""


class ResponsesForm(ChatForm):
    """One Response. Its output has an item for each reasoning, message and call; a new one ends the one before it."""

    def __init__(self, repeated: Json, model: str, prompt_tokens: int) -> None:
        super().__init__(repeated, model, prompt_tokens)
        head = {"id": _new_id("resp"), "created_at": int(time.time()), "model": model, "status": "in_progress"}
        self._response = FIXED | repeated | head | {"output": [], "usage": None}
        self._output: list[Json] = []
        self._open: Json | None = None
        self._call_index = -1
        self._held: list[Json] = []
        self._sequence_number = 0

    def opening(self) -> Iterator[Json]:
        """Yield the events before the first chunk."""
        yield self._of_response("response.created")
        yield self._of_response("response.in_progress")

    def ending(self) -> Iterator[Json]:
        """Yield the end of the last item and of the Response."""
        if not self._output:
            yield from self._begin_message()
        is_cut = self._finish_reason == "length"
        yield from self._end_item("incomplete" if is_cut else "completed")
        self._response |= {"output": self._output, "usage": self._usage_fields()}
        if is_cut:
            self._response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self._response |= {"status": "completed", "completed_at": int(time.time())}
        yield self._of_response(f"response.{self._response['status']}")

    def failure(self, error: ApiError) -> Iterator[Json]:
        """Yield the event of an error that ends the stream. Items that have not ended are incomplete."""
        if self._open is not None:
            self._open["status"] = "incomplete"
        failed = {"code": "server_error", "message": error.message}
        self._response |= {"status": "failed", "error": failed, "output": self._output}
        yield self._of_response("response.failed")

    def _complete(self) -> Json:
        return self._response

    def _reasoning(self, text: str) -> Iterator[Json]:
        if self._open is None or self._open["type"] != "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            yield from self._begin_item({"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": [part]})
        self._part["text"] += text
        yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _text(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        if self._open is None or self._open["type"] != "message":
            if not text:  # tokens without text between two items; they belong to the text that follows
                self._held += logprobs
                return
            yield from self._begin_message()
        logprobs, self._held = [*self._held, *logprobs], []
        self._part["text"] += text
        self._part["logprobs"] += logprobs
        yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _call(self, call: Json) -> Iterator[Json]:
        function = call.get("function") or {}
        if self._open is None or self._open["type"] != "function_call" or call["index"] != self._call_index:
            self._call_index = call["index"]
            own = {"call_id": call.get("id") or _new_id("call"), "name": function.get("name") or "", "arguments": ""}
            yield from self._begin_item({"id": _new_id("fc"), "type": "function_call", **own})
        if piece := function.get("arguments"):
            assert self._open is not None
            self._open["arguments"] += piece
            yield self._of_item("response.function_call_arguments.delta", delta=piece)

    def _begin_message(self) -> Iterator[Json]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._begin_item({"id": _new_id("msg"), "type": "message", "role": "assistant", "content": [part]})

    def _begin_item(self, item: Json) -> Iterator[Json]:
        yield from self._end_item("completed")
        self._open = item | {"status": "in_progress"}
        self._output.append(self._open)
        empty: Json = {"content": []} if "content" in item else {}
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=self._open | empty)
        if empty:
            yield self._of_item("response.content_part.added", content_index=0, part=dict(self._part))

    def _end_item(self, status: str) -> Iterator[Json]:
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            yield self._of_item("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            part = self._part
            if item["type"] == "message":
                yield self._of_item(
                    "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
                )
            else:
                yield self._of_item("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._open = None

    @property
    def _part(self) -> Json:
        """The only part of the open item."""
        assert self._open is not None
        part: Json = self._open["content"][0]
        return part

    def _of_item(self, kind: str, **fields: Any) -> Json:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._output) - 1, **fields)

    def _of_response(self, kind: str) -> Json:
        return self._event(kind, response=dict(self._response))

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _usage_fields(self) -> Json:
        read, written = self._usage.get("prompt_tokens", 0), self._usage.get("completion_tokens", 0)
        reasoned = (self._usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": self._cached_tokens(), "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": reasoned},
            "total_tokens": read + written,
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
