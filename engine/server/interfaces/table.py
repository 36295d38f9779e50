"""The endpoints that are translated to chat completions: one row for each path."""

from __future__ import annotations

from engine.server.interfaces.interface import Interface
from engine.server.interfaces.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    messages_chat,
    messages_count_chat,
    messages_repeated,
)
from engine.server.interfaces.responses_request import (
    InputTokensRequest,
    ResponsesRequest,
    responses_chat,
    responses_prompt,
    responses_repeated,
)

_RESPONSES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_MESSAGES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
}
"""Fields of a chat completion by the names that the interface has for them, for messages of errors."""

INTERFACES = {
    "/v1/responses": Interface(ResponsesRequest, responses_chat, _RESPONSES, repeated=responses_repeated),
    "/v1/responses/input_tokens": Interface(
        InputTokensRequest,
        responses_prompt,
        _RESPONSES,
        counted=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    ),
    "/v1/messages": Interface(
        MessagesRequest, messages_chat, _MESSAGES, repeated=messages_repeated, most_tokens=lambda body: int(body.max_tokens)
    ),
    "/v1/messages/count_tokens": Interface(
        CountTokensRequest, messages_count_chat, _MESSAGES, counted=lambda tokens: {"input_tokens": tokens}
    ),
}
"""Interfaces by the path of their endpoint. All take POST."""
