"""Responses in OpenAI's format: updates of the engine as JSON, complete or in the chunks of a stream.

The choices of an answer are ordered by prompt. Offsets count characters of a choice's text.
"""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.batching.request import Request, Timings, TokenLogprob, Update
from engine.generation.token_text import TokenText
from engine.replies.reply import ReplyForm
from engine.replies.table import NONE
from engine.server.reply_message import ReplyMessage
from engine.server.requests import Asked

Json = dict[str, Any]
Scored = tuple[int, TokenLogprob | None]
"""A token with its log-probability; None for the first token of a prompt, which has no preceding token."""


@dataclass
class _Choice:
    """One answer so far."""

    begun: bool = False
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str = ""
    timings: Timings | None = None
    characters: int = 0
    """Length of the text of the tokens that have offsets, in characters."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("ignore"))


@dataclass(frozen=True)
class Piece:
    """The part that one update adds to a choice."""

    text: str
    scored: Sequence[Scored]
    finish_reason: str | None


class Answer:
    """The JSON of one body's requests; subclasses define the format of a choice."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, asked: Asked, model: str, words: TokenText, *, include_usage: bool = False) -> None:
        """`include_usage`: whether a stream ends with a usage chunk, which the other chunks announce."""
        self._asked, self._words, self._include_usage = asked, words, include_usage
        self._choices = [_Choice() for _ in asked.requests]
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def take(self, index: int, update: Update) -> Piece:
        """Add an update to its choice and return the added piece."""
        choice, request = self._choices[index], self._asked.requests[index]
        text, scored = update.text, [(each.token, each) for each in update.logprobs]
        if self._asked.echoes and not choice.begun:
            text = self._asked.echoes[index // self._asked.choices] + text
        choice.begun = True
        piece = Piece(text, [*_of_prompt(request, update), *scored], update.finish_reason or None)
        choice.text += text
        choice.scored.extend(piece.scored)
        choice.finish_reason, choice.stop_string = piece.finish_reason, update.stop_string
        choice.timings = update.timings or choice.timings
        return piece

    def chunk(self, index: int, piece: Piece) -> Json | None:
        """Return a piece as the chunk of a stream; None for an empty piece."""
        if self._is_empty(piece):
            return None
        choice = self._choices[index]
        chunk, ended = self._chunk([self._streamed(index, piece) | _stop_reason(choice)]), choice.timings
        return chunk | {"timings": timings([ended])} if piece.finish_reason and ended else chunk

    def whole(self) -> Json:
        """Return the complete answer when all choices have ended."""
        choices = []
        for index, choice in enumerate(self._choices):
            piece = Piece(choice.text, choice.scored, choice.finish_reason)
            choices.append(self._complete(index, piece) | _stop_reason(choice))
        known = [choice.timings for choice in self._choices if choice.timings]
        return self._head | {
            "object": self.kind,
            "choices": choices,
            "usage": self._usage(),
            "timings": timings(known) if known else None,
        }

    def opening(self) -> list[Json]:
        """Return the chunks that come before any text."""
        return []

    def usage_chunk(self) -> list[Json]:
        """Return the usage chunk before the end of a stream, if it was requested."""
        return [self._chunk([]) | {"usage": self._usage()}] if self._include_usage else []

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._head | {"object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _usage(self) -> Json:
        prompts = self._choices[:: self._asked.choices]
        read = sum(len(request.prompt) for request in self._asked.requests[:: self._asked.choices])
        new = sum(choice.timings.generated_tokens for choice in self._choices if choice.timings)
        cached = sum(choice.timings.cached_tokens for choice in prompts if choice.timings)
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _is_empty(self, piece: Piece) -> bool:
        return not (piece.text or piece.scored or piece.finish_reason)

    def _streamed(self, index: int, piece: Piece) -> Json:
        raise NotImplementedError

    def _complete(self, index: int, piece: Piece) -> Json:
        raise NotImplementedError


@dataclass(frozen=True)
class ChatPiece(Piece):
    """The part that one update adds to a choice of a chat."""

    thought: str = ""
    calls: Sequence[Json] = ()
    """Parts of calls, each with its `index`, as the delta of a chunk has them."""


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions. Reasoning and calls are taken out of the text as it comes."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Asked, model: str, words: TokenText, *, include_usage: bool = False) -> None:
        super().__init__(asked, model, words, include_usage=include_usage)
        form = asked.form or ReplyForm()
        self._thinks = form.reasoning != NONE
        self._messages = [ReplyMessage(form) for _ in asked.requests]

    def take(self, index: int, update: Update) -> ChatPiece:
        """Add an update to its choice and return the added piece."""
        piece, message = super().take(index, update), self._messages[index]
        text, thought, calls = message.add(piece.text, ended=piece.finish_reason is not None)
        reason = "tool_calls" if piece.finish_reason == "stop" and message.calls else piece.finish_reason
        self._choices[index].finish_reason = reason
        return ChatPiece(text, piece.scored, reason, thought, calls)

    def opening(self) -> list[Json]:
        """Return the chunks that give the role of the speaker."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([_choice(index, delta=delta)]) for index in range(len(self._choices))]

    def _is_empty(self, piece: Piece) -> bool:
        return super()._is_empty(piece) and not (isinstance(piece, ChatPiece) and (piece.thought or piece.calls))

    def _streamed(self, index: int, piece: Piece) -> Json:
        assert isinstance(piece, ChatPiece)
        delta: Json = {"reasoning_content": piece.thought} if piece.thought else {}
        if piece.text or (piece.scored and not piece.thought and not piece.calls):
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = list(piece.calls)
        return _choice(index, piece.finish_reason, self._logprobs(index, piece), delta=delta)

    def _complete(self, index: int, piece: Piece) -> Json:
        own = self._messages[index]
        message: Json = {"role": "assistant", "content": own.text or (None if own.calls else ""), "refusal": None}
        if self._thinks:
            message["reasoning_content"] = own.thought or None
        if own.calls:
            message["tool_calls"] = own.calls
        return _choice(index, piece.finish_reason, self._logprobs(index, piece), message=message)

    def _logprobs(self, index: int, piece: Piece) -> Json | None:
        if self._asked.requests[index].top_logprobs is None:
            return None
        content = []
        for token, scored in piece.scored:
            assert scored is not None
            top = [self._named(other, logprob) for other, logprob in scored.top]
            content.append(self._named(token, scored.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> Json:
        return {"token": self._words.name(token), "logprob": logprob, "bytes": list(self._words.data(token))}


class CompletionAnswer(Answer):
    """Answer of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _streamed(self, index: int, piece: Piece) -> Json:
        return _choice(index, piece.finish_reason, self._logprobs(index, piece), text=piece.text)

    def _complete(self, index: int, piece: Piece) -> Json:
        return _choice(index, piece.finish_reason, self._logprobs(index, piece), text=piece.text)

    def _logprobs(self, index: int, piece: Piece) -> Json | None:
        """Return log-probabilities as parallel lists, for the tokens of the piece."""
        request = self._asked.requests[index]
        if request.top_logprobs is None:
            return None
        choice = self._choices[index]
        offsets = [self._offset(choice, token) for token, _ in piece.scored]
        return {
            "tokens": [self._words.name(token) for token, _ in piece.scored],
            "token_logprobs": [scored.logprob if scored else None for _, scored in piece.scored],
            "top_logprobs": [self._top(scored) if scored else None for _, scored in piece.scored],
            "text_offset": offsets,
        }

    def _offset(self, choice: _Choice, token: int) -> int:
        """Return the offset at which a token begins, and add the token's length."""
        start = choice.characters
        read = choice.decoder.decode(self._words.in_text(token))
        if self._asked.echoes and start == 0 and read.startswith(" ") and not choice.text.startswith(" "):
            read = read[1:]  # decoders drop the space of the first word
        choice.characters += len(read)
        return start

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        """Return log-probabilities by token name, best first, the token itself last; of equal names the better counts."""
        top: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            top.setdefault(self._words.name(token), logprob)
        return top


def _of_prompt(request: Request, update: Update) -> list[Scored]:
    if update.prompt_logprobs is None:
        return []
    return [(request.prompt[0], None), *((each.token, each) for each in update.prompt_logprobs)]


def _choice(index: int, finish_reason: str | None = None, logprobs: Json | None = None, **own: Any) -> Json:
    return {"index": index, **own, "logprobs": logprobs, "finish_reason": finish_reason}


def _stop_reason(choice: _Choice) -> Json:
    """Return the field that names the stop string by which a choice has ended; other ends have no such field."""
    return {"stop_reason": choice.stop_string} if choice.stop_string else {}


def timings(several: Sequence[Timings]) -> Json:
    """Return counts, and times in milliseconds from the first start to the last end; rates are null if undefined."""
    started = min(each.arrived if each.started is None else each.started for each in several)
    ends = [each.arrived if each.finished is None else each.finished for each in several]
    firsts = [end if each.first_token is None else each.first_token for each, end in zip(several, ends, strict=True)]
    cached = sum(each.cached_tokens for each in several)
    prompt = sum(each.prompt_tokens for each in several) - cached
    predicted = sum(each.generated_tokens for each in several)
    prompt_ms, predicted_ms = 1000 * (max(firsts) - started), 1000 * (max(ends) - min(firsts))
    return {
        "cache_n": cached,
        **_rates("prompt", prompt, prompt_ms),
        **_rates("predicted", predicted, predicted_ms),
    }


def _rates(name: str, count: int, milliseconds: float) -> Json:
    return {
        f"{name}_n": count,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / count if count > 0 else None,
        f"{name}_per_second": 1000 * count / milliseconds if count > 0 and milliseconds > 0 else None,
    }
