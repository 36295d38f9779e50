"""Clients and their sockets: slow, incomplete, endless and very many, while another client is served.

Each attack is a file of tests/attacks/connections.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
from attacks_for_tests import attack_files
from server_for_tests import ROOT, process, served, wait_for

from engine.server.connections import connection, connection_limits
from engine.server.connections.access import allowed_hosts
from engine.server.connections.connection_limits import Connections, most_connections, network
from engine.server.connections.hosts import plain_host
from engine.server.connections.log_budget import MOST_CHARACTERS, LogBudget
from engine.server.server import State

ATTACKS = attack_files("connections")
OPEN_FILES = 256
KEY = {"authorization": "Bearer sesame"}
ASKED = {"prompt": "import os\n", "max_tokens": 2}
MOST_LOG_BYTES = 100_000
READING_DESCRIPTORS = 2
"""File descriptors of the process that reads large bodies, which starts with the first such body."""
REQUESTS = 6
"""Number of requests of the well-behaved client during an attack."""


# Attacks on a server in a process of its own with a low limit on open files


@pytest.fixture(scope="module", params=["with a key", pytest.param("without", marks=pytest.mark.slow)])
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    with ExitStack() as stack:
        environment = {"COMPRESS_API_KEY": "sesame"} if request.param == "with a key" else {}
        log = stack.enter_context((tmp_path_factory.mktemp("log") / "log").open("w+"))
        server, ready = stack.enter_context(process("demo", open_files=OPEN_FILES, log=log, **environment))
        httpx2.post(f"{ready['url']}/v1/completions", json=ASKED, headers=KEY, timeout=60)  # kernels are compiled
        yield server, ready["url"]
        server.terminate()
        assert server.wait(60) == 0
        log.seek(0)
        text = log.read()
        assert len(text) < MOST_LOG_BYTES and "Traceback" not in text, text[:2000]


@pytest.mark.parametrize("path", ATTACKS, ids=lambda path: path.stem)
def test_under_attack_others_are_answered(attacked: tuple[subprocess.Popen[str], str], path: Path) -> None:
    server, url = attacked
    process_of_server, address = psutil.Process(server.pid), urlsplit(url)
    before = process_of_server.num_fds()
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "attacker.py"),
        str(path),
        str(address.hostname),
        str(address.port),
    ]
    statuses = []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker,
        httpx2.Client(base_url=url, headers=KEY, timeout=60) as client,
    ):
        try:
            assert attacker.stdout is not None and attacker.stdout.readline() == "attacking\n"
            time.sleep(0.4)
            for head in ({}, {"connection": "close"}) * REQUESTS:
                statuses.append(client.post("/v1/completions", json=ASKED, headers=head).status_code)
                time.sleep(0.05)
            assert attacker.poll() is None
        finally:
            attacker.kill()
    assert statuses == [200] * (2 * REQUESTS)
    wait_for(lambda: process_of_server.num_fds() <= before + READING_DESCRIPTORS)
    assert httpx2.post(f"{url}/v1/completions", json=ASKED, headers=KEY, timeout=60).status_code == 200


# Limits, with short times


def connected(url: str, data: bytes = b"") -> socket.socket:
    address = urlsplit(url)
    made = socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=30)
    made.sendall(data)
    return made


def answer(made: socket.socket) -> tuple[int, dict[str, Any]]:
    """Return status and error of the bytes that arrive until the server closes the connection."""
    text = b""
    with suppress(ConnectionResetError):
        while part := made.recv(65536):
            text += part
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def is_closed(made: socket.socket) -> bool:
    made.settimeout(30)
    try:
        return made.recv(1) == b""
    except ConnectionResetError:
        return True


def is_refused(made: socket.socket, data: bytes) -> bool:
    """Return whether more bytes can no longer be sent."""
    try:
        made.sendall(data)
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: "])
def test_headers_have_a_time(data: bytes) -> None:
    with served(State(), Connections(8, header_seconds=0.2)) as url, connected(url, data) as made:
        status, error = answer(made)
        assert status == 408 and error["code"] == "request_timeout"


def test_headers_that_trickle_after_an_answer_have_a_time_too() -> None:
    with served(State(api_keys=("a",)), Connections(8, header_seconds=0.3)) as url:
        head = b"POST /v1/load HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"
        with connected(url, head) as made:
            assert made.recv(12) == b"HTTP/1.1 401"
            wait_for(lambda: is_refused(made, b"a"))


def test_an_idle_connection_outlives_the_time_of_headers() -> None:
    with served(State(), Connections(8, header_seconds=0.2)) as url, httpx2.Client(base_url=url) as client:
        first = client.get("/health")
        time.sleep(1.5)
        stream = client.get("/health").extensions["network_stream"]
        assert first.extensions["network_stream"].get_extra_info("client_addr") == stream.get_extra_info("client_addr")


def test_a_body_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.2)
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{"
    with served(State(phase="ready")) as url, connected(url, head) as made:
        status, error = answer(made)
        assert status == 408 and error["code"] == "request_timeout" and "0.2 seconds" in error["message"]


def test_large_bodies_have_a_limit_in_all_and_small_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_BODY_BYTES_IN_ALL", 300_000)
    head = b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 400000\r\n\r\n"
    with served(State(phase="ready")) as url:
        with connected(url, head + b" " * 200_000):
            wait_for(lambda: httpx2.post(f"{url}/nowhere", content=b" " * 200_000).status_code == 503)
            assert httpx2.post(f"{url}/nowhere", content=b" " * 60_000).status_code == 404
        wait_for(lambda: httpx2.post(f"{url}/nowhere", content=b" " * 200_000).status_code == 404)


def test_a_client_that_does_not_read_is_dropped() -> None:
    with served(State(phase="ready"), Connections(8, send_seconds=0.5)) as url:
        made = socket.socket()
        with made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            address = urlsplit(url)
            made.connect((str(address.hostname), int(address.port or 0)))
            made.settimeout(30)
            wait_for(lambda: is_refused(made, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 500))


def test_a_new_connection_takes_the_place_of_the_one_that_waited_longest() -> None:
    register = Connections(3, 3)
    with served(State(), register) as url, ExitStack() as stack:
        made = []
        for count in range(1, 4):
            made.append(stack.enter_context(connected(url)))
            wait_for(lambda count=count: len(register._all) == count)
        new = stack.enter_context(connected(url, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"))
        assert new.recv(12) == b"HTTP/1.1 503" and is_closed(made[0]), "the model is being loaded"
        made[1].sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert made[1].recv(12) == b"HTTP/1.1 503"
        stack.enter_context(connected(url))
        assert is_closed(made[2]), "the other one has asked since"


def test_strangers_make_room_before_those_who_were_let_in() -> None:
    register = Connections(2, 2)
    with served(State(api_keys=("sesame",), phase="ready"), register) as url, ExitStack() as stack:
        known = stack.enter_context(connected(url))
        head = b"GET /nowhere HTTP/1.1\r\nhost: a\r\nauthorization: Bearer %s\r\n\r\n"
        known.sendall(head % b"sesame")
        assert known.recv(12) == b"HTTP/1.1 404"
        stranger = stack.enter_context(connected(url, head % b"wrong"))
        assert stranger.recv(12) == b"HTTP/1.1 401"
        wait_for(lambda: len(register._waiting) == 2)
        for _ in range(20):
            stack.enter_context(connected(url))
        known.sendall(head % b"sesame")
        assert b"HTTP/1.1 404" in known.recv(65536) + known.recv(65536)


def test_a_connection_with_pipelined_requests_ends_after_one_answer() -> None:
    request = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    with served(State()) as url, connected(url, request * 3) as made:
        status, error = answer(made)
        assert status == 503 and error["code"] == "loading"


@pytest.mark.parametrize(("most", "of_address"), [(2, 2), (4, 2)])
def test_where_all_are_being_answered_a_new_connection_is_refused(most: int, of_address: int) -> None:
    state = State(phase="ready")
    register = Connections(most, of_address)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        while not state.loaded:
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with served(state, register, app=slow) as url, ExitStack() as stack:
        made = [stack.enter_context(connected(url, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")) for _ in range(2)]
        wait_for(lambda: len(register._all) == 2 and not register._waiting)
        status, error = answer(stack.enter_context(connected(url)))
        assert status == 503 and error["code"] == "too_many_connections"
        state.loaded = True  # type: ignore[assignment]
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in made)
        wait_for(lambda: len(register._waiting) == 2)
        new = stack.enter_context(connected(url, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"))
        assert new.recv(12) == b"HTTP/1.1 200"
    assert not register._all and not register._waiting and not register._per_address and not register._waiting_of


def test_bytes_that_are_no_http_are_400_in_the_form_of_errors() -> None:
    with served(State()) as url:
        for data in (
            b"\x16\x03\x01\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: " + b"a" * 70_000,
        ):
            with connected(url, data) as made:
                status, error = answer(made)
                assert status == 400 and error["type"] == "invalid_request_error"


def test_how_many_follow_from_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((256, 160), (1024, 928), (10, 16), (10**6, 4096), (connection_limits.resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == most
    assert Connections().most_per_address == 2048


def test_whose_connections_are_counted_together() -> None:
    assert network("10.0.0.1") != network("10.0.0.2")
    assert network("2001:db8::1") == network("2001:db8::ffff:1") != network("2001:db8:0:1::1")
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") and network("fe80::1%eth0") == network("fe80::2")
    assert network("") == ""


# Names of the server


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST.:8000", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[0:0::1]", "::1"),
        ("::1", "::1"),
        ("evil.example:80", "evil.example"),
        ("xn--grer-8na0b.example", "xn--grer-8na0b.example"),
        ("[::1", ""),
        ("[localhost]", ""),
        ("localhost]", ""),
        ("a@localhost", ""),
        ("localhost:evil.example", ""),
        ("localhost localhost", ""),
        (":80", ""),
        ("", ""),
    ],
)
def test_the_name_in_a_host_field(field: str, name: str) -> None:
    assert plain_host(field) == name


def test_which_names_a_server_answers_to() -> None:
    assert allowed_hosts("127.0.0.1", ()) == {"localhost", "127.0.0.1", "::1"}
    assert allowed_hosts("127.0.0.9", ("Box.local",)) == {"localhost", "127.0.0.1", "127.0.0.9", "::1", "box.local"}
    assert allowed_hosts("0.0.0.0", ()) is None
    assert allowed_hosts("0.0.0.0", ("models.example", "10.0.0.1")) == {"0.0.0.0", "models.example", "10.0.0.1"}


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]", "[::1", "0.0.0.0", "\xff", ""]
)
def test_another_name_is_refused_before_all_else(host: str) -> None:
    state = State(api_keys=("sesame",), hosts=allowed_hosts("127.0.0.1", ()), phase="ready")
    with served(state) as url:
        for path in ("/health", "/", "/v1/models", "/nowhere"):
            refused = httpx2.get(url + path, headers=KEY | {"host": host.encode("latin-1")})
            error = refused.json()["error"]
            assert refused.status_code == 421 and error["code"] == "wrong_host" and "--allowed-host" in error["message"]
        for own in ("localhost", "127.0.0.1:99", "[::1]:8000"):
            assert httpx2.get(f"{url}/health", headers={"host": own}).status_code == 200


# The log


def test_a_log_grows_by_so_much_a_minute() -> None:
    now, text = [0.0], io.StringIO()
    budget = LogBudget(text, lines_a_minute=10, clock=lambda: now[0])
    logger = logging.Logger("own")
    logger.addHandler(budget)
    for number in range(1000):
        logger.error("message %d", number)
    assert text.getvalue().count("\n") == 11 and "message 9\n" in text.getvalue() and "message 10\n" not in text.getvalue()
    now[0] = 61.0
    logger.error("much: %s", "a" * 100_000)
    assert "990 messages were left out" in text.getvalue()
    assert len(text.getvalue()) < MOST_CHARACTERS + 1000
    for _ in range(20):
        logger.error("more")
    budget.close()
    assert text.getvalue().endswith("13 messages were left out of the log, which takes 10 lines a minute.\n")
