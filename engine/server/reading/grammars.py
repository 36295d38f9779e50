"""Schemas, regular expressions, choices and Lark grammars of request bodies as grammars of llguidance.

Each function returns a grammar in llguidance's serialized form, for `Request.grammar`, and raises ApiError (400) for what
it cannot hold, with the keyword's name. Nothing here imports torch: this runs in the process that reads requests, whose
time and memory are limited. There a grammar is compiled for single bytes and followed for a while, so that one that takes
too much work is refused before it reaches the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

from engine.errors import OptionError
from engine.generation.guidance import first_line, guidance, parser_limits
from engine.server.errors import SHOWN_CHARACTERS, ApiError
from engine.server.reading.limited import OverLimitError, limited
from engine.server.reading.nesting import depth_of

MOST_BYTES = 1_000_000
"""Largest schema or grammar, as UTF-8."""
MOST_DEPTH = 64
"""Arrays and objects within each other in a schema; llguidance reads about twice as many."""
MOST_PATTERN_CHARACTERS = 20_000
MOST_CHOICES = 10_000
WHITESPACE = r"\n?[ \t]{0,20}"
"""Space between the tokens of JSON, as llama.cpp limits it: a model could write space without end."""
JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
"""Options of schemas in llguidance, which a schema has under "x-guidance", also within a Lark grammar (`%json {...}`)."""
STEPS = 128
"""Bytes for which a new grammar is followed."""
SECONDS = 1
"""Limit on the processor time of both. A remainder (`multipleOf`) of seven digits takes minutes, within all other limits."""
_BYTES = 256
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def json_schema_grammar(schema: Any, param: str = "json_schema") -> str:
    """Return a grammar of the JSON texts that a schema describes. schema: as JSON, or its text."""
    if isinstance(schema, str):
        schema = _json(schema, param)
    if not isinstance(schema, dict | bool):
        raise ApiError(400, f"{param}: a schema is an object, true or false", param=param)
    depth = depth_of(schema)
    if depth > MOST_DEPTH:
        raise ApiError(400, f"{param}: the schema is nested {depth} deep, and at most {MOST_DEPTH} are read", param=param)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ApiError(400, f"{param}: the keyword x-guidance is not taken; leave it out", param=param)
    if schema is False:
        raise ApiError(400, f"{param}: no JSON follows the schema false", param=param)
    given = {} if schema is True else schema
    try:
        _check_size(json.dumps(given, allow_nan=False, ensure_ascii=False), param)
        grammar = _library().LLMatcher.grammar_from_json_schema(given, overrides=JSON_OPTIONS)
    except ValueError as error:
        message = f"{param}: the schema has a number beyond 64 bits, or half of a surrogate pair; leave it out"
        raise ApiError(400, message, param=param) from error
    return checked(grammar, param)


def json_object_grammar() -> str:
    """Return a grammar of any JSON object."""
    return json_schema_grammar({"type": "object"})


def choice_grammar(choices: Sequence[str], param: str = "choice") -> str:
    """Return a grammar of a few texts, of which one is generated."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ApiError(400, f"{param}: give one text or several, none of them empty", param=param)
    if len(choices) > MOST_CHOICES:
        raise ApiError(400, f"{param} has {len(choices)} texts, and at most {MOST_CHOICES} are taken", param=param)
    words = " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))
    _check_size(words, param)
    return checked(_library().LLMatcher.grammar_from_lark(f"start: {words}"), param)


def regex_grammar(pattern: str, param: str = "regex") -> str:
    """Return a grammar of the texts that a regular expression matches from beginning to end."""
    if not pattern:
        raise ApiError(400, f"{param} is empty; leave it out for free text", param=param)
    if len(pattern) > MOST_PATTERN_CHARACTERS:
        message = f"{param} has {len(pattern)} characters, and at most {MOST_PATTERN_CHARACTERS} are read"
        raise ApiError(400, message, param=param)
    return checked(_library().LLMatcher.grammar_from_regex(pattern), param)


