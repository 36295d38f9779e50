"""A server at its limits: bytes on the socket, clients that disconnect, keys, sizes, queues, time, and invalid input."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from scripted_loop import ScriptedLoop
from server_for_tests import scripted_state, served, wait_for

from engine.generation.generate import Engine
from engine.server.connections.connection import MOST_BODY_BYTES
from engine.server.reading.reading_pool import ReadingPool
from engine.server.server import State

TEXT = "answer"
ASKED = {"prompt": "ab", "max_tokens": 6}


@pytest.fixture
def state(tiny_engine: Engine, reading_pool: ReadingPool) -> State:
    return scripted_state(tiny_engine, reading_pool, TEXT)


@pytest.fixture
def loop(state: State) -> ScriptedLoop:
    loop: Any = state.service.engine_loop
    return loop


@pytest.fixture
def url(state: State) -> Iterator[str]:
    with served(state) as address:
        yield address


def post(url: str, body: Any = None, path: str = "/v1/completions", **options: Any) -> httpx2.Response:
    return httpx2.post(url + path, json=ASKED if body is None else body, **options)


def error(response: httpx2.Response) -> dict[str, Any]:
    """Return the error object, which has the same form in all responses."""
    body = response.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    assert response.headers["content-type"] == "application/json" and "\n" not in body["error"]["message"]
    made: dict[str, Any] = body["error"]
    return made


def events(response: httpx2.Response) -> list[str]:
    """Return the data of each event, and check that the stream has nothing else."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, rest = response.text.split("\n\n")
    assert rest == "" and all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part.removeprefix("data: ") for part in parts]


def sent(url: str, body: dict[str, Any]) -> socket.socket:
    """Return a connection with a request on it, whose answer nobody has read."""
    address = urlsplit(url)
    made = socket.create_connection((str(address.hostname), int(address.port or 0)))
    data = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "host: a", "content-type: application/json", f"content-length: {len(data)}"]
    made.sendall("\r\n".join([*head, "", ""]).encode() + data)
    return made


# Streams


def test_a_stream_is_events_that_end_in_done(url: str) -> None:
    *chunks, done = events(post(url, ASKED | {"stream": True}))
    assert done == "[DONE]"
    read = [json.loads(chunk) for chunk in chunks]
    assert [chunk["choices"][0]["text"] for chunk in read] == list(TEXT)
    assert {chunk["id"] for chunk in read} == {read[0]["id"]} and all("usage" not in chunk for chunk in read)
    assert [chunk["choices"][0]["finish_reason"] for chunk in read] == [None] * 5 + ["length"]


def test_an_engine_error_is_500_or_ends_the_stream(url: str, loop: ScriptedLoop) -> None:
    loop.failure = "the logits are NaN"
    answer = post(url)
    assert answer.status_code == 500 and error(answer)["message"] == "the logits are NaN"
    *_, event, done = events(post(url, ASKED | {"stream": True}))
    assert json.loads(event)["error"]["code"] == "engine_error" and done == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_the_engine_hears_that_a_client_left(url: str, loop: ScriptedLoop, stream: bool) -> None:
    loop.seconds = 60.0 if not stream else 0.05
    loop.script = loop.script * 20
    connection = sent(url, {"prompt": "ab", "max_tokens": 120, "stream": stream})
    with connection:
        wait_for(lambda: len(loop.going) == 1)
        assert not stream or b"text/event-stream" in connection.recv(10_000)
    wait_for(lambda: not loop.going)
    assert loop.cancelled == [0]


def test_what_has_ended_is_not_cancelled(url: str, loop: ScriptedLoop) -> None:
    post(url)
    post(url, ASKED | {"stream": True})
    assert len(loop.requests) == 2 and loop.cancelled == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_given_up_when_its_time_is_over(url: str, loop: ScriptedLoop, state: State, stream: bool) -> None:
    loop.seconds, state.request_timeout = 60.0, 0.3
    for _ in range(20):  # a busy machine may need all the time for reading the body
        answer = post(url, ASKED | {"stream": stream})
        if loop.requests:
            break
    if stream:
        *_, event, done = events(answer)
        assert json.loads(event)["error"]["code"] == "timeout" and done == "[DONE]"
    else:
        assert answer.status_code == 504 and "longer than 0.3 seconds" in error(answer)["message"]
    wait_for(lambda: loop.cancelled == [0])


