"""A server of a mixture that is larger than its limit of memory, under load: answers, memory, health, and disk errors.

    python benchmarks/serving_limited.py [--requests 5000] [--clients 8] [--tokens 24] [--faults-every 9973]

The model has random weights (6 layers of 32 experts), and about half of its experts fit into the limit. Every so many reads
of the disk one takes a second, or fails, in turn; a failed read ends the requests that are running then with an error. All
other answers must be the texts that the prompts get alone. A further client asks for the server's health all the time.
The script writes results/serving_limited.json, and exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import psutil
from memory_limit import resident_peak
from random_model import shape, write_random_weights, write_tokenizer
from results import markdown, save
from serving_process import counted, server

SHAPE = {"hidden": 512, "layers": 6, "experts": 32, "top_k": 4, "width": 1024}
VOCABULARY = 4096
LIMIT = 900_000_000
OPTIONS = ("--memory-limit", str(LIMIT), "--kv-cache-memory", "16MB", "--max-model-len", "256", "--threads", "1")
PROMPTS = tuple(f"{start}{name}" for start in ("def read_", "class ", "import ") for name in ("path", "Point", "os", "item"))
INJECTED, SLOW_SECONDS = "injected disk error", 1.0
MOST_GROWTH = 0.02
MOST_HEALTH_SECONDS = 1.0
"""Maximum time of a request for the server's health, below that of a slow read with all that waits for it."""
PARTS = 4


