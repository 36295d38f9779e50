"""Chats that are written by hand, and a server that answers with them through the interfaces, without a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engine.server.connections.connection import EventStream, error_response
from engine.server.errors import ApiError
from engine.server.interfaces.form import ChatForm
from engine.server.interfaces.messages_answer import MessagesForm
from engine.server.interfaces.responses_answer import ResponsesForm
from engine.server.interfaces.table import INTERFACES

FORMS: dict[str, type[ChatForm]] = {"/v1/responses": ResponsesForm, "/v1/messages": MessagesForm}
PROMPT_TOKENS, CACHED_TOKENS, NEW_TOKENS = 20, 5, 9


@dataclass(frozen=True)
class Turn:
    """One answer of a chat, as a completion and as chunks."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    """Each call's id, name and arguments."""
    finish_reason: str = ""
    stop_reason: str | None = None

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": NEW_TOKENS,
            "total_tokens": PROMPT_TOKENS + NEW_TOKENS,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        }

    def end(self) -> dict[str, Any]:
        ended = {"finish_reason": self.finish_reason or ("tool_calls" if self.calls else "stop"), "logprobs": None}
        return ended | ({"stop_reason": self.stop_reason} if self.stop_reason else {})

    def completion(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}
                for own, name, arguments in self.calls
            ]
        choice = {"index": 0, "message": message, **self.end()}
        return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": self.usage()}

    def chunks(self, size: int = 3) -> list[dict[str, Any]]:
        """Return chunks with `size` characters each."""

        def pieces(text: str) -> list[str]:
            return [text[start : start + size] for start in range(0, len(text), size)]

        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": piece} for piece in pieces(self.reasoning)]
        deltas += [{"content": piece} for piece in pieces(self.text)]
        for index, (own, name, arguments) in enumerate(self.calls):
            first = {"index": index, "id": own, "type": "function", "function": {"name": name, "arguments": ""}}
            deltas.append({"tool_calls": [first]})
            deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces(arguments)]
        going = [_chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]) for delta in deltas]
        return [*going, _chunk([{"index": 0, "delta": {}, **self.end()}]), _chunk([]) | {"usage": self.usage()}]


@dataclass
class ScriptedChat:
    """A server whose answers are turns, in order, and which records the chats that it was asked for."""

    turns: tuple[Turn, ...]
    chats: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> FastAPI:
        """Return the application."""
        app = FastAPI()
        app.add_api_route("/v1/responses", self._answer, methods=["POST"])
        app.add_api_route("/v1/messages", self._answer, methods=["POST"])
        return app

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        interface = INTERFACES[path]
        try:
            body = interface.read(json.loads(await request.body()))
            self.chats.append(interface.chat(body))
        except ApiError as error:
            return error_response(error, path)
        turn = self.turns[(len(self.chats) - 1) % len(self.turns)]
        form = FORMS[path](interface.kept(body), "scripted", PROMPT_TOKENS)
        if not self.chats[-1].get("stream"):
            return JSONResponse(form.whole(turn.completion()))

        async def events() -> Any:
            for chunk in (None, *turn.chunks(), False):
                made = form.opening() if chunk is None else form.take(chunk) if chunk else form.ending()
                for event in made:
                    yield form.encoded(event)

        return EventStream(events(), lambda: None)


def _chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices}
