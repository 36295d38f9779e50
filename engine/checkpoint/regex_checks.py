"""A check for regular expressions of tokenizers (in Oniguruma's syntax) that can take exponential time.

A backtracking search for `(a+)+$` or `(a|aa)*$` tries exponentially many ways to split a text. Therefore a repeated
group that contains a choice or another repetition is refused, unless nothing that could fail comes after it. Features
that no published tokenizer uses are refused too: references to groups, recursion, conditions and code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PATTERN = 20_000
MAX_REPETITIONS = 4
"""Unbounded repetitions in one alternative; each multiplies the search time by the length of the text."""
MAX_COUNT = 1_000
MAX_DEPTH = 50
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_OPENING = re.compile(r"\(\?(?:[:=!>]|<[=!]|[imxWDSPy-]*:)|\((?!\?|\*)|\(\?<[A-Za-z_]\w*>")
_INLINE_FLAGS = re.compile(r"\(\?[imx-]+\)")
_COMMENT = re.compile(r"\(\?#[^)]*\)")
_REFERENCE = re.compile(r"\\(?:[1-9]|k[<']|g[<'])")


class _Refused(Exception):
    """A feature of the expression that is refused."""


@dataclass
class _Piece:
    """One atom with its quantifiers."""

    ambiguous: bool
    """Whether it can match one text in several ways."""
    explosive: bool
    """Whether it can match one text in exponentially many ways."""
    unbounded: int
    """Number of unbounded repetitions inside it."""
    count: int = 1
    """How often bounded repetitions duplicate it when they are expanded."""


def problem_of_regex(pattern: str) -> str | None:
    """Return the problem of an expression, worded to follow "which"; None if the expression is safe to search for."""
    if len(pattern) > MAX_PATTERN:
        return f"is longer than {MAX_PATTERN} characters"
    try:
        _Reader(pattern).read()
    except _Refused as error:
        return str(error)
    return None


class _Reader:
    """A parser for one expression, which understands as much as the check needs."""

    def __init__(self, pattern: str) -> None:
        self._text, self._place, self._depth = pattern, 0, 0

    def read(self) -> None:
        """Parse the whole expression. Raises _Refused if it may take exponential time."""
        self._alternatives(outermost=True)
        if self._place < len(self._text):
            raise _Refused("closes a group that was not opened")

    def _alternatives(self, outermost: bool = False) -> _Piece:
        """Parse alternatives up to the end of the group."""
        found = [self._alternative(outermost)]
        while self._text.startswith("|", self._place):
            self._place += 1
            found.append(self._alternative(outermost))
        unbounded = max(each.unbounded for each in found)
        ambiguous, count = len(found) > 1 or any(each.ambiguous for each in found), max(each.count for each in found)
        return _Piece(ambiguous, False, unbounded, count)

    def _alternative(self, outermost: bool) -> _Piece:
        pieces: list[_Piece] = []
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            piece = self._quantified(self._atom())
            if piece is not None:
                pieces.append(piece)
        # At the end of the expression, the first match is taken and no other way is tried.
        inner = pieces[:-1] if outermost else pieces
        if any(piece.explosive for piece in inner):
            raise _Refused("repeats a group that holds a repetition or a choice, which may take exponential time")
        unbounded = sum(piece.unbounded for piece in pieces)
        if unbounded > MAX_REPETITIONS:
            raise _Refused(f"has more than {MAX_REPETITIONS} repetitions in a row, which may take very long")
        count = max((piece.count for piece in pieces), default=1)
        return _Piece(any(piece.ambiguous for piece in pieces), False, unbounded, count)

    def _atom(self) -> _Piece | None:
        """Parse one character, class, anchor or group; return None for flags and comments."""
        text, place = self._text, self._place
        if text[place] == "\\":
            if _REFERENCE.match(text, place):
                raise _Refused("refers to a group")
            return self._escape()
        if text[place] == "[":
            self._class()
            return _Piece(False, False, 0)
        if text[place] != "(":
            self._place += 1
            return _Piece(False, False, 0)
        for skipped in (_INLINE_FLAGS, _COMMENT):
            if match := skipped.match(text, place):
                self._place = match.end()
                return None
        return self._group()

    def _escape(self) -> _Piece:
        match = re.compile(r"\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|.|$)", re.DOTALL).match(self._text, self._place)
        assert match is not None
        self._place = match.end()
        return _Piece(False, False, 0)

    def _class(self) -> None:
        """Skip a class of characters, which may contain other classes."""
        depth, first = 0, self._place
        while self._place < len(self._text):
            character = self._text[self._place]
            self._place += 2 if character == "\\" else 1
            if character == "[":
                depth += 1
                if self._text.startswith("^", self._place):
                    self._place += 1
                if self._text.startswith("]", self._place):  # a closing bracket in first position stands for itself
                    self._place += 1
            elif character == "]":
                depth -= 1
                if not depth:
                    return
        raise _Refused(f"opens a class at {first} and does not close it")

    def _group(self) -> _Piece:
        match = _OPENING.match(self._text, self._place)
        if match is None:
            raise _Refused("has a kind of group that no tokenizer needs")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Refused(f"nests groups more than {MAX_DEPTH} deep")
        self._place = match.end()
        inner = self._alternatives()
        if not self._text.startswith(")", self._place):
            raise _Refused("does not close a group")
        self._place += 1
        self._depth -= 1
        return _Piece(False, False, inner.unbounded, inner.count) if match[0] == "(?>" else inner

    def _quantified(self, atom: _Piece | None) -> _Piece | None:
        """Apply the quantifiers that follow an atom; several in a row act like nested groups."""
        if atom is None:
            return None
        while (match := _QUANTIFIER.match(self._text, self._place)) is not None:
            least, most = _counts(match)
            if least is None:
                self._place = match.end()
                continue  # braces that are not a quantifier stand for themselves
            self._place = match.end()
            suffix = self._text[self._place : self._place + 1]
            greedy = match[0][0] != "{"
            if suffix == "?" or (suffix == "+" and greedy):
                self._place += 1
            count = atom.count * max(1, least if most is None else most)
            if count > MAX_COUNT:
                raise _Refused(f"repeats something more than {MAX_COUNT} times")
            repeated = most is None or most > 1
            explosive = atom.explosive or (repeated and atom.ambiguous)
            possessive = suffix == "+" and greedy
            atom = _Piece(
                not possessive and (atom.ambiguous or most != least),
                explosive and not possessive,
                atom.unbounded + (most is None),
                count,
            )
        return atom


def _counts(match: re.Match[str]) -> tuple[int | None, int | None]:
    """Return the least and the largest number of repetitions (None: no limit); (None, None) for no quantifier."""
    fixed = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if match[0] in fixed:
        return fixed[match[0]]
    least, comma, most = match[1], match[2], match[3]
    if not least and not most:
        return None, None
    if len(least) > 6 or len(most) > 6:
        raise _Refused(f"repeats something more than {MAX_COUNT} times")
    if not comma:
        return int(least or most), int(least or most)
    return int(least or 0), int(most) if most else None