def lark_grammar(text: str, param: str = "grammar") -> str:
    """Return a grammar in llguidance's variant of Lark, whose start is `start`."""
    if _GBNF_RULE.search(text):
        message = f"{param}: GBNF and EBNF are not read; write the grammar in Lark (start: ...), or give a schema or a regex"
        raise ApiError(400, message, param=param, code="unsupported_parameter")
    _check_size(text, param)
    return checked(_library().LLMatcher.grammar_from_lark(text), param)


def _library() -> Any:
    """Return llguidance. Raises ApiError on a server without it."""
    try:
        return guidance()
    except OptionError as error:
        raise ApiError(400, str(error), code="unsupported_parameter") from error


def _json(text: str, param: str) -> Any:
    _check_size(text, param)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ApiError(400, f"{param}: the schema is nested too deeply; at most {MOST_DEPTH}", param=param) from error
    except ValueError as error:
        raise ApiError(400, f"{param}: the schema is not valid JSON", param=param) from error


def _check_size(text: str, param: str) -> None:
    size = len(text.encode())
    if size > MOST_BYTES:
        raise ApiError(400, f"{param} has {size} bytes, and at most {MOST_BYTES} are read; send a smaller one", param=param)


def checked(grammar: str, param: str) -> str:
    """Return the grammar if it compiles and can be followed for some bytes. Raises ApiError otherwise."""
    _byte_tokens()  # before the process is copied
    fault = _fault(grammar)
    if fault:
        raise ApiError(400, f"{param}: {fault[:SHOWN_CHARACTERS]}", param=param)
    return grammar


@lru_cache(maxsize=64)
def _fault(grammar: str) -> str:
    """Return why a grammar cannot be used; empty if it can. Clients ask for the same one again and again."""
    try:
        return limited(partial(_followed, grammar), SECONDS)
    except OverLimitError:
        return f"compiling it fails, or takes more than {SECONDS} s of processor time, or too much memory; simplify it"


def _followed(grammar: str) -> str:
    """Return why a grammar cannot be compiled, or followed for some bytes; empty if it can."""
    matcher = _library().LLMatcher(_byte_tokens(), grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return described(matcher.get_error())
    state = 1
    for _ in range(STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not mask:
            reason = described(matcher.get_error())
            return f"it takes too much work, or nothing follows it ({reason}); simplify it"
        allowed = [byte for byte in range(_BYTES) if mask >> byte & 1]
        if not allowed or matcher.is_stopped():
            break
        state = state * 1_103_515_245 + 12_345 & 0x7FFFFFFF  # the usual linear congruence: any byte may come
        matcher.consume_token(allowed[(state >> 8) % len(allowed)])
    return ""


def described(message: str) -> str:
    """Return llguidance's message in one line, with the names of the keywords that it does not hold."""
    lines = [line.strip() for line in message.strip().splitlines()]
    if lines and lines[0].startswith("Unimplemented keys: "):
        keys = ", ".join(json.loads(lines[0].removeprefix("Unimplemented keys: ")))
        return f"the schema has keywords that cannot be held: {keys}; leave them out"
    if lines and lines[0].startswith("oneOf constraints"):
        return "oneOf can be held only where no value fits two of its schemas; use anyOf"
    if lines and lines[0].startswith("Unknown format"):
        return f"format: {lines[0][0].lower()}{lines[0][1:]} cannot be held; leave it out"
    wrong = next((line for line in lines if line.startswith("error: ")), None)
    if wrong is not None:
        where = "pattern: " if lines[0].startswith("regex parse error") else ""
        return f"{where}the regular expression is not valid: {wrong.removeprefix('error: ')}"
    return first_line(message)


class _Bytes:
    """Single bytes and an end, in the form that llguidance's TokenizerWrapper reads."""

    eos_token_id, bos_token_id = _BYTES, None
    special_token_ids = (_BYTES,)
    tokens = (*(bytes([byte]) for byte in range(_BYTES)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokens() -> Any:
    """Return a tokenizer of llguidance with a token for each byte, and one that ends the text."""

    library = _library()
    return library.LLTokenizer(library.TokenizerWrapper(_Bytes()), n_vocab=_BYTES + 1, eos_token=[_BYTES])
