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
        self._limit, self._end_tokens = limit, end_tokens
        self._stops = [StopString(stop) for stop in stops]
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
        before = len(self.text)
        self.text += piece
        found = [before + place for stop in self._stops if (place := stop.find(piece)) is not None]
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
        held_back = max((stop.begun for stop in self._stops), default=0)
        end = len(self.text) if self.finish_reason else len(self.text) - held_back
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


class StopString:
    """Looks for a string in a text that comes in pieces, in time that grows with the text alone (Knuth et al. 1977)."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shorter = _borders(stop)
        self.begun = 0
        """Length of the longest end of the text so far that is a beginning of the string, but not all of it."""

    def find(self, piece: str) -> int | None:
        """Where the string begins, counted from the piece's first character (negative: before it); None where it does not.

        The first place counts, and nothing may follow the piece in which it was found.
        """
        for index, character in enumerate(piece):
            while self.begun and self._stop[self.begun] != character:
                self.begun = self._shorter[self.begun - 1]
            self.begun += self._stop[self.begun] == character
            if self.begun == len(self._stop):
                self.begun = 0
                return index + 1 - len(self._stop)
        return None


def _borders(stop: str) -> list[int]:
    """For each beginning of a string the length of the longest shorter one that it also ends in."""
    lengths, length = [0] * len(stop), 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = lengths[length - 1]
        length += stop[index] == stop[length]
        lengths[index] = length
    return lengths
