"""Chat templates with tools: earlier calls as templates take them, tools, and further variables."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.checkpoint.chat_template import RESERVED, render, takes_tools
from engine.errors import OptionError

ARGUMENTS = '{"city": "Köln", "days": 2}'
CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.id }}:{{ c.function.name }}{% set a = c.function.arguments %}BODY;{% endfor %}{% endfor %}"
)
"""A template with BODY for the way in which it writes the arguments `a`."""


def called(*arguments: str) -> list[Any]:
    calls = [
        {"id": str(place), "type": "function", "function": {"name": "f", "arguments": each}}
        for place, each in enumerate(arguments)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("body", "written"),
    [
        ("{{ a | tojson }}", ARGUMENTS),
        ("{% for key, value in a.items() %}{{ key }}={{ value }} {% endfor %}", "city=Köln days=2 "),
        ("{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}", ARGUMENTS),
        ("{{ '<' + a + '>' }}", f"<{ARGUMENTS}>"),
        ("{{ a }}", ARGUMENTS),
        ("{{ a | trim }}", ARGUMENTS),
    ],
)
def test_arguments_are_what_a_template_takes(body: str, written: str) -> None:
    assert render(CALLS.replace("BODY", body), called(ARGUMENTS), {}) == f"0:f{written};"


def test_a_template_that_only_takes_texts_takes_empty_ones() -> None:
    assert (
        render(CALLS.replace("BODY", "{{ '<' + a + '>' }}"), called("{}", ARGUMENTS), {}) == f"0:f<{{}}>;1:f<{ARGUMENTS}>;"
    )


def test_the_time_limit_is_for_both_attempts() -> None:
    """A template that takes neither form gets no second half second."""
    loop = "{% for b in range(99999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
    start = time.process_time()
    with pytest.raises(OptionError, match="takes longer than"):
        render(CALLS.replace("BODY", loop), called(ARGUMENTS), {})
    assert time.process_time() - start < 0.9


def test_arguments_that_are_no_object_are_passed_as_they_are() -> None:
    template = CALLS.replace("BODY", "{% if a is mapping %}{{ a | tojson }}{% else %}{{ a }}{% endif %}")
    assert render(template, called("", "[1]", '{"a": ', '"x"', "{}"), {}) == '0:f{};1:f[1];2:f{"a": ;3:f"x";4:f{};'


def test_a_template_that_refuses_either_is_refused() -> None:
    with pytest.raises(OptionError, match="cannot take these messages: no calls"):
        render(CALLS.replace("BODY", "{{ raise_exception('no calls') }}"), called(ARGUMENTS), {})


def test_tools_and_variables() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    template = "{{ tools | tojson if tools else 'none' }} {{ level }} {{ bos_token }} {{ add_generation_prompt }}"
    assert render(template, [], {"bos_token": "<s>"}) == "none  <s> True"
    given = {"level": [1, {"a": None}], "bos_token": "x", "add_generation_prompt": False}
    assert render(template, [], {"bos_token": "<s>"}, tools, given) == f"{json.dumps(tools)} [1, {{'a': None}}] <s> True"
    with pytest.raises(OptionError, match="surrogate"):
        render("{{ level }}", [], {}, (), {"level": "\ud800"})


def test_what_a_template_is_given_is_reserved() -> None:
    """Each name that transformers passes itself, or takes as an option, is refused in a request."""
    import inspect

    from transformers.utils.chat_template_utils import render_jinja_template

    options = {
        name for name, each in inspect.signature(render_jinja_template).parameters.items() if each.kind != each.VAR_KEYWORD
    }
    assert options <= RESERVED | {"messages"} and {"messages", "tools", "raise_exception", "strftime_now"} <= RESERVED


def test_a_place_for_tools_is_seen() -> None:
    assert takes_tools("{% if tools %}{% endif %}") and takes_tools("{{ tools | tojson }}")
    assert not takes_tools("{% if message.tool_calls %}{% endif %}") and not takes_tools("{{ messages }}")
