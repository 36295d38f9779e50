"""`compress serve` as a process: its first line, loading, signals, and refusals before any work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from click.testing import CliRunner
from conftest import save_reference
from server_for_tests import ROOT, process, wait_for
from tokenizers_for_tests import VOCABULARY, add_tokenizer

import cli
from compress.commands.click_options import ByteSize
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.server.options import ServeOptions
from engine.server.serve import bind, default_kv_cache_bytes

LONG = {"prompt": "ab", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_reference("mixtral", path, vocab_size=VOCABULARY, max_position_embeddings=4096)
    add_tokenizer(path)
    return path


@pytest.mark.slow
def test_sigterm_lets_what_runs_end_and_takes_no_more(directory: Path) -> None:
    answers: list[httpx2.Response] = []

    def ask(url: str, body: dict[str, Any]) -> None:
        answers.append(httpx2.post(f"{url}/v1/completions", json=body, timeout=60))

    with process(directory) as (server, ready):
        url = ready["url"]
        assert ready == {"url": url, "model": "tiny"} and httpx2.get(f"{url}/health").status_code == 200
        bodies = [LONG | {"max_tokens": 700, "stream": stream} for stream in (True, False)]
        threads = [threading.Thread(target=ask, args=(url, body)) for body in bodies]
        for thread in threads:
            thread.start()
        wait_for(lambda: httpx2.get(f"{url}/v1/load").json()["running"] == 2)
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx2.get(f"{url}/health").status_code == 503)
        assert httpx2.post(f"{url}/v1/completions", json=LONG).status_code == 503
        for thread in threads:
            thread.join()
        assert server.wait(20) == 0
        assert server.stdout is not None and server.stdout.read() == "", "one line on stdout"
    assert [answer.status_code for answer in answers] == [200, 200]
    (whole,) = [answer.json() for answer in answers if answer.headers["content-type"] == "application/json"]
    (stream,) = [answer.text for answer in answers if answer.headers["content-type"] != "application/json"]
    assert whole["usage"]["completion_tokens"] == 700
    assert stream.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in stream


@pytest.mark.slow
def test_killed_while_it_answers_it_starts_again_on_the_same_port(directory: Path) -> None:
    short = {"prompt": "ab", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    with process(directory) as (server, ready):
        url = ready["url"]
        before = httpx2.post(f"{url}/v1/completions", json=short).json()["choices"][0]["text"]
        with (
            suppress(httpx2.HTTPError),
            httpx2.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as answer,
        ):
            next(answer.iter_lines())
            server.send_signal(signal.SIGKILL)
            server.wait(20)
    with process(directory, "--port", url.rpartition(":")[2]) as (_, again):
        assert again["url"] == url
        assert httpx2.post(f"{url}/v1/completions", json=short).json()["choices"][0]["text"] == before


SIGINT = pytest.param((signal.SIGINT,), marks=pytest.mark.slow)


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), SIGINT])
def test_a_second_signal_or_sigint_ends_at_once(directory: Path, signals: tuple[signal.Signals, ...]) -> None:
    received: list[str] = []
    with process(directory) as (server, ready):
        asked = httpx2.stream("POST", f"{ready['url']}/v1/completions", json=LONG | {"stream": True}, timeout=60)
        with suppress(httpx2.HTTPError), asked as answer:  # the client gets an error, or the connection is closed
            for piece in answer.iter_text():
                if not received:
                    for number in signals:
                        server.send_signal(number)
                        time.sleep(0.1)
                received.append(piece)
        assert server.wait(20) == 130
    assert received and '"finish_reason":"length"' not in "".join(received)


@pytest.mark.slow
@pytest.mark.parametrize("hanging", ["engine", pytest.param("loop", marks=pytest.mark.slow)])
def test_a_second_sigterm_ends_it_whatever_hangs(directory: Path, hanging: str) -> None:
    program = (str(ROOT / "tests" / "support" / "hanging_server.py"), hanging)
    with process(directory, program=program) as (server, ready):
        address = urlsplit(ready["url"])
        with socket.create_connection((str(address.hostname), int(address.port or 0))) as asked:
            body = b'{"prompt": "ab", "max_tokens": 4}'
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            asked.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            assert server.stderr is not None and any(line == "hanging\n" for line in server.stderr)
            server.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(1)
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 130


def test_while_the_model_loads_all_is_503(directory: Path) -> None:
    """On a busy machine the server may have loaded before the test is asked to run again, so it has three attempts."""
    assert any(statuses_while_loading(directory) == {200, 503} for _ in range(3))


def statuses_while_loading(directory: Path) -> set[int]:
    """Return the statuses of /health from the start until the model is loaded.

    A free port is found first, because the server's first line comes only after loading.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with process(directory, "--port", str(port), wait=False) as (server, _):
        url, statuses, short = f"http://127.0.0.1:{port}", set[int](), LONG | {"max_tokens": 1}

        def answered() -> bool:
            try:
                answer = httpx2.get(f"{url}/health", timeout=60)
            except httpx2.ConnectError:
                return False
            statuses.add(answer.status_code)
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "loading"
                assert httpx2.post(f"{url}/v1/completions", json=short, timeout=60).status_code in (200, 503)
            return answer.status_code == 200

        wait_for(answered, seconds=60)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    return statuses


