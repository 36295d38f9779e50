"""Requests with grammars in the scheduler: masks hold at any temperature, and other requests never notice them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
import torch
from random_schemas import random_schema
from serving_for_tests import Served, assert_all_free, run_to_end, scheduler_for, serve

from engine.batching import masks_ahead
from engine.batching.masks_ahead import MasksAhead
from engine.batching.request import Request
from engine.generation.generate import Engine
from engine.generation.grammar_matcher import Grammars, Matcher
from engine.generation.options import SamplingOptions
from engine.server.errors import ApiError
from engine.server.reading.grammars import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar

HOT = 1.5
PROMPT = "def main():\n"
PAIR = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "minimum": 3, "maximum": 250}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"enum": [1, 2]}, "of": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
            "required": ["v", "of"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Any] = {
    "pair": PAIR,
    "tree": TREE,
    "integer": {"type": "integer", "exclusiveMinimum": -7, "exclusiveMaximum": 1000, "multipleOf": 7},
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": 0.25, "maximum": 17.5},
        "minItems": 2,
        "maxItems": 3,
    },
    "enum": {"enum": ["größer", 'a"b', None, {"k": [1]}, 2.5]},
    "const": {"const": {"a": [True, "x\ny"]}},
    "pattern": {"type": "string", "pattern": r"^[A-Z]\d{2,5}(-[a-f]+)?$"},
    "length": {"type": "string", "minLength": 4, "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": {"type": "string"}, "maxItems": 4},
    "any": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {"type": "integer"}}]},
    "all": {"allOf": [PAIR, {"properties": {"count": {"multipleOf": 5}}}]},
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.open("demo", device="cpu", threads=1)


def request_for(engine: Engine, grammar: str = "", tokens: int = 120, **fields: Any) -> Request:
    sampling = SamplingOptions(fields.pop("temperature", HOT), seed=fields.pop("seed", 0))
    return Request(tuple(engine.encode(fields.pop("prompt", PROMPT))), tokens, sampling, grammar=grammar, **fields)


def answers(engine: Engine, requests: list[Request], **options: Any) -> list[Served]:
    return serve(engine, *requests, **{"kv_cache_bytes": 1 << 26, "block_size": 16, "max_batch_size": 16} | options)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_ends_follows_its_schema(engine: Engine, name: str) -> None:
    schema = SCHEMAS[name]
    grammar = json_schema_grammar(schema)
    served = answers(engine, [request_for(engine, grammar, seed=seed) for seed in range(6)])
    assert {each.finish_reason for each in served} <= {"stop", "length"}
    ended = [each.text for each in served if each.finish_reason == "stop"]
    assert ended, "all were cut off"
    for text in ended:
        jsonschema_rs.validate(schema, json.loads(text))


def assert_random_schemas_hold(engine: Engine, seeds: range) -> None:
    """Every finished text follows its schema, and what cannot be held was refused before."""
    held: list[tuple[Any, Request]] = []
    refused: list[ApiError] = []
    for seed in seeds:
        schema = random_schema(seed)
        try:
            held.append((schema, request_for(engine, json_schema_grammar(schema), 300, seed=seed)))
        except ApiError as error:
            refused.append(error)
    assert all((error.status, error.param) == (400, "json_schema") for error in refused)
    served = answers(engine, [request for _, request in held])
    ended = [(schema, each) for (schema, _), each in zip(held, served, strict=True) if each.finish_reason == "stop"]
    assert all(each.finish_reason in ("stop", "length") for each in served)
    assert len(held) > 0.7 * len(seeds) and len(ended) > 0.5 * len(held)
    for schema, each in ended:
        jsonschema_rs.validate(schema, json.loads(each.text))


@pytest.mark.slow
def test_random_schemas_hold(engine: Engine) -> None:
    assert_random_schemas_hold(engine, range(40))


@pytest.mark.slow
def test_a_thousand_random_schemas_hold(engine: Engine) -> None:
    for start in range(1000, 2000, 100):
        assert_random_schemas_hold(engine, range(start, start + 100))


def test_without_the_mask_the_text_does_not_follow(engine: Engine) -> None:
    """The tests above can fail: the model itself writes no such JSON."""
    (served,) = answers(engine, [request_for(engine)])
    with pytest.raises(json.JSONDecodeError):
        json.loads(served.text)


def test_free_requests_do_not_notice_others(engine: Engine) -> None:
    free = [request_for(engine, seed=seed, prompt=f"import {seed}") for seed in range(3)]
    alone = [answers(engine, [each])[0].tokens for each in free]
    held = [request_for(engine, json_schema_grammar(schema), seed=5) for schema in (PAIR, TREE)]
    mixed = answers(engine, [held[0], free[0], free[1], held[1], free[2]])
    assert [mixed[place].tokens for place in (1, 2, 4)] == alone
    assert [mixed[place].tokens for place in (0, 3)] == [answers(engine, [each])[0].tokens for each in held]


def test_a_preemption_keeps_the_place_in_the_grammar(engine: Engine) -> None:
    requests = [request_for(engine, json_schema_grammar(PAIR), 40, seed=seed) for seed in range(4)]
    whole = [each.tokens for each in answers(engine, requests)]
    scheduler = scheduler_for(engine, kv_cache_bytes=100_000, block_size=4, max_model_length=64)
    served = [Served(scheduler, engine, each, number) for number, each in enumerate(requests)]
    run_to_end(scheduler)
    assert_all_free(scheduler)
    assert scheduler.preemptions > 0
    assert [each.tokens for each in served] == whole


def test_a_text_ends_where_its_grammar_does(engine: Engine) -> None:
    (served,) = answers(engine, [request_for(engine, choice_grammar(["yes", "no"]))])
    assert served.text in ("yes", "no") and served.finish_reason == "stop"
    assert not engine.end_tokens & set(served.tokens), "no step is spent on the end token"
    for limit, reason in ((3, "stop"), (2, "length")):
        (served,) = answers(engine, [request_for(engine, lark_grammar('start: "%%%" '), limit)])
        wanted = len(served.tokens)
        assert served.finish_reason == ("stop" if served.text == "%%%" else reason) and wanted <= limit


def test_an_end_token_comes_only_where_the_grammar_allows_it(engine: Engine) -> None:
    """The expression may end after each letter; a ban of letters by a bias leaves the end token alone."""
    letters = tuple(token for token in range(4096) if set(engine.tokenizer.decode([token])) == {"a"})
    grammar = regex_grammar("ba*")
    sampling = SamplingOptions(HOT, logit_bias=tuple((token, -100.0) for token in letters))
    (served,) = answers(engine, [Request(tuple(engine.encode(PROMPT)), 20, sampling, grammar=grammar)])
    assert served.text == "b" and served.finish_reason == "stop" and set(served.tokens) & engine.end_tokens


def test_ignored_end_tokens_leave_the_text_to_its_grammar(engine: Engine) -> None:
    request = request_for(engine, regex_grammar("a{3,9}"), temperature=0.0, ignore_end_tokens=True)
    (served,) = answers(engine, [request])
    assert served.text == "a" * 9 and served.finish_reason == "stop"


def test_a_minimum_length_holds_back_ends(engine: Engine) -> None:
    """A bias makes the end token certain; it comes first at the fifth place, and a stop token and a string too."""
    (end,) = engine.end_tokens
    sampling = SamplingOptions(0.0, logit_bias=((end, 100.0),))
    prompt = tuple(engine.encode(PROMPT))
    free, held = answers(engine, [Request(prompt, 9, sampling), Request(prompt, 9, sampling, min_new_tokens=4)])
    assert free.tokens == (end,) and held.tokens.index(end) == 4 and held.finish_reason == "stop"
    (plain,) = answers(engine, [Request(prompt, 12)])
    stop = plain.tokens[2]
    first, later = answers(
        engine, [Request(prompt, 12, stop_tokens=(stop,)), Request(prompt, 12, stop_tokens=(stop,), min_new_tokens=5)]
    )
    assert first.tokens == plain.tokens[: plain.tokens.index(stop) + 1] and first.finish_reason == "stop"
    assert engine.tokenizer.decode([stop]) not in first.text[-1:] or first.text == ""
    assert stop not in later.tokens[:5] and len(later.tokens) > 5
    text = plain.text[4:6]
    (stopped,) = answers(engine, [Request(prompt, 12, stop=(text,), min_new_tokens=11)])
    assert text in stopped.text and len(stopped.tokens) >= 11


def test_penalties_concern_the_prompt(engine: Engine) -> None:
    """With the largest penalty no token of the prompt, nor any twice, is chosen greedily while its logit is positive."""
    prompt = tuple(engine.encode("import os\nimport os\nimport"))
    (plain,) = answers(engine, [Request(prompt, 8)])
    (penalised,) = answers(engine, [Request(prompt, 8, SamplingOptions(repetition_penalty=50.0))])
    assert set(plain.tokens) & set(prompt) and not set(penalised.tokens) & set(prompt)
    assert len(set(penalised.tokens)) == 8


def test_a_grammar_that_grows_too_large_ends_its_request_alone(engine: Engine) -> None:
    """The explosion comes after the first letter, and a grammar for the engine itself is not followed before."""
    grammar = '{"grammars": [{"lark_grammar": "start: /x(a{1000}){1000}/"}]}'
    free = request_for(engine, tokens=6)
    bad, other = answers(engine, [request_for(engine, grammar), free])
    assert bad.finish_reason == "error" and "too many expressions" in bad.updates[-1].error
    assert other.tokens == answers(engine, [free])[0].tokens


def test_a_grammar_that_cannot_be_compiled_ends_its_request(engine: Engine) -> None:
    bad, other = answers(engine, [request_for(engine, "start: unknown"), request_for(engine, tokens=3)])
    assert bad.finish_reason == "error" and "unknown name" in bad.updates[-1].error and len(other.tokens) == 3


def test_choices_of_one_prompt_read_it_once(engine: Engine) -> None:
    """The first of four equal prompts of 64 tokens is read whole, and the others read only their last block."""
    prompt = tuple(range(100, 164))
    requests = [Request(prompt, 4, SamplingOptions(HOT, seed=seed)) for seed in range(4)]
    requests.append(Request(tuple(range(200, 240)), 4))
    served = answers(engine, requests, prefill_chunk=32)
    assert [each.state.timings.cached_tokens for each in served] == [0, 48, 48, 48, 0]
    alone = [answers(engine, [each], prefill_chunk=32)[0].tokens for each in requests]
    assert [each.tokens for each in served] == alone


class Noted:
    """A request with a matcher that says which thread computed its mask."""

    def __init__(self) -> None:
        self.matcher = self
        self.computed = threading.Event()
        self.thread = ""

    def prepare(self) -> None:
        self.thread = threading.current_thread().name
        self.computed.set()


def slow_masks() -> MasksAhead:
    """Return one that has measured masks of a second each."""
    ahead = MasksAhead()
    ahead._mask_seconds = 1.0
    return ahead


def test_masks_that_take_long_are_computed_beside_the_model() -> None:
    """While the body waits for the masks, only another thread can compute them."""
    states: list[Any] = [Noted(), Noted()]
    free: Any = SimpleNamespace(matcher=None)
    with slow_masks().computed([states[0], free, states[1]]):
        assert all(each.computed.wait(60) for each in states)
    assert {each.thread for each in states} == {"masks_0"}


def test_masks_do_not_wait_for_a_busy_thread() -> None:
    ahead, state, go = slow_masks(), Noted(), threading.Event()
    busy = ahead._thread.submit(go.wait, 60)
    states: list[Any] = [state]
    with ahead.computed(states):
        assert not state.thread
    assert state.thread == threading.current_thread().name
    go.set()
    assert busy.result()


def test_masks_that_take_no_time_do_not_wake_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of a step take a third of the limit: no thread. After steps of seven times it, their mean is above it."""
    limit = masks_ahead.THREAD_SECONDS
    ahead, clock, seconds = MasksAhead(), 0.0, limit / 3

    def thread_time() -> float:
        nonlocal clock
        clock += seconds  # each step reads the clock twice
        return clock

    monkeypatch.setattr(masks_ahead.time, "thread_time", thread_time)
    threads = []
    for step in range(8):
        states: list[Any] = [Noted(), Noted()]
        with ahead.computed(states):
            assert all(each.computed.wait(60) for each in states)
        threads.append({each.thread for each in states})
        seconds = limit / 3 if step < 3 else 7 * limit
    own = threading.current_thread().name
    assert threads[:4] == [{own}] * 4 and threads[-1] == {"masks_0"}


def test_each_mask_is_computed_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare: Callable[[Matcher], None] = Matcher.prepare
    computed: list[Matcher] = []

    def noted(self: Matcher) -> None:
        if self._place.allowed_V is None:
            computed.append(self)
        prepare(self)

    monkeypatch.setattr(Matcher, "prepare", noted)
    (served,) = answers(engine, [request_for(engine, json_schema_grammar(PAIR), 12)])
    assert len(computed) == len(served.tokens)


def test_padding_of_the_vocabulary_is_never_chosen(engine: Engine) -> None:
    """Logits may have more tokens than the tokenizer: those have no text."""
    matcher = Grammars(lambda: engine.tokenizer, 4096 + 40, engine.end_tokens).matcher(regex_grammar("[^x]*"))
    allowed = matcher.allowed()
    assert allowed.shape == (4136,) and not bool(allowed[4096:].any()) and bool(allowed[list(engine.end_tokens)].all())
    assert allowed.dtype == torch.bool and int(allowed.sum()) > 3000