def main() -> None:
    if sys.argv[1:2] == ["--faulty-disk"]:
        serve_with_faults(int(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--faults-every", type=int, default=9973, help="reads of the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        stored = write_random_weights(directory, shape(**SHAPE) | {"vocab_size": VOCABULARY})
        write_tokenizer(directory, VOCABULARY)
        program = (__file__, "--faulty-disk", str(options.faults_every))
        with server(*OPTIONS, model=str(directory), program=program) as (url, process):
            found = asyncio.run(load(url, process, options))
            counts = counted(url)
    names = ("experts_used_total", "experts_found_total", "expert_read_bytes_total")
    figures = vars(options) | found | {name: counts[name] for name in names}
    figures |= {"limit": LIMIT, "model_bytes": stored}
    figures["problems"] = problems(figures)
    save("serving_limited", figures)
    if figures["problems"]:
        sys.exit("\n".join(figures["problems"]))


def serve_with_faults(every: int, arguments: list[str]) -> None:
    """Run the command line with a disk of which every so many reads is slow, or fails, in turn."""
    from cli import main as run
    from engine.errors import CheckpointError
    from engine.expert_cache.file_memory import FileMemory
    from engine.files.mapped_file import Extent

    read, calls = FileMemory.read, count(1)

    def faulty(self: FileMemory, extent: Extent) -> None:
        times, rest = divmod(next(calls), every)
        if not rest:
            if times % 2 == 0:
                raise CheckpointError(INJECTED)
            time.sleep(SLOW_SECONDS)
        read(self, extent)

    FileMemory.read = faulty  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    run()


async def load(url: str, process: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    """Send all requests; return the outcomes, the memory after each quarter, and the slowest answer about health."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    outcomes: Counter[str] = Counter()
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        alone = {prompt: await alone_text(client, prompt, options.tokens) for prompt in PROMPTS}
        health: list[float] = []
        watcher = asyncio.create_task(watch(client, health))
        memory, started = [], time.perf_counter()
        for part in range(PARTS):
            numbers = iter(range(part * options.requests // PARTS, (part + 1) * options.requests // PARTS))
            clients = [send(client, numbers, alone, options.tokens, outcomes) for _ in range(options.clients)]
            await asyncio.gather(*clients)
            memory.append(process.memory_info().rss)
        seconds = time.perf_counter() - started
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
    return {
        "outcomes": dict(outcomes),
        "memory": memory,
        "peak": resident_peak(process.pid),
        "health_seconds": max(health),
        "health_asked": len(health),
        "seconds": seconds,
    }


async def alone_text(client: httpx2.AsyncClient, prompt: str, tokens: int) -> str:
    """Return what a prompt gets alone, asking again after a read that failed."""
    while True:
        status, text = await ask(client, prompt, tokens, streams=False)
        if status == 200:
            return text


async def send(client: httpx2.AsyncClient, numbers: Any, alone: dict[str, str], tokens: int, outcomes: Counter[str]) -> None:
    """Send one request after the other, as one of several clients."""
    for number in numbers:
        chosen = random.Random(number)
        prompt = chosen.choice(PROMPTS)
        try:
            status, text = await ask(client, prompt, tokens, streams=chosen.random() < 0.5)
        except Exception as error:
            outcomes["lost"] += 1
            print(f"request {number}: {error!r}", file=sys.stderr)
            continue
        is_injected = status != 200 and INJECTED in text
        outcomes["right" if (status, text) == (200, alone[prompt]) else "disk error" if is_injected else "wrong"] += 1


async def ask(client: httpx2.AsyncClient, prompt: str, tokens: int, *, streams: bool) -> tuple[int, str]:
    """Return (status, text or error) of one request; 500 for a stream that ends in an error."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": streams}
    if not streams:
        answer = await client.post("/v1/completions", json=body)
        return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return answer.status_code, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return 200, text
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return 500, json.dumps(event)
                text += event["choices"][0]["text"]
    return 200, "the stream had no end"


async def watch(client: httpx2.AsyncClient, seconds: list[float]) -> None:
    """Ask for the server's health again and again."""
    while True:
        started = time.perf_counter()
        (await client.get("/health")).raise_for_status()
        seconds.append(time.perf_counter() - started)
        await asyncio.sleep(0.05)


def problems(figures: dict[str, Any]) -> list[str]:
    """Return what is not as it must be."""
    outcomes, first, last = Counter(figures["outcomes"]), figures["memory"][0], figures["memory"][-1]
    found = [f"{outcomes[kind]} requests were {kind}" for kind in ("lost", "wrong") if outcomes[kind]]
    if outcomes.total() != figures["requests"]:
        found.append(f"{outcomes.total()} outcomes of {figures['requests']} requests")
    if figures["peak"] > figures["limit"]:
        found.append(f"the peak of {figures['peak'] / 1e6:.0f} MB is above the limit of {figures['limit'] / 1e6:.0f} MB")
    if last > (1 + MOST_GROWTH) * first:
        found.append(f"memory grew from {first / 1e6:.0f} to {last / 1e6:.0f} MB")
    if figures["health_seconds"] > MOST_HEALTH_SECONDS:
        found.append(f"an answer about health took {figures['health_seconds']:.1f} s")
    return found


def table(figures: dict[str, Any]) -> str:
    """Return one row for each figure."""
    outcomes = Counter(figures["outcomes"])
    memory = ", ".join(f"{each / 1e6:.0f}" for each in figures["memory"])
    found = figures["experts_found_total"] / figures["experts_used_total"]
    rows = [
        ["weights, limit of memory", f"{figures['model_bytes'] / 1e6:.0f} MB, {figures['limit'] / 1e6:.0f} MB"],
        ["requests, clients", f"{figures['requests']:,}, {figures['clients']}"],
        ["answers that are the text alone", f"{outcomes['right']:,}"],
        ["ended by an injected disk error", f"{outcomes['disk error']:,}"],
        ["lost, other texts", f"{outcomes['lost']}, {outcomes['wrong']}"],
        ["resident after each quarter, peak", f"{memory} MB, {figures['peak'] / 1e6:.0f} MB"],
        [f"slowest of {figures['health_asked']:,} answers of `/health`", f"{1e3 * figures['health_seconds']:.0f} ms"],
        ["experts found in memory, read", f"{found:.0%}, {figures['expert_read_bytes_total'] / 1e9:.0f} GB"],
    ]
    return markdown(["", ""], rows)


TABLES = {"serving_limited": table}

if __name__ == "__main__":
    main()
