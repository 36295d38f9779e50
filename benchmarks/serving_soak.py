"""Whether a server keeps its promises under load: many kinds of requests at once, then steady load for long.

    python benchmarks/serving_soak.py [--requests 20000] [--concurrency 8] [--threads 1]

First 200 requests at once: streams and whole answers, clients that go away, prompts that are too long, bodies that are no
request. Every well-formed one has to get the text that it gets alone. The same again with a short queue: there some are told
to come back. Then steady load in rounds; after each resident memory, failures, and the server's
counts against the client's. Writes results/serving_soak.json and .md; exit 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import psutil
from results import ROOT, markdown, save

from engine.load_test import LoadOptions, load_test

PROMPTS = (
    "def read(path):\n",
    "import os\n",
    "class Point:\n",
    "for i in range(",
    "    return ",
    "x = [",
    "# A list of",
    "try:\n",
)
NEW_TOKENS = 48
KINDS = ("whole", "stream", "leaves", "too long", "malformed")
MOST_GROWTH = 0.02


@contextmanager
def server(*options: str) -> Iterator[tuple[str, psutil.Process]]:
    """`compress serve demo` in a process of its own; its URL. It has to end well when told to."""
    command = [sys.executable, "-m", "cli", "serve", "demo", "--port", "0", "--json", *options]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        yield json.loads(started.stdout.readline())["url"], psutil.Process(started.pid)
        started.terminate()
        code = started.wait(60)
        assert code == 0, f"the server ended with {code}"
    finally:
        started.kill()


async def ask(client: httpx2.AsyncClient, kind: str, prompt: str, leave_after: int) -> tuple[int, str | None]:
    """(status, text) of one request; no text where none is to be looked at."""
    body: Any = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": kind in ("stream", "leaves")}
    if kind == "too long":
        body["max_tokens"] = 10**6
    if kind == "malformed":
        answer = await client.post(
            "/v1/completions", content=b'{"prompt": [1, "x", ', headers={"content-type": "application/json"}
        )
        return answer.status_code, None
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
    text, pieces = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return answer.status_code, None
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return 200, text
            if line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                pieces += 1
            if kind == "leaves" and pieces >= leave_after:
                return 200, None
    return 200, "the stream had no end"


async def mixed(url: str, count: int) -> dict[str, Any]:
    """So many at once; counts of statuses by kind, and how many texts were not what the prompt gets alone."""
    chosen = random.Random(0)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        alone = {prompt: (await ask(client, "whole", prompt, 0))[1] for prompt in PROMPTS}
        asked = [(KINDS[place % len(KINDS)], chosen.choice(PROMPTS), chosen.randint(1, 20)) for place in range(count)]
        answers = await asyncio.gather(*(ask(client, *each) for each in asked))
        for _ in range(600):
            load = (await client.get("/v1/load")).json()
            if not load["running"] and not load["waiting"]:
                break
            await asyncio.sleep(0.1)
    statuses = {
        kind: Counter(status for (own, *_), (status, _) in zip(asked, answers, strict=True) if own == kind) for kind in KINDS
    }
    wrong = sum(text is not None and text != alone[prompt] for (_, prompt, _), (_, text) in zip(asked, answers, strict=True))
    return {
        "statuses": {kind: dict(own) for kind, own in statuses.items()},
        "wrong": wrong,
        "left_running": load["running"] + load["waiting"],
        "cache_in_use": load["kv_cache_used_share"],
    }


def counted(url: str) -> dict[str, float]:
    """What the server itself has counted."""
    text = httpx2.get(f"{url}/metrics", trust_env=False).text
    found = re.findall(r"^compress_(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, flags=re.M)
    totals: Counter[str] = Counter()
    for name, value in found:
        totals[name] += float(value)
    return dict(totals)


def steady(url: str, process: psutil.Process, requests: int, concurrency: int, rounds: int) -> list[dict[str, Any]]:
    """Rounds of load; of each what went wrong, how much the process has resident, and both sides' counts."""
    found = []
    for number in range(rounds):
        before = counted(url)
        options = LoadOptions(
            url,
            None,
            requests // rounds,
            concurrency,
            random_input_len=24,
            random_output_len=12,
            ignore_eos=True,
            seed=number,
        )
        figures = load_test(options)
        after = counted(url)
        named = {"prompt_tokens_total": "total_input_tokens", "generation_tokens_total": "total_output_tokens"}
        # The first request of each round is sent before the clock starts, and is not among the client's figures.
        differences = {
            ours: after[ours] - before[ours] - figures[theirs] * (1 + 1 / figures["completed"])
            for ours, theirs in named.items()
        }
        found.append(
            {
                "completed": figures["completed"],
                "failed": figures["failed"],
                "tokens_per_second": figures["output_throughput"],
                "resident_bytes": process.memory_info().rss,
                "count_differences": differences,
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def broken(found: dict[str, Any]) -> list[str]:
    """The promises that were not kept."""
    problems = []
    for name in ("mixed", "short_queue"):
        own = found[name]
        if own["wrong"] or own["left_running"] or own["cache_in_use"]:
            problems.append(f"{name}: {own}")
        if set(own["statuses"]["too long"]) | set(own["statuses"]["malformed"]) != {400}:
            problems.append(f"{name}: {own['statuses']}")
    if any(set(found["mixed"]["statuses"][kind]) != {200} for kind in ("whole", "stream", "leaves")):
        problems.append("a well-formed request was not answered")
    if not any(own.get(429) for own in found["short_queue"]["statuses"].values()):
        problems.append("a full queue did not answer 429")
    rounds = found["steady"]
    if any(each["failed"] for each in rounds):
        problems.append("steady load: requests failed")
    if any(abs(value) > 0.5 for each in rounds for value in each["count_differences"].values()):
        problems.append("the server's counts are not the client's")
    settled = [each["resident_bytes"] for each in rounds[len(rounds) // 4 :]]
    if max(settled) > (1 + MOST_GROWTH) * settled[0]:
        problems.append(f"memory grew from {settled[0] / 1e6:.0f} to {max(settled) / 1e6:.0f} MB")
    return problems


def table(found: dict[str, Any]) -> str:
    """The figures of the page."""
    rounds, mixed_load, short = found["steady"], found["mixed"], found["short_queue"]
    answered, told = (
        sum(own["statuses"][kind].get(status, 0) for kind in ("whole", "stream", "leaves"))
        for own, status in ((mixed_load, 200), (short, 429))
    )
    refused = sum(sum(mixed_load["statuses"][kind].values()) for kind in ("too long", "malformed"))
    rows = [
        ["requests answered under steady load", f"{sum(each['completed'] for each in rounds):,}"],
        ["lost", str(sum(each["failed"] for each in rounds))],
        ["minutes", f"{found['seconds'] / 60:.0f}"],
        ["resident memory after a quarter of them, MB", f"{rounds[len(rounds) // 4]['resident_bytes'] / 1e6:.0f}"],
        ["at the end, MB", f"{rounds[-1]['resident_bytes'] / 1e6:.0f}"],
        ["200 of all kinds at once: well-formed, and answered", str(answered)],
        ["too long or malformed, and refused with 400", str(refused)],
        ["texts that were not what the prompt gets alone", str(mixed_load["wrong"])],
        ["the same with a queue of 10: told to come back (429)", str(told)],
    ]
    return markdown(["", "demo model"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    threads, found = ["--threads", str(arguments.threads)], {}
    with server(*threads, "--max-queue", "10") as (url, _):
        found["short_queue"] = asyncio.run(mixed(url, 200))
    started = time.monotonic()
    with server(*threads) as (url, process):
        found["mixed"] = asyncio.run(mixed(url, 200))
        found["steady"] = steady(url, process, arguments.requests, arguments.concurrency, arguments.rounds)
    found["seconds"] = time.monotonic() - started
    problems = broken(found)
    save("serving_soak", found | {"problems": problems}, table(found))
    print("\n".join(problems) or "every promise was kept")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
