"""Tools and reasoning over HTTP: the official client runs a tool loop against a scripted model, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import llguidance
import openai
import pytest
from conftest import save_reference
from reply_texts import RECORDED, SCHEMAS
from scripted_loop import ReplyLoop
from server_for_tests import Sent, recording, served
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from transformers import AutoTokenizer

from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.replies.reply import ReplyForm
from engine.replies.table import TOOL_FORMS
from engine.server.errors import ApiError
from engine.server.options import ServeOptions
from engine.server.reading.body_reader import BodyReader, Read, ReadingSettings
from engine.server.reading.reading_pool import ReadingPool
from engine.server.reading.text_reader import tokenizer_settings
from engine.server.requests import reading_settings
from engine.server.server import Service, State, create_app

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{{ '\\n' }}{% endif %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
THOUGHT, CALLS = "Two cities.", ({"city": "Köln", "days": 2}, {"city": "Rom"})
FIRST = f"<think>{THOUGHT}</think>\n\nI look.\n" + "\n".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(call, ensure_ascii=False)}}}\n</tool_call>'
    for call in CALLS
)
SECOND = "<think>Both are there.</think>Köln 12, Rom 21."
QUESTION: Any = [{"role": "user", "content": "Wie warm?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMAS["get_weather"]},
    },
    {"type": "function", "function": {"name": "now"}},
]


def weather(prompt: str) -> str:
    """Return calls first, and an answer when there are results."""
    return SECOND if "\ntool(" in prompt else FIRST


@dataclass
class Scripted:
    """A server with a scripted model, and its official client."""

    loop: ReplyLoop
    client: openai.OpenAI
    url: str

    def ask(self, messages: Any = QUESTION, **options: Any) -> Any:
        return self.client.chat.completions.create(**{"model": "tiny", "messages": messages} | options)

    def prompt(self, number: int = -1) -> str:
        return str(self.loop.tokenizer.decode(self.loop.requests[number].prompt, skip_special_tokens=False))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a maker of servers, given a template, special tokens, and what the model replies to a prompt.

    `bodies` gets what is sent to a server.
    """

    @contextmanager
    def made(
        choose: Callable[[str], str] = weather,
        template: str | None = TEMPLATE,
        marks: tuple[str, ...] = (),
        bodies: list[Sent] | None = None,
        **parsers: str,
    ) -> Iterator[Scripted]:
        path = tmp_path_factory.mktemp("model")
        save_reference("mixtral", path, vocab_size=VOCABULARY + len(marks), max_position_embeddings=8192)
        add_tokenizer(path, **{f"mark_{place}": mark for place, mark in enumerate(marks)})
        if template is not None:
            (path / "chat_template.jinja").write_text(template, encoding="utf-8")
        engine = Engine.open(path, device="cpu")
        settings = reading_settings(
            engine, model_name="tiny", max_model_length=8192, max_queue=256, skip_threshold=0.0, **parsers
        )
        loop = ReplyLoop((), str, max_model_length=8192, tokenizer=engine.tokenizer, choose=choose)
        reading, own_loop = ReadingPool(settings.to_json), loop
        fake: Any = own_loop
        state = State(phase="ready", loaded=Service(engine, fake, model_name="tiny", reading=reading))
        try:
            with (
                served(state, app=None if bodies is None else recording(create_app(state), bodies)) as url,
                openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                yield Scripted(loop, client, url)
        finally:
            reading.close()

    return made


@pytest.fixture(scope="module")
def server(make: Any) -> Iterator[Scripted]:
    with make() as made:
        yield made


def results(calls: Any) -> list[Any]:
    """Return a tool's message for each call."""
    return [{"role": "tool", "tool_call_id": call.id, "content": f"{place}°"} for place, call in enumerate(calls)]


def test_a_tool_loop(server: Scripted) -> None:
    answer = server.ask(tools=TOOLS)
    (choice,) = answer.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls" and message.content == "I look.\n" and message.reasoning_content == THOUGHT
    assert [(call.type, call.function.name) for call in message.tool_calls] == [("function", "get_weather")] * 2
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == list(CALLS)
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2 and all(each.startswith("call_") for each in ids)
    assert f"<tools>{json.dumps(TOOLS)}</tools>\nuser: Wie warm?\nassistant:" == server.prompt()
    history = [*QUESTION, message.model_dump(exclude_none=True), *results(message.tool_calls)]
    (last,) = server.ask(history, tools=TOOLS).choices
    assert (last.finish_reason, last.message.content) == ("stop", "Köln 12, Rom 21.")
    assert last.message.tool_calls is None and last.message.reasoning_content == "Both are there."
    called = "".join(
        f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': call}, ensure_ascii=False)}</tool_call>"
        for call in CALLS
    )
    assert server.prompt().endswith(f"assistant: I look.\n{called}\ntool({ids[0]}): 0°\ntool({ids[1]}): 1°\nassistant:")


def test_a_tool_loop_in_streams(server: Scripted) -> None:
    with server.client.chat.completions.stream(model="tiny", messages=QUESTION, tools=TOOLS) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        (choice,) = stream.get_final_completion().choices
    calls = choice.message.tool_calls
    assert names == ["get_weather"] * 2 and choice.finish_reason == "tool_calls" and calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == list(CALLS)
    history = [*QUESTION, {"role": "assistant", "tool_calls": [call.model_dump() for call in calls]}, *results(calls)]
    chunks = list(server.ask(history, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Köln 12, Rom 21."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Both are there."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_chunks_of_a_call(server: Scripted) -> None:
    """The id and the name come once, and the arguments in pieces as they are written."""
    deltas = [chunk.choices[0].delta for chunk in server.ask(tools=TOOLS, stream=True)]
    kinds = ["thought" if getattr(d, "reasoning_content", None) else "call" if d.tool_calls else "text" for d in deltas]
    assert re.fullmatch("(text)?(thought)+(text)+(call)+(text)", "".join(kinds)), "reasoning, content, calls, the end"
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    for place, call in enumerate(CALLS):
        own = [part for part in parts if part.index == place]
        assert own[0].id and own[0].function.name == "get_weather" and own[0].type == "function"
        assert all(part.id is None and part.type is None and part.function.name is None for part in own[1:])
        text = json.dumps(call, ensure_ascii=False)
        assert "".join(part.function.arguments for part in own) == text
        assert len(own) >= len(text), "one piece for each character, as the model's tokens are"


def test_one_call_only(server: Scripted) -> None:
    (choice,) = server.ask(tools=TOOLS, parallel_tool_calls=False).choices
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [CALLS[0]]
    parts = [
        part
        for chunk in server.ask(tools=TOOLS, parallel_tool_calls=False, stream=True)
        for part in chunk.choices[0].delta.tool_calls or ()
    ]
    assert {part.index for part in parts} == {0}
    assert json.loads("".join(part.function.arguments for part in parts)) == CALLS[0]


def test_several_choices_have_their_own_calls(server: Scripted) -> None:
    choices = server.ask(tools=TOOLS, n=2).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls]
    assert len(choices) == 2 and len(set(ids)) == 4


def test_no_tools_are_looked_for_where_none_are_wanted(server: Scripted) -> None:
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {}, {"tools": []}, {"tool_choice": "auto"}):
        (choice,) = server.ask(**options).choices
        assert choice.message.content == FIRST.partition("</think>")[2].lstrip() and choice.message.tool_calls is None
        assert choice.finish_reason == "stop" and server.loop.requests[-1].grammar == ""
        assert ("<tools>" in server.prompt()) is bool(options.get("tools"))


def test_a_call_that_is_cut_off(server: Scripted) -> None:
    (choice,) = server.ask(tools=TOOLS, max_tokens=FIRST.index('"days"')).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city": "Köln"')
    (choice,) = server.ask(tools=TOOLS, max_tokens=15).choices
    assert choice.finish_reason == "length" and choice.message.content == "" and choice.message.tool_calls is None
    assert THOUGHT.startswith(choice.message.reasoning_content)


@pytest.mark.parametrize("named", [False, True])
def test_a_forced_call_has_a_grammar(server: Scripted, named: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "now"}} if named else "required"
    assert server.ask(tools=TOOLS, tool_choice=choice).choices[0].finish_reason == "tool_calls"
    tokenizer = server.loop.tokenizer
    own = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id)

    def takes(text: str) -> bool:
        matcher = llguidance.LLMatcher(own, server.loop.requests[-1].grammar, log_level=0)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())

    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert takes(now) and takes(f"<think>a</think>\n{now}") and not takes("a") and not takes(f"a {now}")
    assert takes(FIRST.replace("I look.\n", "")) is not named


