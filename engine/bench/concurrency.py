"""Throughput of one model at several numbers of concurrent requests, through the scheduler and without HTTP."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from engine.batching.loop import EngineLoop
from engine.batching.request import Request, Update
from engine.decoder.paged_cache import BLOCK_SIZE
from engine.errors import CompressError, OptionError
from engine.generation.generate import Engine


def bench_concurrency(
    engine: Engine,
    counts: Sequence[int],
    *,
    prompt_tokens: int,
    generated_tokens: int,
    repetitions: int,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return one row for each number of requests, with medians of repetitions in which the numbers take turns.

    Tokens per second are measured while all requests are decoding: from the last request's first token to the first
    end. Raises OptionError if the tokens do not fit the model.
    """
    if prompt_tokens < 1 or generated_tokens < 2:
        raise OptionError("this test needs a prompt of at least 1 token and at least 2 new ones; give -p and -n")
    length, most = prompt_tokens + generated_tokens, max(counts)
    position, state = engine.cache_sizes
    engine_loop = EngineLoop(
        engine,
        kv_cache_bytes=most * ((length + BLOCK_SIZE) * position + state),
        max_batch_size=most,
        max_model_length=length,
    )
    engine_loop.start()
    try:
        chosen = random.Random(seed)
        rounds = [
            [
                _run(engine_loop, engine.checkpoint.config.vocabulary_size, count, prompt_tokens, generated_tokens, chosen)
                for count in counts
            ]
            for _ in range(repetitions + 1)
        ]
        load = engine_loop.load()
    finally:
        engine_loop.stop()
    columns = list(zip(*rounds[1:], strict=True))  # the first round warms up
    alone = statistics.median(rate for rate, _ in columns[0])
    return [
        {
            "concurrency": count,
            "tokens_per_second": statistics.median(rate for rate, _ in column),
            "prefill_tokens_per_second": statistics.median(rate for _, rate in column),
            "ratio_to_first": statistics.median(rate for rate, _ in column) / alone,
            "kv_cache_bytes": load.kv_cache_bytes,
            "weights_bytes": load.weights_bytes,
        }
        for count, column in zip(counts, columns, strict=True)
    ]


def _run(
    engine_loop: EngineLoop, vocabulary: int, count: int, prompt_tokens: int, generated_tokens: int, chosen: random.Random
) -> tuple[float, float]:
    """Return the generated and the read tokens per second. The prompts are new, so that none is in the prefix cache."""
    ended = threading.Semaphore(0)
    heard: list[tuple[float, Update]] = []

    def hear(update: Update) -> None:
        heard.append((time.monotonic(), update))
        if update.finish_reason:
            ended.release()

    started = time.monotonic()
    for _ in range(count):
        prompt = tuple(chosen.randrange(vocabulary) for _ in range(prompt_tokens))
        engine_loop.submit(Request(prompt, generated_tokens, ignore_end_tokens=True), hear)
    for _ in range(count):
        ended.acquire()
    lasts = [update for _, update in heard if update.finish_reason]
    timings = [update.timings for update in lasts if update.finish_reason == "length" and update.timings]
    if len(timings) < count:
        raise CompressError(f"a request ended early: {next(filter(None, (update.error for update in lasts)), 'cancelled')}")
    all_began = max(each.first_token or 0.0 for each in timings)
    one_ended = min(each.finished or 0.0 for each in timings)
    together = sum(len(update.tokens) for at, update in heard if all_began < at <= one_ended)
    if not together:
        raise OptionError(f"of {count} requests the first ended before the last began; ask for more tokens with -n")
    return together / (one_ended - all_began), count * prompt_tokens / (all_began - started)
