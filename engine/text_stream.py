"""From tokens to text as they come: whole characters, and no more than what no stop string can take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

CONTEXT_TOKENS = 5
"""Last prompt tokens that are decoded with the first new ones, so that a space between the two is not lost."""


def plain_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, without special ones and otherwise as it is."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """One prompt and what follows it."""

    def __init__(
        self,
        prompt: list[int],
        limit: int,
        end_tokens: frozenset[int],
        stops: tuple[str, ...],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self._limit, self._end_tokens, self._stops = limit, end_tokens, stops
        self._longest_stop = max(map(len, stops), default=0)
        self._characters = Characters(prompt[-CONTEXT_TOKENS:], decode)
        self._taken = 0

    def append(self, token: int) -> None:
        """Take a token: extend the text, and end at an end token, a stop string or the limit."""
        self.tokens.append(token)
        ended = token in self._end_tokens
        last = ended or len(self.tokens) == self._limit
        piece = "" if ended else self._characters.add(token)
        if last:
            piece += self._characters.rest()
        searched_from = max(0, len(self.text) - self._longest_stop + 1)
        self.text += piece
        found = [place for stop in self._stops if (place := self.text.find(stop, searched_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        if found or last:
            self.finish_reason = "stop" if found or ended else "length"

    @property
    def room(self) -> int:
        """Tokens up to the limit."""
        return self._limit - len(self.tokens)

    def take(self) -> str:
        """The text since the last call, but for an end that may become a stop string."""
        end = len(self.text) if self.finish_reason else len(self.text) - held_back(self.text, self._stops)
        piece = self.text[self._taken : end]
        self._taken = end
        return piece


class Characters:
    """Tokens to text, in whole characters: one character may take several tokens, and one token end within another."""

    def __init__(self, context: list[int], decode: Callable[[list[int]], str]) -> None:
        """`context`: tokens before the first, decoded along because what a token reads as may depend on them."""
        self._decode = decode
        self._ids = list(context)
        self._begin = 0  # of the tokens that are decoded as context
        self._read = len(context)  # tokens whose text was given out

    def add(self, token: int) -> str:
        """The characters that are complete with this token."""
        self._ids.append(token)
        text = self._pending()
        return "" if text.endswith("\ufffd") else self._give(text)

    def rest(self) -> str:
        """What is left at the end, with U+FFFD for a character that was never completed."""
        return self._give(self._pending())

    def _pending(self) -> str:
        before = self._decode(self._ids[self._begin : self._read])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _give(self, text: str) -> str:
        if text:  # special tokens read as nothing, and are no use as context
            self._begin, self._read = self._read, len(self._ids)
        return text


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    lengths = (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
    return max(lengths, default=0)