def test_logprobs_are_those_of_all_tokens(server: Scripted) -> None:
    answer = server.ask(tools=TOOLS, logprobs=True)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    chunks = list(server.ask(tools=TOOLS, logprobs=True, stream=True))
    scored = [each for chunk in chunks for each in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())]
    assert [each.token for each in scored] == [each.token for each in answer.choices[0].logprobs.content]


def test_reasoning_is_apart_without_tools(make: Any) -> None:
    with make(lambda prompt: "Hm, well.\n</think>\nNow.", TEMPLATE + "<think>\n") as server:
        (choice,) = server.ask().choices
        assert (choice.message.content, choice.message.reasoning_content) == ("Now.", "Hm, well.")
        assert choice.finish_reason == "stop"
    with make(template=TEMPLATE, reasoning_parser="none", tool_parser="none") as server:
        (choice,) = server.ask(tools=TOOLS).choices
        assert choice.message.content == FIRST and not hasattr(choice.message, "reasoning_content")


def test_what_shapes_reasoning_reaches_the_template(server: Scripted) -> None:
    server.ask(reasoning_effort="low")
    assert server.prompt() == "effort low\nuser: Wie warm?\nassistant:"
    server.ask(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert server.prompt() == "user: Wie warm?\nassistant:<think></think>"
    server.ask(reasoning_effort="none")
    assert server.prompt() == "effort none\nuser: Wie warm?\nassistant:<think></think>"


def test_tokens_of_a_conversation_with_tools(server: Scripted) -> None:
    body = {"messages": QUESTION, "tools": TOOLS, "reasoning_effort": "high"}
    server.ask(tools=TOOLS, reasoning_effort="high")
    assert httpx2.post(f"{server.url}/tokenize", json=body).json()["tokens"] == list(server.loop.requests[-1].prompt)


def tool(**about: Any) -> Any:
    return [{"type": "function", "function": {"name": "f"} | about}]


ASKED = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"tools": tool() * 2}, "tools", "'f' twice"),
        ({"tools": tool(name="a b")}, "tools", "pattern"),
        ({"tools": tool(name="a" * 65)}, "tools", "pattern"),
        ({"tools": tool(name="f\n")}, "tools", "pattern"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "'function'"),
        ({"tools": tool(parameters={"type": "array"})}, "tools", "type 'array'"),
        ({"tools": tool(parameters={"type": "object", "properties": []})}, "tools", "properties"),
        ({"tools": tool(parameters="object")}, "tools", "dictionary"),
        ({"tools": tool() * 2000}, "tools", "at most 1024"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not in tools"),
        ({"tools": tool(), "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not in tools"),
        ({"tools": tool(), "tool_choice": "some"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"functions": [{"name": "f"}]}, "functions", "not available"),
        ({"messages": [*QUESTION, {"role": "tool", "content": "1"}]}, "messages", "without tool_call_id"),
        ({"messages": [*QUESTION, {"role": "tool", "tool_call_id": "a", "content": "1"}]}, "messages", "no earlier message"),
        (
            {"messages": [*QUESTION, ASKED, {"role": "tool", "tool_call_id": "b", "content": "1"}]},
            "messages",
            r"messages\[2\] answers the call 'b'",
        ),
        ({"messages": [{**ASKED, "role": "user"}]}, "messages", "its role is 'user'"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "'low'"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs", "'messages', which the server"),
        (
            {"extra_body": {"chat_template_kwargs": {"eos_token": "x"}}},
            "chat_template_kwargs",
            "'eos_token', which the server",
        ),
        ({"extra_body": {"chat_template_kwargs": {"a b": 1}}}, "chat_template_kwargs", "no name of a variable"),
        ({"extra_body": {"chat_template_kwargs": {"a": "x" * 70_000}}}, "chat_template_kwargs", "64000 bytes"),
        ({"extra_body": {"chat_template_kwargs": [1]}}, "chat_template_kwargs", "dictionary"),
    ],
)
def test_what_cannot_be_honored_is_named(server: Scripted, options: Any, param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        server.ask(**options)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(path)
    return AutoTokenizer.from_pretrained(path), path


@pytest.mark.parametrize(
    ("template", "parser", "choice", "param", "said"),
    [
        (None, "auto", "auto", "tools", "has no place"),
        ("{{ messages[0].content }}", "auto", "required", "tools", "has no place"),
        ("{{ messages[0].content }}", "hermes", "auto", "tools", "has no place"),
        ("{{ tools }}{{ messages[0].content }}", "auto", "auto", "tools", "start the server with --tool-parser"),
        ("{{ tools }}{{ messages[0].content }}", "none", "required", "tool_choice", "--tool-parser none"),
    ],
)
def test_tools_that_have_no_effect_are_refused(
    tokenizer: Any, template: str | None, parser: str, choice: str, param: str, said: str
) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        read(tokenizer, template, parser, tools=TOOLS, tool_choice=choice)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported_parameter")


def test_tools_without_a_form_that_is_known(tokenizer: Any) -> None:
    template = "{{ tools }}{{ messages[0].content }}"
    for own, parser, choice in ((template, "auto", "none"), (template, "none", "auto"), (None, "auto", "none")):
        found = read(tokenizer, own, parser, tools=TOOLS, tool_choice=choice).form
        assert found == ReplyForm()
    assert read(tokenizer, template, "hermes", tools=TOOLS).form.tools == "hermes"


def test_the_template_of_images_needs_a_place_for_tools_too(tokenizer: Any) -> None:
    made, path = tokenizer
    own = replace(tokenizer_settings(made, path, VOCABULARY), chat_template="{{ tools }}<tool_call>")
    reader = BodyReader(ReadingSettings(own, "tiny", 8192, 16, most_skip_threshold=0.0))
    images: Any = SimpleNamespace(template="{{ messages }}")
    reader._images = images
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [image]}], "tools": TOOLS}
    with pytest.raises(ApiError, match="has no place") as caught:
        reader.read("/v1/chat/completions", json.dumps(body).encode())
    assert caught.value.param == "tools"


