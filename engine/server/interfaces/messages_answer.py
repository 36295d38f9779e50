"""Answers of Anthropic's Messages interface: the events of a stream, and the Message object."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from engine.server.errors import ApiError
from engine.server.interfaces.error_forms import anthropic_body
from engine.server.interfaces.form import ChatForm, Json

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Reasons by the finish reason of the chat. An end at a stop string has the reason `stop_sequence`."""
SIGNATURE = "unsigned"
"""Signature of reasoning. Clients send it back with the text, and nothing checks it; some drop reasoning without one."""


class MessagesForm(ChatForm):
    """One Message. Its content has a block for each reasoning, text and call; a new one ends the one before it.

    The repeated fields have `thinking`, and `is_lowered`: whether the limit of new tokens was lowered to what fits.
    """

    def __init__(self, repeated: Json, model: str, prompt_tokens: int) -> None:
        super().__init__(repeated, model, prompt_tokens)
        self._thinking = repeated["thinking"]
        self._message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._blocks: list[Json] = []
        self._is_open = False
        self._call_index, self._arguments = -1, ""

    def opening(self) -> Iterator[Json]:
        """Yield the events before the first chunk."""
        usage = _usage_fields(self._prompt_tokens, 0, 0)
        yield {"type": "message_start", "message": self._message | {"usage": usage}}
        yield {"type": "ping"}

    def ending(self) -> Iterator[Json]:
        """Yield the end of the last block and of the Message."""
        if not self._blocks:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._end()
        reason = STOP_REASONS.get(self._finish_reason, "end_turn")
        if reason == "max_tokens" and self._repeated.get("is_lowered"):
            reason = "model_context_window_exceeded"
        ended = {"stop_reason": "stop_sequence" if self._stop_string else reason, "stop_sequence": self._stop_string}
        read, written = self._usage.get("prompt_tokens", 0), self._usage.get("completion_tokens", 0)
        usage = _usage_fields(read, self._cached_tokens(), written)
        self._message |= {"content": self._blocks, "usage": usage, **ended}
        yield {"type": "message_delta", "delta": ended, "usage": usage}
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Iterator[Json]:
        """Yield the event of an error that ends the stream."""
        yield anthropic_body(error)

    def _complete(self) -> Json:
        return self._message

    def _reasoning(self, text: str) -> Iterator[Json]:
        if self._thinking == "left_out":
            return
        if not self._continues("thinking"):
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if self._thinking == "shown":
            self._blocks[-1]["thinking"] += text
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _text(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        if not text:
            return
        if not self._continues("text"):
            yield from self._begin({"type": "text", "text": ""})
        self._blocks[-1]["text"] += text
        yield self._delta({"type": "text_delta", "text": text})

    def _call(self, call: Json) -> Iterator[Json]:
        function = call.get("function") or {}
        if not self._continues("tool_use") or call["index"] != self._call_index:
            own: Json = {"id": call.get("id") or f"call_{uuid.uuid4().hex}", "name": function.get("name") or "", "input": {}}
            yield from self._begin({"type": "tool_use", **own})
            self._call_index = call["index"]
        if piece := function.get("arguments"):
            self._arguments += piece
            yield self._delta({"type": "input_json_delta", "partial_json": piece})

    def _continues(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1]["type"] == kind

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self._end()
        self._blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _end(self) -> Iterator[Json]:
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if block["type"] == "tool_use":
            block["input"], self._arguments = _input(self._arguments), ""
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _input(arguments: str) -> Any:
    """Return arguments as the object that clients expect. Text of a model that is no JSON object is kept in one field."""
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        values = None
    return values if isinstance(values, dict) else {"arguments": arguments}


def _usage_fields(read: int, cached: int, written: int) -> Json:
    """Return the counts of tokens. Those of the prompt are the sum of three fields here."""
    return {
        "input_tokens": read - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }
