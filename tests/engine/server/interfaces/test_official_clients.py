"""The interfaces as the official clients of OpenAI and Anthropic see them, with the demo model and written chats."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from scripted_chat import CACHED_TOKENS, NEW_TOKENS, PROMPT_TOKENS, ScriptedChat, Turn
from server_for_tests import served

from engine.batching.loop import EngineLoop
from engine.generation.generate import Engine
from engine.server.server import Service, State

ROOT = Path(__file__).resolve().parents[4]
SUPPORT = ROOT / "tests" / "support"
MESSAGES: Any = [{"role": "user", "content": "def read(path):"}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0, "ignore_eos": True}}
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOP = (
    Turn(
        reasoning="I need both.",
        text="Let me look.",
        calls=(("call_1", "weather", '{"city": "Rome"}'), ("call_2", "weather", '{"city": "Köln"}')),
    ),
    Turn(text="Rome has 21 degrees, Köln 9."),
)
RESULTS = {"Rome": "21", "Köln": "9"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the demo model."""
    engine = Engine.open("demo", device="cpu", threads=1)
    engine_loop = EngineLoop(engine, kv_cache_bytes=20_000_000, max_batch_size=4, max_model_length=256)
    engine_loop.start()
    service = Service(engine, engine_loop, model_name="demo")
    with served(State(phase="ready", loaded=service)) as address:
        yield address
    service.close()


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def anthropic_client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def chat_text(url: str, limit: int, **options: Any) -> str:
    with openai_client(url) as client:
        answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=limit, **GREEDY, **options)
    return str(answer.choices[0].message.content)


def test_a_response_says_what_the_chat_says(url: str) -> None:
    with openai_client(url) as client:
        answer = client.responses.create(model="demo", input=MESSAGES, max_output_tokens=12, metadata={"a": "b"}, **GREEDY)
        read = client.responses.input_tokens.count(model="demo", input=MESSAGES).input_tokens
    assert answer.output_text == chat_text(url, 12) and answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.metadata == {"a": "b"} and answer.model == "demo" and answer.id.startswith("resp_")
    usage = answer.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (read, 12, read + 12)
    json.dumps(answer.model_dump())  # a value of another type than the client's would warn


def test_a_response_is_streamed(url: str) -> None:
    text = chat_text(url, 40)
    stop = text[15:17]
    options: dict[str, Any] = {"extra_body": GREEDY["extra_body"] | {"stop": stop}}
    cut = text[: text.index(stop)]
    with openai_client(url) as client:
        with client.responses.stream(model="demo", input=MESSAGES, max_output_tokens=40, **options) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        raw = list(client.responses.create(model="demo", input=MESSAGES, stream=True, max_output_tokens=12, **GREEDY))
    assert "".join(deltas) == cut == final.output_text and final.status == "completed" and len(deltas) > 1
    assert [event.sequence_number for event in raw] == list(range(len(raw))) and raw[-1].type == "response.incomplete"
    assert raw[-1].response.output_text == chat_text(url, 12)


def test_logprobs_of_a_response_are_those_of_the_chat(url: str) -> None:
    with openai_client(url) as client:
        chat = client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2, **GREEDY
        )
        answer = client.responses.create(
            model="demo",
            input=MESSAGES,
            max_output_tokens=4,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
            **GREEDY,
        )
    expected, item = chat.choices[0].logprobs, answer.output[0]
    assert expected is not None and item.type == "message" and item.content[0].type == "output_text"
    found = item.content[0].logprobs
    assert found is not None and expected.content is not None and len(found) == 4
    assert [(each.token, each.top_logprobs[1].token) for each in found] == [
        (each.token, each.top_logprobs[1].token) for each in expected.content
    ]


def test_a_message_says_what_the_chat_says(url: str) -> None:
    with anthropic_client(url) as client:
        answer = client.messages.create(model="demo", messages=MESSAGES, max_tokens=12, **GREEDY)
        read = client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens
        assert client.messages.count_tokens(model="demo", messages=MESSAGES, system="be brief").input_tokens > read
    assert answer.content[0].type == "text" and answer.content[0].text == chat_text(url, 12)
    assert answer.stop_reason == "max_tokens" and answer.role == "assistant" and answer.id.startswith("msg_")
    usage = answer.usage
    assert (usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens) == (read, 12)
    json.dumps(answer.model_dump())