def test_a_form_that_cannot_be_forced_is_forced_in_another(tokenizer: Any) -> None:
    template = "{{ tools }} func_name1( {{ messages[0].content }}"
    assert read(tokenizer, template, "auto", tools=TOOLS).form.tools == "llama4_pythonic"
    forced = read(tokenizer, template, "auto", tools=TOOLS, tool_choice="required")
    assert forced.form.tools == "llama3_json" and '\\"parameters\\": ' in forced.request["grammar"]


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def test_a_constrained_answer_beside_tools(tokenizer: Any) -> None:
    """The answer follows its schema or is a call; after reasoning, in a model that reasons."""
    template = "{{ tools }}<tool_call>{{ messages[0].content }}"
    plain = read(tokenizer, template, "auto", response_format=FORMAT).request["grammar"]
    beside = read(tokenizer, template, "auto", response_format=FORMAT, tools=TOOLS).request["grammar"]
    assert [set(each) & {"name"} for each in json.loads(beside)["grammars"]] == [set(), {"name"}]
    assert "<tool_call>" in beside and "<tool_call>" not in plain
    reasons = read(tokenizer, template + "</think>", "auto", response_format=FORMAT).request["grammar"]
    assert "<think>" in reasons
    bare = "{{ tools }} func_name1( {{ messages[0].content }}"
    with pytest.raises(ApiError, match="exclude each other"):
        read(tokenizer, bare, "auto", response_format=FORMAT, tools=TOOLS)
    free = read(tokenizer, bare, "auto", response_format=FORMAT, tools=TOOLS, tool_choice="none")
    assert free.request["grammar"] == plain


