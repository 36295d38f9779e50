"""State of one request from arrival to last update: tokens, text, place in the cache and in the grammar.

Shape suffixes: L positions, R rows of one request, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batching.request import Listener, Request, Timings, TokenLogprob, Update
from engine.decoder.block_pool import BlockTable
from engine.errors import OptionError
from engine.generation.grammar_matcher import Grammars, Matcher
from engine.generation.sampling import penalised, sample_at
from engine.generation.text_stream import TextStream

Piece = tuple["RequestState", int]
"""A request whose text is read, and the position up to which a pass reads it."""
HEAD_ROWS = 64
"""Number of positions whose logits are held at a time when log-probabilities of a whole prompt are requested."""


def passes(pieces: list[Piece], together: bool) -> list[list[Piece]]:
    """Return the pieces of each forward pass: all of them in one, or each in one of its own."""
    return [pieces] if pieces and together else [[piece] for piece in pieces]


@dataclass(frozen=True)
class Surroundings:
    """Properties of an engine that all its requests share."""

    end_tokens: frozenset[int]
    decode: Callable[..., str]
    """Returns the text of token ids, as PlainText does."""
    grammars: Grammars | None = None
    """Compiler of grammars; None where no request has one."""


@dataclass
class _Choosing:
    """State that the choice of a token depends on and changes, except the place in the grammar."""

    counts: Counter[int] = field(default_factory=Counter)
    """How often each token was generated."""
    generated: int = 0
    """Number of generated tokens, which decides by which random numbers the next one is drawn."""

    def copy(self) -> _Choosing:
        """Return a copy."""
        return _Choosing(self.counts.copy(), self.generated)

    def note(self, token: int) -> None:
        """Count a token."""
        self.counts[token] += 1
        self.generated += 1


class RequestState:
    """A waiting, running or ended request. Only this object calls its listener, and never after the last update."""

    def __init__(self, number: int, request: Request, listener: Listener, shared: Surroundings) -> None:
        self.number, self.request, self._listener = number, request, listener
        self.tokens = list(request.prompt)
        """Prompt tokens, followed by generated tokens."""
        self.table = BlockTable()
        self.timings = Timings(prompt_tokens=len(request.prompt))
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finished = False
        self._told_prompt = False
        self._shared = shared
        self._end_tokens = frozenset() if request.ignore_end_tokens else shared.end_tokens
        ends = self._end_tokens.union(request.stop_tokens)
        shown, least = frozenset(request.shown_special_tokens), request.min_new_tokens
        decode = partial(shared.decode, shown=shown) if shown else shared.decode
        self._stream = TextStream(list(request.prompt), request.max_new_tokens, ends, request.stop, decode, least)
        self._choosing = _Choosing()
        self._trial: _Choosing | None = None
        """State after the drafted tokens while tokens are drafted; None otherwise."""
        self.drafted: list[int] = []
        """Tokens that a draft proposes after `tokens`, for the next `take`."""
        self._penalised = frozenset(request.prompt) if request.sampling.repetition_penalty != 1 else frozenset()
        self.matcher: Matcher | None = None
        """The place in the grammar, once it is compiled. It follows the generated tokens, which a preemption keeps."""
        self.refusal = ""
        """Why the grammar cannot be compiled; empty if it can."""

    def compile(self) -> None:
        """Compile the grammar, if there is one. Any thread may do so before the request is scheduled; it never raises."""
        if not self.request.grammar or self.matcher is not None or self.refusal:
            return
        assert self._shared.grammars is not None, "a grammar needs a compiler of grammars"
        try:
            self.matcher = self._shared.grammars.matcher(self.request.grammar)
        except OptionError as error:
            self.refusal = str(error)
        except Exception:  # this request ends; the others go on
            logging.getLogger(__name__).exception("the grammar of request %d cannot be compiled", self.number)
            self.refusal = "the engine failed on this request's grammar; simplify it"

    def start(self, cached: int) -> bool:
        """Record that the request left the queue with `cached` tokens in the cache.

        Returns whether this is the first time.
        """
        if self.timings.started is not None:
            return False
        self.timings.started = time.monotonic()
        self.timings.cached_tokens = cached
        return True

    @property
    def unread(self) -> int:
        """Number of tokens that are not in the cache."""
        return len(self.tokens) - self.table.length

    @property
    def asks_for_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.request.prompt_logprobs and len(self.prompt_logprobs) < len(self.request.prompt) - 1

    def take_prompt(self, start: int, end: int, logits: Callable[[int, int], Tensor]) -> None:
        """Store the log-probabilities of the prompt tokens that follow the positions from `start` to `end`.

        `logits`: returns the logits [L, V] of a range of these positions, counted from `start`.
        """
        begin = len(self.prompt_logprobs)
        following = self.request.prompt[begin + 1 : end + 1]
        for first in range(0, len(following), HEAD_ROWS):
            targets = following[first : first + HEAD_ROWS]
            place = begin - start + first
            logits_LV = logits(place, place + len(targets))
            self.prompt_logprobs += described(logits_LV, targets, self.request.top_logprobs or 0)

    @property
    def room(self) -> int:
        """Number of tokens left up to the limit."""
        return self._stream.room

    def draft(self, logits_V: Tensor, greedy: int) -> bool:
        """Append a drafted token, chosen by a draft's logits as `take` chooses by the model's, with the same random number.

        Returns whether another one may follow. The grammar stays after the drafted tokens up to `settle`.
        """
        if self._trial is None:
            self._trial = self._choosing.copy()
        try:
            token = self._next_token(logits_V, greedy, self._trial)
            complete = self.matcher is not None and self.matcher.draft(token)
        except Exception:  # such as an extreme temperature; `take` ends the request if the text itself leads there
            return False
        self._trial.note(token)
        self.drafted.append(token)
        return not complete and token not in self._stream.end_tokens

    def settle(self) -> None:
        """End the drafting: the next choice is again that of the first token after `tokens`."""
        self._trial = None
        if self.matcher is not None:
            self.matcher.undo()

    def _next_token(self, logits_V: Tensor, greedy: int, choosing: _Choosing) -> int:
        """Return the next token; `greedy` is the most probable one. Raises OptionError if the grammar cannot be followed."""
        if self.matcher is not None and (token := self.matcher.only()) is not None:
            return token  # such as most of the names and brackets of a schema
        options, allowed_V = self.request.sampling, self._allowed(logits_V.shape[-1], choosing.generated)
        adjusted_V = penalised(logits_V, choosing.counts, options, self._penalised)
        if allowed_V is None and options.temperature == 0 and adjusted_V is logits_V:
            return greedy
        return sample_at(adjusted_V, options, choosing.generated, allowed_V)

    def _allowed(self, vocabulary: int, generated: int) -> Tensor | None:
        """Return the tokens that may follow so many generated ones, bool [V]; None for all.

        Before the minimum length, and where end tokens are ignored, a text ends only where its grammar leaves nothing else.
        """
        request, closed = self.request, frozenset[int]()
        if self.matcher is None and not request.min_new_tokens:
            return None
        allowed_V = None if self.matcher is None else self.matcher.allowed()
        if generated < request.min_new_tokens:
            closed = self._end_tokens.union(request.stop_tokens)
        if self.matcher is not None and request.ignore_end_tokens:
            closed |= self._shared.end_tokens
        if not closed:
            return allowed_V
        left_V = torch.ones(vocabulary, dtype=torch.bool) if allowed_V is None else allowed_V.clone()
        left_V[list(closed)] = False
        return left_V if bool(left_V.any()) else allowed_V

    def take(self, logits_RV: Tensor, greedy: Sequence[int]) -> None:
        """Choose the next token by the first row, and while it is the drafted one, the token after it by the next row.

        Append the tokens, and send one update to the listener. greedy: the most probable token of each row.
        """
        if self.timings.first_token is None:
            self.timings.first_token = time.monotonic()
        if self.request.max_new_tokens == 0:
            self._tell(finish_reason="length")
            return
        drafted, self.drafted = self.drafted, []
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        try:
            for row, best in enumerate(greedy):
                token = self._take_one(logits_RV[row], best)
                tokens.append(token)
                if self.request.top_logprobs is not None:
                    logprobs += described(logits_RV[row, None], [token], self.request.top_logprobs)
                if self._stream.finish_reason or drafted[row : row + 1] != [token]:
                    break
        finally:  # tokens that were chosen before an error are sent as well
            if tokens:
                self._tell(self._stream.finish_reason, self._stream.take(), tuple(tokens), tuple(logprobs))

    def _take_one(self, logits_V: Tensor, greedy: int) -> int:
        token = self._next_token(logits_V, greedy, self._choosing)
        complete = self.matcher is not None and self.matcher.take(token)
        self._choosing.note(token)
        self.tokens.append(token)
        self._stream.append(token, complete)
        self.timings.generated_tokens += 1
        return token

    def end(self, finish_reason: str, error: str = "") -> None:
        """Send the last update to the listener, unless it was sent before."""
        if not self.finished:
            self._tell(finish_reason, error=error)

    def _tell(
        self,
        finish_reason: str,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str = "",
    ) -> None:
        self.finished = bool(finish_reason)
        if self.finished:
            self.timings.finished = time.monotonic()
        prompt = None
        if self.request.prompt_logprobs and not self._told_prompt and self.timings.first_token is not None:
            prompt, self._told_prompt = tuple(self.prompt_logprobs), True
        timings, stop = (self.timings, self._stream.stop_string) if self.finished else (None, "")
        try:
            self._listener(Update(text, tokens, logprobs, prompt, finish_reason, error, timings, stop))
        except Exception:  # this request cannot be notified any more; the others go on
            logging.getLogger(__name__).exception("the listener of request %d failed; the request ends", self.number)
            self.finished = True


def described(logits_LV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return each token's log-probability at its position, with the `top` most probable tokens there."""
    logprobs_LV = F.log_softmax(logits_LV.float(), dim=-1)
    chosen = logprobs_LV.gather(1, torch.tensor(tokens, device=logits_LV.device)[:, None])[:, 0].tolist()
    best = logprobs_LV.topk(min(top, logits_LV.shape[-1]), dim=-1)
    tops = [tuple(zip(ids, values, strict=True)) for ids, values in zip(*(x.tolist() for x in best[::-1]), strict=True)]
    return [TokenLogprob(*each) for each in zip(tokens, chosen, tops, strict=True)]
