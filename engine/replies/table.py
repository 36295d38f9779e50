"""The forms of calls and of reasoning, one row for each.

A form is chosen by the model's chat template, or by its name (`--tool-parser`, `--reasoning-parser`). The names are vLLM's.
The first row counts whose signs a template has.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.replies import marked_calls as marks
from engine.replies.bare_calls import CLOSING, OPENINGS, json_calls, python_calls
from engine.replies.events import Schemas, Steps
from engine.replies.grammar import Call, Lark, Part, Rules, Writing, json_call, numbered_call, tagged_writing_of
from engine.replies.json_calls import call_in_json, in_sections
from engine.replies.source import Source
from engine.replies.tagged_calls import Tags, tagged_call
from engine.replies.thoughts import channel_thoughts, tagged_thoughts

AUTO, NONE = "auto", "none"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
Thoughts = Callable[[Source, bool], Steps[None]]


def call_id() -> str:
    """Return a new id of a call."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return a new id of nine letters and digits, which some templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolForm:
    """How a family writes calls of tools."""

    written: str
    """An example for the documentation."""
    signs: tuple[str, ...]
    """Texts that the chat templates of the family all have."""
    marks: tuple[str, ...]
    """Texts that may be special tokens of its tokenizers."""
    parse: Callable[[Source, Schemas], Steps[None]]
    writing: Callable[[str], Writing] | None = None
    """Returns how forced calls are written, given the chat template; None if they are written in the form `forced`."""
    forced: str = ""
    is_bare: bool = False
    """Whether forced calls are JSON without marks, which a grammar cannot tell from other JSON."""
    new_id: Callable[[], str] = call_id


@dataclass(frozen=True)
class ReasoningForm:
    """How a family writes reasoning."""

    written: str
    signs: tuple[str, ...]
    marks: tuple[str, ...]
    parse: Thoughts
    opening: str
    """End of a prompt after which a reply begins with reasoning."""
    before: Callable[[Rules, bool], list[Part]]
    """Returns the parts of a grammar for reasoning before forced calls; bool: whether the reply begins inside."""
    begins_inside: bool = False
    """Whether a reply begins inside whatever the prompt is."""
    answer: str = ""
    """Text between the reasoning and the answer."""


def _tagged(tags: Tags, opening: str, closing: str, *firsts: str) -> Callable[[Source, Schemas], Steps[None]]:
    def parse(source: Source, schemas: Schemas) -> Steps[None]:
        yield from in_sections(opening, closing, tagged_call(tags, schemas), *firsts)(source)

    return parse


def _plain(parse: Callable[[Source], Steps[None]]) -> Callable[[Source, Schemas], Steps[None]]:
    return lambda source, schemas: parse(source)


def _always(call: Call, **around: Any) -> Callable[[str], Writing]:
    """Return the writing of a form whose templates all write calls in one way. around: fields of Writing."""
    return lambda template: Writing(call, **around)


def _listed(template: str) -> Writing:
    if marks.ARGUMENTS in template:
        return Writing(json_call(f"{marks.TOOL_CALLS}NAME{marks.ARGUMENTS}", ""))
    return Writing(json_call('{"name": "NAME", "arguments": ', "}"), f"{marks.TOOL_CALLS}[", ", ", "]")


def _keyed(template: str) -> Writing:
    between = "" if f"{KEYS.keyed}{KEYS.value}" in template else "\n"
    return Writing(tagged_writing_of(KEYS, f"{TOOL_CALL}NAME{between}", TOOL_CALL_END, between), between=between)


def _dsml(section: str) -> Callable[[str], Writing]:
    call = tagged_writing_of(DSML, '<｜DSML｜invoke name="NAME">\n', "</｜DSML｜invoke>\n")
    return _always(call, opening=f"<｜DSML｜{section}>\n", closing=f"</｜DSML｜{section}>")


LINES = Tags(
    call="<function=", named=">", end="</function>", key="<parameter=", keyed=">", valued="</parameter>", strips_lines=True
)
KEYS = Tags(
    call="",
    named="",
    end=TOOL_CALL_END,
    key="<arg_key>",
    keyed="</arg_key>",
    value="<arg_value>",
    valued="</arg_value>",
    ends_section=True,
)
DSML = Tags(
    call='<｜DSML｜invoke name="',
    named='">',
    end="</｜DSML｜invoke>",
    key='<｜DSML｜parameter name="',
    keyed='"',
    typed=">",
    valued="</｜DSML｜parameter>",
)
INVOKE = Tags(call='<invoke name="', named='">', end="</invoke>", key='<parameter name="', keyed='">', valued="</parameter>")
INVOKE_SECTION, INVOKE_SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"
SEPARATED = (marks.SECTION, marks.SECTION_END, marks.CALL, marks.SEPARATOR, marks.CALL_END)
CHANNELS = (marks.START, marks.CHANNEL, marks.MESSAGE, marks.CONSTRAIN, *marks.MESSAGE_ENDS)