def test_a_forced_call_beside_a_constrained_answer_is_refused(tokenizer: Any) -> None:
    template = "{{ tools }}<tool_call>{{ messages[0].content }}"
    with pytest.raises(ApiError, match="leave one of them out") as caught:
        read(tokenizer, template, "auto", structured_outputs={"regex": "a+"}, tools=TOOLS, tool_choice="required")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_forced_call_leaves_the_format_of_answers_to_later_ones(tokenizer: Any, choice: Any) -> None:
    """Agents send the format of their last answer with every request, those that force a call included."""
    template = "{{ tools }}<tool_call>{{ messages[0].content }}"
    forced = read(tokenizer, template, "auto", tools=TOOLS, tool_choice=choice)
    beside = read(tokenizer, template, "auto", response_format=FORMAT, tools=TOOLS, tool_choice=choice)
    assert beside.request["grammar"] == forced.request["grammar"] and beside.form == forced.form
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    with pytest.raises(ApiError) as caught:
        read(tokenizer, template, "auto", response_format=wrong, tools=TOOLS, tool_choice=choice)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_schemas_of_tools_that_cannot_be_held_are_refused_by_the_keyword(tokenizer: Any, choice: str) -> None:
    template = "{{ tools }}<tool_call>{{ messages[0].content }}"
    wrong = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": wrong}}]
    more = {} if choice == "required" else {"response_format": FORMAT}
    with pytest.raises(ApiError, match="uniqueItems") as caught:
        read(tokenizer, template, "auto", tools=tools, tool_choice=choice, **more)
    assert caught.value.param == "tools"


