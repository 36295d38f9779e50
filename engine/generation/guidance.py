"""llguidance, which follows grammars (https://github.com/guidance-ai/llguidance), and a model's tokens in its form.

Without torch: schemas and grammars are checked in the process that reads requests.
"""

from __future__ import annotations

from typing import Any

from engine.errors import OptionError
from engine.generation.token_text import TokenText

MOST_LEXER_STATES = 50_000
"""States that the lexer of one text may have, of up to 2 kB each."""


def guidance() -> Any:
    """Return the module llguidance. Raises OptionError if it is not installed."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise OptionError(
            "output that follows a schema or a grammar needs the package llguidance, which is not installed: "
            "pip install 'moe-compress[serve]'"
        ) from error
    return llguidance


def parser_limits() -> Any:
    """Return the limits on the work of one grammar: llguidance's own, with fewer states and shorter messages."""
    return guidance().LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)


def first_line(message: str) -> str:
    """Return the first line of a message of llguidance, whose others show its state."""
    return message.strip().partition("\n")[0][:200]


def guidance_tokens(tokenizer: Any, vocabulary: int, end_tokens: list[int]) -> Any:
    """Return llguidance's form of a model's tokens: the bytes of each, and a function that encodes text.

    A model without end tokens gets one beyond its vocabulary, which it never generates: its texts end only where their
    grammar leaves nothing else.
    """
    library = guidance()
    ends = end_tokens or [vocabulary]
    tokens = Tokens(tokenizer, max(vocabulary, ends[-1] + 1), ends)
    return library.LLTokenizer(library.TokenizerWrapper(tokens), n_vocab=len(tokens.tokens), eos_token=ends)


class Tokens:
    """Tokens in the form that llguidance's TokenizerWrapper reads. Special tokens and the ends are no text."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: list[int]) -> None:
        self._tokenizer, words = tokenizer, TokenText(tokenizer)
        self.eos_token_id, self.bos_token_id = end_tokens[0], None
        special = {token for token, about in tokenizer.added_tokens_decoder.items() if about.special}
        self._special = special.union(end_tokens)
        self.tokens = [words.data(token) for token in range(vocabulary)]
        """Bytes of each token; empty for those that pad the vocabulary."""
        self.special_token_ids = sorted(self._special)
        self._by_bytes = {data: token for token, data in enumerate(self.tokens) if data and token not in self._special}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text. Where a grammar leaves one text only, llguidance allows just these tokens.

        They are the tokenizer's own if these have the text's bytes: some tokenizers add a space, change letters, or take the
        name of a special token for the token.
        """
        try:
            ids = list(self._tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"])
        except UnicodeDecodeError:
            ids = []
        is_plain = self._special.isdisjoint(ids) and b"".join(self.tokens[token] for token in ids) == text
        return ids if is_plain else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Return tokens with the bytes of the text, each the longest possible, up to bytes that no token has."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            found = next((end for end in ends if text[start:end] in self._by_bytes), None)
            if found is None:
                break
            ids.append(self._by_bytes[text[start:found]])
            start = found
        return ids
