"""Single tokens as text and bytes, for log-probabilities: a token may hold only a part of a character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """The text and bytes of each token of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(token for token, about in added.items() if about.special)
        self._added = {token: str(about.content) for token, about in added.items()}
        decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._alphabet = byte_alphabet() if "ByteLevel" in decoder else {}
        self._kept: dict[int, bytes] = {}

    def data(self, token: int) -> bytes:
        """Return the token's bytes: UTF-8, possibly a part of a character; for a special token its name."""
        if token not in self._kept:
            self._kept[token] = self._data(token)
        return self._kept[token]

    def in_text(self, token: int) -> bytes:
        """Return the token's bytes in the text of an answer, where special tokens are left out."""
        return b"" if token in self._special else self.data(token)

    def name(self, token: int) -> str:
        """Return the token's text, or the form `bytes:\\xe2\\x80` if it is not whole characters."""
        data = self.data(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _data(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""  # a padding token of the model's vocabulary
        if self._alphabet and all(letter in self._alphabet for letter in piece):
            return bytes(self._alphabet[letter] for letter in piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("▁", " ").encode()


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each letter in byte-level tokenizers: printable bytes are themselves, others come after 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
