"""Chunks of a chat become the events of a Response, and all chunks together the Response."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted_chat import CACHED_TOKENS, NEW_TOKENS, PROMPT_TOKENS, Turn

from engine.server.errors import ApiError
from engine.server.interfaces.responses_answer import ResponsesForm
from engine.server.interfaces.table import INTERFACES

INTERFACE = INTERFACES["/v1/responses"]
REPEATED = INTERFACE.kept(INTERFACE.read({"input": "hi", "metadata": {"a": "b"}}))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALLS = (("call_1", "f", '{"city": "Rome"}'), ("call_2", "g", "{}"))
FULL = Turn(reasoning="hm, yes", text="Let me see.", calls=CALLS)


def events(chunks: list[dict[str, Any]], form: ResponsesForm | None = None) -> list[dict[str, Any]]:
    """Return the events of a stream, checked by the types of OpenAI's client."""
    form = form or ResponsesForm(REPEATED, "m", PROMPT_TOKENS)
    made = [*form.opening()]
    for chunk in chunks:
        made += form.take(chunk)
    made += form.ending()
    for number, event in enumerate(made):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    return made


def kinds(made: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, without their common prefix; equal neighbors once."""
    names = [event["type"].removeprefix("response.") for event in made]
    return [name for number, name in enumerate(names) if number == 0 or name != names[number - 1]]


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Return a Response without what differs from answer to answer."""
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    varying = ("id", "created_at", "completed_at", "output")
    return {name: value for name, value in response.items() if name not in varying} | {"output": items}


def test_the_events_of_a_text() -> None:
    made = events(Turn(text="Hello").chunks(size=2))
    assert [event["type"].removeprefix("response.") for event in made] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert made[0]["response"]["status"] == "in_progress" and made[0]["response"]["output"] == []
    assert made[2]["item"]["content"] == [] and made[2]["item"]["status"] == "in_progress"
    assert [event["delta"] for event in made[4:7]] == ["He", "ll", "o"] and made[7]["text"] == "Hello"
    item = made[9]["item"]
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert item == {"id": item["id"], "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert {event["item_id"] for event in made[3:9]} == {item["id"]} and item["id"].startswith("msg_")
    response = made[-1]["response"]
    assert response["output"] == [item] and response["status"] == "completed" and response["metadata"] == {"a": "b"}
    assert response["usage"] == {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": CACHED_TOKENS, "cache_write_tokens": 0},
        "output_tokens": NEW_TOKENS,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT_TOKENS + NEW_TOKENS,
    }


def test_reasoning_text_and_calls_are_items_one_after_the_other() -> None:
    made = events(FULL.chunks())
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(made) == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    items = [event["item"] for event in made if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in made if event["type"] == "response.output_item.done"] == [0, 1, 2, 3]
    assert items == made[-1]["response"]["output"] and {item["status"] for item in items} == {"completed"}
    assert items[0]["summary"] == [] and items[0]["content"] == [{"type": "reasoning_text", "text": "hm, yes"}]
    for item, (call_id, name, arguments) in zip(items[2:], CALLS, strict=True):
        own = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
        assert item == {"id": item["id"], "status": "completed", **own}
        deltas = [event["delta"] for event in made if event.get("item_id") == item["id"] and "delta" in event]
        assert "".join(deltas) == arguments


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    "turn", [FULL, Turn(text="Hello"), Turn(), Turn(calls=CALLS), Turn(text="a", finish_reason="length")], ids=str
)
def test_a_whole_answer_is_that_of_the_stream(turn: Turn, size: int) -> None:
    whole = ResponsesForm(REPEATED, "m", PROMPT_TOKENS).whole(turn.completion())
    Response.model_validate(whole)
    assert plain(whole) == plain(events(turn.chunks(size))[-1]["response"])


def test_an_answer_that_was_cut_is_incomplete() -> None:
    made = events(Turn(reasoning="a", text="b", finish_reason="length").chunks())
    assert made[-1]["type"] == "response.incomplete"
    response = made[-1]["response"]
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_an_empty_answer_is_an_empty_message() -> None:
    (item,) = events(Turn().chunks())[-1]["response"]["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == ""


def test_logprobs_stay_with_the_text() -> None:
    def scored(token: str) -> dict[str, Any]:
        return {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}

    def chunk(delta: dict[str, Any], *tokens: str) -> dict[str, Any]:
        logprobs = {"content": [scored(token) for token in tokens]}
        return {"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}

    made = events([chunk({"content": ""}, "<"), chunk({"content": "ab"}, "a", "b"), chunk({"content": ""}, ">")])
    deltas = [event for event in made if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in deltas] == ["ab", ""]
    assert [[each["token"] for each in event["logprobs"]] for event in deltas] == [["<", "a", "b"], [">"]]
    done = next(event for event in made if event["type"] == "response.output_text.done")
    assert [each["token"] for each in done["logprobs"]] == ["<", "a", "b", ">"]


def test_a_failure_ends_the_stream() -> None:
    form = ResponsesForm(REPEATED, "m", PROMPT_TOKENS)
    made = [*form.opening()]
    for chunk in Turn(text="Hello").chunks()[:3]:
        made += form.take(chunk)
    (event,) = form.failure(ApiError(500, "the logits are NaN", code="engine_error"))
    EVENT.validate_python(event)
    assert event["type"] == "response.failed" and event["sequence_number"] == len(made)
    response = event["response"]
    assert response["status"] == "failed" and response["error"] == {"code": "server_error", "message": "the logits are NaN"}
    assert [(item["status"], item["content"][0]["text"]) for item in response["output"]] == [("incomplete", "Hello")]


def test_events_are_named() -> None:
    form = ResponsesForm(REPEATED, "m", PROMPT_TOKENS)
    assert (
        form.encoded({"type": "response.created", "a": 1})
        == b'event: response.created\ndata: {"type":"response.created","a":1}\n\n'
    )
    assert form.closing == b""
