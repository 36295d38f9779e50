"""Tokenization of texts and messages in the process that reads requests, without torch and without a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.checkpoint.chat_template import DEFAULT_TEMPLATE, render
from engine.errors import OptionError
from engine.generation.text_stream import special_tokens


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a tokenizer for another process, which loads no model."""

    tokenizer: str | None
    """Content of tokenizer.json; None for a tokenizer without this file, which is loaded from `directory`."""
    directory: str
    vocabulary: int
    begin_token: int | None
    chat_template: str | None
    """The model's chat template; None for a model without one."""
    tool_template: str | None = None
    """Another template for conversations with tools; None if there is one for all."""
    splits_special_tokens: bool = False
    special_tokens: dict[str, Any] = field(default_factory=dict)
    """Special tokens by their names in chat templates."""


def tokenizer_settings(tokenizer: Any, directory: Path, vocabulary: int) -> TokenizerSettings:
    """Return the settings of a transformers tokenizer, for the model in `directory` with `vocabulary` tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    template = tokenizer.chat_template
    named = template if isinstance(template, dict) else {"default": template}
    return TokenizerSettings(
        tokenizer=None if backend is None else backend.to_str(),
        directory=str(directory),
        vocabulary=vocabulary,
        begin_token=tokenizer.bos_token_id,
        chat_template=named.get("default") or None,
        tool_template=named.get("tool_use") or None,
        splits_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        special_tokens={name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)},
    )


class _Tokens(Protocol):
    """Interface of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def vocabulary(self) -> Mapping[str, int]: ...

    @property
    def special(self) -> Mapping[str, int]: ...


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

    @property
    def special(self) -> Mapping[str, int]:
        return {about.content: token for token, about in self._own.get_added_tokens_decoder().items() if about.special}


class _SlowTokens:
    """A tokenizer that only transformers supports."""

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

    @property
    def special(self) -> Mapping[str, int]:
        return {text: token for token, text in special_tokens(self._own).items()}


class TextReader:
    """A tokenizer with its chat template."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self._settings = settings
        self._tokens: _Tokens = _SlowTokens(settings) if settings.tokenizer is None else _FastTokens(settings)
        self.longest_token_bytes = max((len(token.encode()) for token in self._tokens.vocabulary), default=1)
        """Maximum number of UTF-8 bytes of one token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._tokens.encode(text, add_special_tokens)

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt; an empty text becomes the model's begin token.

        Raises OptionError for an empty text if the model has no such token.
        """
        ids = self.encode(text)
        if not ids and self._settings.begin_token is not None:
            ids = [self._settings.begin_token]
        if not ids:
            raise OptionError("the prompt is empty and this model has no begin token; give a prompt")
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._tokens.decode(ids)

    @property
    def template(self) -> str:
        """The chat template."""
        return self._settings.chat_template or DEFAULT_TEMPLATE

    @property
    def tool_template(self) -> str:
        """The chat template of conversations with tools."""
        return self._settings.tool_template or self.template

    def is_special_name(self, name: str) -> bool:
        """Return whether a special token has this name in chat templates, such as `bos_token`."""
        return name in self._settings.special_tokens

    def special_ids(self, texts: Collection[str]) -> dict[str, int]:
        """Return the ids of those texts that are special tokens."""
        return {text: token for text, token in self._tokens.special.items() if text in texts}

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of the messages, ready for the answer. tools, variables: as for `chat_template.render`.

        Raises OptionError for messages that the template refuses.
        """
        template = self.tool_template if tools else self.template
        return render(template, messages, self._settings.special_tokens, tools, variables)

    def conversation_ids(self, text: str) -> list[int]:
        """Return the token ids of a text from `conversation`. Raises OptionError if there are none."""
        # A template writes the special tokens itself. The default template has none, so the tokenizer adds them.
        ids = self.encode(text, add_special_tokens=self._settings.chat_template is None)
        if not ids:
            raise OptionError("the messages contain no tokens; add some text")
        return ids
