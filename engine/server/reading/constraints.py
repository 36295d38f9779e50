"""The one constraint that a body puts on its output, as a grammar, under whichever name it is given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.server.errors import ApiError
from engine.server.reading.grammars import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from engine.server.reading.schema import GenerationBody, ResponseFormat, StructuredOutputs

KINDS: dict[str, Callable[[Any, str], str]] = {
    "json": json_schema_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}
"""Functions from a value and the name of its parameter to a grammar, by the kind of constraint in the words of vLLM."""
PARAMETERS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Kinds of the parameters that are one constraint each: older ones of vLLM, and those of llama.cpp's server."""


def grammar_of(body: GenerationBody) -> str:
    """Return the grammar that the output of a body must follow; empty for free output.

    Raises ApiError for two constraints, and for one that cannot be held.
    """
    found: dict[str, Callable[[], str]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        found["response_format"] = partial(_of_format, body.response_format)
    if body.structured_outputs is not None:
        found["structured_outputs"] = partial(_of_outputs, body.structured_outputs)
    for name, kind in PARAMETERS.items():
        value = getattr(body, name)
        if value is not None and value not in ("", {}):
            found[name] = partial(KINDS[kind], value, name)
    if len(found) > 1:
        first, second, *_ = found
        raise ApiError(400, f"{first} and {second} both constrain the output; give one of them", param=second)
    return next((make() for make in found.values()), "")


def _of_format(given: ResponseFormat) -> str:
    name = "response_format"
    if given.type == "json_object":
        return json_object_grammar() if given.schema_ is None else json_schema_grammar(given.schema_, name)
    schema = given.schema_ if given.json_schema is None else given.json_schema.schema_
    if schema is None:
        raise ApiError(400, f"{name}: json_schema has no schema; give one, or the type json_object", param=name)
    return json_schema_grammar(schema, name)


def _of_outputs(given: StructuredOutputs) -> str:
    name = "structured_outputs"
    values = {kind: getattr(given, "json_" if kind == "json" else kind) for kind in KINDS}
    asked = {kind: value for kind, value in values.items() if value is not None}
    if others := [key for key, value in (given.model_extra or {}).items() if value not in (None, False)]:
        raise ApiError(400, f"{name}: {others[0]} is not available; leave it out", param=name, code="unsupported_parameter")
    if len(asked) + bool(given.json_object) != 1:
        raise ApiError(400, f"{name} needs one of {', '.join(KINDS)} and json_object", param=name)
    if given.json_object:
        return json_object_grammar()
    ((kind, value),) = asked.items()
    return KINDS[kind](value, name)
