"""A scheduler in its own thread: any thread may submit requests, and listeners are called in the engine's thread."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Condition, Thread, current_thread

from engine.batching.disk_cache import DiskCache, DiskCounts
from engine.batching.options import QueueOptions
from engine.batching.request import Listener, Load, Request
from engine.batching.request_state import RequestState, Surroundings
from engine.batching.scheduler import Scheduler, described_error
from engine.errors import BusyError, OptionError
from engine.generation.generate import Engine
from engine.generation.grammar_matcher import Grammars
from engine.generation.text_stream import PlainText
from engine.passes.memory_budget import resident_memory_bytes

PREFILL_CHUNK = 256
"""Number of prompt tokens read in one step."""
MOST_HELD_BYTES = 2 << 30
"""Limit on the inputs of images that all requests together hold."""
RATE_SECONDS = 5
"""Window in seconds for the rate of tokens per second."""


class EngineLoop:
    """Runs an engine in its own thread. Nothing else may use the engine meanwhile."""

    def __init__(
        self,
        engine: Engine,
        *,
        kv_cache_bytes: int,
        max_batch_size: int = QueueOptions.max_batch_size,
        max_queue: int = QueueOptions.max_queue,
        max_model_length: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        disk: DiskCache | None = None,
    ) -> None:
        """`max_model_length`: positions of the longest sequence; None for as many as the model and the cache have.

        `disk`: where blocks of the KV cache go that leave the memory; None for nowhere.

        Raises OptionError for limits that cannot be met.
        """
        if max_queue < 1:
            raise OptionError(f"the queue is {max_queue}; it must be at least 1")
        self._engine, self._disk = engine, disk
        self._scheduler = Scheduler(
            engine,
            kv_cache_bytes=kv_cache_bytes,
            max_batch_size=max_batch_size,
            max_model_length=max_model_length,
            prefill_chunk=prefill_chunk,
            disk=disk,
        )
        self.max_model_length = self._scheduler.max_model_length
        tokenizer = copy.deepcopy(engine.tokenizer)  # other threads may use the engine's tokenizer at the same time
        vocabulary = engine.checkpoint.config.vocabulary_size
        copied = partial(copy.deepcopy, engine.tokenizer)
        grammars = Grammars(copied, vocabulary, engine.end_tokens, drafts=engine.draft is not None)
        self._surroundings = Surroundings(engine.end_tokens, PlainText(tokenizer), grammars)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._max_queue = max_queue
        self._changed = Condition()
        """Guards the attributes below, and is notified when any of them changes."""
        self._states: dict[int, RequestState] = {}
        """Requests that have not ended, by number."""
        self._arrived: deque[RequestState] = deque()
        self._compiling: set[int] = set()
        """Numbers of requests whose grammars are being compiled; they arrive afterwards, and others overtake them."""
        self._cancelled: list[int] = []
        self._next_number = 1
        self._draining = self._stopping = False
        self._rate = _Rate()
        self._thread = Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> int:
        """Queue a request and return its number for `cancel`.

        Raises OptionError for a request that can never run here, and BusyError if the queue is full or shutdown has
        begun.
        """
        self._scheduler.check(request)
        with self._changed:
            if self._draining or self._stopping:
                raise BusyError("the engine is shutting down and accepts no more requests; try another one")
            if len(self._arrived) + len(self._compiling) + len(self._scheduler.waiting) >= self._max_queue:
                raise BusyError(f"{self._max_queue} requests are waiting, which is the maximum; try again later")
            self._check_images(request)
            number = self._next_number
            self._next_number += 1
            state = RequestState(number, request, listener, self._surroundings)
            self._states[number] = state
            if request.grammar:
                self._compiling.add(number)
                self._compiler.submit(self._compile, state)
            else:
                self._arrived.append(state)
                self._changed.notify_all()
        return number

    def _compile(self, state: RequestState) -> None:
        """Compile the grammar of a request, which then arrives."""
        if not state.finished:
            state.compile()
        with self._changed:
            self._compiling.discard(state.number)
            self._arrived.append(state)
            self._changed.notify_all()

    def _check_images(self, request: Request) -> None:
        """Raise BusyError if the inputs of images of all requests would be too large. Choices of one answer share theirs."""
        if not request.images:
            return
        others = {id(own.images): own.image_bytes for state in self._states.values() if (own := state.request).images}
        others.pop(id(request.images), None)
        if others and sum(others.values()) + request.image_bytes > MOST_HELD_BYTES:
            raise BusyError("too many images are waiting for their answers; try again later")

    def cancel(self, number: int) -> None:
        """End a request soon; ignored if it has ended already."""
        with self._changed:
            if number in self._states:
                self._cancelled.append(number)
                self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait up to `timeout` seconds for the others. Returns whether all have ended."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._states, timeout)

    def stop(self) -> None:
        """End all requests and wait for the thread to end, unless it is the calling thread.

        With a disk, the thread first hands the KV cache to it, for some seconds at most.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self._thread.ident is None:
            self._end_all()
        elif self._thread is not current_thread():
            self._thread.join()

    def load(self) -> Load:
        """Return the current load and the counts since the start."""
        scheduler = self._scheduler
        evaluated, skipped = scheduler.runner.counts
        counts = DiskCounts() if scheduler.on_disk is None else scheduler.on_disk.counts
        cache = self._engine.expert_cache
        return Load(
            running=len(scheduler.running),
            waiting=len(self._arrived) + len(self._compiling) + len(scheduler.waiting),
            kv_cache_bytes=scheduler.runner.cache_bytes + (scheduler.drafting.cache_bytes if scheduler.drafting else 0),
            kv_cache_used_share=scheduler.used_share,
            weights_bytes=sum(each.weights_bytes for each in self._engine.both),
            resident_bytes=resident_memory_bytes(),
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            cached_tokens=scheduler.cached_tokens,
            preemptions=scheduler.preemptions,
            tokens_per_second=self._rate.over(RATE_SECONDS),
            experts_evaluated_per_layer=evaluated,
            experts_skipped_per_layer=skipped,
            load_seconds=sum(each.load_seconds for each in self._engine.both),
            draft=scheduler.drafting.load if scheduler.drafting else None,
            kv_cache_disk_bytes=0 if self._disk is None else self._disk.bytes,
            kv_cache_disk_blocks_read=counts.read,
            kv_cache_disk_blocks_written=counts.written,
            kv_cache_disk_blocks_failed=counts.failed,
            kv_cache_disk_hits=counts.hits,
            expert_cache=() if cache is None else tuple(map(replace, cache.figures.values())),
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
        try:
            self._scheduler.close()
        except Exception:
            logging.getLogger(__name__).exception("the key-value cache was not written to disk")

    def _take_orders(self) -> bool:
        """Sleep until there is work, and take over arrivals and cancellations. Returns False to stop."""
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
    """Counts per second, for a rate over the last seconds. Other threads may read while one adds."""

    def __init__(self) -> None:
        self._places = [(0, 0)] * (RATE_SECONDS + 1)

    def add(self, count: int) -> None:
        second = int(time.monotonic())
        at, so_far = self._places[second % len(self._places)]
        self._places[second % len(self._places)] = second, count + (so_far if at == second else 0)

    def over(self, seconds: int) -> float:
        """Return the rate per second, over the current second and the `seconds` - 1 before it."""
        now = time.monotonic()
        return sum(count for at, count in self._places if int(now) - seconds < at) / (now - int(now) + seconds - 1)
