"""Throughput of a server whose clients ask for JSON of a schema, beside free text.

    python benchmarks/structured_output.py [--model demo …] [--clients 8] [--requests 4] [--tokens 128] [--rounds 5]

One `compress serve` answers all kinds of requests in turn, in each round: free text without end tokens, a schema that all
clients share, a schema of each request's own, which is compiled for it, any JSON object, and a regular expression. No text
ends before the limit, so all kinds have equally many tokens. Requests are sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from results import ROOT, markdown, require, save, times

FREE = "free text"
PROMPT = "def records(path):\n    return "


def schema_of(name: str) -> dict[str, Any]:
    """Return a schema of so many records that no answer of the benchmark is complete. name: that of a field."""
    kinds = {"enum": ["read", "write", "append"]}
    fields = {name: {"type": "string"}, "count": {"type": "integer", "minimum": 0}, "kind": kinds, "ok": {"type": "boolean"}}
    record = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": 10_000}


def body(kind: str, number: int, tokens: int) -> dict[str, Any]:
    """Return one request; `number` makes seeds, and names of fields, that no other request has."""
    given: dict[str, Any] = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 1, "seed": number}
    own: dict[str, dict[str, Any]] = {
        FREE: {"ignore_eos": True},
        "one schema": {"structured_outputs": {"json": schema_of("name")}},
        "a schema for each request": {"structured_outputs": {"json": schema_of(f"name_{number}")}},
        "records without a schema": {"structured_outputs": {"json": {"type": "array", "minItems": 10_000}}},
        "a regular expression": {"structured_outputs": {"regex": r"([a-z]{1,12}( [0-9]{1,4})?\n){10000}"}},
    }
    return given | own[kind]


KINDS = (FREE, "one schema", "a schema for each request", "records without a schema", "a regular expression")


@contextmanager
def server(model: str, *options: str) -> Iterator[str]:
    """Yield the URL of `compress serve` in a process of its own."""
    command = [sys.executable, "-m", "cli", "serve", model, "--port", "0", "--json", *options]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    try:
        yield json.loads(started.stdout.readline())["url"]
    finally:
        started.kill()
        started.wait()


def measured(url: str, bodies: list[dict[str, Any]], clients: int) -> float:
    """Return generated tokens a second of all requests, of which each client sends one after the other."""

    def ask(given: dict[str, Any]) -> int:
        answer = httpx2.post(f"{url}/v1/completions", json=given, timeout=600)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length", "the answer is complete, so that kinds have unequally many tokens"
        return int(answer.json()["usage"]["completion_tokens"])

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(ask, bodies))
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["demo"], help="one after the other")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4, help="of each client, in each round")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    require("llguidance")
    sizes = {name: getattr(arguments, name) for name in ("clients", "tokens", "rounds")}
    names = [Path(model).name for model in arguments.model]
    found = {name: rates_of(model, arguments) for name, model in zip(names, arguments.model, strict=True)}
    save("structured_output", sizes | {"tokens_per_second": found})


def rates_of(model: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return generated tokens a second of each kind of request, in each round."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    number = 0
    with server(model, "--threads", str(arguments.threads), "--max-batch-size", str(arguments.clients)) as url:
        measured(url, [body(kind, place, 8) for place, kind in enumerate(KINDS)], 1)
        for _ in range(arguments.rounds):
            for kind in KINDS:
                count = arguments.clients * arguments.requests
                bodies = [body(kind, number + place + len(KINDS), arguments.tokens) for place in range(count)]
                number += count
                found[kind].append(measured(url, bodies, arguments.clients))
    return found


def table(figures: dict[str, Any]) -> str:
    """Return a row for each kind of request, and two columns for each model."""
    models = figures["tokens_per_second"]
    rows = []
    for kind in KINDS:
        rows.append([kind])
        for rates in models.values():
            own, free = rates[kind], rates[FREE]
            ratio = statistics.median(a / b for a, b in zip(own, free, strict=True))
            rows[-1] += [f"{statistics.median(own):,.0f}", "" if kind == FREE else times(ratio, own, free)]
    about = (
        f"{figures['clients']} clients, {figures['tokens']} tokens an answer; medians of {figures['rounds']} rounds in turn"
    )
    header = [title for name in models for title in (f"{name}, tokens/s", "of free text (range)")]
    return f"{about}.\n\n{markdown(['', *header], rows)}"


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return the ratio of a shared schema to free text, of each model."""
    found = {}
    for name, rates in figures["tokens_per_second"].items():
        ratio = statistics.median(a / b for a, b in zip(rates["one schema"], rates[FREE], strict=True))
        found["".join(letter if letter.isalnum() else "_" for letter in name)] = f"{ratio:.2f}"
    return found


TABLES = {"structured_output": table}
IN_TEXT = {"structured_output": quoted}


if __name__ == "__main__":
    main()