def test_a_message_is_streamed_and_names_its_stop_sequence(url: str) -> None:
    text = chat_text(url, 40)
    stop = text[15:17]
    options: dict[str, Any] = {"max_tokens": 40, "stop_sequences": ["never there", stop], **GREEDY}
    with anthropic_client(url) as client:
        with client.messages.stream(model="demo", messages=MESSAGES, **options) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        whole = client.messages.create(model="demo", messages=MESSAGES, **options)
    assert "".join(pieces) == text[: text.index(stop)] == stream.get_final_text() and len(pieces) > 1
    for answer in (final, whole):
        assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop
    assert final.usage.output_tokens == whole.usage.output_tokens > 1


def test_a_limit_of_a_message_is_lowered_to_what_fits(url: str) -> None:
    with anthropic_client(url) as client:
        for limit, reason in ((10_000, "model_context_window_exceeded"), (20, "max_tokens")):
            answer = client.messages.create(model="demo", messages=MESSAGES, max_tokens=limit, **GREEDY)
            usage = answer.usage
            assert answer.stop_reason == reason
            total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens
            assert total == 256 if limit == 10_000 else usage.output_tokens == 20


def test_what_was_read_before_is_counted_as_cached(url: str) -> None:
    long: Any = [{"role": "user", "content": "x = 1\n" * 40}]
    with openai_client(url) as client:
        first, second = (client.responses.create(model="demo", input=long, max_output_tokens=1).usage for _ in range(2))
    assert first is not None and second is not None and second.input_tokens_details.cached_tokens > 0
    with anthropic_client(url) as client:
        usage = client.messages.create(model="demo", messages=long, max_tokens=1).usage
    assert usage.cache_read_input_tokens == second.input_tokens_details.cached_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == second.input_tokens