@pytest.mark.slow
def test_sigterm_while_the_model_loads(directory: Path) -> None:
    with process(directory, wait=False) as (server, _):
        assert server.stderr is not None
        time.sleep(0.5)
        wait_for(lambda: _listens(server.pid))
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) in (0, -signal.SIGTERM), "at once, whether or not the handler was there"


def _listens(process_id: int) -> bool:
    import psutil

    return any(each.status == psutil.CONN_LISTEN for each in psutil.Process(process_id).net_connections())


def test_a_model_that_cannot_be_loaded_is_one_line_and_1(tmp_path: Path) -> None:
    with process(tmp_path, wait=False) as (server, _):
        assert server.wait(60) == 1 and server.stderr is not None
        assert server.stderr.read().startswith("Error: ")


def test_the_key_comes_from_the_environment(directory: Path) -> None:
    with process(directory, "--served-model-name", "mine", COMPRESS_API_KEY="sesame") as (_, ready):
        assert ready["model"] == "mine"
        assert httpx2.get(f"{ready['url']}/v1/models").status_code == 401
        answer = httpx2.get(f"{ready['url']}/v1/models", headers={"authorization": "Bearer sesame"})
        assert answer.json()["data"][0]["id"] == "mine"


@pytest.mark.slow
def test_several_keys_one_a_line(directory: Path) -> None:
    with process(directory, COMPRESS_API_KEY="open,\nsesame\n") as (_, ready):
        for key, status in (("open,", 200), ("sesame", 200), ("open", 401), ("wrong", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx2.get(f"{ready['url']}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("value", ["", "\n", "a\n\nb"])
def test_an_empty_variable_is_no_key(directory: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("COMPRESS_API_KEY", value)
    monkeypatch.setattr("engine.server.serve.bind", lambda *_: pytest.fail("it is refused before any work"))
    result = CliRunner().invoke(cli.main, ["serve", str(directory)])
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "COMPRESS_API_KEY is set and has no key" in result.output


def test_what_is_refused_before_any_work(directory: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli.main, ["serve", str(directory), "--port", str(port)])
        assert result.exit_code == 1 and f"127.0.0.1:{port} cannot be listened on" in result.output
    for options, said in (
        (["--host", "no such host", "--allow-anonymous"], "cannot be listened on"),
        (["--api-key", "größer"], "printable ASCII"),
        (["--api-key", ""], "printable ASCII"),
        (["--api-key", "good", "--api-key", ""], "printable ASCII"),
        (["--host", "0.0.0.0"], "--allow-anonymous"),
        (["--allowed-host", ""], "the allowed host '' is neither"),
        (["--served-model-name", " "], "is empty"),
        (["--kv-cache-memory", "2 of them"], "is not a size"),
        (["--port", "70000"], "70000"),
    ):
        result = CliRunner().invoke(cli.main, ["serve", str(directory), *options])
        assert result.exit_code in (1, 2) and said in result.output, result.output


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8), ("7k", 7000), ("123", 123)]
)
def test_sizes(text: str, size: int) -> None:
    assert ByteSize().convert(text, None, None) == size


def test_who_else_may_come() -> None:
    assert ServeOptions(host="0.0.0.0", allow_anonymous=True).is_exposed
    assert not ServeOptions(host="0.0.0.0", api_keys=("a",)).is_exposed
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert not ServeOptions(host=host).is_exposed
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(OptionError, match="--allow-anonymous"):
            ServeOptions(host=host)


def test_the_cache_holds_a_full_batch_or_what_memory_allows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.open(directory, device="cpu")
    sequence = 2 * 3 * 2 * 8 * 4 * (4096 + 32)  # keys and values, layers, heads, their width, bytes, positions
    assert default_kv_cache_bytes(engine, ServeOptions(max_batch_size=3)) == 3 * sequence
    assert default_kv_cache_bytes(engine, ServeOptions(max_model_length=224)) == 16 * sequence // 4128 * 256
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 10 * sequence}))
    assert default_kv_cache_bytes(engine, ServeOptions()) == 10 * sequence // 4
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 0}))
    assert default_kv_cache_bytes(engine, ServeOptions()) == sequence
    assert default_kv_cache_bytes(engine, ServeOptions(max_model_length=1 << 40)) == 0  # no memory is taken for this


def test_without_the_extra_it_says_so_and_the_rest_works() -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; import engine.generation.generate, cli\n"
        "assert not {'fastapi', 'starlette', 'prometheus_client'} & set(sys.modules)\n"
        "cli.main(['serve'])"
    )
    paths = {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | paths, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("Error: ") and "pip install 'moe-compress[serve]'" in result.stderr


def test_an_api_key_is_never_shown() -> None:
    with pytest.raises(OptionError) as caught:
        ServeOptions(api_keys=("geheimnis\n",))
    assert "geheimnis" not in str(caught.value)
