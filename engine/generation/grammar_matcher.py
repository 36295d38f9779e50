"""Text that follows a grammar: which tokens may come next, by llguidance (https://github.com/guidance-ai/llguidance).

A grammar is compiled once for a model's tokens and copied for each text. The copy takes the tokens of its text one by one
and says which may follow. A mask takes about 50 microseconds for a vocabulary of 128,000 tokens, and is computed without
Python's lock, so that the model can run meanwhile.

Shape suffixes: V vocabulary of the logits, which may be larger than the tokenizer's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import OptionError, is_panic
from engine.generation.guidance import first_line, guidance, guidance_tokens, parser_limits

KEPT_GRAMMARS = 16
"""Compiled grammars that are kept for further requests, the last ones used."""


class Grammars:
    """Compiles grammars for the tokens of one model. Any thread may use it."""

    def __init__(
        self, tokenizer: Callable[[], Any], vocabulary: int, end_tokens: Collection[int], drafts: bool = False
    ) -> None:
        """tokenizer: returns one that no other thread uses; called for the first grammar.

        vocabulary: that of the logits. end_tokens: those that may end a text. drafts: whether matchers take tokens on trial,
        for which each grammar is compiled twice: copies share their limits, and a trial must not use up those of the text.
        """
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, sorted(end_tokens)
        self._drafts = drafts
        self._tokens: Any = None
        self._kept: OrderedDict[str, list[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of a text.

        Compiling takes milliseconds, or seconds for a schema of thousands of properties. Raises OptionError for a grammar
        that cannot be compiled, and if llguidance is not installed.
        """
        with self._lock:
            made = self._kept.get(grammar)
        if made is None:  # others, which may be small, do not wait for it
            made = [self._compiled(grammar) for _ in range(1 + self._drafts)]
        with self._lock:
            self._kept[grammar] = made
            self._kept.move_to_end(grammar)
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            own, *trial = (each.deep_copy() for each in made)
        return Matcher(own, self._vocabulary, *trial)

    def _compiled(self, grammar: str) -> Any:
        library = guidance()
        with self._lock:
            if self._tokens is None:
                self._tokens = guidance_tokens(self._tokenizer(), self._vocabulary, self._end_tokens)
        made = _unpanicked(partial(library.LLMatcher, self._tokens, grammar, log_level=0, limits=parser_limits()))
        if made.is_error():
            raise OptionError(f"the grammar cannot be compiled: {first_line(made.get_error())}")
        return made


@dataclass
class _Place:
    """A place in a text, and what may follow there, once it is computed."""

    allowed_V: Tensor | None = None
    only: int | None = None
    failure: str = ""
    """Why no token may follow; empty if some may."""


class Matcher:
    """The place of one text in its grammar. One thread uses it at a time."""

    def __init__(self, own: Any, vocabulary: int, trial: Any = None) -> None:
        """own and trial: llguidance's matchers of one grammar, compiled apart; None where no tokens are taken on trial."""
        self._own, self._vocabulary, self._trial = own, vocabulary, trial
        self._place = _Place()
        self._ahead_own: Any = None
        """llguidance's matcher after the tokens that were taken on trial; None while there are none."""
        self._before = _Place()
        """The place before them."""
        self._ahead: list[tuple[int, _Place]] = []
        """Tokens that were taken on trial, and the place after each, which is kept if the text takes the same token."""

    def prepare(self) -> None:
        """Compute which tokens may follow, for `allowed`. It never raises."""
        place = self._place
        if place.allowed_V is not None:
            return
        allowed_V = np.zeros(self._vocabulary, dtype=bool)
        try:
            own = self._own if self._ahead_own is None else self._ahead_own
            bits = np.frombuffer(_unpanicked(own.compute_bitmask), dtype=np.uint8)
            allowed_V = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(bool)
            place.failure = first_line(own.get_error())
        except OptionError as error:
            place.failure = str(error)
        count = np.count_nonzero(allowed_V)
        if not count:
            place.failure = place.failure or "no token of this model continues it"
        place.only = int(allowed_V.argmax()) if count == 1 and not place.failure else None
        place.allowed_V = torch.from_numpy(allowed_V)

    def allowed(self) -> Tensor:
        """Return which tokens may follow, bool [V] on the CPU; the end tokens are among them where the text may end.

        Raises OptionError if the grammar became too large to follow, or no token of the model continues the text.
        """
        self.prepare()
        assert self._place.allowed_V is not None
        if self._place.failure:
            raise _ended(self._place.failure)
        return self._place.allowed_V

    def only(self) -> int | None:
        """Return the one token that may follow; None if several may, or none."""
        self.prepare()
        return self._place.only

    def take(self, token: int) -> bool:
        """Take the token that follows the text, one of the allowed ones. Returns whether only an end may follow it.

        Raises OptionError if the grammar became too large to follow.
        """
        token_and_place = self._ahead.pop(0) if self._ahead else (token, _Place())
        if token_and_place[0] != token or token_and_place[1].failure:  # an error on trial is not one of the text
            self._ahead, token_and_place = [], (token, _Place())
        self._place = token_and_place[1]
        if self._trial is not None and not self._trial.consume_token(token):
            self._trial = None
        return _consumed(self._own, token)

    def draft(self, token: int) -> bool:
        """Take a token on trial, up to `undo`. Returns and raises as `take` does, and raises where no trial is possible."""
        if self._trial is None:
            raise _ended("no tokens can be taken on trial")
        if self._ahead_own is None:
            self._ahead_own, self._before, self._ahead = self._trial.deep_copy(), self._place, []  # takes microseconds
        complete = _consumed(self._ahead_own, token)
        self._place = _Place()
        self._ahead.append((token, self._place))
        return complete

    def undo(self) -> None:
        """Go back before the tokens that were taken on trial. What may follow each is kept, and not computed again."""
        if self._ahead_own is not None:
            self._ahead_own, self._place = None, self._before


def _consumed(own: Any, token: int) -> bool:
    """Let llguidance's matcher take a token; return whether only an end may follow. Raises OptionError."""
    if not _unpanicked(partial(own.consume_token, token)):
        raise _ended(first_line(own.get_error()))
    return bool(own.is_stopped())


def _unpanicked(call: Callable[[], Any]) -> Any:
    """Return what a call of the library returns. Raises OptionError if it panics, which is no Exception."""
    try:
        return call()
    except BaseException as error:
        if not is_panic(error):
            raise
        raise OptionError("llguidance fails on this grammar; simplify it") from error


def _ended(reason: str) -> OptionError:
    return OptionError(f"the text cannot follow its grammar any further: {reason}; ask for a simpler one")
