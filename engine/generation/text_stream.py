"""Incremental detokenization: tokens to text in whole characters, holding back text that may become a stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

CONTEXT_TOKENS = 5
"""Number of last prompt tokens decoded with the first new ones, so that a space between the two is not lost."""


def plain_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, without special tokens and without any cleanup of spaces."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class PlainText:
    """Decodes the tokens of one tokenizer as `plain_text` does, and keeps special tokens that a caller names."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, ids: Sequence[int], shown: Collection[str] = ()) -> str:
        """Return the text of tokens without special tokens, except those whose text is in `shown`."""
        if not shown:
            return plain_text(self._tokenizer, ids)
        kept = [token for token in ids if (name := self._special.get(token)) is None or name in shown]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _special(self) -> dict[int, str]:
        return special_tokens(self._tokenizer)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of a transformers tokenizer's special tokens, by id."""
    return {token: str(about.content) for token, about in tokenizer.added_tokens_decoder.items() if about.special}


class TextStream:
    """One prompt and its continuation."""

    def __init__(
        self,
        prompt: list[int],
        limit: int,
        end_tokens: frozenset[int],
        stops: tuple[str, ...],
        decode: Callable[[list[int]], str],
        least: int = 0,
    ) -> None:
        """least: number of tokens before which the text has no stop strings."""
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self.stop_string = ""
        """The stop string that ended the text; empty if none did."""
        self._limit, self.end_tokens, self._least = limit, end_tokens, least
        self._stops = {stop: StopString(stop) for stop in stops}
        self._characters = Characters(prompt[-CONTEXT_TOKENS:], decode)
        self._taken = 0

    def append(self, token: int, complete: bool = False) -> None:
        """Append a token: extend the text, and end at an end token, a stop string, the limit, or where it is complete."""
        self.tokens.append(token)
        ended = token in self.end_tokens
        last = ended or complete or len(self.tokens) == self._limit
        piece = "" if ended else self._characters.add(token)
        if last:
            piece += self._characters.rest()
        before = len(self.text)
        self.text += piece
        stops = self._stops.items() if len(self.tokens) > self._least else ()
        searched = ((name, stop.find(piece)) for name, stop in stops)
        found = [(before + place, name) for name, place in searched if place is not None]
        if found:
            end, self.stop_string = min(found)
            self.text = self.text[:end]
        if found or last:
            self.finish_reason = "stop" if found or ended or complete else "length"

    @property
    def room(self) -> int:
        """Number of tokens left up to the limit."""
        return self._limit - len(self.tokens)

    def take(self) -> str:
        """Return the text since the last call, except an ending that may become a stop string."""
        held_back = max((stop.begun for stop in self._stops.values()), default=0)
        end = len(self.text) if self.finish_reason else len(self.text) - held_back
        piece = self.text[self._taken : end]
        self._taken = end
        return piece


class Characters:
    """Decodes tokens in whole characters: a character may take several tokens, and a token may end within a character."""

    def __init__(self, context: list[int], decode: Callable[[list[int]], str]) -> None:
        """`context`: tokens before the first; they are decoded too, because the text of a token may depend on them."""
        self._decode = decode
        self._ids = list(context)
        self._begin = 0  # start of the tokens that are decoded as context
        self._read = len(context)  # number of tokens whose text was returned

    def add(self, token: int) -> str:
        """Return the characters that this token completes."""
        self._ids.append(token)
        text = self._pending()
        return "" if text.endswith("\ufffd") else self._give(text)

    def rest(self) -> str:
        """Return the remaining text, with U+FFFD for a character that was never completed."""
        return self._give(self._pending())

    def _pending(self) -> str:
        before = self._decode(self._ids[self._begin : self._read])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _give(self, text: str) -> str:
        if text:  # special tokens have no text, and are of no use as context
            self._begin, self._read = self._read, len(self._ids)
        return text


class StopString:
    """Searches for a string in a text that comes in pieces, in time linear in the text (Knuth et al. 1977)."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shorter = _borders(stop)
        self.begun = 0
        """Length of the longest suffix of the text so far that is a proper prefix of the string."""

    def find(self, piece: str) -> int | None:
        """Return the position of the string relative to the piece's first character (negative: before it), or None.

        Only the first match is reported; no piece may follow the one that completed the match.
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
    """Return for each prefix of a string the length of its longest proper border (both prefix and suffix)."""
    lengths, length = [0] * len(stop), 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = lengths[length - 1]
        length += stop[index] == stop[length]
        lengths[index] = length
    return lengths
