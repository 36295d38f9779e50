"""The HTTP interface as the official client sees it: a tiny model, its real engine loop, a real socket."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from conftest import save_reference
from server_for_tests import served
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from engine.batching.loop import EngineLoop
from engine.checkpoint.chat_template import DEFAULT_TEMPLATE
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.skip_tables import SkipTables
from engine.generation.generate import Engine
from engine.server.reading.text_reader import TextReader, tokenizer_settings
from engine.server.server import Service, State

PROMPT = "def größer(a):"
"""A prompt of 18 bytes, which are its tokens. The characters ö and ß have two bytes each."""
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_reference("mixtral", path, vocab_size=VOCABULARY)
    add_tokenizer(path)
    SkipTables((torch.ones(1),) * 3, (torch.ones(6, 6),) * 3).save(path / FILE_NAME)
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    """Return the engine that gives the expected answers. Only the test uses it, never the server."""
    return Engine.open(directory, device="cpu")


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    own = Engine.open(directory, device="cpu", skip_threshold=1.0)
    engine_loop = EngineLoop(own, kv_cache_bytes=2_000_000, max_batch_size=4, max_model_length=128)
    engine_loop.start()
    service = Service(own, engine_loop, model_name="tiny", skip_threshold=1.0)
    with served(State(phase="ready", loaded=service)) as address:
        yield address
    service.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    """Request a greedy completion without skipping, up to the limit."""
    extra = {"ignore_eos": True, "skip_threshold": 0.0} | options.pop("extra", {})
    given = {"max_tokens": 12, "temperature": 0} | options
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **given)


def logprobs_LV(engine: Engine, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return engine.decoder(torch.tensor([tokens]))[0].float().log_softmax(-1)


def greedy(engine: Engine, prompt: str, count: int) -> list[int]:
    """Decode token by token, reading the whole text again each time."""
    tokens = engine.encode(prompt)
    for _ in range(count):
        tokens.append(int(logprobs_LV(engine, tokens)[-1].argmax()))
    return tokens[-count:]


def text_of(engine: Engine, tokens: list[int]) -> str:
    return str(engine.tokenizer.decode(tokens, skip_special_tokens=True))


def test_a_completion_is_the_models_own(client: openai.OpenAI, engine: Engine) -> None:
    answer = complete(client)
    (choice,) = answer.choices
    assert choice.text == text_of(engine, greedy(engine, PROMPT, 12)) and choice.finish_reason == "length"
    assert answer.object == "text_completion" and answer.model == "tiny" and answer.id.startswith("cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (16, 12, 28)


def test_timings_count_what_was_read_and_written(client: openai.OpenAI) -> None:
    complete(client, "x" * 70, max_tokens=3)
    answer = complete(client, "x" * 70, max_tokens=3)
    timings, cached = answer.timings, answer.usage.prompt_tokens_details.cached_tokens
    assert cached > 0 and (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (cached, 70 - cached, 3)
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 3)
    assert timings["prompt_per_second"] == pytest.approx(1000 * (70 - cached) / timings["prompt_ms"])


def test_four_forms_of_prompt(client: openai.OpenAI, engine: Engine) -> None:
    one, two = engine.encode("one"), engine.encode("two")
    texts = [complete(client, text).choices[0].text for text in ("one", "two")]
    assert complete(client, one).choices[0].text == texts[0]
    for both in (["one", "two"], [one, two]):
        answer = complete(client, both)
        assert [choice.text for choice in answer.choices] == texts and answer.usage.prompt_tokens == 6
        assert [choice.index for choice in answer.choices] == [0, 1]


def test_a_stream_is_the_same_in_pieces(client: openai.OpenAI) -> None:
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"] and len(reasons) > 1
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].timings["predicted_n"] == 12


def test_several_choices_of_several_prompts_in_one_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"prompt": ["one", "two"], "n": 2, "temperature": 1, "seed": 5}
    whole = complete(client, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3] and whole.usage.completion_tokens == 48
    texts = [""] * 4
    for chunk in complete(client, **options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices] and len(set(texts)) == 4


def test_a_seed_decides(client: openai.OpenAI) -> None:
    def text(**options: Any) -> str:
        return str(complete(client, temperature=1, **options).choices[0].text)

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text(seed=-3) == text(seed=-3)
    assert text() != text(), "without one each answer has its own"


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=40).choices[0].text
    stop = text[5:7]
    for given in (stop, ["never there", stop]):
        choice = complete(client, max_tokens=40, stop=given).choices[0]
        assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop" and choice.stop_reason == stop
        last = list(complete(client, max_tokens=40, stop=given, stream=True))[-1].choices[0]
        assert last.finish_reason == "stop" and last.stop_reason == stop
    assert "stop_reason" not in complete(client, max_tokens=4).choices[0].to_dict()


def test_logprobs_are_those_of_a_plain_forward(client: openai.OpenAI, engine: Engine) -> None:
    tokens = greedy(engine, PROMPT, 6)
    expected_LV = logprobs_LV(engine, engine.encode(PROMPT) + tokens)[15:-1]
    found = complete(client, max_tokens=6, logprobs=2).choices[0].logprobs
    torch.testing.assert_close(torch.tensor(found.token_logprobs), expected_LV.amax(-1), atol=1e-4, rtol=0)
    for place, top in enumerate(found.top_logprobs):
        assert list(top.values()) == pytest.approx(expected_LV[place].topk(2).values.tolist(), abs=1e-4)
        assert next(iter(top)) == found.tokens[place]


def test_echo_repeats_the_prompt_with_its_logprobs(client: openai.OpenAI, engine: Engine) -> None:
    ids = engine.encode(PROMPT)
    answer = complete(client, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == PROMPT and choice.finish_reason == "length" and answer.usage.completion_tokens == 0
    found = choice.logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    expected = logprobs_LV(engine, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.token_logprobs[1:]), expected, atol=1e-4, rtol=0)
    assert found.tokens[:7] == ["d", "e", "f", " ", "g", "r", "bytes:\\xc3"]
    assert found.text_offset == [0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 8, 9, 10, 11, 12, 13]
    more = complete(client, [ids, ids[:3]], echo=True, max_tokens=2)
    assert [choice.text[: len(text)] for choice, text in zip(more.choices, (PROMPT, "def"), strict=True)] == [PROMPT, "def"]
    streamed = list(complete(client, echo=True, logprobs=1, max_tokens=2, stream=True))
    assert streamed[0].choices[0].text.startswith(PROMPT) and streamed[0].choices[0].logprobs.tokens[:3] == ["d", "e", "f"]
    offsets = [offset for chunk in streamed for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets[:16] == found.text_offset and offsets[16] == 14


def test_penalties_keep_tokens_from_coming_again(client: openai.OpenAI, engine: Engine) -> None:
    free = complete(client, max_tokens=60, logprobs=0).choices[0].logprobs.tokens
    kept = complete(client, max_tokens=60, logprobs=0, frequency_penalty=2, presence_penalty=2).choices[0].logprobs.tokens
    assert len(set(kept)) > len(set(free))


def test_chat_uses_the_template_that_is_documented(client: openai.OpenAI, engine: Engine) -> None:
    options: Any = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "skip_threshold": 0},
    }
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    turns: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(messages=turns, logprobs=True, top_logprobs=3, **options)
    prompt = "system: be brief\nuser: hi\nassistant:"
    tokens = greedy(engine, prompt, 8)
    (choice,) = answer.choices
    assert choice.message.content == text_of(engine, tokens) and choice.message.role == "assistant"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert bytes(byte for each in choice.logprobs.content for byte in each.bytes or ()).decode(errors="replace") == (
        engine.tokenizer.decode(tokens, skip_special_tokens=False)
    )
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [3] * 8
    streamed = list(client.chat.completions.create(messages=turns, stream=True, **options))
    assert streamed[0].choices[0].delta.role == "assistant" and streamed[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content
    assert streamed[-1].choices[0].finish_reason == "length"


def test_a_models_own_template_comes_first(engine: Engine) -> None:
    settings = tokenizer_settings(engine.tokenizer, engine.checkpoint.directory, VOCABULARY)
    assert settings.chat_template is None
    said = [{"role": "user", "content": "a"}]
    default, own = TextReader(settings), TextReader(replace(settings, chat_template="</s>{{ messages[0].content }}!"))
    assert text_of(engine, default.conversation_ids(default.conversation(said))) == "user: a\nassistant:"
    assert own.conversation_ids(own.conversation(said)) == [2, *engine.encode("a!")]
    documented = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert DEFAULT_TEMPLATE.replace("\n", "\\n") in documented


def test_a_chat_without_a_limit_ends_where_the_context_does(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == 128 and answer.choices[0].finish_reason == "length"


def test_a_request_skips_what_it_asks_for_and_no_more_than_the_server_allows(client: openai.OpenAI, url: str) -> None:
    def skipped() -> int:
        return sum(httpx2.get(f"{url}/v1/load").json()["experts_skipped_per_layer"])

    before = skipped()
    complete(client, max_tokens=3)
    assert skipped() == before
    complete(client, max_tokens=3, extra={"skip_threshold": 1.0})
    assert skipped() > before
    with pytest.raises(openai.BadRequestError, match="at most its own"):
        complete(client, extra={"skip_threshold": 1.5})


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"max_tokens": 200}, "prompt", "16 tokens and 200 new ones .* 216; the maximum is 128"),
        ({"prompt": "x" * 128}, "prompt", "128 tokens and 12 new ones"),
        ({"prompt": [VOCABULARY]}, "prompt", f"token {VOCABULARY}, and the model's tokens are below {VOCABULARY}"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"best_of": 3}, "best_of", "best_of is 3 and n is 1"),
        ({"suffix": "x"}, "suffix", "not available"),
        ({"extra": {"typical_p": 0.5}}, "typical_p", "not available"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"extra": {"mirostat": 2}}, "mirostat", "not available"),
        ({"extra": {"stream_options": {"include_usage": True}}}, "stream_options", "for streams"),
        ({"prompt": ["a"] * 300}, None, "prompts times n are 300"),
    ],
)
def test_what_cannot_be_honoured_is_named(client: openai.OpenAI, options: Any, param: str | None, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        complete(client, **options)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    if "max_tokens" in options:
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_so_in_chats(client: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | options)
    assert caught.value.param == param


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    extra = {
        "min_p": 0,
        "top_n_sigma": -1,
        "repetition_penalty": 1,
        "logit_bias": {},
        "stop_token_ids": [],
        "min_tokens": 0,
        "grammar": "",
        "json_schema": {},
        "structured_outputs": None,
        "best_of": 1,
        "top_k": -1,
        "of another server": {"a": [1]},
        "response_format": {"type": "text"},
    }
    assert complete(client, user="me", extra=extra).choices[0].text == complete(client).choices[0].text
    client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=1, store=True, metadata={"a": "b"})


def test_models_and_one_that_is_not_here(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    for ask in (lambda: client.models.retrieve("org/other"), lambda: client.completions.create(model="other", prompt="a")):
        with pytest.raises(openai.NotFoundError, match="is not served here") as caught:
            ask()
        assert caught.value.code == "model_not_found"


def test_tokens_there_and_back(url: str, engine: Engine) -> None:
    ids = engine.encode(PROMPT)
    answer = httpx2.post(f"{url}/tokenize", json={"prompt": PROMPT}).json()
    assert answer == {"tokens": ids, "count": 16, "max_model_len": 128}
    assert httpx2.post(f"{url}/detokenize", json={"tokens": ids}).json() == {"prompt": PROMPT}
    chat = httpx2.post(f"{url}/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert text_of(engine, chat) == "user: hi\nassistant:"
    assert httpx2.post(f"{url}/tokenize", json={}).status_code == 400


def test_metrics_count_requests_and_tokens(client: openai.OpenAI, url: str) -> None:
    def figures() -> dict[str, float]:
        lines = httpx2.get(f"{url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = figures()
    complete(client, max_tokens=5)
    after = figures()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["compress_prompt_tokens_total"] == 16 and grown["compress_generation_tokens_total"] == 5
    assert grown['compress_request_success_total{finished_reason="length"}'] == 1
    names = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "inter_token_latency")
    assert [grown[f"compress_{name}_seconds_count"] for name in names] == [1, 1, 1, 4]
    assert after["compress_weights_bytes"] > 0 and after["compress_kv_cache_bytes"] > 0
    assert 'compress_experts_skipped_total{layer="2"}' in after and after["compress_num_requests_running"] == 0


def test_documentation_needs_nothing_from_elsewhere(url: str) -> None:
    page = httpx2.get(f"{url}/docs").text
    schema = httpx2.get(f"{url}/openapi.json").json()
    assert all(f"<code>{path}</code>" in page for path in schema["paths"]) and "http" not in page.replace(
        "https://json-schema", ""
    )
    assert "422" not in {
        status for methods in schema["paths"].values() for about in methods.values() for status in about["responses"]
    }


def test_the_client_of_npm(url: str) -> None:
    """The test runs if the package is installed: `npm install openai` in a directory that NODE_PACKAGES names."""
    node, packages = shutil.which("node"), os.environ.get("NODE_PACKAGES", str(Path.home()))
    if node is None or not (Path(packages) / "node_modules" / "openai").is_dir():
        pytest.skip("there is no node, or no openai package in the directory that NODE_PACKAGES names")
    script = str(Path(__file__).parents[2] / "support" / "openai_npm.mjs")
    result = subprocess.run([node, script, url], cwd=packages, capture_output=True, text=True, check=False)
    assert result.stdout == "ok\n", result.stderr
