"""Grammars of forced calls, with llguidance: what a family writes is accepted, and what a request forbids is refused."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import pytest
from reply_texts import JSON_CITY, taken_apart
from tokenizers_for_tests import add_tokenizer
from transformers import AutoTokenizer

from engine.generation.text_stream import special_tokens
from engine.replies.grammar import answer_grammar, calls_grammar
from engine.replies.reply import ReplyForm
from engine.replies.table import REASONING_FORMS, TOOL_FORMS

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"$ref": "#/$defs/unit"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"unit": {"type": "array", "items": {"enum": ["c", "f"]}}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "mode": {"properties": {"mode": {"enum": ["fast", "slow"]}}, "required": ["mode"], "additionalProperties": False},
}
VALUE = 'Sankt "Pölten" {}'
XML = {"days": "3", "unit": '["c"]'}
WRITTEN = {
    "openai": ("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}", "", "", ""),
    "deepseek_v3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "hermes": ('<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', "", "\n", ""),
    "mistral": ('{{"name": "{name}", "arguments": {arguments}}}', "[TOOL_CALLS][", ", ", "]"),
    "llama3_json": ('{{"name": "{name}", "parameters": {arguments}}}', "", "; ", ""),
    "qwen3_coder": ("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", "", "\n", ""),
    "glm45": ("<tool_call>{name}\n{arguments}</tool_call>", "", "\n", ""),
    "deepseek_v32": (
        '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>',
        "<｜DSML｜function_calls>\n",
        "\n",
        "\n</｜DSML｜function_calls>",
    ),
    "deepseek_v4": (
        '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>',
        "<｜DSML｜tool_calls>\n",
        "\n",
        "\n</｜DSML｜tool_calls>",
    ),
    "granite": ('{{"name": "{name}", "arguments": {arguments}}}', "<|tool_call|>[", ", ", "]"),
    "minimax_m2": ('<invoke name="{name}">\n{arguments}</invoke>', "<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
}
"""How each form writes a call, and what stands before, between and after calls."""
ARGUMENT = {
    "qwen3_coder": "<parameter={key}>\n{value}\n</parameter>\n",
    "glm45": "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    "deepseek_v32": '<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n',
    "deepseek_v4": '<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n',
    "minimax_m2": '<parameter name="{key}">{value}</parameter>\n',
}
FORMS = pytest.mark.parametrize("form", [name for name, form in TOOL_FORMS.items() if form.writing])
ONE_CALL = ("openai", "llama3_json")
"""Forms whose forced calls are one for each reply."""
KINDS = pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])


def call(form: str, name: str, **arguments: Any) -> str:
    """Return a call as the form writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    if form in ARGUMENT:
        text = "".join(
            ARGUMENT[form].format(
                key=key,
                value=value if isinstance(value, str) else json.dumps(value),
                is_text="true" if isinstance(value, str) else "false",
            )
            for key, value in arguments.items()
        )
    return WRITTEN[form][0].format(name=name, arguments=text)


def reply(form: str, *calls: str) -> str:
    _, opening, between, closing = WRITTEN[form]
    return opening + between.join(calls) + closing


@cache
def tokenizers(marks: tuple[str, ...]) -> tuple[Any, Any]:
    """Return a byte-level tokenizer with these special tokens, as transformers' and as llguidance's."""
    with TemporaryDirectory() as directory:
        add_tokenizer(Path(directory), **{f"mark_{place}": mark for place, mark in enumerate(marks)})
        made = AutoTokenizer.from_pretrained(directory)
    return made, llguidance.hf.from_tokenizer(made)


