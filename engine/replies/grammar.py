"""Grammars of forced calls, in llguidance's variant of Lark (github.com/guidance-ai/llguidance, docs/syntax.md).

A grammar has the calls exactly as the family's chat template writes them, so that the form's parser reads whatever follows
it. Marks that are special tokens are given by their ids, because the text of a token does not match them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.replies.events import Schemas
from engine.replies.tagged_calls import Tags, schema_types

ANY_TEXT = r"/(.|\n)*/"
MOST_COUNTED = 1_000
"""Largest maxLength of a text between tags that is held; counting takes work for each character."""
_ANY_NAME = r"/[A-Za-z0-9_.-]{1,64}/"
_SHARED = ("$defs", "definitions")
_JSON_OPTIONS = {"whitespace_pattern": r"\n?[ \t]{0,20}", "lenient": False, "coerce_one_of": False}
"""Options of llguidance for a schema: little space between its tokens, which a model could write without end, and an error
for keywords that it does not hold."""


class Lark(NamedTuple):
    """A part of a rule as it stands, where any other part is text."""

    text: str


_ANSWER = "answer"
"""Name of the grammar that the answer itself follows."""
Part = str | Lark
Call = Callable[[str, Mapping[str, Any], "Rules"], list[Part]]


@dataclass(frozen=True)
class Writing:
    """How calls are written: an opening, the calls with something between them, and a closing.

    What may follow a call has to differ in its first character, because the lexer of a grammar does not go back.
    """

    call: Call
    """Returns the parts of one call, given the tool's name and the schema of its arguments."""
    opening: str = ""
    between: str = ""
    closing: str = ""
    takes_several: bool = True
    """Whether a reply may have more than one call."""


class Rules:
    """The rules of one grammar. `special`: ids of special tokens by their texts."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._lines: list[str] = []

    def sequence(self, parts: Sequence[Part]) -> str:
        """Return parts one after the other. Texts that follow each other are one, which leaves the lexer no choice."""
        items, text = list[str](), ""
        for part in parts:
            if isinstance(part, Lark):
                items += [*self._literal(text), part.text]
            text = "" if isinstance(part, Lark) else text + part
        return " ".join([*items, *self._literal(text)])

    def rule(self, body: str, options: str = "") -> Lark:
        """Add a rule and return its name."""
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return Lark(name)

    def choice(self, several: Sequence[Sequence[Part]]) -> Lark:
        """Return a rule for one of several sequences."""
        return self.rule(" | ".join(self.sequence(each) or '""' for each in several))

    def json(self, schema: Mapping[str, Any]) -> Lark:
        """Return a rule for JSON of a schema."""
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}")

    def text_and(self, mark: str, text: str = ANY_TEXT) -> Lark:
        """Return a rule for text up to the first place where `mark` comes, and the mark. text: a regular expression."""
        if special := self._marks.search(mark):  # no text has a special token, so it may be as long as possible
            name = f"TEXT_{len(self._lines)}"
            self._lines.append(f"{name}: {self.sequence([Lark(text), mark[: special.start()]])}")
            return self.rule(self.sequence([Lark(name), mark[special.start() :]]))
        return self.rule(f"{text} {json.dumps(mark)}", "[lazy]")

    def grammar(self, start: Sequence[Part]) -> str:
        """Return the grammar that begins with a sequence."""
        return "\n".join(["%llguidance {}", f"start: {self.sequence(start)}", *self._lines, ""])

    def _literal(self, text: str) -> list[str]:
        items, place = [], 0
        for found in self._marks.finditer(text):
            items += [json.dumps(text[place : found.start()]), f"<[{self._special[found[0]]}]>"]
            place = found.end()
        return [item for item in (*items, json.dumps(text[place:])) if item != '""']


Before = Callable[[Rules], list[Part]]
"""Returns the parts of a reply before its calls or its answer, such as reasoning."""


def calls_grammar(writing: Writing, schemas: Schemas, special: Mapping[str, int], *, several: bool, before: Before) -> str:
    """Return the grammar of one call of one of the tools, or of one or more calls.

    special: ids of the tokenizer's special tokens by their texts. before: returns the parts before the calls.
    """
    rules = Rules(special)
    return rules.grammar([*before(rules), *_calls(writing, schemas, rules, several)])


def answer_grammar(
    answer: str,
    special: Mapping[str, int],
    *,
    before: Before,
    opening: str = "",
    calls: tuple[Writing, Schemas, bool] | None = None,
) -> str:
    """Return the grammar of an answer that follows a grammar of its own, or of calls in its place.

    answer: the answer's own grammar, in llguidance's serialized form. opening: text before the answer. calls: their writing,
    the schemas of the tools, and whether there may be several; None where no tool can be called.
    """
    rules = Rules(special)
    choices: list[Sequence[Part]] = [[opening, Lark(f"@{_ANSWER}")]]
    if calls is not None:
        writing, schemas, several = calls
        choices.append(_calls(writing, schemas, rules, several))
    whole = rules.grammar([*before(rules), rules.choice(choices)])
    own = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    return json.dumps({"grammars": [{"lark_grammar": whole}, own[0] | {"name": _ANSWER}, *own[1:]]})


def _calls(writing: Writing, schemas: Schemas, rules: Rules, several: bool) -> list[Part]:
    """Return the parts of one call, or of one or more."""
    call = rules.choice([writing.call(name, {"type": "object"} | dict(schema), rules) for name, schema in schemas.items()])
    parts: list[Part] = [writing.opening, call]
    if several and writing.takes_several:
        parts.append(Lark(f"({rules.sequence([writing.between, call])})*"))
    return [*parts, writing.closing]


def json_call(begin: str, end: str) -> Call:
    """Return the writing of a call with JSON arguments; NAME stands for the tool's name in `begin`."""

    def call(name: str, schema: Mapping[str, Any], rules: Rules) -> list[Part]:
        return [begin.replace("NAME", name), rules.json(schema), end]

    return call


