"""A load test of a server: random prompts to its completions endpoint, streamed, and the latencies that a client sees.

The metrics have their usual names. TTFT: time from sending to the first text. TPOT: the time after the first text
divided by the tokens after the first. ITL: time from one piece of text to the next. The result gives all in
milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.bench.options import LoadOptions
from engine.errors import CompressError, OptionError

try:
    import httpx2
except ModuleNotFoundError as error:
    raise OptionError(
        "a load test needs the package httpx2, which is not installed: pip install 'moe-compress[serve]'"
    ) from error

TIMEOUT_SECONDS = 600
PERCENTILE = 99


@dataclass
class Outcome:
    """Outcome of one request; times in seconds."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    """Times at which text arrived."""
    error: str = ""


def load_test(options: LoadOptions) -> dict[str, Any]:
    """Send all prompts and return the figures of the answers. Raises CompressError if no request is answered."""
    return asyncio.run(_run(options))


async def _run(options: LoadOptions) -> dict[str, Any]:
    headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=options.server.rstrip("/"), headers=headers, limits=limits, timeout=TIMEOUT_SECONDS, trust_env=False
    ) as client:
        model = await _model(client, options)
        first, *prompts = await _prompts(client, options)
        await _send(client, model, first, options)  # a first request causes one-time work that is not measured
        started = time.perf_counter()
        outcomes = await _send_all(client, model, prompts, options)
        seconds = time.perf_counter() - started
    if all(outcome.error for outcome in outcomes):
        raise CompressError(f"{options.server} answered none of {len(outcomes)} requests: {outcomes[0].error}")
    return figures(outcomes, seconds)


async def _model(client: httpx2.AsyncClient, options: LoadOptions) -> str:
    try:
        answer = await client.get("/v1/models")
    except httpx2.HTTPError as error:
        raise OptionError(f"{options.server} cannot be reached: {error}; start one with: compress serve") from error
    if answer.status_code != 200:
        raise OptionError(f"{options.server} answers {answer.status_code} to /v1/models: {answer.text[:200]}")
    return str(answer.json()["data"][0]["id"])


async def _prompts(client: httpx2.AsyncClient, options: LoadOptions) -> list[list[int]]:
    """Return random prompts made of the tokens of some plain text, which every server's vocabulary has."""
    text = "".join(map(chr, range(33, 127))) + " the of and to in for on with as by from at or if not is be it this that"
    answer = await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    if answer.status_code != 200:
        raise OptionError(f"{options.server} answers {answer.status_code} to /tokenize; a load test needs that endpoint")
    known = sorted(set(answer.json()["tokens"]))
    chosen = random.Random(options.seed)
    return [chosen.choices(known, k=options.random_input_len) for _ in range(1 + options.num_prompts)]


async def _send_all(
    client: httpx2.AsyncClient, model: str, prompts: Sequence[list[int]], options: LoadOptions
) -> list[Outcome]:
    room = asyncio.Semaphore(options.max_concurrency or len(prompts))
    chosen = random.Random(options.seed)

    async def one(prompt: list[int]) -> Outcome:
        async with room:
            return await _send(client, model, prompt, options)

    sending = []
    for prompt in prompts:
        sending.append(asyncio.create_task(one(prompt)))
        if options.request_rate is not None:
            await asyncio.sleep(chosen.expovariate(options.request_rate))
    return await asyncio.gather(*sending)


async def _send(client: httpx2.AsyncClient, model: str, prompt: list[int], options: LoadOptions) -> Outcome:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.random_output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": options.ignore_eos,
    }
    outcome = Outcome(sent=time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                outcome.error = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:200]}"
                return outcome
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(outcome, json.loads(line.removeprefix("data: ")), time.perf_counter())
    except httpx2.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if not outcome.error and not outcome.output_tokens:
        outcome.error = "the stream ended before its usage chunk"
    return outcome


def _take(outcome: Outcome, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        outcome.error = str(chunk["error"].get("message"))
        return
    if any(choice["text"] for choice in chunk["choices"]):
        outcome.pieces.append(now)
    if chunk.get("usage"):
        outcome.prompt_tokens = chunk["usage"]["prompt_tokens"]
        outcome.output_tokens = chunk["usage"]["completion_tokens"]


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return counts, throughput and latencies of the answered requests; latencies without any value are None."""
    good = [outcome for outcome in outcomes if not outcome.error]
    read, written = sum(each.prompt_tokens for each in good), sum(each.output_tokens for each in good)
    first = [each.pieces[0] - each.sent for each in good if each.pieces]
    later = [
        (each.pieces[-1] - each.pieces[0]) / (each.output_tokens - 1)
        for each in good
        if each.pieces and each.output_tokens > 1
    ]
    between = [now - before for each in good for before, now in zip(each.pieces, each.pieces[1:], strict=False)]
    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:5],
        "duration": seconds,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(good) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
        **_spread("ttft", first),
        **_spread("tpot", later),
        **_spread("itl", between),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    milliseconds = [1000 * value for value in values]
    if not milliseconds:
        return {f"{which}_{name}_ms": None for which in ("mean", "median", f"p{PERCENTILE}")}
    return {
        f"mean_{name}_ms": statistics.mean(milliseconds),
        f"median_{name}_ms": statistics.median(milliseconds),
        f"p{PERCENTILE}_{name}_ms": float(np.percentile(milliseconds, PERCENTILE)),
    }


COUNTS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "total_token_throughput": "Total token throughput (tok/s):",
}
LATENCIES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)", "itl": "Inter-token Latency"}
WIDTH = 50


def result_block(values: dict[str, Any]) -> str:
    """Return the figures as text, in the layout of other serving benchmarks."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line(title, values[key]) for key, title in COUNTS.items()]
    for name, title in LATENCIES.items():
        lines.append(f"{title:-^{WIDTH}}")
        for which, shown in (("mean", "Mean"), ("median", "Median"), (f"p{PERCENTILE}", f"P{PERCENTILE}")):
            lines.append(_line(f"{shown} {name.upper()} (ms):", values[f"{which}_{name}_ms"]))
    return "\n".join([*lines, "=" * WIDTH])


def _line(title: str, value: float | int | None) -> str:
    text = "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<40} {text:<9}".rstrip()
