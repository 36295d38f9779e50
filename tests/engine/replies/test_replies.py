"""Each form of calls and reasoning: recorded replies, whole and cut at every character, and replies that are no calls."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_texts import JSON_CITY, MALFORMED, RECORDED, SCHEMAS, Recorded, events, taken_apart

from engine.replies.events import Arguments, CallBegun, Text, Thought
from engine.replies.reply import ReplyForm
from engine.replies.table import NONE, REASONING_FORMS, TOOL_FORMS, reasoning_form_of, short_call_id, tool_form_of

RECORDS = pytest.mark.parametrize("recorded", RECORDED.values(), ids=list(RECORDED))
WORDS = re.compile(r"w\d+")


def test_every_form_is_recorded() -> None:
    assert {recorded.form for recorded in RECORDED.values()} == set(TOOL_FORMS) == set(MALFORMED)
    assert {recorded.reasoning for recorded in RECORDED.values()} == {*REASONING_FORMS, NONE} - {"deepseek_r1"}


@RECORDS
def test_a_recorded_reply_whole(recorded: Recorded) -> None:
    content, thought, calls = taken_apart(recorded.reply_form, [recorded.text])
    assert (content, thought) == (recorded.content, recorded.thought)
    assert [(name, json.loads(arguments)) for name, _, arguments in calls] == list(recorded.calls)
    assert [call_id for _, call_id, _ in calls] == list(recorded.ids or [""] * len(calls))


@RECORDS
def test_a_recorded_reply_cut_at_every_character(recorded: Recorded) -> None:
    whole = taken_apart(recorded.reply_form, [recorded.text])
    assert taken_apart(recorded.reply_form, list(recorded.text)) == whole
    for place in range(len(recorded.text) + 1):
        assert taken_apart(recorded.reply_form, [recorded.text[:place], recorded.text[place:]]) == whole


@RECORDS
def test_a_reply_that_ends_anywhere_is_taken_apart(recorded: Recorded) -> None:
    """The parts of a reply that was cut off by a limit are beginnings of those of the whole one, or marks as content."""
    _, whole_thought, whole_calls = taken_apart(recorded.reply_form, [recorded.text])
    for place in range(len(recorded.text)):
        _, thought, calls = taken_apart(recorded.reply_form, [recorded.text[:place]])
        assert recorded.reasoning == "openai_gptoss" or whole_thought.startswith(thought[: len(whole_thought)])
        assert [name for name, _, _ in calls] == [name for name, _, _ in whole_calls[: len(calls)]]
        for (_, _, arguments), (_, _, whole) in zip(calls, whole_calls, strict=False):
            assert whole.startswith(arguments)


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts])
def test_a_reply_that_is_no_call_is_content(form: str, text: str) -> None:
    for own in (text, f"Before. {text}" if form not in ("llama3_json", "llama4_pythonic") else text, f"{text} after"):
        for pieces in ([own], list(own)):
            assert taken_apart(ReplyForm(form, schemas=SCHEMAS), pieces) == (own, "", [])


def test_a_call_after_a_malformed_one_is_found() -> None:
    text = '<tool_call>{"name": }</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
    content, _, calls = taken_apart(ReplyForm("hermes", schemas=SCHEMAS), [text])
    assert content == '<tool_call>{"name": }</tool_call>\n' and calls == [("now", "", "{}")]


def test_arguments_that_break_off_end_their_call_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call> Sorry.'
    content, _, calls = taken_apart(ReplyForm("hermes", schemas=SCHEMAS), [text])
    assert calls == [("now", "", '{"a": 1')] and content == "</tool_call> Sorry."


def test_json_arguments_come_while_they_are_written() -> None:
    for form, opening in (
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": '),
        ("mistral", "[TOOL_CALLS]get_weather[ARGS]"),
        ("llama3_json", '{"name": "get_weather", "parameters": '),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"),
        ("openai", "<|channel|>commentary to=functions.get_weather<|message|>"),
    ):
        found = events(ReplyForm(form, schemas=SCHEMAS), [opening, *JSON_CITY])
        assert isinstance(found[0], CallBegun) and found[0].name == "get_weather"
        assert [each.text for each in found[1:-1] if isinstance(each, Arguments)] == list(JSON_CITY)


def test_content_and_reasoning_come_while_they_are_written() -> None:
    form = ReplyForm("hermes", "qwen3", schemas=SCHEMAS)
    assert events(form, ["<think>", "a", "b ", "c", "</think>", "d", "e ", "f"]) == [
        *(Thought(text) for text in ("a", "b", " c")),
        *(Text(text) for text in ("d", "e ", "f")),
    ]


@pytest.mark.parametrize(
    ("text", "inside", "content", "thought"),
    [
        ("<think> a </think>\n\nb ", False, "b ", "a"),
        ("\n<think>a", False, "", "a"),
        ("a</think>b", True, "b", "a"),
        ("<think>a</think>b", True, "b", "a"),
        ("</think>b", True, "b", ""),
        ("a </think> b", False, "a </think> b", ""),
        (" \n a <think>b</think>", False, " \n a <think>b</think>", ""),
        ("<think>a</think>b<think>c</think>", False, "b<think>c</think>", "a"),
        ("<thin", False, "<thin", ""),
        ("", False, "", ""),
        (" ", False, " ", ""),
    ],
)
def test_reasoning_is_at_the_beginning(text: str, inside: bool, content: str, thought: str) -> None:
    for pieces in ([text], list(text)):
        assert taken_apart(ReplyForm(reasoning="qwen3", inside=inside), pieces) == (content, thought, [])
        always = taken_apart(ReplyForm(reasoning="deepseek_r1"), pieces)
        assert inside is False or always == (content, thought, [])


def test_without_forms_the_text_is_as_it_was() -> None:
    for recorded in RECORDED.values():
        assert taken_apart(ReplyForm(), list(recorded.text)) == (recorded.text, "", [])


FRAGMENTS = {
    name: sorted(
        {
            *form.marks,
            *re.findall(r"<[^<>{}…]*>|\[[A-Z_]+\]|```json|```", form.written),
            '{"name": "now", "arguments": {',
            "{",
            "}",
            "}}",
            '"',
            "\\",
            ";",
            ",",
            "[",
            "]",
            "(",
            "now",
            "=",
            " ",
            "\n",
            "functions.now:0",
            'name="',
            '">',
        }
    )
    for name, form in TOOL_FORMS.items()
}


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", TOOL_FORMS)
def test_no_word_is_lost_and_no_cut_matters(name: str, data: st.DataObject) -> None:
    """Words between marks in any order are in the content, the reasoning, a name, an id or arguments, and in their order."""
    parts = data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=12))
    words = [f"w{place}" for place in range(len(parts))]
    text = "".join(part + word for part, word in zip(parts, words, strict=True))
    reasoning = data.draw(st.sampled_from([NONE, "openai_gptoss" if name == "openai" else "qwen3"]))
    form = ReplyForm(name, reasoning, schemas=SCHEMAS)
    whole = taken_apart(form, [text])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert taken_apart(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert taken_apart(form, list(text)) == whole
    content, thought, calls = whole
    found = WORDS.findall(" ".join([content, thought, *(each for call in calls for each in call)]))
    assert set(words) <= set(found)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab{}[]<>|\"'\\:;,=()\n /_toolcalthinkARGS", max_size=80), st.sampled_from(sorted(TOOL_FORMS)))
def test_text_without_a_call_is_as_it_was(text: str, name: str) -> None:
    content, _, calls = taken_apart(ReplyForm(name, schemas=SCHEMAS), list(text))
    assert calls or content == text


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        *((name, "word ") for name in TOOL_FORMS),
        ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>"),
        ("glm45", "<tool_call>now<arg_key>a</arg_key><arg_value>"),
        ("hermes", '<tool_call>{"name": "'),
        ("openai", "<|start|>"),
        ("mistral", "[TOOL_CALLS]"),
        ("llama4_pythonic", "<|python_start|>[now("),
        ("llama3_json", '<|python_tag|>{"arguments": {'),
    ],
)
def test_long_replies_take_little_time(name: str, piece: str) -> None:
    """Work that grows with the square of these lengths takes minutes."""
    text, start = piece * 4_000, time.process_time()
    assert taken_apart(ReplyForm(name, schemas=SCHEMAS), [piece] * 4_000) == (text, "", [])
    assert time.process_time() - start < 5


@pytest.mark.parametrize("name", TOOL_FORMS)
def test_a_form_is_found_by_its_template(name: str) -> None:
    template = f"{{% if tools %}}{' '.join(TOOL_FORMS[name].signs)}{{% endif %}}"
    assert tool_form_of(template) == name
    assert tool_form_of("{{ messages }}") == NONE


def test_a_form_of_reasoning_is_found_by_its_template() -> None:
    assert reasoning_form_of("{{ '<think>' }}{{ content.split('</think>') }}") == "qwen3"
    assert reasoning_form_of("<|channel|>analysis") == "openai_gptoss" and reasoning_form_of("[THINK]") == "mistral"
    assert reasoning_form_of("{{ messages }}") == NONE


def test_short_ids_are_what_their_template_requires() -> None:
    made = {short_call_id() for _ in range(50)}
    assert len(made) == 50 and all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in made)


def test_the_documentation_has_every_form() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    for forms in (TOOL_FORMS, REASONING_FORMS):
        for name, form in forms.items():
            assert f"| `{name}` | `{form.written.replace('|', chr(92) + '|')}` |" in page