class Forced:
    """The grammar of forced calls in one form, for a tokenizer with or without special tokens for the form's marks."""

    def __init__(
        self,
        form: str,
        special: bool,
        *,
        names: tuple[str, ...] = tuple(SCHEMAS),
        several: bool = True,
        reasoning: str = "",
        inside: bool = False,
        template: str = "",
    ) -> None:
        row, thoughts = TOOL_FORMS[form], REASONING_FORMS.get(reasoning)
        self.tokenizer, self.own = tokenizers((*row.marks, *(thoughts.marks if thoughts else ())) if special else ())
        assert row.writing is not None
        ids = {text: token for token, text in special_tokens(self.tokenizer).items()}
        self.grammar = calls_grammar(
            row.writing(template),
            {name: SCHEMAS[name] for name in names},
            {text: ids[text] for text in (*row.marks, *(thoughts.marks if thoughts else ())) if text in ids},
            several=several,
            before=lambda rules: thoughts.before(rules, inside) if thoughts else [],
        )

    def takes(self, text: str) -> bool:
        matcher = llguidance.LLMatcher(self.own, self.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def sampled(self, seed: int) -> str:
        """Return a text that the grammar allows: characters that end something are preferred, so that it is short."""
        matcher, chance = llguidance.LLMatcher(self.own, self.grammar, log_level=0), random.Random(seed)
        ids: list[int] = []
        while not matcher.is_stopped() and len(ids) < 3000:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [token for token in np.flatnonzero(bits).tolist() if token < len(self.tokenizer)]
            ends = [token for token in allowed if self.tokenizer.decode([token]) in ('"', "}", "]") or token in (2,)]
            token = chance.choice(ends if ends and chance.random() < 0.4 else allowed)
            assert matcher.consume_token(token)
            ids.append(token)
        return str(self.tokenizer.decode([token for token in ids if token != 2], skip_special_tokens=False))


@FORMS
@KINDS
def test_what_a_family_writes_is_accepted_and_parsed(form: str, special: bool) -> None:
    city, now = call(form, "get_weather", city=VALUE, days=3, unit=["c"]), call(form, "now")
    forced = Forced(form, special)
    texts = [
        reply(form, city),
        reply(form, call(form, "get_weather", city=VALUE)),
        reply(form, call(form, "mode", mode="slow")),
    ]
    texts += [] if form in ONE_CALL else [reply(form, city, now), reply(form, now, now, city)]
    for text in texts:
        assert forced.takes(text)
        content, _, calls = taken_apart(ReplyForm(form, schemas=SCHEMAS), [text])
        assert not content and len(calls) == sum(text.count(name) for name in ("get_weather", "now", "mode", "slow")) - (
            2 if "slow" in text else 0
        )
        assert json.loads(calls[0][2]).get("city", VALUE) == VALUE


@FORMS
@KINDS
def test_what_a_request_does_not_allow_is_refused(form: str, special: bool) -> None:
    city, now = call(form, "get_weather", city=VALUE), call(form, "now")
    forced = Forced(form, special)
    wrong = (
        call(form, "unknown"),
        call(form, "get_weather"),
        call(form, "get_weather", city="a", days="three"),
        call(form, "get_weather", city="a", unit=["kelvin"]),
        call(form, "get_weather", city="a", other=1),
        call(form, "mode", mode="medium"),
    )
    for text in (
        *(reply(form, each) for each in wrong),
        "Hello.",
        "",
        f"Hello. {reply(form, now)}",
        f"{reply(form, now)} Hi.",
    ):
        assert not forced.takes(text), text
    if form not in ONE_CALL:
        assert forced.takes(reply(form, city, now)) and not Forced(form, special, several=False).takes(
            reply(form, city, now)
        )
    named = Forced(form, special, names=("now",), several=False)
    assert named.takes(reply(form, now)) and not named.takes(reply(form, city))


@FORMS
@KINDS
def test_a_model_may_think_first(form: str, special: bool) -> None:
    text = reply(form, call(form, "now"))
    if form == "openai":
        forced = Forced(form, special, reasoning="openai_gptoss")
        thought = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant"
        assert forced.takes(text) and forced.takes(thought + text) and not forced.takes(f"Hm.{text}")
        return
    outside, inside = Forced(form, special, reasoning="qwen3"), Forced(form, special, reasoning="qwen3", inside=True)
    assert outside.takes(text) and outside.takes(f"<think>Hm </b>.</think>\n\n{text}") and not outside.takes(f"Hm{text}")
    assert inside.takes(f"Hm </b>.</think>\n\n{text}") and not inside.takes(text)


def test_a_form_that_has_names_after_its_mark_is_seen_by_its_template() -> None:
    forced = Forced("mistral", True, template="[TOOL_CALLS] [ARGS]")
    assert forced.takes(f"[TOOL_CALLS]get_weather[ARGS]{JSON_CITY}[TOOL_CALLS]now[ARGS]{{}}")
    assert not forced.takes('[TOOL_CALLS][{"name": "now", "arguments": {}}]')


def test_a_form_without_lines_is_seen_by_its_template() -> None:
    forced = Forced("glm45", True, template="<arg_key>{{ k }}</arg_key>\n<arg_value>")
    text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rom</arg_value></tool_call><tool_call>now</tool_call>"
    assert not forced.takes(text), "this template has something between the tags"
    assert Forced("glm45", True, template="</arg_key><arg_value>").takes(text)


def test_space_in_arguments_has_an_end_and_keywords_are_held_or_refused() -> None:
    forced = Forced("hermes", False, names=("now",))
    call_with = '<tool_call>\n{{"name": "now", "arguments": {{{}}}}}\n</tool_call>'
    assert forced.takes(call_with.format(" ")) and not forced.takes(call_with.format(" " * 200))
    for schema in ({"not": {"type": "string"}}, {"x-guidance": {"lenient": True}, "not": {}}):
        writing = TOOL_FORMS["hermes"].writing
        assert writing is not None
        grammar = calls_grammar(writing(""), {"f": schema}, {}, several=False, before=lambda rules: [])
        matcher = llguidance.LLMatcher(tokenizers(())[1], grammar, log_level=0)
        assert matcher.is_error() and "not" in matcher.get_error()


@pytest.mark.parametrize("form", list(ARGUMENT))
@KINDS
def test_lengths_of_texts_between_tags(form: str, special: bool) -> None:
    tokenizer, own = tokenizers(TOOL_FORMS[form].marks if special else ())
    ids = {text: token for token, text in special_tokens(tokenizer).items() if text in TOOL_FORMS[form].marks}
    writing = TOOL_FORMS[form].writing
    assert writing is not None
    for bounds, right, wrong in (
        ({"maxLength": 4}, ("", "ab", "<\n/ö"), ("abcde", "a" * 100)),
        ({"maxLength": 2000}, ("", "a" * 3000), ()),
    ):
        schema = {"type": "object", "properties": {"a": {"type": "string", **bounds}}, "required": ["a"]}
        grammar = calls_grammar(writing(""), {"f": schema}, ids, several=False, before=lambda rules: [])
        for text in (*right, *wrong):
            matcher = llguidance.LLMatcher(own, grammar, log_level=0)
            tokens = tokenizer(reply(form, call(form, "f", a=text)), add_special_tokens=False)["input_ids"]
            assert (matcher.validate_tokens(tokens) == len(tokens)) is (text in right), (bounds, text)


def test_arguments_without_properties_are_free() -> None:
    tokenizer, own = tokenizers(())
    for form, text in (
        ("hermes", call("hermes", "f", a=1, b=["x"])),
        ("qwen3_coder", call("qwen3_coder", "f", a="x\n<b>", b="y")),
    ):
        writing = TOOL_FORMS[form].writing
        assert writing is not None
        grammar = calls_grammar(writing(""), {"f": {}}, {}, several=False, before=lambda rules: [])
        matcher = llguidance.LLMatcher(own, grammar, log_level=0)
        assert matcher.consume_tokens(tokenizer(text, add_special_tokens=False)["input_ids"]) and matcher.is_accepting()


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3_json", "deepseek_v31", "kimi_k2", "openai"])
def test_whatever_the_grammar_allows_is_a_call(form: str) -> None:
    """Forced calls cannot fail: random tokens under the grammar are calls of the tools with their arguments."""
    for seed in range(6):
        text = Forced(form, True).sampled(seed)
        content, thought, calls = taken_apart(ReplyForm(form, schemas=SCHEMAS), [text])
        assert calls and not content and not thought
        for name, _, arguments in calls:
            values, schema = json.loads(arguments), SCHEMAS[name]
            assert set(schema.get("required", ())) <= set(values) <= set(schema["properties"])
            assert isinstance(values.get("days", 0), int) and set(values.get("unit", ())) <= {"c", "f"}


ANSWER = json.dumps(
    {"grammars": [{"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}]}
)
ANSWERS = [(ANSWER, '{"n": 3}', '{"n": "three"}'), ('start: "yes" | "no"', "no", "maybe")]
"""Grammars of an answer, each with a text that follows it and one that does not."""


@pytest.mark.parametrize("form", [form for form in WRITTEN if not TOOL_FORMS[form].is_bare])
@KINDS
@pytest.mark.parametrize(("answer", "right", "wrong"), ANSWERS, ids=["json", "lark"])
def test_an_answer_of_a_grammar_may_be_a_call_instead(form: str, special: bool, answer: str, right: str, wrong: str) -> None:
    forced = Forced(form, special)
    row = TOOL_FORMS[form]
    ids = {text: token for token, text in special_tokens(forced.tokenizer).items()}
    forced.grammar = answer_grammar(
        *(answer, {text: ids[text] for text in row.marks if text in ids}),
        before=lambda rules: [],
        calls=(row.writing("") if row.writing else None, SCHEMAS, True),  # type: ignore[arg-type]
    )
    city = reply(form, call(form, "get_weather", city=VALUE))
    assert forced.takes(right) and forced.takes(city) and not forced.takes(wrong) and not forced.takes(f"{right}{city}")
    content, _, calls = taken_apart(ReplyForm(form, schemas=SCHEMAS), [right])
    assert (content, calls) == (right, [])


@pytest.mark.parametrize("name", [*REASONING_FORMS])
@KINDS
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_may_reason_before_an_answer_of_a_grammar(name: str, special: bool, inside: bool) -> None:
    thoughts = REASONING_FORMS[name]
    inside = (inside and bool(thoughts.opening)) or thoughts.begins_inside
    forced = Forced("hermes", special, reasoning=name)
    ids = {text: token for token, text in special_tokens(forced.tokenizer).items()}
    forced.grammar = answer_grammar(
        *(ANSWER, {text: ids[text] for text in thoughts.marks if text in ids}),
        before=lambda rules: thoughts.before(rules, inside),
        opening=thoughts.answer,
    )
    answer = f'{thoughts.answer}{{"n": 3}}'
    start, end = {
        "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        "mistral": ("[THINK]", "[/THINK]"),
    }.get(name, ("<think>", "</think>"))
    thought = f"{'' if inside else start}Let me see. {{{end}"
    assert forced.takes(thought + answer) and forced.takes(answer) != inside
    assert not forced.takes(thought) and not forced.takes(thought + thoughts.answer + "three")
    content, reasoning, _ = taken_apart(ReplyForm(reasoning=name, inside=inside), [thought + answer])
    assert (content, reasoning.strip()) == ('{"n": 3}', "Let me see. {")
