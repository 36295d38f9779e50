"""`compress serve` with several models, over HTTP: loaded at first use, closed for others, named by requests."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from conftest import save_reference
from server_for_tests import process, served, wait_for
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from engine.batching.scheduler import Scheduler
from engine.errors import CheckpointError, OptionError
from engine.server import models, serve
from engine.server.model_memory import MODEL_BYTES, cache_bytes, needed_bytes
from engine.server.options import ServeOptions
from engine.server.serve import load, models_of
from engine.server.server import Service, State

SHORT = {"prompt": "ab", "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, family in (("first", "mixtral"), ("second", "olmoe"), ("third", "mixtral")):
        save_reference(family, path / name, vocab_size=VOCABULARY, max_position_embeddings=4096)
        add_tokenizer(path / name)
    return path


def options_for(directory: Path, **given: Any) -> ServeOptions:
    return ServeOptions(models_dir=directory, kv_cache_bytes=1 << 20, threads=1, **given)


@contextmanager
def server(options: ServeOptions) -> Iterator[tuple[httpx2.Client, State]]:
    state = State(phase="ready", models=models_of(options))
    try:
        with served(state) as url, httpx2.Client(base_url=url, timeout=60) as client:
            yield client, state
    finally:
        state.names.close()
        for each in state.services:
            each.close()


def complete(client: httpx2.Client, model: str | None, **options: Any) -> Any:
    named = {} if model is None else {"model": model}
    return client.post("/v1/completions", json=SHORT | named | options)


def loaded(client: httpx2.Client) -> dict[str, bool]:
    return {each["id"]: each["loaded"] for each in client.get("/v1/models").json()["data"]}


def test_requests_name_the_model_and_load_it(directory: Path) -> None:
    alone = {}
    for name in ("first", "second"):
        service = load(options_for(directory).of_one(name, str(directory / name)))
        with served(State(phase="ready", loaded=service)) as url:
            alone[name] = httpx2.post(f"{url}/v1/completions", json=SHORT, timeout=60).json()["choices"][0]["text"]
            assert "loaded" not in httpx2.get(f"{url}/v1/models").json()["data"][0]
        service.close()
    with server(options_for(directory)) as (client, _):
        assert loaded(client) == {"first": False, "second": False, "third": False}
        assert client.get("/v1/load").json()["loaded"] is False and "compress_model_loaded" in client.get("/metrics").text
        second = complete(client, "second").json()
        assert second["model"] == "second" and second["choices"][0]["text"] == alone["second"]
        assert loaded(client) == {"first": False, "second": True, "third": False}
        assert complete(client, None).json()["choices"][0]["text"] == alone["first"], "the first without a name"
        assert client.get("/v1/models/second").json()["max_model_len"] > 0
        assert client.get("/v1/models/third").json()["loaded"] is False
        load_of_second = client.get("/v1/load", params={"model": "second"}).json()
        assert (load_of_second["id"], load_of_second["generated_tokens"]) == ("second", 6)
        lines = client.get("/metrics").text.splitlines()
        assert 'compress_generation_tokens_total{model="second"} 6.0' in lines
        assert 'compress_request_success_total{finished_reason="length",model="first"} 1.0' in lines
        assert 'compress_model_loaded{model="third"} 0.0' in lines
        assert sum(line.startswith("compress_process_resident_memory_bytes ") for line in lines) == 1
        assert sum(line.startswith("# TYPE compress_kv_cache_bytes ") for line in lines) == 1


def test_every_endpoint_takes_the_name(directory: Path) -> None:
    with server(options_for(directory)) as (client, _):
        turns: Any = [{"role": "user", "content": "hi"}]
        with (
            openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="-", max_retries=0) as own,
            anthropic.Anthropic(base_url=str(client.base_url).rstrip("/"), api_key="-", max_retries=0) as other,
        ):
            assert own.chat.completions.create(model="first", messages=turns, max_tokens=2).model == "first"
            chunks = list(own.chat.completions.create(model="second", messages=turns, max_tokens=2, stream=True))
            assert {chunk.model for chunk in chunks} == {"second"}
            assert own.responses.create(model="third", input="hi", max_output_tokens=2).model == "third"
            assert other.messages.create(model="second", messages=turns, max_tokens=2).model == "second"
            assert other.messages.count_tokens(model="third", messages=turns).input_tokens > 2
            with pytest.raises(anthropic.NotFoundError, match="is not served here"):
                other.messages.create(model="fourth", messages=turns, max_tokens=2)
        tokens = client.post("/tokenize", json={"model": "second", "prompt": "ab"}).json()["tokens"]
        assert client.post("/detokenize", json={"model": "third", "tokens": tokens}).json()["prompt"] == "ab"


def test_what_is_refused_loads_nothing(directory: Path) -> None:
    with server(options_for(directory)) as (client, _):
        unknown = complete(client, "fourth")
        assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "model"
        assert "'first', 'second', 'third'" in unknown.json()["error"]["message"]
        assert client.post("/v1/completions", json=SHORT | {"model": 5}).json()["error"]["param"] == "model"
        headers = {"content-type": "application/json"}
        for body in (b"{", b"[]", b'{"model": "first"', b"\xff", b'{"model":' + b"[" * 100_000):
            assert client.post("/v1/completions", content=body, headers=headers).status_code == 400
        assert client.post("/v1/completions", content=b'{"model": "first"}').status_code == 400
        assert client.get("/v1/load", params={"model": "fourth"}).status_code == 404
        assert client.get("/v1/models/fourth").status_code == 404
        assert not any(loaded(client).values())


def test_a_broken_model_says_why_and_is_tried_again(directory: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    save_reference("mixtral", broken, vocab_size=VOCABULARY)
    add_tokenizer(broken)
    config = (broken / "config.json").read_text()
    (broken / "config.json").write_text("{")
    with server(options_for(tmp_path)) as (client, _):
        answer = complete(client, "broken")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_not_loaded"
        assert "config.json" in answer.json()["error"]["message"] and str(tmp_path) not in answer.text
        (broken / "config.json").write_text(config)
        assert complete(client, "broken").status_code == 200


def test_nothing_waits_for_a_model_that_loads(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, loads = threading.Event(), []

    def slow(options: ServeOptions, *others: Any) -> Service:
        loads.append(options.name)
        assert options.name == "first" or go.wait(30)
        return load(options, *others)

    monkeypatch.setattr(serve, "load", slow)
    with server(options_for(directory)) as (client, _):
        assert complete(client, "first").status_code == 200
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(complete(client, "second"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(loads) == 2)
        started = time.monotonic()
        for _ in range(10):
            assert client.get("/health").status_code == 200
            assert complete(client, "first").status_code == 200
        assert time.monotonic() - started < 20 and not answers
        go.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 4 and loads == ["first", "second"]


@pytest.mark.slow
def test_the_limit_closes_the_least_recently_used(directory: Path) -> None:
    """Each model takes its weights, 1 MiB of cache and the allowance, so that two fit."""
    with server(options_for(directory, memory_limit=3 * MODEL_BYTES)) as (client, state):
        for name in ("first", "second", "first"):
            assert complete(client, name).status_code == 200
        assert state.models is not None
        second = state.models.loaded["second"]
        threads_before = threading.active_count()
        gone = [
            weakref.ref(second),
            weakref.ref(second.engine_loop._engine),
            weakref.ref(second.engine_loop._engine.decoder),
        ]
        del second
        assert complete(client, "third").status_code == 200
        assert loaded(client) == {"first": True, "second": False, "third": True}
        gc.collect()
        assert [each() for each in gone] == [None] * 3, "the weights are freed"
        assert threading.active_count() <= threads_before + 1
        assert complete(client, "second").status_code == 200
        assert loaded(client) == {"first": False, "second": True, "third": True}
    with server(options_for(directory, memory_limit=MODEL_BYTES)) as (client, _):
        refused = complete(client, "first")
        assert refused.status_code == 400 and "the model 'first' needs 0.20GB" in refused.json()["error"]["message"]


def test_a_stream_keeps_its_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ROOM_SECONDS", 0.2)
    step = Scheduler.step

    def slow(scheduler: Scheduler) -> None:
        time.sleep(0.005)
        step(scheduler)

    monkeypatch.setattr(Scheduler, "step", slow)
    with server(options_for(directory, memory_limit=MODEL_BYTES * 3 // 2)) as (client, _):
        long = SHORT | {"model": "first", "max_tokens": 2000, "stream": True}
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()  # the end of this iterator would end the stream
            next(lines)
            busy = complete(client, "second")
            assert busy.status_code == 503 and busy.json()["error"]["code"] == "models_busy" and busy.headers["retry-after"]
            assert loaded(client)["first"]
        wait_for(lambda: complete(client, "second").status_code == 200)  # the client of the stream has left
        assert loaded(client) == {"first": False, "second": True, "third": False}


def test_what_a_model_will_need(directory: Path) -> None:
    options = options_for(directory).of_one("first", str(directory / "first"))
    service = load(options)
    assert abs(needed_bytes(options, 1 << 30) - service.memory_bytes) < 100_000
    service.close()
    unsaid, limit = replace(options, kv_cache_bytes=None), MODEL_BYTES + 40_000_000
    service = load(unsaid, limit)
    assert abs(needed_bytes(unsaid, limit) - service.memory_bytes) < 100_000
    cache = service.engine_loop.load().kv_cache_bytes
    assert 9_000_000 < cache < 10_000_000, "a quarter of what the limit leaves, less than a full batch"
    service.close()
    assert cache_bytes((10, 0), 68, 4, 1 << 40) == 4 * 10 * 100
    assert cache_bytes((10, 0), 68, 4, 8000) == 2000, "a quarter"
    assert cache_bytes((10, 0), 68, 4, 0) == 1000, "one sequence"


@pytest.mark.slow
def test_the_process_with_several_models(directory: Path) -> None:
    with process(directory / "third", str(directory / "second"), "--kv-cache-memory", "1MB") as (server_process, ready):
        assert ready == {"url": ready["url"], "model": "third", "models": ["third", "second"]}
        with httpx2.Client(base_url=ready["url"], timeout=60) as client:
            assert complete(client, "second").json()["model"] == "second"
            assert loaded(client) == {"third": False, "second": True}
        server_process.terminate()
        assert server_process.wait(20) == 0


def test_options_of_several_models(directory: Path) -> None:
    with pytest.raises(OptionError, match="served-model-name"):
        ServeOptions(models=("a", "b"), served_model_name="c")
    with pytest.raises(OptionError, match="two models have the name first"):
        models_of(ServeOptions(models=(str(directory / "first"), str(directory / "first"))))
    with pytest.raises(CheckpointError, match="no such directory"):
        models_of(ServeOptions(models=("demo", str(directory / "nowhere"))))
