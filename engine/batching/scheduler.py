"""Continuous batching: a loop of schedule, run, postprocess, while requests arrive and end.

Each step generates one token for every decoding sequence, or several where they are drafted, and reads pieces of the
prompts that are still unread. A request's result does not depend on the other requests: a prompt is always split at the
same places, sequences never share an attention product, and each has random numbers of its own. Only a Runner knows the
model.

Shape suffixes: B sequences, T rows, R rows of one sequence, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.adapted.adapted_decoder import AdaptedDecoder
from engine.batching.adapted_runner import AdaptedRunner
from engine.batching.disk_blocks import DiskBlocks, disk_blocks
from engine.batching.disk_cache import DiskCache
from engine.batching.drafting import Drafting, cache_sizes
from engine.batching.masks_ahead import MasksAhead
from engine.batching.onnx_runner import OnnxRunner
from engine.batching.paged_runner import PagedRunner
from engine.batching.request import Request
from engine.batching.request_state import Piece, RequestState, passes
from engine.decoder.block_pool import BlockPool, BlockTable, OutOfBlocksError
from engine.decoder.paged_cache import BLOCK_SIZE
from engine.errors import OptionError
from engine.generation.generate import Engine
from engine.generation.sampling import NOT_FINITE, are_finite, largest
from engine.onnx.runtime import OnnxDecoder


class Runner(Protocol):
    """Interface of a model with its cache: reads tokens and returns logits."""

    @property
    def pool(self) -> BlockPool:
        """The pool that owns the cache's blocks."""

    @property
    def cache_bytes(self) -> int:
        """Size of all blocks in bytes."""

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of evaluated experts and of skipped experts for each MoE layer, summed over tokens."""

    def clear(self) -> None:
        """Delete the whole content of the cache."""

    def check(self, threshold: float | None) -> None:
        """Raise OptionError for a skip threshold that this model does not support."""

    def kind(self, state: RequestState) -> bytes:
        """Return a key of everything besides tokens that determines keys and values, and of who may share them."""

    def piece_end(self, state: RequestState, end: int) -> int:
        """Return where the next piece of a prompt may end instead of `end`, at least one token on."""

    def decode(self, states: Sequence[RequestState]) -> Tensor:
        """Read the one unread token of each sequence, and its drafted tokens after it, which only PagedRunner takes.

        Returns the logits [T, V] after each token; the drafted ones do not count as read.
        """

    @property
    def reads_together(self) -> bool:
        """Whether one pass may read pieces of several prompts: whether what each gets does not depend on the others."""

    def read(self, pieces: Sequence[Piece]) -> Tensor:
        """Read pieces of prompts in one pass and store requested prompt log-probabilities.

        Returns the logits [B, V] after the prompts that have no unread token left.
        """


class Step(NamedTuple):
    """The work of one step."""

    decoding: list[RequestState]
    """Requests with one unread token."""
    reading: list[Piece]
    """Pieces of prompts."""


class Scheduler:
    """The requests of one engine. Not thread-safe: EngineLoop runs it in one thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        kv_cache_bytes: int,
        max_batch_size: int,
        max_model_length: int | None,
        prefill_chunk: int,
        block_size: int = BLOCK_SIZE,
        disk: DiskCache | None = None,
    ) -> None:
        """disk: where blocks of the cache go that leave the memory; None for nowhere.

        Raises OptionError for limits that cannot be met, CheckpointError for damaged skip tables.
        """
        for name, value in (("the batch", max_batch_size), ("the chunk of a prompt", prefill_chunk)):
            if value < 1:
                raise OptionError(f"{name} is {value}; it must be at least 1")
        if engine.prediction is not None:
            raise OptionError("a model's own layers draft for one prompt at a time; open it without them for a batch")
        self._engine, self._vocabulary = engine, engine.checkpoint.config.vocabulary_size
        self._max_batch_size, self._prefill_chunk = max_batch_size, prefill_chunk
        states = max_batch_size * cache_sizes(engine)[1]
        self.max_model_length = _resolved_length(engine, max_model_length, kv_cache_bytes, states, block_size)
        self._masks = MasksAhead()
        self.drafting: Drafting | None = None
        """The draft, where the engine has one. Both caches hold equally many positions."""
        cache = kv_cache_bytes - states
        if engine.draft is not None:
            blocks = cache // (cache_sizes(engine)[0] * block_size)
            cache = blocks * engine.cache_sizes[0] * block_size
            self.drafting = Drafting(engine, blocks, block_size, prefill_chunk, self._masks)
        self.runner = _runner(engine, cache, block_size, max_batch_size)
        self.on_disk = None if disk is None else _on_disk(engine, self.runner, disk, prefill_chunk)
        """The blocks on disk; None without a disk, and for a model whose prompts share nothing."""
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        """Running requests, oldest first."""
        self.preemptions = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self._unused_when_full = -1
        """Unused blocks when the first of the queue found no room; the queue is not tried again until this changes."""

    def check(self, request: Request) -> None:
        """Raise OptionError for a request that can never run here."""
        prompt, new = len(request.prompt), request.max_new_tokens
        vocabulary = self._vocabulary
        if not prompt:
            raise OptionError("the prompt has no tokens; give at least one")
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise OptionError(f"the prompt has a token outside the vocabulary of {vocabulary}; use the model's tokenizer")
        if new < 0:
            raise OptionError(f"the number of new tokens is {new}; it must be 0 (the prompt only) or more")
        if prompt + new > self.max_model_length:
            raise OptionError(
                f"a prompt of {prompt} tokens and {new} new ones make {prompt + new}, and {self.max_model_length} "
                "positions are served; shorten the prompt or ask for fewer tokens"
            )
        if not 0 <= request.min_new_tokens <= new:
            raise OptionError(
                f"at least {request.min_new_tokens} new tokens are asked for, and at most {new}; ask for fewer"
            )
        for what, tokens in (("stop tokens", request.stop_tokens), ("bias", [t for t, _ in request.sampling.logit_bias])):
            if not all(0 <= token < vocabulary for token in tokens):
                raise OptionError(f"the {what} name a token outside the vocabulary of {vocabulary}; give the model's own")
        if not all(request.stop):
            raise OptionError("a stop string is empty; leave it out to generate up to the limit")
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= vocabulary:
            raise OptionError(f"{request.top_logprobs} most probable tokens were asked for; ask for 0 to {vocabulary}")
        if request.images and self._engine.image_reader is None:
            raise OptionError("the prompt has images, and the engine was opened for text; leave them out")
        self.runner.check(request.skip_threshold)

    def add(self, state: RequestState) -> None:
        """Append a request to the queue, or end it if its grammar cannot be compiled. EngineLoop compiles it beforehand."""
        state.compile()
        if state.refusal:
            state.end("error", state.refusal)
        if not state.finished:
            self.waiting.append(state)

    def step(self) -> None:
        """Generate one token for every decoding sequence, or several where they are drafted, and read pieces of prompts.

        Any exception is a bug or out of memory.
        """
        with torch.inference_mode():
            step = self._schedule()
            if self.on_disk is not None and not step.decoding and not step.reading:
                self.on_disk.wait()
            if self.drafting is None:
                self._postprocess(self._run(step))
            else:
                self._draft_and_run(step, self.drafting)

    def cancel(self, state: RequestState) -> None:
        """End a waiting or running request."""
        if state in self.waiting:
            self.waiting.remove(state)
            self._unused_when_full = -1
        self._end(state, "cancelled")

    def fail(self, error: str) -> None:
        """After a step that raised: end every running request, or the first of the queue if none was running.

        The cache is emptied, because its content may be damaged.
        """
        for state in self.running or [self.waiting.popleft() for _ in range(min(1, len(self.waiting)))]:
            state.end("error", error)
        self.running.clear()
        self.runner.clear()
        if self.drafting is not None:
            self.drafting.clear()
        self._unused_when_full = -1

    def close(self) -> None:
        """Hand the cache's content to the disk, within some seconds, once all requests have ended. The last call."""
        if self.on_disk is not None:
            self.on_disk.keep_all()

    @property
    def used_share(self) -> float:
        """Share of the cache that running requests use."""
        pool = self.runner.pool
        return 1 - pool.unused / pool.count

    def _schedule(self) -> Step:
        preemptions = self.preemptions
        if self.on_disk is not None:
            self.cached_tokens += self.on_disk.advance(self.running)
        for state in list(self.running):
            if state.unread == 1 and state in self.running:
                self._make_room(state)
        if self.preemptions == preemptions:
            self._admit()
        return Step([state for state in self.running if state.unread == 1], self._chunks())

    def _make_room(self, state: RequestState) -> None:
        """Make room for one more position; the youngest requests return to the queue until there is room."""
        while state in self.running:
            try:
                self.runner.pool.extend(state.table, len(state.tokens))
                return
            except OutOfBlocksError:
                self._preempt(self.running[-1])

    def _preempt(self, state: RequestState) -> None:
        """Return a request to the head of the queue. Its generated tokens stay, and are read again with its prompt."""
        self.running.remove(state)
        self.runner.pool.release(state.table)
        state.table = BlockTable()  # the old table's state is released with it
        if self.drafting is not None:
            self.drafting.release(state)
        self.waiting.appendleft(state)
        self.preemptions += 1

    def _admit(self) -> None:
        """Admit requests in order while there is room for their tokens and one more block for each running request."""
        pool = self.runner.pool
        while len(self.running) < self._max_batch_size and pool.unused != self._unused_when_full:
            first = list(islice(self.waiting, self._max_batch_size))
            state = next((state for state in first if not self._is_being_read(state)), None)
            if state is None:
                return
            known = [] if state.asks_for_prompt else state.tokens
            found = pool.find(known, self.runner.kind(state))
            if pool.missing(found, len(state.tokens)) + len(self.running) > pool.unused:
                self._unused_when_full = pool.unused
                return
            self._unused_when_full = -1
            pool.take(found)
            pool.extend(found, len(state.tokens))
            state.table = found
            self.waiting.remove(state)
            self.running.append(state)
            self._note_start(state, found.length)

    def _is_being_read(self, state: RequestState) -> bool:
        """Whether a running request reads a block that this one shares next, as choices of one prompt do.

        It waits for the block then, and others overtake it, so that what prompts have in common is read once.
        """
        pool = self.runner.pool
        if not pool.shares or state.asks_for_prompt:
            return False
        for other in self.running:
            end = (other.table.length // pool.block_size + 1) * pool.block_size
            if other.unread > 1 and end <= len(other.tokens) and end < len(state.tokens):
                begins_alike = other.tokens[: pool.block_size] == state.tokens[: pool.block_size]
                is_same = begins_alike and other.tokens[:end] == state.tokens[:end]
                if is_same and self.runner.kind(other) == self.runner.kind(state):
                    return True
        return False

    def _note_start(self, state: RequestState, cached: int) -> None:
        is_first = state.start(cached)
        if is_first:
            self.prompt_tokens += len(state.request.prompt)
            self.cached_tokens += cached
        if self.on_disk is not None and not state.asks_for_prompt:
            self.on_disk.begin(state, is_first)

    def _chunks(self) -> list[Piece]:
        """Return pieces of prompts in order, together at most one chunk, or one longer piece.

        The places where a prompt is split depend on that prompt alone.
        """
        chunk = left = self._prefill_chunk
        chosen: list[Piece] = []
        for state in self.running:
            if state.unread > 1 and (self.on_disk is None or not self.on_disk.is_arriving(state)):
                begin = state.table.length
                end = self.runner.piece_end(state, min(len(state.tokens), (begin // chunk + 1) * chunk))
                left -= end - begin
                if chosen and left < 0:
                    break
                chosen.append((state, end))
        return chosen

    def _draft_and_run(self, step: Step, drafting: Drafting) -> None:
        generated = self.generated_tokens
        drafting.propose(step.decoding, self.runner.pool, len(self.running))
        results = self._run(step)
        drafting.settle(step.decoding)
        self._postprocess(results)
        if not step.reading:
            drafting.end_step(len(step.decoding), self.generated_tokens - generated)

    def _run(self, step: Step) -> list[tuple[list[RequestState], Tensor]]:
        """Run the forward passes; return the sequences that are fully read, with the logits [T, V] that follow them."""
        results: list[tuple[list[RequestState], Tensor]] = []
        ends = [state for state, end in step.reading if end == len(state.tokens)]
        with self._masks.computed([*step.decoding, *ends]):
            if step.decoding:
                results.append((step.decoding, self.runner.decode(step.decoding)))
            for pieces in passes(step.reading, self.runner.reads_together):
                if (logits_BV := self._read(pieces)) is not None:
                    results.append(([state for state, _ in pieces if not state.unread], logits_BV))
        return results

    def _read(self, pieces: Sequence[Piece]) -> Tensor | None:
        """Read pieces of prompts. Models raise many kinds for images that do not fit; only that request ends then."""
        try:
            return self.runner.read(pieces)
        except Exception as error:
            if not any(state.request.images for state, _ in pieces):
                raise
            logging.getLogger(__name__).exception("the model cannot read a prompt with images; its request ends")
            for state, _ in pieces:
                self._end_in_doubt(state, described_error(error))
            return None

    def _postprocess(self, results: list[tuple[list[RequestState], Tensor]]) -> None:
        """Choose tokens, send updates, and release sequences that have ended."""
        for states, logits_TV in results:
            wide_TV = logits_TV.float()
            finite, greedy = are_finite(wide_TV).tolist(), largest(wide_TV).tolist()
            end = 0
            for state in states:
                start, end = end, end + 1 + len(state.drafted)
                usable = next((row for row in range(start, end) if not finite[row]), end)
                if usable > start:
                    self._take(state, wide_TV[start:usable], greedy[start:usable])
                else:
                    self._end_in_doubt(state, NOT_FINITE)

    def _take(self, state: RequestState, logits_RV: Tensor, greedy: Sequence[int]) -> None:
        generated, drafted, failure = state.timings.generated_tokens, len(state.drafted), ""
        try:
            state.take(logits_RV, greedy)
        except OptionError as error:  # what its grammar asks
            failure = str(error)
        except Exception as error:  # the error concerns one request only, such as an extreme temperature
            failure = described_error(error)
        new = state.timings.generated_tokens - generated
        self.generated_tokens += new
        if drafted and self.drafting is not None:
            self.runner.pool.fill(state.table, state.tokens, len(state.tokens) - 1)
            self.drafting.note(state, drafted, max(0, new - 1))
        if failure:
            self._end_in_doubt(state, failure)
        elif state.finished:
            self._end(state, "")

    def _end_in_doubt(self, state: RequestState, error: str) -> None:
        """End a request with an error, and let no other request reuse its content in the cache."""
        self.runner.pool.forget(state.table)
        self._end(state, "error", error)

    def _end(self, state: RequestState, finish_reason: str, error: str = "") -> None:
        if state in self.running:
            self.running.remove(state)
            self.runner.pool.release(state.table)
            self._unused_when_full = -1
        state.end(finish_reason, error)
        if self.drafting is not None:
            self.drafting.release(state)


def described_error(error: BaseException) -> str:
    """Return a message of one line for an unexpected exception."""
    words = " ".join(str(error).split())[:200]
    return f"the engine failed on this request ({type(error).__name__}: {words}); other requests continue; try it again"


def _runner(engine: Engine, kv_cache_bytes: int, block_size: int, sequences: int) -> Runner:
    if isinstance(engine.decoder, OnnxDecoder):
        return OnnxRunner(engine.decoder, kv_cache_bytes, block_size)
    if isinstance(engine.decoder, AdaptedDecoder):
        return AdaptedRunner(engine, engine.decoder, kv_cache_bytes, block_size)
    return PagedRunner(engine, engine.decoder, kv_cache_bytes, block_size, sequences)


def _on_disk(engine: Engine, runner: Runner, disk: DiskCache, prefill_chunk: int) -> DiskBlocks | None:
    made = disk_blocks(engine, runner.cache, disk, prefill_chunk) if isinstance(runner, PagedRunner) else None
    if made is None:
        where = engine.checkpoint.directory.name
        logging.getLogger(__name__).warning("%s: prompts share nothing in memory, and are not kept on disk either", where)
    return made


def _resolved_length(engine: Engine, asked: int | None, kv_cache_bytes: int, states: int, block_size: int) -> int:
    """Return the length of the longest sequence that is served. `states`: bytes that recurrent states take."""
    config = engine.checkpoint.config
    positions, each = config.max_positions, cache_sizes(engine)[0]
    room = max(0, kv_cache_bytes - states) // (each * block_size) * block_size
    length = min(positions, max(room, block_size)) if asked is None else asked
    if not 1 <= length <= positions:
        raise OptionError(
            f"the length to serve is {length} positions and the model has {positions}{config.why_no_more}; ask for 1 to "
            f"{positions}"
        )
    if length > room:
        needed = -(-length // block_size) * block_size * each + states
        raise OptionError(
            f"a key-value cache of {kv_cache_bytes:,} bytes holds {room:,} positions and one sequence may have {length:,}; "
            f"give it {needed:,} bytes or more, or serve shorter sequences"
        )
    return length
