"""Checks a server under load: many kinds of requests at once, then steady load for a long time.

    python benchmarks/serving_soak.py [--requests 20000] [--concurrency 8] [--threads 1] [--bodies 2] [--no-attackers]
    python benchmarks/serving_soak.py --only-interfaces [--requests 20000] [--concurrency 8] [--threads 1]

First 200 requests are sent at once: streams and whole answers, clients that disconnect, prompts that are too long, and
invalid bodies. Every valid request must get the text that it gets alone. This is repeated with a short queue, where some
requests are told to come back later. Then follows steady load in rounds. After each round, the script checks resident memory
and descriptors, failures, and the server's counts against the client's. In every other round benchmarks/serving_attacks.py
attacks the server from a process of its own: no request may be lost, nobody may get a 5xx but 503, and the time per token of
the steady load may be at most twice that without attacks. The server may open few files, so that connections compete. Last,
as many requests of all kinds go through all interfaces (serving_interfaces.py) to a server whose engine's thread fails now
and then. The script writes results/serving_soak.json, and exits with 1 if a check fails. With --only-interfaces the last
part runs alone, and nothing is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx2
import psutil
from results import ROOT, markdown, require, save
from serving_interfaces import broken_interfaces, interface_rows, interfaces
from serving_process import at_rest, counted, server

from engine.bench.load_test import load_test
from engine.bench.options import LoadOptions

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
AT_ONCE, QUEUE = 200, 10
KINDS = ("whole", "stream", "leaves", "too long", "malformed")
MOST_GROWTH = 0.02
MOST_SLOWER = 2.0
"""Maximum ratio of the time per token, 99th percentile, with attackers to that without."""
MOST_MORE_DESCRIPTORS = 8


async def ask(client: httpx2.AsyncClient, kind: str, prompt: str, leave_after: int) -> tuple[int, str | None]:
    """Return (status, text) of one request, without a text if it is not to be checked."""
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
    """Send so many requests at once. Returns counts of statuses by kind, and the number of unexpected texts."""
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


@contextmanager
def attackers(url: str, report: dict[str, Any], options: tuple[str, ...] = ()) -> Iterator[None]:
    """Attack from a process of its own inside the context. `report` gets the outcome."""
    command = [sys.executable, str(ROOT / "benchmarks" / "serving_attacks.py"), url, *options]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        assert started.stdout.readline() == "attacking\n"
        yield
        started.terminate()
        report.update(json.loads(started.communicate(timeout=120)[0]))
    finally:
        started.kill()
        started.wait()


def steady(
    url: str, process: psutil.Process, requests: int, concurrency: int, rounds: int, attacks_options: tuple[str, ...] | None
) -> list[dict[str, Any]]:
    """Run rounds of load, every other one under attack. Returns each round's failures, memory, and counts of both sides."""
    found = []
    for number in range(rounds):
        attacks: dict[str, Any] = {}
        under_attack = attacks_options is not None and number % 2 == 1
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
        before = counted(url)
        with attackers(url, attacks, attacks_options or ()) if under_attack else nullcontext():
            figures = load_test(options)
        resident, descriptors = at_rest(url, process)
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
                "errors": figures["errors"],
                "tokens_per_second": figures["output_throughput"],
                "p99_tpot_ms": figures["p99_tpot_ms"],
                "median_tpot_ms": figures["median_tpot_ms"],
                "p99_ttft_ms": figures["p99_ttft_ms"],
                "resident_bytes": resident,
                "descriptors": descriptors,
                "count_differences": None if under_attack else differences,
                "attacks": attacks or None,
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def slower(rounds: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Return milliseconds per token, 99th percentile, without attackers and with them: medians over the rounds."""
    kinds = [[each["p99_tpot_ms"] for each in rounds if bool(each["attacks"]) == kind] for kind in (False, True)]
    if not all(kinds):
        return None
    without, under = (statistics.median(kind) for kind in kinds)
    return without, under


def answered_by_attack(rounds: list[dict[str, Any]]) -> Counter[str]:
    """Return how often attackers' bodies got each status."""
    total: Counter[str] = Counter()
    for each in rounds:
        for counts in (each["attacks"] or {}).get("statuses", {}).values():
            total.update(counts)
    return total


def broken_by_attackers(rounds: list[dict[str, Any]]) -> list[str]:
    """Return the checks that failed under attack."""
    problems = []
    failed = {status: count for status, count in answered_by_attack(rounds).items() if status in ("500", "502", "504")}
    if failed:  # closed connections are no failures: the server makes room, as floods of connections come from one address
        problems.append(f"attackers' bodies: {failed}")
    for each in rounds:
        attacks = each["attacks"] or {}
        if attacks.get("failures") or any(attacks.get("connections", {}).values()):
            problems.append(f"an attack ended by itself: {attacks['failures']} {attacks['connections']}")
    times = slower(rounds)
    if times is not None and times[1] > MOST_SLOWER * times[0]:
        problems.append(f"under attack the time per token (p99) is {times[1]:.1f} ms, and {times[0]:.1f} ms without")
    return problems


def broken(found: dict[str, Any]) -> list[str]:
    """Return the checks that failed."""
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
        problems.append(f"steady load: requests failed: {[each['errors'] for each in rounds if each['failed']]}")
    if any(abs(value) > 0.5 for each in rounds for value in (each["count_differences"] or {}).values()):
        problems.append("the server's counts are not the client's")
    quarter = max(1, len(rounds) // 4)
    settled, last = rounds[len(rounds) // 4]["resident_bytes"], min(each["resident_bytes"] for each in rounds[-quarter:])
    # The least of several rounds: after one, the allocator may not have given back yet what large bodies took.
    if last > (1 + MOST_GROWTH) * settled:
        problems.append(f"memory grew from {settled / 1e6:.0f} to {last / 1e6:.0f} MB")
    descriptors = [each["descriptors"] for each in rounds]
    if max(descriptors) > descriptors[0] + MOST_MORE_DESCRIPTORS:
        problems.append(f"descriptors grew from {descriptors[0]} to {max(descriptors)}")
    return problems + broken_by_attackers(rounds)


def table(found: dict[str, Any]) -> str:
    """Return the table of the page."""
    rounds, mixed_load, short = found["steady"], found["mixed"], found["short_queue"]
    answered, told = (
        sum(own["statuses"][kind].get(status, 0) for kind in ("whole", "stream", "leaves"))
        for own, status in ((mixed_load, "200"), (short, "429"))
    )
    refused = sum(sum(mixed_load["statuses"][kind].values()) for kind in ("too long", "malformed"))
    rows = [
        ["requests answered under steady load", f"{sum(each['completed'] for each in rounds):,}"],
        ["lost", str(sum(each["failed"] for each in rounds))],
        ["minutes", f"{found['seconds'] / 60:.0f}"],
        ["resident memory after a quarter of them, MB", f"{rounds[len(rounds) // 4]['resident_bytes'] / 1e6:.0f}"],
        ["at the end, MB", f"{rounds[-1]['resident_bytes'] / 1e6:.0f}"],
        *attack_rows(rounds),
        [f"{found['at_once']} requests of all kinds at once: valid and answered", str(answered)],
        [f"{found['at_once']} requests of all kinds at once: too long or malformed, refused with 400", str(refused)],
        ["texts that differ from those of the prompt alone", str(mixed_load["wrong"])],
        [f"with a queue of {found['queue']}: refused with 429", str(told)],
        *(interface_rows(found["interfaces"]) if "interfaces" in found else ()),
    ]
    return markdown(["", "demo model"], rows)


TABLES = {"serving_soak": table}


def attack_rows(rounds: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table rows of the rounds under attack, if there are any."""
    times = slower(rounds)
    if times is None:
        return []
    answers = answered_by_attack(rounds)
    ended = sum(count for status, count in answers.items() if not status.isdigit())
    return [
        ["open descriptors, first and last", f"{rounds[0]['descriptors']}, {rounds[-1]['descriptors']}"],
        ["time per token, p99, ms: without attackers, and with", f"{times[0]:.1f}, {times[1]:.1f}"],
        ["bodies of attackers", f"{sum(answers.values()):,}"],
        [
            "bodies of attackers answered with 5xx",
            str(sum(count for status, count in answers.items() if status.startswith("5"))),
        ],
        ["bodies of attackers whose connection was closed to admit others", str(ended)],
    ]


def under_load(
    requests: int, concurrency: int, rounds: int, attacks: tuple[str, ...] | None, threads: tuple[str, ...]
) -> dict[str, Any]:
    """Return the figures of requests at once, with a short queue and without, and of steady load."""
    found: dict[str, Any] = {"at_once": AT_ONCE, "queue": QUEUE}
    with server(*threads, "--max-queue", str(QUEUE)) as (url, _):
        found["short_queue"] = asyncio.run(mixed(url, AT_ONCE))
    started = time.monotonic()
    with server(*threads) as (url, process):
        found["mixed"] = asyncio.run(mixed(url, AT_ONCE))
        found["steady"] = steady(url, process, requests, concurrency, rounds, attacks)
    return found | {"seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-attackers", action="store_true")
    parser.add_argument("--bodies", type=float, default=2.0, help="Of attackers, a second; 0 for none.")
    parser.add_argument(
        "--only-interfaces", action="store_true", help="Send requests of all kinds through all interfaces, no more."
    )
    arguments = parser.parse_args()
    require("llguidance")
    threads = ("--threads", str(arguments.threads))
    found: dict[str, Any] = {}
    if not arguments.only_interfaces:
        attacks = None if arguments.no_attackers else ("--bodies", str(arguments.bodies))
        found = under_load(arguments.requests, arguments.concurrency, arguments.rounds, attacks, threads)
    found["interfaces"] = interfaces(arguments.requests, arguments.concurrency, arguments.rounds, *threads)
    problems = ([] if arguments.only_interfaces else broken(found)) + broken_interfaces(found["interfaces"])
    if arguments.only_interfaces:
        print(markdown(["", "demo model"], interface_rows(found["interfaces"])))
    else:
        save("serving_soak", found | {"problems": problems})
    print("\n".join(problems) or "every promise was kept")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
