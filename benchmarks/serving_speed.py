"""Tokens per second of the scheduler with 1 to 16 running sequences, beside the plain decoding of one.

python benchmarks/serving_speed.py [MODEL] [--threads 1] [--rounds 7] [--block-size 32] [--past 5]

Medians of interleaved rounds. With one thread the clock is that of the processor (time.thread_time), so that what else the
machine does counts less.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from engine.generate import Engine
from engine.kv_cache import KeyValueCache
from engine.paged_cache import BLOCK_SIZE, position_bytes
from engine.request import Request
from engine.request_state import RequestState, Surroundings
from engine.scheduler import Scheduler

STEPS = 96
SEQUENCES = (1, 2, 4, 8, 16)


def plain(engine: Engine, past: int, clock) -> float:
    """Greedy decoding of one sequence, as `compress bench` does it."""
    cache = KeyValueCache(engine.checkpoint.config, 1, past + STEPS, engine.dtype, engine.device)
    token_B = engine.prefill(torch.randint(3, 256, (1, past)), None, cache).argmax(-1)
    started = clock()
    for _ in range(STEPS):
        token_B = engine.step(token_B, None, cache).argmax(-1)
    return STEPS / (clock() - started)


def served(engine: Engine, count: int, past: int, block_size: int, clock) -> float:
    """The same number of steps of so many sequences."""
    length = past + STEPS + 2
    size = position_bytes(engine.checkpoint.config, engine.dtype) * (count + 1) * (length + block_size)
    options = {"max_batch_size": count, "max_model_length": length, "prefill_chunk": 256, "block_size": block_size}
    scheduler = Scheduler(engine, kv_cache_bytes=size, **options)
    surroundings = Surroundings(frozenset(), engine._decode, engine.device)
    for number in range(count):
        request = Request(tuple(torch.randint(3, 256, (past,)).tolist()), STEPS + 2, ignore_end_tokens=True)
        scheduler.add(RequestState(number, request, lambda update: None, surroundings))
    while len(scheduler.running) < count or any(state.unread > 1 for state in scheduler.running):
        scheduler.step()
    before, started = scheduler.generated_tokens, clock()
    for _ in range(STEPS - count):
        scheduler.step()
    return (scheduler.generated_tokens - before) / (clock() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE)
    parser.add_argument("--past", type=int, default=5)
    given = parser.parse_args()
    engine = Engine.open(given.model, threads=given.threads)
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    rates: dict[str, list[float]] = {}
    for _ in range(given.rounds + 1):  # the first is to warm up
        rates.setdefault("plain", []).append(plain(engine, given.past, clock))
        for count in SEQUENCES:
            rate = served(engine, count, given.past, given.block_size, clock)
            rates.setdefault(f"{count} served", []).append(rate)
    medians = {name: statistics.median(each[1:]) for name, each in rates.items()}
    for name, median in medians.items():
        print(f"{name:>10} {median:10.1f} tokens/s   {median / medians['1 served']:5.2f} of one served")


if __name__ == "__main__":
    main()
