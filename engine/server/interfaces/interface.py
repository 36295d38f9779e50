"""An interface: how the body of another interface becomes the body of a chat completion, and how errors name its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from engine.server.errors import SHOWN_CHARACTERS, SHOWN_PROBLEMS, ApiError
from engine.server.reading.schema import NEUTRAL, Body, ChatCompletionRequest

Json = dict[str, Any]
MOST_REPEATED_BYTES = 1_000_000
"""Limit on the JSON of the fields that an answer repeats: the server writes them up to three times for a stream."""
MOST_DEPTH = 100
"""Limit on the depth of these fields; every process must be able to write them."""


class Unavailable(NamedTuple):
    """A parameter of an interface that is not available."""

    advice: str
    neutral: Sequence[Any] = ()
    """Values at which it has no effect."""
    code: str = "unsupported_parameter"


@dataclass(frozen=True)
class Interface:
    """One endpoint of another interface."""

    body: type[Body]
    chat: Callable[[Any], Json]
    """Returns the body of the chat completion for a validated body."""
    names: Mapping[str, str]
    """Names of this interface for fields of a chat completion, where they differ."""
    repeated: Callable[[Any], Json] | None = None
    """Returns the fields that the answer repeats; None if it repeats none."""
    most_tokens: Callable[[Any], int] | None = None
    """Returns the limit of new tokens of an interface that lowers it to what fits after the prompt, instead of refusing."""
    counted: Callable[[int], Json] | None = None
    """Returns the complete answer of an endpoint that only counts the tokens of a prompt."""

    def read(self, values: Json) -> Any:
        """Return the validated body. Raises ApiError with the place of the problem in the body."""
        try:
            return self.body.model_validate(values)
        except ValidationError as error:
            raise located(error.errors(include_url=False), values) from error

    def kept(self, body: Any) -> Json:
        """Return the fields that the answer repeats. Raises ApiError if they are too large or too deep."""
        if self.repeated is None:
            return {}
        fields = self.repeated(body)
        for name, value in fields.items():
            if _is_deeper(value, MOST_DEPTH):
                raise ApiError(400, f"{name} is nested more than {MOST_DEPTH} levels deep; send a flatter one", param=name)
        sizes = {name: len(json.dumps(value)) for name, value in fields.items()}
        if sum(sizes.values()) > MOST_REPEATED_BYTES:
            name = max(sizes, key=sizes.__getitem__)
            message = (
                f"{name} has {sizes[name]} bytes of JSON, and the answer repeats at most {MOST_REPEATED_BYTES}; shorten it"
            )
            raise ApiError(400, message, param=name)
        return fields

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Give errors of the chat completion the names of this interface."""
        try:
            yield
        except ApiError as error:
            own = self.names.get(error.param or "")
            if own is None:
                raise
            message = re.sub(rf"^{re.escape(error.param or '')}\b", own, error.message)
            raise ApiError(error.status, message, param=own, code=error.code) from error


def located(problems: Sequence[Any], values: Json) -> ApiError:
    """Return the error for the validation problems that are deepest in the body, where unions have several."""
    places = [_place(problem["loc"], values, is_missing=problem["type"] == "missing") for problem in problems]
    place = max(places, key=len)
    keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    name = " ".join(keys.removeprefix(".").split())
    found = [problem for problem, own in zip(problems, places, strict=True) if own == place]
    for problem in found:
        context, given = problem.get("ctx", {}), problem.get("input")
        tag = f"{name}.{'role' if 'role' in context.get('discriminator', '') else 'type'}"
        if problem["type"] == "union_tag_invalid":
            return _not_available(tag, context["tag"], context["expected_tags"])
        if problem["type"] == "literal_error" and isinstance(given, str):
            return _not_available(name, given, context["expected"])
        if problem["type"] == "union_tag_not_found":
            return ApiError(400, f"{tag}: Field required", param=tag)
    said = " or ".join(dict.fromkeys(problem["msg"] for problem in found[:SHOWN_PROBLEMS]))
    return ApiError(400, f"{name or 'the body'}: {said}"[:SHOWN_CHARACTERS], param=name or None)


def extensions(body: Body, instead: Mapping[str, str | None], unavailable: Mapping[str, Unavailable]) -> Json:
    """Return the fields of a body that only chat completions have, such as `top_k` and `skip_threshold`.

    `instead`: fields of chat completions that this interface has under another name, or not at all (None). Raises ApiError
    for these, and for what is not available.
    """
    given = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, value in given.items():
        if name in instead:
            advice = f"use {instead[name]}" if instead[name] else "leave it out"
            raise ApiError(400, f"{name} is not a parameter of this endpoint; {advice}", param=name)
        if name in unavailable and value not in unavailable[name].neutral:
            row = unavailable[name]
            raise ApiError(400, f"{name} is not available; {row.advice}", param=name, code=row.code)
    passed = ChatCompletionRequest.model_fields.keys() | NEUTRAL.keys()
    return {name: value for name, value in given.items() if name in passed and name not in unavailable}


def chat_effort(effort: str | None) -> str | None:
    """Return a reasoning effort by its name in chats, whose highest is `xhigh`."""
    return "xhigh" if effort == "max" else effort


def without_none(**fields: Any) -> Json:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _place(location: Sequence[int | str], values: Any, *, is_missing: bool) -> list[int | str]:
    """Return the keys of a location that lead through the body; pydantic's locations also have the names of alternatives.

    is_missing: whether the last key is that of a missing field.
    """
    found: list[int | str] = []
    for number, key in enumerate(location):
        is_absent = is_missing and number == len(location) - 1
        if isinstance(values, list) and isinstance(key, int) and key < len(values):
            values = values[key]
        elif isinstance(values, dict) and (key in values or is_absent):
            values = values.get(key)
        else:
            continue
        found.append(key)
    return found


def _not_available(name: str, given: str, expected: str) -> ApiError:
    message = f"{name} {given!r:.60} is not available; use {expected}"
    return ApiError(400, message[:SHOWN_CHARACTERS], param=name, code="unsupported_parameter")


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if not level:
            return False
    return True
