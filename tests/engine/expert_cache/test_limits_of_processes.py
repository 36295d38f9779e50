"""`--memory-limit` of `generate`, `bench` and `serve` as seen from outside the process."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from memory_limit import resident_peak, run_watched
from random_model import shape, write_random_weights, write_tokenizer
from server_for_tests import process

from engine.errors import OptionError
from engine.server.options import ServeOptions

LIMIT = 900_000_000
TEXT_LIMIT = 800_000_000
"""That of `generate`, whose text uses most of the experts."""
PROMPT = "def add(a, b):\n    return a"


@pytest.fixture(name="model", scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a mixture whose experts do not fit, even without the interpreter beside them."""
    directory = tmp_path_factory.mktemp("limit") / "model"
    config = shape(hidden=1024, layers=4, experts=40, top_k=2, width=1024) | {"vocab_size": 4096}
    assert write_random_weights(directory, config, alike=True) > LIMIT
    write_tokenizer(directory, 4096)
    return directory


def run(*command: str) -> tuple[dict[str, Any], int]:
    done, peak = run_watched([sys.executable, "-m", "cli", *command, "--json"])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout), peak


def fetched(url: str, body: Any = None) -> str:
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, sent, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
def test_generate_stays_below_its_limit_and_writes_the_same(model: Path) -> None:
    command = ["generate", str(model), "-p", PROMPT, "-n", "96", "--temperature", "2"]
    free, free_peak = run(*command)
    limited, peak = run(*command, "--memory-limit", str(TEXT_LIMIT))
    assert peak <= TEXT_LIMIT < free_peak, f"{peak / 1e6:.0f} MB, {free_peak / 1e6:.0f} MB without a limit"
    assert limited["text"] == free["text"] and free["expert_cache"] is None
    figures = limited["expert_cache"]
    assert 0 < figures["expert_hit_rate"] < 1 and len(figures["expert_hit_rate_per_layer"]) == 4
    assert figures["expert_bytes_read_per_token"] > 0 and figures["expert_slots_left_out"] == 0


@pytest.mark.slow
def test_a_miss_threshold_reads_less(model: Path) -> None:
    command = ["generate", str(model), "-p", PROMPT, "-n", "48", "--memory-limit", str(LIMIT)]
    exact, _ = run(*command)
    light, _ = run(*command, "--miss-threshold", "0.9")
    assert light["expert_cache"]["expert_slots_replaced"] > 0 and light["expert_cache"]["miss_cost"] is None
    assert light["expert_cache"]["expert_bytes_read_per_token"] < exact["expert_cache"]["expert_bytes_read_per_token"]


@pytest.mark.slow
def test_bench_stays_below_its_limit(model: Path) -> None:
    figures, peak = run("bench", str(model), "-p", "64", "-n", "16", "-r", "2", "--memory-limit", str(LIMIT))
    assert peak <= LIMIT and {row["test"] for row in figures["rows"]} == {"pp64", "tg16"}
    assert all(0 < row["expert_hit_rate"] < 1 and row["expert_bytes_read_per_token"] > 0 for row in figures["rows"])


@pytest.mark.slow
def test_a_server_within_a_limit_answers_all_and_stays_healthy(model: Path) -> None:
    """Eight clients at once; the answers are those without a limit, the metrics count, and /health never waits."""
    options = ["--memory-limit", str(LIMIT), "--kv-cache-memory", "8MB", "--max-model-len", "256"]
    with process(model, *options, log=None) as (server, started):
        url = started["url"]
        answers: list[str] = []
        slowest = [0.0]
        ended = threading.Event()

        def ask(number: int) -> None:
            body = {"model": "model", "prompt": f"{PROMPT} + {number}", "max_tokens": 16, "temperature": 0}
            answers.append(json.loads(fetched(f"{url}/v1/completions", body))["choices"][0]["text"])

        def watch() -> None:
            while not ended.wait(0.05):
                asked = time.perf_counter()
                fetched(f"{url}/health")
                slowest[0] = max(slowest[0], time.perf_counter() - asked)

        watcher = threading.Thread(target=watch)
        clients = [threading.Thread(target=ask, args=[number]) for number in range(8)]
        for each in (watcher, *clients):
            each.start()
        for each in clients:
            each.join()
        ended.set()
        watcher.join()
        metrics = fetched(f"{url}/metrics")
        peak = resident_peak(server.pid)
    assert len(answers) == 8 and slowest[0] < 5 and peak <= LIMIT
    lines = [line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("compress_expert")]
    counted = {name: float(value) for name, value in lines}
    for layer in range(4):
        used, found, read = (
            counted[f'compress_{name}_total{{layer="{layer}"}}']
            for name in ("experts_used", "experts_found", "expert_read_bytes")
        )
        assert used > found > 0 and read > 0


@pytest.mark.slow
def test_a_file_that_shrinks_ends_requests_and_not_the_server(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    with process(
        copy, "--memory-limit", str(LIMIT), "--kv-cache-memory", "8MB", "--max-model-len", "256", log=None
    ) as found:
        _, started = found
        body = {"model": "model", "prompt": PROMPT, "max_tokens": 64, "temperature": 0}
        fetched(f"{started['url']}/v1/completions", body)
        os.truncate(copy / "model.safetensors", 8192)
        with pytest.raises(urllib.error.HTTPError) as raised:
            fetched(f"{started['url']}/v1/completions", body | {"prompt": "class Other:"})
        assert raised.value.code == 500 and "became shorter while in use" in raised.value.read().decode()
        assert fetched(f"{started['url']}/health")


def test_a_threshold_without_a_limit_of_one_model_is_refused() -> None:
    assert ServeOptions(models=("demo",), memory_limit=1 << 30, miss_threshold=0.1).memory_limit == 1 << 30
    for options in ({"models": ("demo",)}, {"models": ("demo", "other"), "memory_limit": 1 << 30}):
        with pytest.raises(OptionError, match="--miss-threshold is for one model with --memory-limit"):
            ServeOptions(**options, miss_threshold=0.1)
