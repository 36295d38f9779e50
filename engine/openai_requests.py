"""From a body in OpenAI's form to requests to the engine."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.chat_template import conversation, has_template
from engine.errors import OptionError
from engine.generate import Engine
from engine.onnx_runtime import OnnxDecoder
from engine.openai_errors import ApiError
from engine.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    Message,
    TokenizeRequest,
    content_text,
    refuse,
)
from engine.request import Request
from engine.sampling import SamplingOptions
from engine.text_stream import plain_text
from engine.token_text import TokenText

COMPLETION_TOKENS = 16
"""Of a completion that does not say how many; a chat may use all the room there is."""
TEMPERATURE = 1.0
"""Where a body names none, as clients of this interface expect."""


@dataclass(frozen=True)
class Asked:
    """Requests to the engine that one body makes: each prompt `choices` times, with seeds that differ."""

    requests: tuple[Request, ...]
    choices: int
    echoes: tuple[str, ...] = ()
    """The text of each prompt, where answers are to repeat it."""


class Reader:
    """Reads bodies for one engine. Its methods tokenize, so they are for worker threads; they take turns."""

    def __init__(self, engine: Engine, max_model_length: int, skip_threshold: float) -> None:
        """`skip_threshold`: the engine's own, and the most that a request may ask for."""
        self._engine, self._max_length, self._skip_threshold = engine, max_model_length, skip_threshold
        self._vocabulary = engine.checkpoint.config.vocabulary_size
        self._turn = threading.Lock()  # a tokenizer changes its settings when first used
        self.words = TokenText(engine.tokenizer)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template of its own."""
        return has_template(self._engine.tokenizer)

    def chat(self, body: ChatCompletionRequest) -> Asked:
        """The requests of a chat completion. Raises ApiError and OptionError."""
        refuse(body)
        prompt = self._conversation(body.messages)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        top = (body.top_logprobs or 0) if body.logprobs else None
        return self._asked(body, [prompt], limit, self._max_length, top)

    def completion(self, body: CompletionRequest) -> Asked:
        """The requests of a completion. Raises ApiError and OptionError."""
        refuse(body)
        prompts = self._prompts(body.prompt)
        asked = self._asked(body, [ids for ids, _ in prompts], body.max_tokens, COMPLETION_TOKENS, body.logprobs)
        if not body.echo:
            return asked
        scored = body.logprobs is not None
        requests = tuple(replace(request, prompt_logprobs=scored) for request in asked.requests)
        return Asked(requests, asked.choices, tuple(text for _, text in prompts))

    def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """The answer of /tokenize. Raises ApiError and OptionError."""
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt or messages, one of them", param="prompt")
        if body.messages is not None:
            ids = self._conversation(body.messages)
        else:
            special = body.add_special_tokens is not False
            with self._turn:
                ids = list(self._engine.tokenizer(body.prompt, add_special_tokens=special, verbose=False)["input_ids"])
        return {"tokens": ids, "count": len(ids), "max_model_len": self._max_length}

    def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """The answer of /detokenize. Raises ApiError."""
        return {"prompt": self._text(self._known(body.tokens, "tokens"))}

    def _conversation(self, messages: Sequence[Message]) -> list[int]:
        turns = []
        for message in messages:
            role = "system" if message.role == "developer" else message.role
            turns.append(message.model_dump(exclude_none=True) | {"role": role, "content": content_text(message)})
        with self._turn:
            return conversation(self._engine.tokenizer, turns)

    def _prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[tuple[list[int], str]]:
        """Tokens and text of each."""
        if isinstance(prompt, str):
            return [(self._encode(prompt), prompt)]
        if isinstance(prompt[0], int):
            prompt = [[token for token in prompt if isinstance(token, int)]]
        made = []
        for each in prompt:
            if isinstance(each, str):
                made.append((self._encode(each), each))
            elif isinstance(each, list):
                made.append((self._known(each, "prompt"), self._text(each)))
        return made

    def _encode(self, text: str) -> list[int]:
        with self._turn:
            return self._engine.encode(text)

    def _text(self, tokens: list[int]) -> str:
        return plain_text(self._engine.tokenizer, tokens)

    def _known(self, tokens: list[int], param: str) -> list[int]:
        if tokens and max(tokens) >= self._vocabulary:
            message = f"{param} has token {max(tokens)}, and the model knows those below {self._vocabulary}"
            raise ApiError(400, message, param=param)
        return tokens

    def _asked(
        self, body: GenerationBody, prompts: list[list[int]], limit: int | None, default: int, top_logprobs: int | None
    ) -> Asked:
        param = "messages" if isinstance(body, ChatCompletionRequest) else "prompt"
        choices, seed = body.n or 1, secrets.randbits(62) if body.seed is None else body.seed % 2**63
        sampling = SamplingOptions(
            temperature=TEMPERATURE if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
        )
        requests: list[Request] = []
        for prompt in prompts:
            request = Request(
                prompt=tuple(prompt),
                max_new_tokens=self._room(prompt, limit, default, param),
                stop=tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
                top_logprobs=top_logprobs,
                skip_threshold=self._threshold(body.skip_threshold),
                ignore_end_tokens=bool(body.ignore_eos),
            )
            for _ in range(choices):
                own = replace(sampling, seed=(seed + len(requests)) % 2**63)
                requests.append(replace(request, sampling=own))
        return Asked(tuple(requests), choices)

    def _room(self, prompt: list[int], limit: int | None, default: int, param: str) -> int:
        """New tokens that may be asked for. Raises ApiError where prompt and limit are longer than the model allows."""
        left = self._max_length - len(prompt)
        least = 1 if limit is None else limit
        if left < least:
            message = (
                f"the prompt has {len(prompt)} tokens and {least} new ones are asked for, which make "
                f"{len(prompt) + least}, and the most is {self._max_length}; shorten the prompt or ask for fewer"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return min(default, left) if limit is None else limit

    def _threshold(self, asked: float | None) -> float | None:
        if isinstance(self._engine.decoder, OnnxDecoder):
            return asked  # the engine itself refuses what the graph was not exported with
        if asked is not None and asked > self._skip_threshold:
            message = (
                f"skip_threshold is {asked}, and this server allows at most its own, {self._skip_threshold}; ask for less, "
                "or start it with a higher --skip-threshold"
            )
            raise ApiError(400, message, param="skip_threshold")
        return asked


def check_count(asked: Asked, most: int) -> None:
    """Raises OptionError for more requests than ever wait at once: no later time would be better."""
    if len(asked.requests) > most:
        raise OptionError(f"prompts times n are {len(asked.requests)}, and this server takes {most} at once; send fewer")
