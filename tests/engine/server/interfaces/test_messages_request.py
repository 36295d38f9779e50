"""Bodies of Anthropic's Messages interface become chats, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.errors import ApiError
from engine.server.interfaces.table import INTERFACES
from engine.server.reading.schema import ChatCompletionRequest

INTERFACE = INTERFACES["/v1/messages"]
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat(**values: Any) -> dict[str, Any]:
    """Return the chat of a body, which a chat completion must accept."""
    made = INTERFACE.chat(INTERFACE.read({"max_tokens": 5, "messages": HI} | values))
    ChatCompletionRequest.model_validate(made)
    return made


def test_options_have_the_names_of_chats() -> None:
    made = chat(
        model="m", system="be brief", stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=3, stream=True, seed=1
    )
    assert made == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, *HI],
        "stop": ["a", "b"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 1,
    }


def test_what_has_no_effect_is_taken() -> None:
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    made = chat(
        system=[cached, {"type": "text", "text": "b"}], metadata={"user_id": "me"}, service_tier="auto", mcp_servers=[]
    )
    assert made == {"messages": [{"role": "system", "content": "a\nb"}, *HI]}


def test_blocks_become_messages() -> None:
    turns = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "call_1", "name": "f", "input": {"city": "Zürich"}},
                {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and now?"},
                {"type": "tool_result", "tool_use_id": "call_1", "content": "one"},
                {"type": "tool_result", "tool_use_id": "call_2", "is_error": True},
            ],
        },
    ]
    call = {"type": "function"}
    assert chat(messages=turns)["messages"] == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "calling",
            "tool_calls": [
                call | {"id": "call_1", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}},
                call | {"id": "call_2", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
        {"role": "user", "content": "and now?"},
    ]


def test_images_are_data_urls() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": "a"}
    linked = {"type": "image", "source": {"type": "url", "url": "data:image/gif;base64,BB"}}
    shown = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,BB"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text, image]}
    assert chat(messages=[{"role": "user", "content": [image, text, linked]}, *HI])["messages"] == [
        {"role": "user", "content": [part, text, shown, {"type": "text", "text": "hi"}]}
    ]
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    assert chat(messages=[*HI, call, {"role": "user", "content": [result]}])["messages"][2:] == [
        {"role": "tool", "tool_call_id": "c", "content": [text, part]}
    ]


def test_turns_of_the_user_that_follow_each_other_are_one() -> None:
    turns = [*HI, {"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "system", "content": "now"}, *HI]
    assert chat(messages=turns)["messages"] == [
        {"role": "user", "content": "hi\na"},
        {"role": "system", "content": "now"},
        *HI,
    ]


def test_tools_and_their_choice() -> None:
    tools = [
        {"name": "weather", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        {"type": "custom", "name": "time", "input_schema": {}, "strict": True},
    ]
    own = [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "time", "parameters": {}, "strict": True}},
    ]
    assert chat(tools=tools) == {"messages": HI, "tools": own}
    for choice, expected in (
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "time"}, {"type": "function", "function": {"name": "time"}}),
    ):
        made = chat(tools=tools, tool_choice=choice)
        assert made["tool_choice"] == expected and "parallel_tool_calls" not in made
    assert chat(tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})["parallel_tool_calls"] is False


def test_thinking_and_output() -> None:
    for thinking, reasons, shown in (
        ({"type": "enabled", "budget_tokens": 2000}, True, "shown"),
        ({"type": "adaptive", "display": "omitted"}, True, "omitted"),
        ({"type": "disabled"}, False, "left_out"),
    ):
        made = chat(thinking=thinking)
        assert made["chat_template_kwargs"] == {"enable_thinking": reasons, "thinking": reasons}
        assert INTERFACE.kept(INTERFACE.read({"max_tokens": 5, "messages": HI, "thinking": thinking})) == {"thinking": shown}
    assert "chat_template_kwargs" not in chat()
    made = chat(output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}})
    assert made["reasoning_effort"] == "high"
    assert made["response_format"]["json_schema"] == {"name": "answer", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("values", "param", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "'tool' is not available; use 'user'"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "Field required"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "have no content"),
        ({"messages": [*HI, {"role": "assistant", "content": "a"}]}, "messages", "end with an assistant turn"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
            "'document' is not available; use 'text', 'image', 'tool_result'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
            "'file' is not available",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "b"}]}]}
                ]
            },
            "messages[0].content[0].content[0].type",
            "'b' is not available",
        ),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]},
                    *HI,
                ]
            },
            "messages[1].content[0].input",
            "valid dictionary",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "b"}]}
                ]
            },
            "messages[0].content[1].tool_use_id",
            "is 'b', and no call before it has this id",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type", "'image' is not available; use 'text'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type",
            "'web_search_20250305' is not",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "Field required"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type", "'all' is not available; use 'auto', 'none', 'any', 'tool'"),
        ({"thinking": {"type": "deep"}}, "thinking.type", "'deep' is not available"),
        ({"container": "c"}, "container", "not available"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers", "not available"),
        ({"thread": {"type": "create"}}, "thread", "send the whole conversation"),
        ({"stop": "a"}, "stop", "use stop_sequences"),
        ({"top_logprobs": 2}, "top_logprobs", "leave it out"),
    ],
)
def test_what_cannot_be_honored_is_named(values: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        INTERFACE.chat(INTERFACE.read({"max_tokens": 5, "messages": HI} | values))
    error = caught.value
    assert error.status == 400 and error.param == param and error.message.startswith(param) and said in error.message


def test_the_limit_may_be_lowered() -> None:
    assert INTERFACE.most_tokens is not None
    assert INTERFACE.most_tokens(INTERFACE.read({"max_tokens": 5, "messages": HI})) == 5


def test_counting_needs_no_limit() -> None:
    interface = INTERFACES["/v1/messages/count_tokens"]
    assert interface.chat(interface.read({"messages": HI, "system": "s"})) == {
        "messages": [{"role": "system", "content": "s"}, *HI]
    }
    assert interface.counted is not None and interface.counted(7) == {"input_tokens": 7}


def test_errors_of_the_chat_have_the_names_of_this_interface() -> None:
    with pytest.raises(ApiError, match="stop_sequences: too many"), INTERFACE.naming():
        raise ApiError(400, "stop: too many", param="stop")
