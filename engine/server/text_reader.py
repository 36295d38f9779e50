"""From texts and messages to token ids, in the process that reads requests: no torch, and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.checkpoint.chat_template import DEFAULT_TEMPLATE, render
from engine.errors import OptionError


@dataclass(frozen=True)
class TokenizerSettings:
    """A tokenizer as it is given to another process, which loads no model."""

    tokenizer: str | None
    """The content of tokenizer.json; None for a tokenizer that is not in that form, which is loaded from `directory`."""
    directory: str
    vocabulary: int
    begin_token: int | None
    chat_template: str | None
    """None for a model without a template of its own."""
    splits_special_tokens: bool = False
    special_tokens: dict[str, Any] = field(default_factory=dict)
    """By the names that templates call them."""


def tokenizer_settings(tokenizer: Any, directory: Path, vocabulary: int) -> TokenizerSettings:
    """The settings of a transformers tokenizer of a model in `directory` that knows so many tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return TokenizerSettings(
        tokenizer=None if backend is None else backend.to_str(),
        directory=str(directory),
        vocabulary=vocabulary,
        begin_token=tokenizer.bos_token_id,
        chat_template=template or None,
        splits_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        special_tokens={name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)},
    )


class _Tokens(Protocol):
    """The operations of a tokenizer that reading needs."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def vocabulary(self) -> Mapping[str, int]: ...


class _FastTokens:
    """A tokenizer of the tokenizers library, used as transformers uses it."""

    def __init__(self, settings: TokenizerSettings) -> None:
        from tokenizers import Tokenizer

        assert settings.tokenizer is not None
        self._own = Tokenizer.from_str(settings.tokenizer)
        self._own.no_truncation()
        self._own.no_padding()
        self._own.encode_special_tokens = settings.splits_special_tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._own.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._own.decode(list(ids), skip_special_tokens=True))

    @property
    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._own.get_vocab(with_added_tokens=True))


class _SlowTokens:
    """A tokenizer that only transformers reads."""

    def __init__(self, settings: TokenizerSettings) -> None:
        from engine.checkpoint.tokenizer import load_tokenizer_of

        self._own = load_tokenizer_of(Path(settings.directory), settings.vocabulary)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._own(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._own.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._own.get_vocab())


class TextReader:
    """One tokenizer with its chat template."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self._settings = settings
        self._tokens: _Tokens = _SlowTokens(settings) if settings.tokenizer is None else _FastTokens(settings)
        self.longest_token_bytes = max((len(token.encode()) for token in self._tokens.vocabulary), default=1)
        """No token stands for more bytes of UTF-8 than this."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokens.encode(text, add_special_tokens)

    def prompt(self, text: str) -> list[int]:
        """The same with a token to begin with. Raises OptionError for an empty text where the model has no such token."""
        ids = self.encode(text)
        if not ids and self._settings.begin_token is not None:
            ids = [self._settings.begin_token]
        if not ids:
            raise OptionError("the prompt is empty and this model has no token to begin with; give a prompt")
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._tokens.decode(ids)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that an answer to the messages follows. Raises OptionError for messages that the template refuses."""
        return render(self._settings.chat_template or DEFAULT_TEMPLATE, messages, self._settings.special_tokens)

    def conversation_ids(self, text: str) -> list[int]:
        """Token ids of what `conversation` gave. Raises OptionError where there are none."""
        # A template writes the special tokens itself; the default one has none, so that the tokenizer's own are right.
        ids = self.encode(text, add_special_tokens=self._settings.chat_template is None)
        if not ids:
            raise OptionError("the messages make no token; say something in them")
        return ids