def test_a_template_for_tools_beside_another(tokenizer: Any) -> None:
    made, path = tokenizer
    own = replace(
        tokenizer_settings(made, path, VOCABULARY),
        chat_template="plain",
        tool_template="{{ tools }}<tool_call>{{ messages }}",
    )
    reader = BodyReader(
        ReadingSettings(own, model_name="tiny", max_model_length=8192, max_queue=16, most_skip_threshold=0.0)
    )
    for tools in (None, TOOLS):
        found = reader.read("/v1/chat/completions", json.dumps({"messages": QUESTION, "tools": tools}).encode())
        assert isinstance(found, Read) and made.decode(found.prompts[0]).startswith("[{'type'" if tools else "plain")


def read(tokenizer: tuple[Any, Path], template: str | None, parser: str, **options: Any) -> Any:
    """Return what a body of a conversation says to a server with a template."""
    made, path = tokenizer
    own = replace(tokenizer_settings(made, path, VOCABULARY), chat_template=template)
    settings = ReadingSettings(own, "tiny", 8192, 16, most_skip_threshold=0.0, tool_parser=parser)
    return BodyReader(settings).read("/v1/chat/completions", json.dumps({"messages": QUESTION} | options).encode())


@pytest.mark.parametrize("name", ["openai", "mistral, names", "deepseek_v31"])
def test_marks_that_are_special_tokens(make: Any, name: str) -> None:
    """Special tokens are no text of an answer, and parsers get those that they need."""
    recorded = RECORDED[name]
    signs = " ".join((*TOOL_FORMS[recorded.form].signs, "</think>" if recorded.reasoning == "qwen3" else "[THINK]"))
    template = f"{{# {signs} #}}{{% if tools %}}{{% endif %}}{{{{ messages[0].content }}}}{'<think>' * recorded.inside}"
    marks = tuple(mark for mark in TOOL_FORMS[recorded.form].marks if mark in recorded.text)
    tools: Any = [{"type": "function", "function": {"name": each, "parameters": schema}} for each, schema in SCHEMAS.items()]
    with make(lambda prompt: recorded.text.removesuffix("<|call|>") + "<pad>", template, marks) as server:
        for stream in (False, True):
            if stream:
                with server.client.chat.completions.stream(model="tiny", messages=QUESTION, tools=tools) as chunks:
                    for _ in chunks:
                        pass
                    message: Any = chunks.get_final_completion().choices[0].message
            else:
                message = server.ask(tools=tools).choices[0].message
            found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
            assert found == list(recorded.calls) and (message.content or "") == recorded.content
            assert (getattr(message, "reasoning_content", None) or "") == recorded.thought
        assert set(server.loop.requests[-1].shown_special_tokens) == set(marks)
        plain = server.client.completions.create(model="tiny", prompt="a").choices[0].text
        assert not any(mark in plain for mark in marks)


def test_parsers_are_names_of_forms() -> None:
    assert ServeOptions(tool_parser="hermes", reasoning_parser="none").tool_parser == "hermes"
    with pytest.raises(OptionError, match="tool-parser is 'other'; it must be one of auto, "):
        ServeOptions(tool_parser="other")
