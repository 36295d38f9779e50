"""A scheduler in a thread of its own: requests go in from any thread, updates come out in the engine's."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from functools import partial
from threading import Condition, Thread, current_thread

from engine.batching.request import Listener, Load, Request
from engine.batching.request_state import RequestState, Surroundings
from engine.batching.scheduler import Scheduler, described_error
from engine.errors import BusyError, OptionError
from engine.generation.generate import Engine
from engine.generation.text_stream import plain_text
from engine.passes.memory_budget import resident_memory_bytes

PREFILL_CHUNK = 256
"""Prompt tokens of one step."""
RATE_SECONDS = 5
"""Over which tokens per second are taken."""


class EngineLoop:
    """Serves an engine, which nobody else may use meanwhile."""

    def __init__(
        self,
        engine: Engine,
        *,
        kv_cache_bytes: int,
        max_batch_size: int = 16,
        max_queue: int = 256,
        max_model_length: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        """`max_model_length`: positions of the longest sequence; None for as many as the model and the cache have.

        Raises OptionError for limits that cannot be kept.
        """
        if max_queue < 1:
            raise OptionError(f"the queue is {max_queue}; it must be at least 1")
        self._engine = engine
        self._scheduler = Scheduler(
            engine,
            kv_cache_bytes=kv_cache_bytes,
            max_batch_size=max_batch_size,
            max_model_length=max_model_length,
            prefill_chunk=prefill_chunk,
        )
        self.max_model_length = self._scheduler.max_model_length
        tokenizer = copy.deepcopy(engine.tokenizer)  # others may encode with theirs at the same time
        self._surroundings = Surroundings(engine.end_tokens, partial(plain_text, tokenizer), engine.device)
        self._max_queue = max_queue
        self._changed = Condition()
        """Guards what follows, and is notified when any of it changes."""
        self._states: dict[int, RequestState] = {}
        """Every request that has not ended."""
        self._arrived: deque[RequestState] = deque()
        self._cancelled: list[int] = []
        self._next_number = 1
        self._draining = self._stopping = False
        self._rate = _Rate()
        self._thread = Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> int:
        """A number for `cancel`. Raises OptionError for what can never run here, BusyError where too many wait."""
        self._scheduler.check(request)
        with self._changed:
            if self._draining or self._stopping:
                raise BusyError("the engine is shutting down and takes no more requests; send it to another")
            if len(self._arrived) + len(self._scheduler.waiting) >= self._max_queue:
                raise BusyError(f"{self._max_queue} requests are waiting, which is as many as may; try again later")
            number = self._next_number
            self._next_number += 1
            state = RequestState(number, request, listener, self._surroundings)
            self._states[number] = state
            self._arrived.append(state)
            self._changed.notify_all()
        return number

    def cancel(self, number: int) -> None:
        """End a request soon; nothing happens to one that has ended."""
        with self._changed:
            if number in self._states:
                self._cancelled.append(number)
                self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Take no more requests, and wait so many seconds for those that are here; whether all have ended."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._states, timeout)

    def stop(self) -> None:
        """End everything; back when the thread has ended, unless it is the caller's own."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is None:
            self._end_all()
        elif self._thread is not current_thread():
            self._thread.join()

    def load(self) -> Load:
        """How busy it is."""
        scheduler = self._scheduler
        evaluated, skipped = scheduler.runner.counts
        return Load(
            running=len(scheduler.running),
            waiting=len(self._arrived) + len(scheduler.waiting),
            kv_cache_bytes=scheduler.runner.cache_bytes,
            kv_cache_used_share=scheduler.used_share,
            weights_bytes=self._engine.weights_bytes,
            resident_bytes=resident_memory_bytes(),
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.preemptions,
            tokens_per_second=self._rate.over(RATE_SECONDS),
            experts_evaluated_per_layer=evaluated,
            experts_skipped_per_layer=skipped,
            load_seconds=self._engine.load_seconds,
        )

    def _serve(self) -> None:
        while self._take_orders():
            before = self._scheduler.generated_tokens
            try:
                self._scheduler.step()
            except Exception as error:
                logging.getLogger(__name__).exception("a step failed; the running requests end")
                self._scheduler.fail(described_error(error))
            self._rate.add(self._scheduler.generated_tokens - before)
            self._drop_ended()
        self._end_all()

    def _take_orders(self) -> bool:
        """Sleep until there is something to do; False to stop."""
        scheduler = self._scheduler
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._arrived or self._cancelled or scheduler.running or scheduler.waiting
            )
            while self._arrived:
                scheduler.add(self._arrived.popleft())
            cancelled = [state for number in self._cancelled if (state := self._states.get(number)) is not None]
            self._cancelled.clear()
            if self._stopping:
                return False
        for state in cancelled:
            scheduler.cancel(state)
        self._drop_ended()
        return True

    def _drop_ended(self) -> None:
        with self._changed:
            ended = [number for number, state in self._states.items() if state.finished]
            for number in ended:
                del self._states[number]
            if ended:
                self._changed.notify_all()

    def _end_all(self) -> None:
        self._arrived.clear()
        for state in list(self._states.values()):
            self._scheduler.cancel(state)
        self._drop_ended()


class _Rate:
    """Counts by the second, for a rate over the last few. Read by other threads while one adds."""

    def __init__(self) -> None:
        self._places = [(0, 0)] * (RATE_SECONDS + 1)

    def add(self, count: int) -> None:
        second = int(time.monotonic())
        at, so_far = self._places[second % len(self._places)]
        self._places[second % len(self._places)] = second, count + (so_far if at == second else 0)

    def over(self, seconds: int) -> float:
        """Per second, the current one and `seconds` - 1 before it."""
        now = time.monotonic()
        return sum(count for at, count in self._places if int(now) - seconds < at) / (now - int(now) + seconds - 1)