# Keys, sizes, queues, states


def test_a_key_is_asked_for_everywhere_but_at_the_health_endpoint(state: State) -> None:
    state.api_keys = ("sesame",)
    with served(state) as url:
        assert httpx2.get(f"{url}/health").status_code == 200 and httpx2.get(f"{url}/").status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/load", "/docs", "/openapi.json", "/nowhere"):
            answer = httpx2.get(url + path)
            assert answer.status_code == 401 and error(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer sesam", "Bearer sesame2", "sesame", "Basic sesame", "Bearer", b"Bearer \xff\xe4"):
            assert post(url, headers={"authorization": wrong}).status_code == 401
        assert post(url, headers={"authorization": "Bearer sesame"}).status_code == 200
        assert httpx2.get(f"{url}/v1/load", headers={"authorization": "bearer sesame"}).status_code == 200


def test_of_several_keys_each_has_what_it_sent_to_itself(state: State, loop: ScriptedLoop) -> None:
    state.api_keys = ("open", "sesame")
    with served(state) as url:
        for key in ("open", "sesame", "open"):
            assert post(url, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert post(url, headers={"authorization": "Bearer opensesame"}).status_code == 401
    first, second, third = (request.namespace for request in loop.requests)
    assert first == third != second and "open" not in first and first and second


def test_with_one_key_or_none_all_share(state: State, loop: ScriptedLoop) -> None:
    for keys in ((), ("sesame",)):
        state.api_keys = keys
        with served(state) as url:
            for _ in range(2):
                assert post(url, headers={"authorization": "Bearer sesame"}).status_code == 200
    first, second, third, fourth = (request.namespace for request in loop.requests)
    assert first == second == "" and third == fourth, "what a key has sent before another server may be on disk"


def test_a_namespace_belongs_to_a_key_and_a_secret_and_not_to_its_place(state: State, loop: ScriptedLoop) -> None:
    for secret, keys in ((b"one", ("open", "sesame")), (b"one", ("other", "sesame")), (b"two", ("open", "sesame"))):
        state.api_keys, state.secret = keys, secret
        with served(state) as url:
            for key in keys:
                assert post(url, headers={"authorization": f"Bearer {key}"}).status_code == 200
    names = [request.namespace for request in loop.requests]
    assert names[1] == names[3] and len(set(names)) == 5 and not any("sesame" in name for name in names)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(url: str, loop: ScriptedLoop, chunked: bool) -> None:
    def pieces(size: int) -> Iterator[bytes]:
        body = json.dumps(ASKED).encode()
        yield body + b" " * 100
        for _ in range(size // 100_000):
            yield b" " * 100_000

    for size, status in ((MOST_BODY_BYTES - 100_000, 200), (MOST_BODY_BYTES, 413)):
        content: Any = pieces(size) if chunked else b"".join(pieces(size))
        answer = httpx2.post(f"{url}/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
    assert error(answer)["code"] == "request_too_large" and len(loop.requests) == 1


def test_a_full_queue_is_429_and_says_when_to_come_back(url: str, loop: ScriptedLoop) -> None:
    loop.max_queue, loop.seconds = 2, 60.0
    with sent(url, ASKED):
        wait_for(lambda: len(loop.going) == 1)
        answer = post(url, ASKED | {"n": 2})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert error(answer)["code"] == "queue_full" and error(answer)["type"] == "rate_limit_error"
        assert len(loop.going) == 1, "of a request that does not fit whole, nothing stays"
        assert post(url, ASKED | {"n": 2, "stream": True}).status_code == 429


@pytest.mark.parametrize(("phase", "open_paths"), [("loading", ()), ("draining", ("/metrics",))])
def test_before_and_after_all_is_503(url: str, state: State, loop: ScriptedLoop, phase: Any, open_paths: Any) -> None:
    state.phase = phase
    for path in ("/health", "/", "/v1/models", "/metrics", "/docs", "/nowhere"):
        answer = httpx2.get(url + path)
        assert answer.status_code == (200 if path in open_paths else 503)
        if answer.status_code == 503:
            assert error(answer)["code"] == phase and int(answer.headers["retry-after"]) >= 1
    assert post(url).status_code == 503 and not loop.requests


def test_one_that_slips_through_while_draining_is_503(url: str, state: State, loop: ScriptedLoop) -> None:
    loop.draining = True
    assert post(url).status_code == 429
    state.phase = "draining"
    assert post(url).status_code == 503


# Invalid input


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"null", None),
        (b"[]", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", None),
        (b"{}", "prompt"),
        (b'{"prompt": {}}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [[]]}', "prompt"),
        (b'{"prompt": [1, "a"]}', "prompt"),
        (b'{"prompt": [-1]}', "prompt"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "a", "max_tokens": "3"}', "max_tokens"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "stream": "yes"}', "stream"),
        (b'{"prompt": "a", "logprobs": true}', "logprobs"),
        (b'{"prompt": "a", "seed": 9223372036854775808}', "seed"),
    ],
)
def test_a_body_that_is_none(url: str, loop: ScriptedLoop, body: bytes, param: str | None) -> None:
    answer = httpx2.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and error(answer)["param"] == param
    assert not loop.requests


def test_json_has_to_say_so(url: str) -> None:
    """A page of another site can send text anywhere, but JSON only where it is allowed to."""
    answer = httpx2.post(f"{url}/v1/completions", content=json.dumps(ASKED), headers={"content-type": "text/plain"})
    assert answer.status_code == 400 and "content-type" in error(answer)["message"]


def test_unknown_paths_and_methods(url: str) -> None:
    assert httpx2.get(f"{url}/nowhere").status_code == 404 and "/nowhere" in error(httpx2.get(f"{url}/nowhere"))["message"]
    answer = httpx2.get(f"{url}/v1/completions")
    assert answer.status_code == 405 and "POST" in answer.headers["allow"] and error(answer)


def test_a_few_hundred_damaged_bodies(url: str, loop: ScriptedLoop) -> None:
    """Bytes are changed, cut or doubled. The server gives an answer or one of our errors, and never fails."""
    chosen = random.Random(0)
    whole = {
        "prompt": "größer",
        "max_tokens": 2,
        "stop": ["x"],
        "logprobs": 1,
        "echo": True,
        "seed": 1,
        "n": 2,
        "top_p": 0.5,
    }
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    statuses = set()
    with httpx2.Client() as client:
        for number in range(300):
            path, body = (("/v1/completions", whole), ("/v1/chat/completions", chat))[number % 2]
            data = bytearray(json.dumps(body, ensure_ascii=False).encode())
            for _ in range(chosen.randint(1, 3)):
                start = chosen.randrange(len(data))
                part = data[start : start + chosen.randint(1, 8)]
                instead = (b"", bytes(part * 2), chosen.randbytes(1), b"0", b'"', b"-", b"[", b"e9")
                data[start : start + len(part)] = chosen.choice(instead)
            answer = client.post(url + path, content=bytes(data), headers={"content-type": "application/json"})
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400), (bytes(data), answer.text)
            if answer.status_code == 400:
                error(answer)
    assert statuses == {200, 400} and not loop.going


def test_a_failure_of_ours_is_500_without_details(url: str, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*asked: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(state.service.reading, "read", broken)
    answer = post(url)
    assert answer.status_code == 500 and "secret" not in answer.text and error(answer)["type"] == "server_error"


@pytest.mark.slow
def test_what_the_schema_promises_holds(url: str) -> None:
    """This is a short run of benchmarks/fuzz_server.py."""
    import sys

    try:
        from fuzz_server import fuzz
    finally:
        sys.path.pop(0)
    figures = fuzz(url, examples=4)
    assert figures["failures"] == [] and figures["cases"] >= 40
