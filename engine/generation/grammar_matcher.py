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

    def __init__(self, tokenizer: Callable[[], Any], vocabulary: int, end_tokens: Collection[int]) -> None:
        """tokenizer: returns one that no other thread uses; called for the first grammar.

        vocabulary: that of the logits. end_tokens: those that may end a text.
        """
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, sorted(end_tokens)
        self._tokens: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of a text.

        Compiling takes milliseconds, or seconds for a schema of thousands of properties. Raises OptionError for a grammar
        that cannot be compiled, and if llguidance is not installed.
        """
        with self._lock:
            made = self._kept.get(grammar)
        if made is None:
            made = self._compiled(grammar)  # others, which may be small, do not wait for it
        with self._lock:
            self._kept[grammar] = made
            self._kept.move_to_end(grammar)
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return Matcher(made.deep_copy(), self._vocabulary)

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

    def __init__(self, own: Any, vocabulary: int) -> None:
        self._own, self._vocabulary = own, vocabulary
        self._place = _Place()
        self._certain: tuple[Any, _Place] | None = None
        """llguidance's matcher and the place before the tokens that were taken on trial; None while there are none."""
        self._ahead: list[tuple[int, _Place]] = []
        """Tokens that were taken on trial, and the place after each, for the text that may go there."""

    def prepare(self) -> None:
        """Compute which tokens may follow, for `allowed`. It never raises."""
        place = self._place
        if place.allowed_V is not None:
            return
        allowed_V = np.zeros(self._vocabulary, dtype=bool)
        try:
            bits = np.frombuffer(_unpanicked(self._own.compute_bitmask), dtype=np.uint8)
            allowed_V = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(bool)
            place.failure = first_line(self._own.get_error())
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
        is_known = bool(self._ahead) and self._ahead[0][0] == token
        self._place = self._ahead.pop(0)[1] if is_known else _Place()
        if not is_known:
            self._ahead.clear()
        return self._consumed(token)

    def draft(self, token: int) -> bool:
        """Take a token on trial, up to `undo`. Returns and raises as `take` does."""
        if self._certain is None:
            self._certain = self._own, self._place
            # Copying takes microseconds, and an error of the copy leaves the original alone.
            self._own, self._ahead = self._own.deep_copy(), []
        complete = self._consumed(token)
        self._place = _Place()
        self._ahead.append((token, self._place))
        return complete

    def undo(self) -> None:
        """Go back before the tokens that were taken on trial. What may follow each is kept, and not computed again."""
        if self._certain is not None:
            (self._own, self._place), self._certain = self._certain, None

    def _consumed(self, token: int) -> bool:
        if not _unpanicked(partial(self._own.consume_token, token)):
            raise _ended(first_line(self._own.get_error()))
        return bool(self._own.is_stopped())


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
