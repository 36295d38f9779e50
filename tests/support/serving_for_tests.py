"""A scheduler that is driven step by step, without its thread, and the updates that its requests receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from engine.batching.draft_switch import DraftSwitch
from engine.batching.request import Request, Update
from engine.batching.request_state import RequestState, Surroundings
from engine.batching.scheduler import Scheduler
from engine.generation.generate import Engine
from engine.generation.grammar_matcher import Grammars
from engine.generation.text_stream import PlainText


class AlwaysOn(DraftSwitch):
    """Drafts in every step, whatever it costs."""

    def wants(self, sequences: int) -> bool:
        return True


class Served:
    """A request and every update that it received."""

    def __init__(self, scheduler: Scheduler, engine: Engine, request: Request, number: int = 1) -> None:
        self.updates: list[Update] = []
        surroundings = Surroundings(engine.end_tokens, PlainText(engine.tokenizer), grammars_of(engine))
        scheduler.check(request)
        self.state = RequestState(number, request, self.updates.append, surroundings)
        scheduler.add(self.state)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for update in self.updates for token in update.tokens)

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)

    @property
    def finish_reason(self) -> str:
        assert all(not update.finish_reason for update in self.updates[:-1]), "told more after the end"
        return self.updates[-1].finish_reason if self.updates else ""


@cache
def grammars_of(engine: Engine) -> Grammars:
    """Return the compiler of grammars that all requests of an engine share."""
    vocabulary = engine.checkpoint.config.vocabulary_size
    return Grammars(lambda: engine.tokenizer, vocabulary, engine.end_tokens, drafts=engine.draft is not None)


def scheduler_for(engine: Engine, **options: Any) -> Scheduler:
    defaults = {
        "kv_cache_bytes": 1 << 20,
        "max_batch_size": 8,
        "max_model_length": None,
        "prefill_chunk": 16,
        "block_size": 4,
    }
    scheduler = Scheduler(engine, **defaults | options)
    if scheduler.drafting is not None:
        scheduler.drafting.switch = AlwaysOn()
    return scheduler


def run_to_end(scheduler: Scheduler) -> None:
    for _ in range(5000):
        if not scheduler.running and not scheduler.waiting:
            return
        scheduler.step()
    raise AssertionError("it does not come to an end")


def serve(engine: Engine, *requests: Request, **options: Any) -> list[Served]:
    """Serve all requests together, until they end."""
    scheduler = scheduler_for(engine, **options)
    served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
    run_to_end(scheduler)
    assert_all_free(scheduler)
    return served


def run_schedule(
    scheduler: Scheduler, engine: Engine, requests: Sequence[Request], arrivals: Sequence[int], cancelled: Mapping[int, int]
) -> list[Served]:
    """Return the requests, served as they arrive at steps and are cancelled at others. arrivals: in order."""
    served: list[Served] = []
    for step in range(5000):
        while len(served) < len(requests) and arrivals[len(served)] <= step:
            served.append(Served(scheduler, engine, requests[len(served)], len(served)))
        for number, when in cancelled.items():
            if when == step and number < len(served) and not served[number].finish_reason:
                scheduler.cancel(served[number].state)
        if len(served) == len(requests) and not scheduler.running and not scheduler.waiting:
            break
        scheduler.step()
    return served


def assert_all_free(scheduler: Scheduler) -> None:
    pools = [scheduler.runner.pool] + ([scheduler.drafting.pool] if scheduler.drafting is not None else [])
    assert all(pool.unused == pool.count and not any(pool._users) for pool in pools)
    assert scheduler.used_share == 0
