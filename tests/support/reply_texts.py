"""Replies as the families write them, by hand after their chat templates: what each says, and the calls in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.replies.events import Arguments, CallBegun, CallEnded, Event, Text, Thought
from engine.replies.reply import Reply, ReplyForm

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "near": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
    "save.text-2": {"type": "object", "properties": {"text": {"type": "string"}, "unit": {"enum": ["a", "b"]}}},
}
"""Tools of all texts."""


@dataclass(frozen=True)
class Recorded:
    """A reply and what is in it."""

    form: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    content: str = ""
    thought: str = ""
    reasoning: str = "none"
    inside: bool = False
    ids: tuple[str, ...] = ()
    """Ids of the calls that the model writes itself."""

    @property
    def reply_form(self) -> ReplyForm:
        return ReplyForm(self.form, self.reasoning, self.inside, SCHEMAS)


CITY = {"city": 'Sankt "Pölten" {}', "days": 3}
TEXT = {"text": "<b>a</b>\n\tif x < 3:\n  pass\n", "unit": "b"}
JSON_CITY, JSON_TEXT = json.dumps(CITY, ensure_ascii=False), json.dumps(TEXT)

RECORDED = {
    "hermes": Recorded(
        "hermes",
        f'I will look.\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON_CITY}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        (("get_weather", CITY), ("now", {})),
        "I will look.\n",
    ),
    "hermes, arguments first, after thinking": Recorded(
        "hermes",
        "<think>\nNow <tool_call> ...\n</think>\n\n"
        f'<tool_call>{{"arguments": {JSON_TEXT}, "name": "save.text-2"}}</tool_call>',
        (("save.text-2", TEXT),),
        thought="Now <tool_call> ...",
        reasoning="qwen3",
    ),
    "hermes, arguments as a string, none, and null": Recorded(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(JSON_CITY)}}}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}</tool_call> Done.',
        (("get_weather", CITY), ("now", {}), ("now", {})),
        "Done.",
    ),
    "qwen3_coder": Recorded(
        "qwen3_coder",
        "First this.\n<tool_call>\n<function=save.text-2>\n<parameter=text>\n"
        f"{TEXT['text']}\n</parameter>\n<parameter=unit>\nb\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
        "<parameter=near>\n[1.5, 2]\n</parameter>\n</function>\n</tool_call>",
        (("save.text-2", TEXT), ("get_weather", {"city": "12", "hourly": True, "near": [1.5, 2]})),
        "First this.\n",
    ),
    "qwen3_coder, without the opening": Recorded("qwen3_coder", "<function=now>\n</function>\n</tool_call>", (("now", {}),)),
    "mistral, a list": Recorded(
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {JSON_CITY}}}, {{"name": "now", "arguments": {{}}}}]',
        (("get_weather", CITY), ("now", {})),
    ),
    "mistral, names": Recorded(
        "mistral",
        f"[THINK]Well.[/THINK]Both.[TOOL_CALLS]get_weather[ARGS]{JSON_CITY}[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{{}}",
        (("get_weather", CITY), ("now", {})),
        "Both.",
        "Well.",
        reasoning="mistral",
        ids=("", "a1B2c3D4e"),
    ),
    "llama3_json": Recorded(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {JSON_CITY}}}; {{"type": "function", "name": "now", "parameters": {{}}}}',
        (("get_weather", CITY), ("now", {})),
    ),
    "llama3_json, after its tag": Recorded(
        "llama3_json",
        f'Calling.<|python_tag|>{{"name": "save.text-2", "parameters": {JSON_TEXT}}}',
        (("save.text-2", TEXT),),
        "Calling.",
    ),
    "llama4_pythonic": Recorded(
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='Sankt \"Pölten\" {}', days=3), now(), save.text(a=1)]<|python_end|>",
        (),
        "<|python_start|>[get_weather(city='Sankt \"Pölten\" {}', days=3), now(), save.text(a=1)]<|python_end|>",
    ),
    "llama4_pythonic, two calls": Recorded(
        "llama4_pythonic",
        '\n[get_weather(city=\'Sankt "Pölten" {}\', days=3), get_weather(city="]", hourly=False, near=[-1.5, 2]), now()]',
        (("get_weather", CITY), ("get_weather", {"city": "]", "hourly": False, "near": [-1.5, 2]}), ("now", {})),
    ),
    "deepseek_v3": Recorded(
        "deepseek_v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{JSON_CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("get_weather", CITY), ("now", {})),
        "Sure.",
    ),
    "deepseek_v31": Recorded(
        "deepseek_v31",
        "The user asks.</think>Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{JSON_CITY}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("get_weather", CITY), ("now", {})),
        "Sure.",
        "The user asks.",
        reasoning="qwen3",
        inside=True,
    ),
    "deepseek_v32": Recorded(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="save.text-2">\n<｜DSML｜parameter name="text" string="true">'
        f'{TEXT["text"]}</｜DSML｜parameter>\n<｜DSML｜parameter name="unit" string="true">b</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">5'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        (("save.text-2", TEXT), ("get_weather", {"city": "5", "days": 5})),
    ),
    "deepseek_v4": Recorded(
        "deepseek_v4",
        'Easy.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{CITY["city"]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        (("get_weather", CITY), ("now", {})),
        thought="Easy.",
        reasoning="qwen3",
        inside=True,
    ),
    "granite": Recorded(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON_CITY}}}, {{"name": "now", "arguments": {{}}}}]',
        (("get_weather", CITY), ("now", {})),
    ),
    "glm45, without lines": Recorded(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rom</arg_value><arg_key>near</arg_key>"
        "<arg_value>[1]</arg_value></tool_call><tool_call>now</tool_call>",
        (("get_weather", {"city": "Rom", "near": [1]}), ("now", {})),
    ),
    "glm45": Recorded(
        "glm45",
        "\n<think>Which city?</think>\nOne moment.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        f"<arg_value>{CITY['city']}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
        (("get_weather", CITY), ("now", {})),
        "One moment.\n",
        "Which city?",
        reasoning="qwen3",
    ),
    "kimi_k2": Recorded(
        "kimi_k2",
        "Both.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON_CITY}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        (("get_weather", CITY), ("now", {})),
        "Both.",
        ids=("functions.get_weather:0", "functions.now:1"),
    ),
    "minimax_m2": Recorded(
        "minimax_m2",
        'So.\n</think>\n\nHere.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
        f'{CITY["city"]}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        (("get_weather", CITY), ("now", {})),
        "Here.\n",
        "So.",
        reasoning="qwen3",
        inside=True,
    ),
    "openai": Recorded(
        "openai",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{JSON_CITY}<|call|>",
        (("get_weather", CITY),),
        "Let me look.",
        "Need the weather.",
        reasoning="openai_gptoss",
    ),
    "openai, recipients first": Recorded(
        "openai",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{JSON_CITY}<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}",
        (("get_weather", CITY), ("now", {})),
        reasoning="openai_gptoss",
    ),
    "openai, an answer": Recorded(
        "openai",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is {4}.<|return|>",
        (),
        "It is {4}.",
        "Easy.",
        reasoning="openai_gptoss",
    ),
}
"""Replies by a description."""

MALFORMED = {
    "hermes": (
        "<tool_call>\nget_weather\n</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments',
        "<tool_call></tool_call> and <tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_cal>x</tool_cal>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\nnow\n</tool_call>",
        "<function=>\n</function>",
    ),
    "mistral": ('[TOOL_CALLS][{"arguments": {}}]', "[TOOL_CALLS]", "[TOOL_CALLS]now[ARGS]nothing", "[TOOL_CALLS][]"),
    "llama3_json": (
        '{"name": "unknown", "parameters": {}}',
        '{"name": "now", "other": 1, "parameters": {}}',
        '{"a": 1}',
        "<|python_tag|>print(1)",
        " \n plain text",
        'text and {"name": "now", "parameters": {}}',
    ),
    "llama4_pythonic": (
        "[1, 2, 3]",
        "[unknown(a=1)]",
        "[now(1)]",
        "[now(**{})]",
        "[now(a=open('x'))]",
        "[now(a={1, 2})]",
        "[now(a=1)",
        "[now(]",
        "[now(a=1e999)]",
        "[[now()]]",
        "a [now()]",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>thing<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>text<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜><｜tool▁calls▁end｜>",),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="a" other>1</｜DSML｜parameter>',
        "<｜DSML｜function_calls>",
    ),
    "deepseek_v4": ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜tool_calls>',),
    "granite": ('<|tool_call|>{"name": ', "<|tool_call|>[]", "<|tool_call|>text"),
    "glm45": (
        "<tool_call>now\n<arg_key>a</arg_key>\n</tool_call>",
        "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1",
        "<tool_call>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_begin|>:0<|tool_call_argument_begin|>{}",
    ),
    "minimax_m2": ('<minimax:tool_call>\n<invoke name="now">\n<parameter name="a">1</invoke>',),
    "openai": (
        "<|channel|>commentary to=functions.now<|message|>no object<|call|>",
        "<|channel|>somewhere<|message|>{}",
        "<|start|>assistant",
        "tell me to=functions.now and more",
    ),
}
"""Replies by their form that are no calls, so that all of their text is content."""


def events(form: ReplyForm, pieces: Sequence[str]) -> list[Event]:
    """Return the events of a reply that comes in these pieces."""
    reply = Reply(form)
    return [*(event for piece in pieces for event in reply.feed(piece)), *reply.finish()]


def taken_apart(form: ReplyForm, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return content, reasoning and calls (name, id, arguments) of a reply that comes in these pieces."""
    content, thought, calls, open_call = "", "", list[tuple[str, str, str]](), False
    for event in events(form, pieces):
        if isinstance(event, CallBegun):
            assert not open_call
            calls.append((event.name, event.call_id, ""))
            open_call = True
        elif isinstance(event, Arguments):
            assert open_call and event.text
            name, call_id, arguments = calls[-1]
            calls[-1] = name, call_id, arguments + event.text
        elif isinstance(event, CallEnded):
            assert open_call
            open_call = False
        else:
            assert isinstance(event, Text | Thought) and event.text and not open_call
            content += event.text if isinstance(event, Text) else ""
            thought += event.text if isinstance(event, Thought) else ""
    assert not open_call
    return content, thought, calls
