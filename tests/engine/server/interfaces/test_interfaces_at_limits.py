"""The interfaces at the limits of the server: keys, sizes, queues, time, clients that leave, and failures of the engine."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx2
import openai
import pytest
from scripted_loop import ScriptedLoop
from server_for_tests import scripted_state, served, wait_for

from engine.generation.generate import Engine
from engine.server.connections.connection import MOST_BODY_BYTES
from engine.server.reading.reading_pool import ReadingPool
from engine.server.server import State

TEXT = "answer"
HI = [{"role": "user", "content": "hi"}]
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
ASKED: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hi", "max_output_tokens": 6},
    MESSAGES: {"messages": HI, "max_tokens": 6},
    COUNT: {"messages": HI},
}
BOTH = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


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


def post(url: str, path: str, headers: Any = None, **changed: Any) -> httpx2.Response:
    return httpx2.post(url + path, json=ASKED[path] | changed, headers=headers)


def error(response: httpx2.Response, path: str) -> tuple[str, str]:
    """Return type and message of an error, which has the form of the interface of the path."""
    body = response.json()
    own = body["error"]
    if path.startswith(MESSAGES):
        assert set(body) == {"type", "error"} and body["type"] == "error" and {"type", "message"} <= set(own)
        assert set(own) <= {"type", "message", "details"}
    else:
        assert list(body) == ["error"] and list(own) == ["message", "type", "param", "code"]
    assert response.headers["content-type"] == "application/json" and "\n" not in own["message"]
    return own["type"], own["message"]


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is named by its type."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@BOTH
def test_a_key_is_asked_for(state: State, path: str) -> None:
    state.api_keys = ("sesame",)
    with served(state) as url:
        for headers in (None, {"x-api-key": "sesam"}, {"x-api-key": ""}, {"authorization": "Bearer sesam"}):
            answer = post(url, path, headers)
            assert answer.status_code == 401 and error(answer, path)[0] == "authentication_error"
        for headers in ({"x-api-key": "sesame", "anthropic-version": "2023-06-01"}, {"authorization": "Bearer sesame"}):
            assert post(url, path, headers).status_code == 200


def test_authorization_decides_where_both_are_sent(state: State, loop: ScriptedLoop) -> None:
    state.api_keys = ("open", "sesame")
    with served(state) as url:
        for key, authorization, status in (
            ("sesame", "Bearer wrong", 401),
            ("wrong", "Bearer sesame", 200),
            ("open", "Bearer sesame", 200),
            ("sesame", "Basic sesame", 401),
        ):
            answer = post(url, MESSAGES, {"x-api-key": key, "authorization": authorization})
            assert answer.status_code == status
        for key in ("open", "sesame"):
            assert post(url, MESSAGES, {"x-api-key": key}).status_code == 200
    namespaces = [request.namespace for request in loop.requests]
    assert namespaces[0] == namespaces[1] == namespaces[3] != namespaces[2]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, COUNT])
def test_sizes_and_types_of_bodies(url: str, loop: ScriptedLoop, path: str) -> None:
    whole = json.dumps(ASKED[path]).encode()
    as_json = {"content-type": "application/json"}
    large = httpx2.post(url + path, content=whole + b" " * MOST_BODY_BYTES, headers=as_json)
    assert large.status_code == 413
    assert error(large, path)[0] == ("invalid_request_error" if path == RESPONSES else "request_too_large")
    for content, headers in ((whole, {"content-type": "text/plain"}), (b"[]", as_json), (b"{", as_json), (b"\xff", as_json)):
        answer = httpx2.post(url + path, content=content, headers=headers)
        assert answer.status_code == 400 and error(answer, path)[0] == "invalid_request_error"
    assert httpx2.get(url + path).status_code == 405
    assert not loop.requests


@BOTH
def test_long_lists_and_deep_values(url: str, loop: ScriptedLoop, path: str) -> None:
    name = "input" if path == RESPONSES else "messages"
    part = {"type": "input_text" if path == RESPONSES else "text", "text": "a"}
    for value in (HI * 10_001, [{"role": "user", "content": [part] * 10_001}]):
        answer = post(url, path, **{name: value})
        assert answer.status_code == 400 and error(answer, path)[1].startswith(f"{name} has 10001 entries")
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    tool = b'{"type": "%s", "name": "f", "%s": %s}'
    tool %= (b"function", b"parameters", deep) if path == RESPONSES else (b"custom", b"input_schema", deep)
    body = json.dumps(ASKED[path]).encode()[:-1] + b', "tools": [' + tool + b"]}"
    answer = httpx2.post(url + path, content=body, headers={"content-type": "application/json"})
    if path == RESPONSES:
        assert answer.status_code == 400 and error(answer, path)[1].startswith("tools is nested more than 100 levels")
    else:
        assert answer.status_code in (200, 400)
    assert answer.status_code == 200 or not loop.requests


@BOTH
def test_a_full_queue_is_429(url: str, loop: ScriptedLoop, path: str) -> None:
    loop.max_queue = 0
    for stream in (False, True):
        answer = post(url, path, stream=stream)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert error(answer, path)[0] == "rate_limit_error"


@pytest.mark.parametrize("phase", ["loading", "draining"])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, COUNT])
def test_before_and_after_all_is_503(url: str, state: State, path: str, phase: Any) -> None:
    state.phase = phase
    answer = post(url, path)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert error(answer, path)[0] == ("server_error" if path == RESPONSES else "overloaded_error")


@BOTH
def test_the_time_is_over(url: str, loop: ScriptedLoop, state: State, path: str) -> None:
    loop.seconds, state.request_timeout = 60.0, 1.5
    answer = post(url, path)
    assert answer.status_code == 504 and "longer than 1.5 seconds" in error(answer, path)[1]
    last = events(post(url, path, stream=True))[-1]
    if path == RESPONSES:
        assert last["type"] == "response.failed" and "longer than" in last["response"]["error"]["message"]
    else:
        assert last["type"] == "error" and last["error"]["type"] == "timeout_error"
    wait_for(lambda: loop.cancelled == [0, 1])


@BOTH
def test_a_failure_of_the_engine(url: str, loop: ScriptedLoop, path: str) -> None:
    loop.failure = "the logits are NaN"
    answer = post(url, path)
    assert answer.status_code == 500 and error(answer, path) == (
        "server_error" if path == RESPONSES else "api_error",
        "the logits are NaN",
    )
    last = events(post(url, path, stream=True))[-1]
    assert last["type"] == ("response.failed" if path == RESPONSES else "error")


def test_clients_hear_of_a_failure_within_a_stream(url: str, loop: ScriptedLoop) -> None:
    loop.failure = "the logits are NaN"
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="the logits are NaN"),
        client.messages.stream(model="tiny", messages=HI, max_tokens=6) as stream,  # type: ignore[arg-type]
    ):
        stream.get_final_message()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as other:
        *_, last = other.responses.create(model="tiny", input="hi", stream=True)
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "the logits are NaN" and last.response.status == "failed"


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_the_engine_hears_that_a_client_left(url: str, loop: ScriptedLoop, path: str, stream: bool) -> None:
    loop.seconds = 0.05 if stream else 60.0
    loop.script = loop.script * 15
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 80, "stream": stream}
    data = json.dumps(ASKED[path] | limit).encode()
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
        head = [f"POST {path} HTTP/1.1", "host: a", "content-type: application/json", f"content-length: {len(data)}"]
        connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
        wait_for(lambda: len(loop.going) == 1)
        assert not stream or b"text/event-stream" in connection.recv(10_000)
    wait_for(lambda: not loop.going)
    assert loop.cancelled == [0]


def test_nothing_is_cancelled_that_has_ended(url: str, loop: ScriptedLoop) -> None:
    for path in (RESPONSES, MESSAGES):
        assert post(url, path).status_code == 200 and events(post(url, path, stream=True))
    assert len(loop.requests) == 4 and loop.cancelled == []


def test_unknown_paths(url: str) -> None:
    for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("GET", "resp_1/input_items"), ("POST", "resp_1/cancel")):
        answer = httpx2.request(method, f"{url}{RESPONSES}/{path}")
        assert answer.status_code == 404 and "not stored here" in error(answer, RESPONSES)[1]
    for path in (f"{MESSAGES}/batches", f"{MESSAGES}/msg_1"):
        answer = httpx2.get(url + path)
        assert answer.status_code == 404 and error(answer, path) == ("not_found_error", f"there is no {path}; see /docs")
    assert error(httpx2.get(f"{url}/v1/messaging"), "/v1/messaging")[0] == "invalid_request_error"


def test_a_few_hundred_damaged_bodies(url: str, loop: ScriptedLoop) -> None:
    """Bytes are changed, cut or doubled. The server gives an answer or an error of the interface, and never fails."""
    chosen = random.Random(0)
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "größer"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
    ]
    blocks = [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "c", "content": "größer"}]
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}}
    turns = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": blocks}]
    tool = {"name": "f", "input_schema": {"type": "object"}}
    options = {"tools": [function], "tool_choice": "none", "metadata": {"a": "b"}, "top_p": 0.5}
    others = {"tools": [tool], "tool_choice": {"type": "none"}, "system": "a", "thinking": {"type": "adaptive"}}
    bodies = {
        RESPONSES: ASKED[RESPONSES] | {"input": items} | options,
        MESSAGES: ASKED[MESSAGES] | {"messages": turns} | others,
    }
    statuses = set()
    with httpx2.Client() as client:
        for number in range(300):
            path = (RESPONSES, MESSAGES)[number % 2]
            data = bytearray(json.dumps(bodies[path], ensure_ascii=False).encode())
            for _ in range(chosen.randint(1, 3)):
                start = chosen.randrange(len(data))
                part = data[start : start + chosen.randint(1, 8)]
                instead = (b"", bytes(part * 2), chosen.randbytes(1), b"0", b'"', b"-", b"[", b"e9")
                data[start : start + len(part)] = chosen.choice(instead)
            answer = client.post(url + path, content=bytes(data), headers={"content-type": "application/json"})
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400), (bytes(data), answer.text)
            if answer.status_code == 400:
                error(answer, path)
    assert statuses == {200, 400} and not loop.going