TOOL_FORMS: dict[str, ToolForm] = {
    "openai": ToolForm(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>",
        (marks.CHANNEL,),
        CHANNELS,
        _plain(marks.channel_calls),
        _always(json_call("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""), takes_several=False),
    ),
    "deepseek_v32": ToolForm(
        '<｜DSML｜function_calls> <｜DSML｜invoke name="NAME"> <｜DSML｜parameter name="KEY" string="true">…',
        ("｜DSML｜", "function_calls>"),
        ("｜DSML｜",),
        _tagged(DSML, "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        _dsml("function_calls"),
    ),
    "deepseek_v4": ToolForm(
        '<｜DSML｜tool_calls> <｜DSML｜invoke name="NAME"> <｜DSML｜parameter name="KEY" string="true">…',
        ("｜DSML｜", "tool_calls>"),
        ("｜DSML｜",),
        _tagged(DSML, "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        _dsml("tool_calls"),
    ),
    "deepseek_v3": ToolForm(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME ```json {…} ```<｜tool▁call▁end｜>…",
        (marks.SECTION, "```json"),
        SEPARATED,
        _plain(marks.separated_calls),
        _always(
            json_call(f"{marks.CALL}function{marks.SEPARATOR}NAME\n```json\n", f"\n```{marks.CALL_END}"),
            opening=marks.SECTION,
            between="\n",
            closing=marks.SECTION_END,
        ),
    ),
    "deepseek_v31": ToolForm(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…",
        (marks.SECTION,),
        SEPARATED,
        _plain(marks.separated_calls),
        _always(
            json_call(f"{marks.CALL}NAME{marks.SEPARATOR}", marks.CALL_END), opening=marks.SECTION, closing=marks.SECTION_END
        ),
    ),
    "kimi_k2": ToolForm(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…",
        (marks.NUMBERED,),
        (
            marks.NUMBERED_SECTION,
            marks.NUMBERED_SECTION_END,
            marks.NUMBERED,
            marks.NUMBERED_ARGUMENTS,
            marks.NUMBERED_END,
        ),
        _plain(marks.numbered_calls),
        _always(
            numbered_call(f"{marks.NUMBERED}functions.NAME:", marks.NUMBERED_ARGUMENTS, marks.NUMBERED_END),
            opening=marks.NUMBERED_SECTION,
            closing=marks.NUMBERED_SECTION_END,
        ),
    ),
    "minimax_m2": ToolForm(
        '<minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">…</parameter> </invoke> </minimax:tool_call>',
        ("minimax:tool_call",),
        (INVOKE_SECTION, INVOKE_SECTION_END),
        _tagged(INVOKE, INVOKE_SECTION, INVOKE_SECTION_END),
        _always(
            tagged_writing_of(INVOKE, '<invoke name="NAME">\n', "</invoke>\n"),
            opening=f"{INVOKE_SECTION}\n",
            closing=INVOKE_SECTION_END,
        ),
    ),
    "qwen3_coder": ToolForm(
        "<tool_call> <function=NAME> <parameter=KEY> … </parameter> </function> </tool_call>",
        (TOOL_CALL, "<function="),
        (TOOL_CALL, TOOL_CALL_END),
        _tagged(LINES, TOOL_CALL, TOOL_CALL_END, LINES.call),
        _always(tagged_writing_of(LINES, f"{TOOL_CALL}\n<function=NAME>\n", f"</function>\n{TOOL_CALL_END}"), between="\n"),
    ),
    "glm45": ToolForm(
        "<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>…</arg_value> </tool_call>",
        (TOOL_CALL, KEYS.key),
        (TOOL_CALL, TOOL_CALL_END, KEYS.key, KEYS.keyed, KEYS.value, KEYS.valued),
        _tagged(KEYS, TOOL_CALL, TOOL_CALL_END),
        _keyed,
    ),
    "hermes": ToolForm(
        '<tool_call> {"name": "NAME", "arguments": {…}} </tool_call>',
        (TOOL_CALL,),
        (TOOL_CALL, TOOL_CALL_END),
        _plain(in_sections(TOOL_CALL, TOOL_CALL_END, call_in_json)),
        _always(
            json_call(f'{TOOL_CALL}\n{{"name": "NAME", "arguments": ', f"}}\n{TOOL_CALL_END}"),
            between="\n",
        ),
    ),
    "mistral": ToolForm(
        '[TOOL_CALLS][{"name": "NAME", "arguments": {…}}], or [TOOL_CALLS]NAME[ARGS]{…}',
        (marks.TOOL_CALLS,),
        (marks.TOOL_CALLS, marks.ARGUMENTS, marks.CALL_ID),
        _plain(marks.listed_calls),
        _listed,
        new_id=short_call_id,
    ),
    "granite": ToolForm(
        '<|tool_call|>[{"name": "NAME", "arguments": {…}}]',
        (marks.LIST_OF_CALLS,),
        (marks.LIST_OF_CALLS,),
        lambda source, schemas: marks.listed_calls(source, marks.LIST_OF_CALLS),
        _always(
            json_call('{"name": "NAME", "arguments": ', "}"), opening=f"{marks.LIST_OF_CALLS}[", between=", ", closing="]"
        ),
    ),
    "llama4_pythonic": ToolForm(
        '[NAME(KEY="…"), …] at the beginning of the reply',
        ("func_name1(",),
        (*OPENINGS, CLOSING),
        python_calls,
        forced="llama3_json",
    ),
    "llama3_json": ToolForm(
        '{"name": "NAME", "parameters": {…}} at the beginning of the reply, also after <|python_tag|>',
        ('"parameters": dictionary',),
        (*OPENINGS, CLOSING),
        json_calls,
        _always(json_call('{"name": "NAME", "parameters": ', "}"), takes_several=False),
        is_bare=True,
    ),
}
"""Forms of calls, by the name that `--tool-parser` takes."""


def _tagged_before(opening: str, closing: str) -> Callable[[Rules, bool], list[Part]]:
    def before(rules: Rules, inside: bool) -> list[Part]:
        ended: list[Part] = [rules.text_and(closing), Lark(r"/\s{0,4}/")]
        return ended if inside else [Lark(f"({rules.sequence([opening, *ended])})?")]

    return before


def _channel_before(rules: Rules, inside: bool) -> list[Part]:
    opening = f"{marks.CHANNEL}analysis{marks.MESSAGE}"
    analysis = rules.sequence([opening, rules.text_and("<|end|>"), f"{marks.START}assistant"])
    return [Lark(f"({analysis})?")]


THINK, THINK_END = "<think>", "</think>"
BRACKETS, BRACKETS_END = "[THINK]", "[/THINK]"

REASONING_FORMS: dict[str, ReasoningForm] = {
    "openai_gptoss": ReasoningForm(
        "<|channel|>analysis<|message|>…<|end|>",
        (marks.CHANNEL,),
        CHANNELS,
        channel_thoughts,
        "",
        _channel_before,
        answer=f"{marks.CHANNEL}final{marks.MESSAGE}",
    ),
    "mistral": ReasoningForm(
        f"{BRACKETS}…{BRACKETS_END}",
        (BRACKETS,),
        (BRACKETS, BRACKETS_END),
        tagged_thoughts(BRACKETS, BRACKETS_END),
        BRACKETS,
        _tagged_before(BRACKETS, BRACKETS_END),
    ),
    "qwen3": ReasoningForm(
        f"{THINK}…{THINK_END}",
        (THINK_END,),
        (THINK, THINK_END),
        tagged_thoughts(THINK, THINK_END),
        THINK,
        _tagged_before(THINK, THINK_END),
    ),
    "deepseek_r1": ReasoningForm(
        f"…{THINK_END}, with or without {THINK} before it",
        (),
        (THINK, THINK_END),
        tagged_thoughts(THINK, THINK_END),
        THINK,
        _tagged_before(THINK, THINK_END),
        begins_inside=True,
    ),
}
"""Forms of reasoning, by the name that `--reasoning-parser` takes. A form without signs is never chosen by itself."""


def tool_form_of(template: str) -> str:
    """Return the name of the form that a chat template writes calls in; NONE for an unknown one."""
    return _first(template, {name: form.signs for name, form in TOOL_FORMS.items()})


def reasoning_form_of(template: str) -> str:
    """Return the name of the form that a chat template writes reasoning in; NONE for none."""
    return _first(template, {name: form.signs for name, form in REASONING_FORMS.items()})


def _first(template: str, signs: dict[str, tuple[str, ...]]) -> str:
    return next((name for name, own in signs.items() if own and all(sign in template for sign in own)), NONE)
