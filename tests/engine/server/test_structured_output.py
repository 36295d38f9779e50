"""Constrained output and sampling over HTTP, by the official client: a tiny model whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import jsonschema_rs
import openai
import pydantic
import pytest
from conftest import save_reference
from server_for_tests import served
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from engine.batching.loop import EngineLoop
from engine.generation.generate import Engine
from engine.server.server import Service, State

END = 2
LETTER_A = 3 + sorted(chr(code) for code in [*range(33, 127)]).index("a")
MESSAGES: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
LARK = "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
CHOICES = ["red", "green"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path: Path = tmp_path_factory.mktemp("model")
    save_reference("mixtral", path, vocab_size=VOCABULARY)
    add_tokenizer(path)
    own = Engine.open(path, device="cpu")
    engine_loop = EngineLoop(own, kv_cache_bytes=4_000_000, max_batch_size=4, max_model_length=128)
    engine_loop.start()
    service = Service(own, engine_loop, model_name="tiny")
    with served(State(phase="ready", loaded=service)) as address:
        yield address
    service.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def complete(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "prompt": "answer:", "max_tokens": 60, "temperature": 1.5, "seed": 1}
    return client.completions.create(**given | options).choices[0]


def is_valid(text: str) -> bool:
    return bool(jsonschema_rs.is_valid(SCHEMA, json.loads(text)))


@pytest.mark.parametrize(
    "extra",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"json_schema": SCHEMA},
        {"guided_grammar": LARK},
        {"grammar": LARK, "structured_outputs": None},
    ],
)
def test_a_schema_under_each_of_its_names(client: openai.OpenAI, extra: Any) -> None:
    choice = complete(client, extra_body=extra)
    assert choice.finish_reason == "stop" and is_valid(choice.text)


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"choice": CHOICES}},
        {"guided_choice": CHOICES},
        {"structured_outputs": {"regex": "red|green"}},
        {"guided_regex": "(red|green)"},
        {"structured_outputs": {"grammar": 'start: "red" | "green"'}},
    ],
)
def test_choices_and_expressions(client: openai.OpenAI, extra: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=1.5, n=4, seed=3, extra_body=extra, max_tokens=20
    )
    assert all(choice.message.content in CHOICES and choice.finish_reason == "stop" for choice in answer.choices)


def test_any_object(client: openai.OpenAI) -> None:
    """A bias against everything but brackets and quotes makes the object a short one."""
    bias = {str(token): -50 for token in range(3, VOCABULARY - 5) if chr(token - 3 + 33) not in '{}":'}
    for extra in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        choice = complete(client, logit_bias=bias, extra_body=extra)
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)


def test_the_clients_own_parsing(client: openai.OpenAI) -> None:
    """The schema that the official client makes of a class of pydantic is held to."""

    class Answer(pydantic.BaseModel):
        color: Literal["red", "green"]
        count: Literal[1, 2, 3] | None

    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Answer, temperature=1.5, seed=5, max_tokens=100
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Answer) and parsed.color in CHOICES


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    whole = complete(client, extra_body={"guided_json": SCHEMA}).text
    given = {"model": "tiny", "prompt": "answer:", "max_tokens": 60, "temperature": 1.5, "seed": 1, "stream": True}
    chunks = list(client.completions.create(**given, extra_body={"guided_json": SCHEMA}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole and chunks[-1].choices[0].finish_reason == "stop"


def bad(**fields: Any) -> dict[str, Any]:
    return {"extra_body": fields}


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        (
            bad(response_format={"type": "json_object"}, guided_regex="a"),
            "guided_regex",
            "response_format and guided_regex both",
        ),
        (bad(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs", "needs one of"),
        (bad(structured_outputs={}), "structured_outputs", "needs one of"),
        (bad(structured_outputs={"structural_tag": "{}", "regex": "a"}), "structured_outputs", "structural_tag is not"),
        (bad(structured_outputs={"json": {"not": {}}}), "structured_outputs", "keywords that cannot be held: not"),
        (bad(response_format={"type": "json_schema"}), "response_format", "has no schema"),
        (bad(response_format={"type": "json_schema", "json_schema": {"schema": 5}}), "response_format", "valid"),
        (bad(response_format={"type": "xml"}), "response_format", "json_schema"),
        (bad(guided_choice=[]), "guided_choice", "none of them empty"),
        (bad(guided_choice=[5]), "guided_choice", "valid string"),
        (bad(guided_regex="["), "guided_regex", "unclosed"),
        (bad(guided_regex="(aa?){100000}"), "guided_regex", "too much work"),
        (bad(grammar='root ::= "a"'), "grammar", "GBNF"),
        (bad(json_schema={"type": "x"}), "json_schema", "Invalid type"),
        (bad(min_p=1.5), "min_p", "less than or equal to 1"),
        (bad(min_p="a"), "min_p", "valid number"),
        (bad(repetition_penalty=0), "repetition_penalty", "greater than or equal to 0.01"),
        (bad(repetition_penalty=1.1, repeat_penalty=1.2), "repeat_penalty", "differ"),
        (bad(top_n_sigma=-2), "top_n_sigma", "greater than"),
        (bad(stop_token_ids=[VOCABULARY]), "stop_token_ids", f"token {VOCABULARY}"),
        (bad(stop_token_ids=[0] * 257), "stop_token_ids", "at most 256"),
        (bad(min_tokens=61), "min_tokens", "min_tokens is 61 and the answer has at most 60"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "match pattern"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias", f"token {VOCABULARY}"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "at most 1024"),
    ],
)
def test_what_cannot_be_honored_is_named(client: openai.OpenAI, options: Any, param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        complete(client, **options)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_a_deep_body_names_its_field(url: str) -> None:
    deep = '{"items":' * 2000 + "true" + "}" * 2000
    for name in ("guided_json", "response_format"):
        content = f'{{"prompt": "a", "{name}": {deep}}}'
        answer = httpx2.post(f"{url}/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_a_bias_decides(client: openai.OpenAI) -> None:
    assert complete(client, logit_bias={str(LETTER_A): 100}, max_tokens=5, temperature=0).text == "aaaaa"
    assert complete(client, logit_bias={str(END): 100}, temperature=0).text == ""
    assert "a" not in complete(client, logit_bias={str(LETTER_A): -100}).text


def test_ends_and_their_minimum(client: openai.OpenAI) -> None:
    bias = {str(LETTER_A): 100}
    choice = complete(client, logit_bias=bias, extra_body={"stop_token_ids": [LETTER_A]}, temperature=0)
    assert (choice.text, choice.finish_reason) == ("", "stop")
    extra = {"stop_token_ids": [LETTER_A], "min_tokens": 3}
    choice = complete(client, logit_bias=bias, extra_body=extra, temperature=0, logprobs=0)
    assert len(choice.logprobs.tokens) == 4 and choice.logprobs.tokens[-1] == "a" and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "extra", [{"min_p": 1.0}, {"top_n_sigma": 0.001}, {"min_p": 0.9, "top_k": 1}, {"top_n_sigma": 0.001, "top_p": 0.5}]
)
def test_the_narrowest_samplers_are_greedy(client: openai.OpenAI, extra: Any) -> None:
    greedy = complete(client, temperature=0, max_tokens=20).text
    assert complete(client, max_tokens=20).text != greedy
    assert complete(client, max_tokens=20, extra_body=extra).text == greedy


def test_both_names_of_the_repetition_penalty(client: openai.OpenAI) -> None:
    plain = complete(client, temperature=0, max_tokens=20).text
    (first, second), neutral = (
        [
            complete(client, temperature=0, max_tokens=20, extra_body={name: 8.0}).text
            for name in ("repetition_penalty", "repeat_penalty")
        ],
        complete(client, temperature=0, max_tokens=20, extra_body={"repeat_penalty": 1, "repetition_penalty": 1.0}).text,
    )
    assert first == second != plain == neutral


def test_choices_of_one_prompt_share_it(client: openai.OpenAI) -> None:
    """Three of four choices find the prompt's whole blocks; their seeds differ by one each."""
    prompt = "shared " * 10
    answer = client.completions.create(model="tiny", prompt=prompt, n=4, max_tokens=8, temperature=1.5, seed=7)
    texts = [choice.text for choice in answer.choices]
    alone = [complete(client, prompt=prompt, max_tokens=8, seed=7 + place).text for place in range(4)]
    assert texts == alone and len(set(texts)) > 1
    assert answer.timings["cache_n"] >= 3 * 64