def test_errors_are_those_of_the_clients(url: str) -> None:
    with openai_client(url) as client:
        for options, param in (
            ({"input": "a" * 5_000}, "input"),
            ({"input": "a", "max_output_tokens": 256}, "input"),
            ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
            ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(**{"model": "demo"} | options)  # type: ignore[arg-type]
            assert caught.value.param == param and caught.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.responses.create(model="other", input="a")
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="responses are not stored here"):
                ask("resp_1")
    with anthropic_client(url) as other:
        for changed, said in (
            ({"messages": [{"role": "user", "content": "a" * 5_000}]}, "messages has 5000|the prompt has"),
            ({"system": [{"type": "image"}]}, r"system\[0\].type 'image' is not available"),
            ({"stop_sequences": ["a"] * 5}, "stop_sequences: .*at most 4"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=said) as refused:
                other.messages.create(**{"model": "demo", "messages": MESSAGES, "max_tokens": 1} | changed)  # type: ignore[arg-type]
            assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        with pytest.raises(anthropic.NotFoundError, match="is not served here") as missing:
            other.messages.create(model="other", messages=MESSAGES, max_tokens=1)
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


# Chats with reasoning and calls


@pytest.fixture
def chat() -> ScriptedChat:
    return ScriptedChat(LOOP)


@pytest.fixture
def scripted_url(chat: ScriptedChat) -> Iterator[str]:
    with served(State(), app=chat.app()) as address:
        yield address


def check_transcript(chat: ScriptedChat, question: dict[str, Any]) -> None:
    """Check that the second request of a loop has the first answer and the results of its calls."""
    first, second = chat.chats
    calls = [
        {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}
        for own, name, arguments in LOOP[0].calls
    ]
    assert first["messages"] == [question]
    assert second["messages"] == [
        question,
        {"role": "assistant", "reasoning_content": "I need both.", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "21"},
        {"role": "tool", "tool_call_id": "call_2", "content": "9"},
    ]
    for each in chat.chats:
        (tool,) = each["tools"]
        assert tool["function"]["name"] == "weather" and tool["function"]["parameters"]["required"] == ["city"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_openais_client(chat: ScriptedChat, scripted_url: str, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    items: list[Any] = [{"role": "user", "content": "How warm?"}]
    with openai_client(scripted_url) as client:

        def ask() -> Any:
            if not stream:
                return client.responses.create(model="scripted", input=items, tools=tools)
            with client.responses.stream(model="scripted", input=items, tools=tools) as events:
                return events.get_final_response()

        first = ask()
        items += [item.to_dict() for item in first.output]
        calls = [item for item in first.output if item.type == "function_call"]
        for call in calls:
            result = RESULTS[json.loads(call.arguments)["city"]]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        last = ask()
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output_text == "Let me look." and first.output[0].content[0].text == "I need both."
    assert last.output_text == LOOP[1].text and last.status == "completed"
    assert last.usage.input_tokens_details.cached_tokens == CACHED_TOKENS and last.usage.output_tokens == NEW_TOKENS
    check_transcript(chat, {"role": "user", "content": "How warm?"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_anthropics_client(chat: ScriptedChat, scripted_url: str, stream: bool) -> None:
    tools: Any = [{"name": "weather", "input_schema": WEATHER}]
    turns: list[Any] = [{"role": "user", "content": "How warm?"}]
    with anthropic_client(scripted_url) as client:

        def ask() -> Any:
            options: Any = {"model": "scripted", "messages": turns, "tools": tools, "max_tokens": 50}
            if not stream:
                return client.messages.create(**options)
            with client.messages.stream(**options) as events:
                return events.get_final_message()

        first = ask()
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.input["city"]]} for call in calls]
        turns += [first.to_param(), {"role": "user", "content": results}]
        last = ask()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use" and first.content[0].thinking == "I need both."
    assert last.content[0].text == LOOP[1].text and last.stop_reason == "end_turn"
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == PROMPT_TOKENS
    check_transcript(chat, {"role": "user", "content": "How warm?"})


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_runs_tools_itself(chat: ScriptedChat, scripted_url: str, stream: bool) -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the temperature of a city in degrees."""
        return RESULTS[city]

    with anthropic_client(scripted_url) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="scripted",
            max_tokens=50,
            tools=[weather],
            messages=[{"role": "user", "content": "How warm?"}],
            stream=stream,
        )
        last = runner.until_done()
    assert last.content[0].text == LOOP[1].text
    check_transcript(chat, {"role": "user", "content": "How warm?"})


def test_what_a_client_parses(scripted_url: str, chat: ScriptedChat) -> None:
    from pydantic import BaseModel

    class Degrees(BaseModel):
        city: str
        degrees: int

    chat.turns = (Turn(text='{"city": "Rome", "degrees": 21}'),)
    with openai_client(scripted_url) as client:
        answer = client.responses.parse(model="scripted", input="How warm?", text_format=Degrees)
        assert answer.output_parsed == Degrees(city="Rome", degrees=21)
        with client.responses.stream(model="scripted", input="How warm?", text_format=Degrees) as stream:
            assert stream.get_final_response().output_parsed == Degrees(city="Rome", degrees=21)
    with anthropic_client(scripted_url) as other:
        message = other.messages.parse(
            model="scripted", max_tokens=9, messages=[{"role": "user", "content": "How warm?"}], output_format=Degrees
        )
    assert message.parsed_output == Degrees(city="Rome", degrees=21)
    for each in chat.chats:
        schema = each["response_format"]["json_schema"]["schema"]
        assert set(schema["properties"]) == {"city", "degrees"}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "package"), [("responses_npm.mjs", "openai"), ("messages_npm.mjs", "@anthropic-ai/sdk")])
def test_the_clients_of_npm(scripted_url: str, chat: ScriptedChat, script: str, package: str) -> None:
    """The test runs after `npm install openai @anthropic-ai/sdk` in a directory that NODE_PACKAGES names."""
    node, packages = shutil.which("node"), Path(os.environ.get("NODE_PACKAGES", str(Path.home())))
    if node is None or not (packages / "node_modules" / package).is_dir():
        pytest.skip(f"there is no node, or no package {package} in the directory that NODE_PACKAGES names")
    command = [node, str(SUPPORT / script), scripted_url]
    result = subprocess.run(command, cwd=packages, capture_output=True, text=True, check=False)
    assert result.stdout == "ok\n", result.stderr
    for start in (0, 2):  # whole, and streamed
        check_transcript(ScriptedChat(LOOP, chat.chats[start : start + 2]), {"role": "user", "content": "How warm?"})


def test_the_snippets_of_the_documentation(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page[page.index("## Other clients") : page.index("## Endpoints")]
    snippets = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        assert "http://127.0.0.1:8000" in snippet
        names: dict[str, Any] = {}
        exec(snippet.replace("http://127.0.0.1:8000", url), names)
        for value in names.values():
            if isinstance(value, openai.OpenAI | anthropic.Anthropic):
                value.close()  # before the garbage collector finds its sockets, in any order
        assert len(capsys.readouterr().out) > 20


def test_the_schema_describes_the_interfaces(url: str) -> None:
    schema = httpx2.get(f"{url}/openapi.json").json()
    for path, name in (
        ("/v1/responses", "ResponsesRequest"),
        ("/v1/responses/input_tokens", "InputTokensRequest"),
        ("/v1/messages", "MessagesRequest"),
        ("/v1/messages/count_tokens", "CountTokensRequest"),
    ):
        (reference,) = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].values()
        assert reference == f"#/components/schemas/{name}" and schema["components"]["schemas"][name]["properties"]["model"]
    errors = schema["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert errors["required"] == ["type", "error"]
    assert "/v1/messages/count_tokens" in httpx2.get(f"{url}/docs").text