def numbered_call(begin: str, middle: str, end: str) -> Call:
    """Return the writing of a call with a number between its name and its JSON arguments."""

    def call(name: str, schema: Mapping[str, Any], rules: Rules) -> list[Part]:
        return [begin.replace("NAME", name), Lark("/[0-9]{1,3}/"), middle, rules.json(schema), end]

    return call


def tagged_writing_of(tags: Tags, begin: str, end: str, between: str = "\n") -> Call:
    """Return the writing of a call with a tag for each argument, in the order of the schema.

    begin, end: what stands around the arguments, NAME being the tool's name. between: what follows each tag.
    """
    line, gap = "\n" if tags.strips_lines else "", between if tags.value else ""
    after = f"{line}{tags.valued}{between}"

    def argument(name: Part, types: frozenset[str], value: Sequence[Part]) -> list[Part]:
        attributes = f' string="{"true" if "string" in types else "false"}"{tags.typed}' if tags.typed else ""
        return [tags.key, name, f"{tags.keyed}{attributes}{gap}{tags.value}{line}", *value]

    def call(name: str, schema: Mapping[str, Any], rules: Rules) -> list[Part]:
        parts: list[Part] = [begin.replace("NAME", name)]
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping):
            anything = argument(Lark(_ANY_NAME), frozenset({"string"}), [rules.text_and(after)])
            return [*parts, Lark(f"({rules.sequence(anything)})*"), end]
        shared = {word: schema[word] for word in _SHARED if word in schema}
        for key, own in properties.items():
            types = schema_types(own, schema)
            each = argument(key, types, _value(own, types, shared, after, rules))
            needed = isinstance(required, list) and key in required
            parts.append(rules.choice([each]) if needed else Lark(f"({rules.sequence(each)})?"))
        return [*parts, end]

    return call


def _value(own: Any, types: frozenset[str], shared: Mapping[str, Any], after: str, rules: Rules) -> Sequence[Part]:
    """Return the parts of the value of an argument and of what follows it."""
    members = own.get("enum", [own["const"]] if "const" in own else None) if isinstance(own, Mapping) else None
    if isinstance(members, list) and members and all(isinstance(member, str) for member in members):
        return [rules.choice([[member] for member in members]), after]
    if "string" in types or not types:
        return [rules.text_and(after, _text_of(own) if types == {"string"} else ANY_TEXT)]
    return [rules.json({**own, **shared}), after]


def _text_of(own: Any) -> str:
    """Return the regular expression of texts with at most the characters of a schema, up to MOST_COUNTED.

    A minimum would let a text contain its own end.
    """
    most = own.get("maxLength")
    return rf"/(.|\n){{0,{most}}}/" if isinstance(most, int) and 0 <= most <= MOST_COUNTED else ANY_TEXT
