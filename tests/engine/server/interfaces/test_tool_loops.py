"""Tools and reasoning through the interfaces: the official clients run a tool loop against a scripted model."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import pytest
from test_tools import CALLS, QUESTION, THOUGHT, TOOLS, Scripted, make  # noqa: F401 (make is a fixture)

RESULTS = {"Köln": "12", "Rom": "21"}
ANSWER = "Köln 12, Rom 21."
SCHEMA = TOOLS[0]["function"]["parameters"]


def prompts_of_chat(server: Scripted) -> list[str]:
    """Return the prompts of the same loop through chat completions."""
    messages = list(QUESTION)
    first = server.ask(messages, tools=TOOLS[:1]).choices[0].message
    messages.append(first.to_dict())
    for call in first.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[city]})
    server.ask(messages, tools=TOOLS[:1])
    return [server.prompt(-2), server.prompt(-1)]


def without_ids(prompt: str) -> str:
    return re.sub(r"tool\([^)]*\)", "tool()", prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_responses(make: Any, stream: bool) -> None:  # noqa: F811
    tools: Any = [{"type": "function", "name": "get_weather", "description": "Weather", "parameters": SCHEMA}]
    with make() as server:
        client, items = server.client, list(QUESTION)

        def ask() -> Any:
            if not stream:
                return client.responses.create(model="tiny", input=items, tools=tools)
            with client.responses.stream(model="tiny", input=items, tools=tools) as events:
                return events.get_final_response()

        first = ask()
        items += [item.to_dict() for item in first.output]
        for call in (item for item in first.output if item.type == "function_call"):
            city = json.loads(call.arguments)["city"]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[city]})
        last = ask()
        own = [without_ids(server.prompt(-2)), without_ids(server.prompt(-1))]
        assert own == [without_ids(prompt) for prompt in prompts_of_chat(server)]
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == THOUGHT and first.output_text.strip() == "I look."
    assert [json.loads(item.arguments) for item in first.output[2:]] == list(CALLS)
    assert last.output_text == ANSWER and last.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_messages(make: Any, stream: bool) -> None:  # noqa: F811
    tools: Any = [{"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}]
    with make() as server, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        turns = list(QUESTION)

        def ask() -> Any:
            options: Any = {"model": "tiny", "messages": turns, "tools": tools, "max_tokens": 4000}
            if not stream:
                return client.messages.create(**options)
            with client.messages.stream(**options) as events:
                return events.get_final_message()

        first = ask()
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.input["city"]]} for call in calls]
        turns += [first.to_param(), {"role": "user", "content": results}]
        last = ask()
        own = [without_ids(server.prompt(-2)), without_ids(server.prompt(-1))]
        count = client.messages.count_tokens(model="tiny", messages=turns, tools=tools).input_tokens
        assert count == len(server.loop.requests[-1].prompt)
        assert own == [without_ids(prompt) for prompt in prompts_of_chat(server)]
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.content[0].thinking == THOUGHT and first.stop_reason == "tool_use"
    assert [call.input for call in calls] == list(CALLS)
    assert [block.text for block in last.content if block.type == "text"] == [ANSWER] and last.stop_reason == "end_turn"


def test_thinking_reaches_the_template(make: Any) -> None:  # noqa: F811
    with make() as server, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        client.messages.create(
            model="tiny", messages=QUESTION, max_tokens=100, thinking={"type": "disabled"}, output_config={"effort": "max"}
        )
        assert server.prompt().endswith("assistant:<think></think>") and "effort xhigh" in server.prompt()


def test_a_forced_call_has_a_grammar(make: Any) -> None:  # noqa: F811
    with make() as server, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            client.messages.create(model="tiny", messages=QUESTION, max_tokens=100, tools=tools, tool_choice=choice)
            assert server.loop.requests[-1].grammar
        with pytest.raises(anthropic.BadRequestError, match="tool_choice names the tool 'b'"):
            client.messages.create(
                model="tiny", messages=QUESTION, max_tokens=100, tools=tools, tool_choice={"type": "tool", "name": "b"}
            )
