"""Bodies of OpenAI's Responses interface become chats, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.errors import ApiError
from engine.server.interfaces.table import INTERFACES
from engine.server.reading.schema import ChatCompletionRequest

INTERFACE = INTERFACES["/v1/responses"]
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat(**values: Any) -> dict[str, Any]:
    """Return the chat of a body, which a chat completion must accept."""
    made = INTERFACE.chat(INTERFACE.read(values))
    ChatCompletionRequest.model_validate(made)
    return made


def refused(**values: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        INTERFACE.kept(INTERFACE.read(values)) and INTERFACE.chat(INTERFACE.read(values))
    assert caught.value.status == 400 and "\n" not in caught.value.message
    return caught.value


def test_a_text_is_a_message_of_the_user() -> None:
    assert chat(input="hi", model="m") == {"model": "m", "messages": HI}
    assert chat(input="hi", instructions="be brief")["messages"] == [{"role": "system", "content": "be brief"}, *HI]


def test_options_have_the_names_of_chats() -> None:
    assert chat(input="hi", max_output_tokens=5, temperature=0.5, top_p=0.9, stream=True, reasoning={"effort": "low"}) == {
        "messages": HI,
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
    }


def test_the_highest_effort_is_that_of_chats() -> None:
    assert chat(input="hi", reasoning={"effort": "max"})["reasoning_effort"] == "xhigh"


def test_extensions_of_chats_are_passed_on_and_other_fields_are_not() -> None:
    made = chat(input="hi", top_k=3, skip_threshold=0.5, ignore_eos=True, min_p=0, unheard_of=1, user="me", store=False)
    assert made == {"messages": HI, "top_k": 3, "skip_threshold": 0.5, "ignore_eos": True, "min_p": 0}


def test_items_become_messages() -> None:
    image = "data:image/png;base64,AAAA"
    items = [
        {"role": "developer", "content": "be brief"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": image}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "d"}],
        },
    ]
    assert chat(input=items)["messages"] == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": image}}]},
        {"role": "assistant", "content": "cd"},
    ]


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    def call(number: int, arguments: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": "f",
            "arguments": arguments,
        }

    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "calling"},
        call(1, '{"a": 1}'),
        call(2, "{}"),
        {"type": "function_call_output", "call_id": "call_1", "output": "one"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        call(3, "{}"),
    ]
    made = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for number, arguments in ((1, '{"a": 1}'), (2, "{}"), (3, "{}"))
    ]
    assert chat(input=items)["messages"] == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "reasoning_content": "hm", "content": "calling", "tool_calls": made[:2]},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        {"role": "assistant", "tool_calls": made[2:]},
    ]


def test_tools_and_their_choice() -> None:
    tools = [
        {"type": "function", "name": "weather", "description": "d", "parameters": WEATHER, "strict": True},
        {"type": "function", "name": "time"},
    ]
    own = [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER, "strict": True}},
        {"type": "function", "function": {"name": "time"}},
    ]
    assert chat(input="hi", tools=tools, parallel_tool_calls=False) == {
        "messages": HI,
        "tools": own,
        "parallel_tool_calls": False,
    }
    for choice in ("auto", "none", "required"):
        assert chat(input="hi", tools=tools, tool_choice=choice)["tool_choice"] == choice
    named = chat(input="hi", tools=tools, tool_choice={"type": "function", "name": "time"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "time"}} and named["tools"] == own
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    some = chat(input="hi", tools=tools, tool_choice=allowed)
    assert some["tools"] == own[1:] and some["tool_choice"] == "required"


def test_formats_of_text() -> None:
    assert "response_format" not in chat(input="hi", text={"format": {"type": "text"}, "verbosity": "low"})
    assert chat(input="hi", text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    given = {"type": "json_schema", "name": "n", "schema": WEATHER, "strict": True}
    assert chat(input="hi", text={"format": given})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": WEATHER, "strict": True},
    }


def test_logprobs_are_asked_for_by_include() -> None:
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    made = chat(input="hi", include=include, top_logprobs=2)
    assert made["logprobs"] is True and made["top_logprobs"] == 2
    assert "logprobs" not in chat(input="hi", include=include[1:], top_logprobs=0)


@pytest.mark.parametrize(
    ("values", "param", "said"),
    [
        ({}, "input", "Field required"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": {}}, "input", "valid string"),
        (
            {"input": [{"type": "web_search_call"}]},
            "input[0].type",
            "'web_search_call' is not available; use 'message', 'function",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference' is not available"),
        ({"input": [*HI, {"type": "function_call", "name": "f", "arguments": ""}]}, "input[1].call_id", "Field required"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", "Field required"),
        (
            {"input": [*HI, {"type": "function_call_output", "call_id": "a", "output": ""}]},
            "input[1].call_id",
            "is 'a', and no",
        ),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'tool' is not available; use 'user'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
            "'input_file' is not",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "Field required"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "only reasoning without text"),
        ({"input": "\ud800"}, "input", "surrogate"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"input": "a", "temperature": 3}, "temperature", "less than or equal to 2"),
        (
            {"input": "a", "tools": [{"type": "web_search"}]},
            "tools[0].type",
            "'web_search' is not available; use 'function'",
        ),
        ({"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice.type", "'web_search' is not available"),
        ({"input": "a", "tool_choice": "any"}, "tool_choice", "'any' is not available; use 'none', 'auto' or 'required'"),
        (
            {
                "input": "a",
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            },
            "tool_choice",
            "allows 'f', which is not among tools",
        ),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "Field required"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "'xml' is not available"),
        ({"input": "a", "include": ["everything"]}, "include[0]", "'everything' is not available"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs", "needs include to have message.output_text.logprobs"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"input": "a", "background": True}, "background", "not available; wait"),
        ({"input": "a", "store": True}, "store", "not stored here"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", "not stored here"),
        ({"input": "a", "truncation": "auto"}, "truncation", "shorten the input"),
        ({"input": "a", "messages": HI}, "messages", "not a parameter of this endpoint; use input"),
        ({"input": "a", "max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"input": "a", "n": 2}, "n", "leave it out"),
    ],
)
def test_what_cannot_be_honored_is_named(values: dict[str, Any], param: str, said: str) -> None:
    error = refused(**values)
    assert error.param == param and error.message.startswith(param) and said in error.message


def test_neutral_values_change_nothing() -> None:
    neutral = {
        "background": False,
        "truncation": "disabled",
        "previous_response_id": None,
        "conversation": None,
        "store": None,
    }
    assert chat(input="hi", **neutral) == {"messages": HI}


def test_the_answer_repeats_options_with_their_defaults() -> None:
    bare = INTERFACE.kept(INTERFACE.read({"input": "hi"}))
    assert bare == {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
    }
    tools = [{"type": "function", "name": "f", "parameters": WEATHER}]
    given = {"input": "hi", "tools": tools, "tool_choice": {"type": "function", "name": "f"}, "metadata": {"a": "b"}}
    own = INTERFACE.kept(INTERFACE.read(given | {"safety_identifier": "me", "parallel_tool_calls": False}))
    assert own["tools"] == [{"type": "function", "name": "f", "description": None, "parameters": WEATHER, "strict": None}]
    assert own["tool_choice"] == {"type": "function", "name": "f"} and own["metadata"] == {"a": "b"}
    assert own["safety_identifier"] == "me" and own["parallel_tool_calls"] is False


def test_large_and_deep_fields_are_not_repeated() -> None:
    error = refused(input="hi", instructions="x" * 1_000_000)
    assert error.param == "instructions" and "1000002 bytes" in error.message
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"a": deep}
    error = refused(input="hi", tools=[{"type": "function", "name": "f", "parameters": deep}])
    assert error.param == "tools" and "more than 100 levels" in error.message
    assert INTERFACE.kept(
        INTERFACE.read({"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": deep["a"]["a"]["a"]}]})
    )


def test_errors_of_the_chat_have_the_names_of_this_interface() -> None:
    with pytest.raises(ApiError) as caught, INTERFACE.naming():
        raise ApiError(400, "messages: too long", param="messages", code="context_length_exceeded")
    error = caught.value
    assert (error.param, error.message, error.code) == ("input", "input: too long", "context_length_exceeded")
    with pytest.raises(ApiError) as caught, INTERFACE.naming():
        raise ApiError(400, "temperature: too hot", param="temperature")
    assert caught.value.param == "temperature"
