"""Grammars of request bodies: what they take, and what is refused with which words. Texts are matched byte by byte."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import llguidance
import pytest

from engine.generation.guidance import parser_limits
from engine.server.errors import ApiError
from engine.server.reading import grammars
from engine.server.reading.grammars import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from engine.server.reading.nesting import depth_of, nested_field


def accepts(grammar: str, text: str) -> bool:
    """Return whether the grammar takes the whole text and may end there."""
    matcher = llguidance.LLMatcher(grammars._byte_tokens(), grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        ({"type": "integer", "minimum": 10, "maximum": 19}, ["10", "19"], ["9", "20", "1", "10.5", " 10"]),
        (
            {"type": "array", "items": {"const": 1}, "maxItems": 2},
            ["[]", "[1]", "[ 1,\n  1]"],
            ["[1,1,1]", "[2]", "[" + " " * 30 + "]"],
        ),
        (True, ['{"a": [null]}', "-2.5e3"], ["{a}", ""]),
        ('{"enum": ["a", null]}', ['"a"', "null"], ['"b"', "a"]),
        ({"type": "string", "pattern": "b+$"}, ['"abb"'], ['"abbc"']),
        ({"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]}, ["null", '"äö"', '"\\n"'], ['"abc"']),
        ({"oneOf": [{"type": "null"}, {"type": "boolean"}]}, ["null", "true"], ["1"]),
    ],
)
def test_json_of_a_schema(schema: Any, taken: list[str], not_taken: list[str]) -> None:
    grammar = json_schema_grammar(schema)
    assert all(accepts(grammar, text) for text in taken)
    assert not any(accepts(grammar, text) for text in not_taken)


def test_other_constraints() -> None:
    assert accepts(json_object_grammar(), '{"a": {}}') and not accepts(json_object_grammar(), "[]")
    words = ["yes", 'a "b"', "n\no", "größe 😀", "\\d/"]
    assert all(accepts(choice_grammar(words), word) for word in words) and not accepts(choice_grammar(words), "ye")
    regex = regex_grammar(r"^\d{2}/[a-c]+$")
    assert accepts(regex, "12/ab") and not accepts(regex, "12/") and not accepts(regex, "x12/a")
    lark = lark_grammar('start: item ("," item)*\nitem: /[a-z]+/ | "::="')
    assert accepts(lark, "a,bc") and accepts(lark, "::=") and not accepts(lark, "a,")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"type": "string"}}, "not; leave"),
        ({"type": "array", "contains": {"type": "integer"}, "uniqueItems": True}, "contains, uniqueItems"),
        ({"type": "object", "properties": {"a": {"if": {"type": "null"}, "then": {"type": "null"}}}}, "if, then"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "format": "iri"}, "format: unknown format: iri"),
        ({"type": "string", "format": "x" * 5000}, "format: unknown format: xxx"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern: .*look-around"),
        ({"type": "string", "pattern": "[a"}, "pattern: .*unclosed"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum .3. is greater"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "https://example.com/schema.json"}, "does not fetch"),
        ({"$ref": "#"}, "nothing follows it"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"type": "integer", "multipleOf": 9_999_991}, "more than 1 s of processor time"),
        ({"const": -(2**63)}, "compiling it fails"),
        ({"type": "integer", "maximum": 10**30}, "beyond 64 bits"),
        ({"const": float("inf")}, "beyond 64 bits"),
        ({"minimum": float("nan")}, "beyond 64 bits"),
        ({"properties": {"\ud800": {}}}, "half of a surrogate pair"),
        ({"type": "number", "multipleOf": 0}, "invalid multiple of"),
        (False, "the schema false"),
        ([1], "an object, true or false"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ({"enum": ["x" * 1_000_001]}, "at most 1000000"),
        ({"type": "object", "properties": {str(place): {} for place in range(5000)}}, "too much"),
    ],
)
def test_schemas_that_are_refused(schema: Any, said: str) -> None:
    with pytest.raises(ApiError, match=f"^given: .*{said}|^given has .*{said}") as caught:
        json_schema_grammar(schema, "given")
    assert caught.value.status == 400 and caught.value.param == "given" and len(caught.value.message) < 500


def test_the_depth_of_schemas_is_limited() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(63):
        schema = {"items": schema}
    assert depth_of(schema) == 64 and json_schema_grammar(schema)
    with pytest.raises(ApiError, match="nested 65 deep, and at most 64"):
        json_schema_grammar({"items": schema})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError, match="100002 deep"):
        json_schema_grammar({"enum": deep}, "given")
    while deep:  # freeing so many lists at once would need as deep a stack
        deep = deep[0]


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (regex_grammar, "[", "unclosed character class"),
        (regex_grammar, "", "empty"),
        (regex_grammar, r"(a)\1", "backreferences"),
        (regex_grammar, "(a{1000}){1000}", "too much work"),
        (regex_grammar, "x(a{1000}){1000}", "too much work"),
        (regex_grammar, "(aa?){100000}", "too much work"),
        (regex_grammar, "(" * 5000 + ")" * 5000, "nested parentheses"),
        (regex_grammar, "a" * 20_001, "at most 20000"),
        (choice_grammar, [], "none of them empty"),
        (choice_grammar, ["a", ""], "none of them empty"),
        (choice_grammar, ["a"] * 10_001, "at most 10000"),
        (lark_grammar, 'root ::= "a"', "GBNF"),
        (lark_grammar, "start: unknown", "unknown name"),
        (lark_grammar, "", "Empty"),
        (lark_grammar, "start: " + "(" * 100_000, "nested"),
        (lark_grammar, 'start: "a" start', "too much work"),
        (lark_grammar, 'start: %json {"not": {}}', "not"),
    ],
)
def test_other_constraints_that_are_refused(monkeypatch: pytest.MonkeyPatch, make: Any, given: Any, said: str) -> None:
    monkeypatch.setattr(grammars, "SECONDS", 60)  # a slow processor would reach the limit on time before the one on work
    with pytest.raises(ApiError, match=said) as caught:
        make(given, "given")
    assert caught.value.status == 400 and caught.value.param == "given" and len(caught.value.message) < 500


def test_the_field_that_is_nested_too_deeply() -> None:
    deep = "[" * 900 + "]" * 900
    assert nested_field(f'{{"a": [{{"b": "{{"}}], "c" : {{"d": {deep}}}, "e": 1}}'.encode()) == "c"
    assert nested_field(b'{"a": "\\"[", "b": [[1]]}') is None and nested_field(deep.encode()) is None
    assert nested_field(b'{"a": ' + b"[" * 2_000_000) == "a"


def test_no_torch_is_imported() -> None:
    code = "import sys, engine.server.reading.constraints; print('torch' in sys.modules, 'llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"


def test_a_server_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ApiError, match=r"llguidance, which is not installed: pip install 'moe-compress\[serve\]'") as caught:
        json_object_grammar()
    assert caught.value.status == 400 and json.dumps(caught.value.body())
