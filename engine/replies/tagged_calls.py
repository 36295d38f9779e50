"""Calls with a tag for each argument. They are given on when they end, because types come from the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.replies.events import MalformedError, Schemas, Steps
from engine.replies.json_calls import parsed, whole_call
from engine.replies.source import MOST_NAME, Source

NO_TYPES: frozenset[str] = frozenset()
_STRING, _OTHER = 'string="true"', 'string="false"'
_TYPE_OF = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


@dataclass(frozen=True, kw_only=True)
class Tags:
    """How a form writes one call."""

    call: str
    """Before the name of the tool."""
    named: str
    """After it; empty if the first argument or the end of the call follows at once."""
    end: str
    """End of a call."""
    ends_section: bool = False
    """Whether the end of the call is the end of the section around it, which is not read here."""
    key: str
    """Before the name of an argument."""
    keyed: str
    """After it."""
    typed: str = ""
    """After the attributes that follow the name of an argument; empty without attributes."""
    value: str = ""
    """Before the value of an argument; empty if it follows at once."""
    valued: str
    """After the value."""
    strips_lines: bool = False
    """Whether the value has lines of its own."""


class _NoJsonError(Exception):
    """A value is not valid JSON."""


def tagged_call(tags: Tags, schemas: Schemas) -> Callable[[Source], Steps[None]]:
    """Return a parser of one call."""

    def steps(source: Source) -> Steps[None]:
        if tags.call:
            yield from source.expect(tags.call)
        name = yield from source.word()
        if tags.named:
            yield from source.expect(tags.named)
        schema, values = schemas.get(name, {}), dict[str, Any]()
        while True:
            yield from source.space()
            if (yield from (source.comes(tags.end) if tags.ends_section else source.starts(tags.end))):
                break
            yield from source.expect(tags.key)
            key = yield from source.until(tags.keyed, MOST_NAME)
            attributes = (yield from source.until(tags.typed, MOST_NAME)) if tags.typed else ""
            if tags.typed and attributes.strip() not in (_STRING, _OTHER):
                raise MalformedError
            if tags.value:
                yield from source.expect(tags.value)
            text = yield from source.until(tags.valued)
            if tags.strips_lines:
                text = text.removeprefix("\n").removesuffix("\n")
            values[key.strip()] = _value(text, _types(key.strip(), schema, attributes))
        yield from whole_call(source, name, json.dumps(values, ensure_ascii=False))

    return steps


def _types(key: str, schema: Mapping[str, Any], attributes: str) -> frozenset[str]:
    """Return the types that an argument may have; none if its schema does not say."""
    if attributes:
        return frozenset({"string"}) if attributes.strip() == _STRING else NO_TYPES
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    return schema_types(own, schema)


def schema_types(own: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows, as far as it says so in a simple way; none if it does not."""
    if not isinstance(own, Mapping) or depth > 8:
        return NO_TYPES
    reference = own.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return schema_types(target, root, depth + 1)
    given = own.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    if isinstance(members := own.get("enum"), list):
        return frozenset(_TYPE_OF.get(type(member), "string") for member in members)
    if "const" in own:
        return frozenset({_TYPE_OF.get(type(own["const"]), "string")})
    several = [each for word in ("anyOf", "oneOf") if isinstance(own.get(word), list) for each in own[word]]
    found = [schema_types(each, root, depth + 1) for each in several]
    return frozenset().union(*found) if all(found) else NO_TYPES


def _value(text: str, types: frozenset[str]) -> Any:
    """Return the value that the text of an argument stands for."""
    if types == {"string"}:
        return text
    plain = text.strip()
    if types and _WORDS.get(plain.lower()) == "null" and "null" not in types and "string" in types:
        return text
    try:
        value = parsed(_WORDS.get(plain.lower(), plain) if "string" not in types else plain, _NoJsonError)
    except _NoJsonError:
        return text
    if "string" not in types:
        return value
    found = _TYPE_OF[type(value)]
    return value if found in types - {"string"} or (found == "integer" and "number" in types) else text
