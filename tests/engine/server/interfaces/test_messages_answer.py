"""Chunks of a chat become the events of a Message, and all chunks together the Message."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from scripted_chat import CACHED_TOKENS, NEW_TOKENS, PROMPT_TOKENS, Turn

from engine.server.errors import ApiError
from engine.server.interfaces.messages_answer import MessagesForm

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CALLS = (("call_1", "f", '{"city": "Rome"}'), ("call_2", "g", ""))
FULL = Turn(reasoning="hm, yes", text="Let me see.", calls=CALLS)
USAGE = {
    "input_tokens": PROMPT_TOKENS - CACHED_TOKENS,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": CACHED_TOKENS,
    "output_tokens": NEW_TOKENS,
}


def form(thinking: str = "shown") -> MessagesForm:
    return MessagesForm({"thinking": thinking}, "m", PROMPT_TOKENS)


def events(chunks: list[dict[str, Any]], thinking: str = "shown") -> list[dict[str, Any]]:
    """Return the events of a stream, checked by the types of Anthropic's client, which has none for `ping`."""
    made_by = form(thinking)
    made = [*made_by.opening()]
    for chunk in chunks:
        made += made_by.take(chunk)
    made += made_by.ending()
    for event in made:
        assert event["type"] == "ping" or EVENT.validate_python(event)
    return made


def content(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the blocks together from their events, as a client does."""
    blocks: list[dict[str, Any]] = []
    for event in made:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            kind, (name, value) = event["delta"]["type"], list(event["delta"].items())[1]
            assert kind == {"partial_json": "input_json_delta"}.get(name, f"{name}_delta")
            blocks[-1][name] = blocks[-1].get(name, "") + value
    return blocks


def test_the_events_of_a_text() -> None:
    made = events(Turn(text="Hello").chunks(size=2))
    start = made[0]["message"]
    opening = USAGE | {"input_tokens": PROMPT_TOKENS, "cache_read_input_tokens": 0, "output_tokens": 0}
    assert start == {
        "id": start["id"],
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": opening,
    }
    assert made[1:] == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
            for text in ("He", "ll", "o")
        ),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": USAGE},
        {"type": "message_stop"},
    ]


def test_reasoning_text_and_calls_are_blocks_one_after_the_other() -> None:
    made = events(FULL.chunks())
    assert content(made) == [
        {"type": "thinking", "thinking": "hm, yes", "signature": "unsigned"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {}, "partial_json": '{"city": "Rome"}'},
        {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
    ]
    assert [event["index"] for event in made if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert made[-2]["delta"]["stop_reason"] == "tool_use"
    whole = form().whole(FULL.completion())
    Message.model_validate(whole)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm, yes", "signature": "unsigned"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
    ]
    assert whole["usage"] == USAGE and whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("turn", [FULL, Turn(text="Hello"), Turn(), Turn(reasoning="a")], ids=str)
def test_a_whole_answer_is_that_of_the_stream(turn: Turn, size: int) -> None:
    import json

    blocks = content(events(turn.chunks(size)))
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    assert form().whole(turn.completion())["content"] == blocks


def test_reasoning_is_omitted_or_left_out() -> None:
    omitted = content(events(FULL.chunks(), "omitted"))
    assert omitted[0] == {"type": "thinking", "thinking": "", "signature": "unsigned"} and len(omitted) == 4
    left_out = content(events(FULL.chunks(), "left_out"))
    assert [block["type"] for block in left_out] == ["text", "tool_use", "tool_use"]
    assert form("left_out").whole(FULL.completion())["content"][0]["type"] == "text"


@pytest.mark.parametrize(
    ("turn", "reason", "sequence"),
    [
        (Turn(text="a"), "end_turn", None),
        (Turn(text="a", finish_reason="length"), "max_tokens", None),
        (Turn(text="a", stop_reason="\n\n"), "stop_sequence", "\n\n"),
    ],
)
def test_reasons_of_the_end(turn: Turn, reason: str, sequence: str | None) -> None:
    whole = form().whole(turn.completion())
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert events(turn.chunks())[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_limit_that_was_lowered_is_the_end_of_the_context() -> None:
    turn = Turn(text="a", finish_reason="length")
    lowered = MessagesForm({"thinking": "shown", "is_lowered": True}, "m", PROMPT_TOKENS)
    assert lowered.whole(turn.completion())["stop_reason"] == "model_context_window_exceeded"
    free = MessagesForm({"thinking": "shown", "is_lowered": True}, "m", PROMPT_TOKENS)
    assert free.whole(Turn(text="a").completion())["stop_reason"] == "end_turn"


def test_an_empty_answer_is_an_empty_text() -> None:
    assert content(events(Turn().chunks())) == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("arguments", ["[1]", "{", '"a"', "[" * 10_000])
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    (block,) = form().whole(Turn(calls=(("c", "f", arguments),)).completion())["content"]
    assert block["input"] == {"arguments": arguments}


def test_a_failure_ends_the_stream() -> None:
    for status, kind in ((500, "api_error"), (503, "overloaded_error"), (504, "timeout_error")):
        assert list(form().failure(ApiError(status, "no"))) == [{"type": "error", "error": {"type": kind, "message": "no"}}]


def test_events_are_named() -> None:
    assert form().encoded({"type": "ping"}) == b'event: ping\ndata: {"type":"ping"}\n\n' and form().closing == b""
