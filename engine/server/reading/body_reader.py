"""Request bodies: parsed, validated and tokenized, in the process that reads requests (`reading_process.py`).

Nothing here imports torch, except for a model that reads images. Sizes are checked before any larger work: the lengths of
lists before validation, the number of prompts times n before tokenization, and the bytes of a text before its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from engine.checkpoint.chat_template import takes_tools
from engine.errors import CompressError, OptionError
from engine.files.image_file import decoded_images
from engine.replies.reply import ReplyForm
from engine.replies.table import AUTO
from engine.server.errors import ApiError, api_error, body_error, unknown_model
from engine.server.interfaces.interface import Interface
from engine.server.interfaces.table import INTERFACES
from engine.server.reading.constraints import grammar_of
from engine.server.reading.image_parts import image_files
from engine.server.reading.name_reader import body_values
from engine.server.reading.nesting import nested_field
from engine.server.reading.schema import (
    TEMPERATURE,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    Message,
    TokenizeRequest,
    content_parts,
    content_text,
    image_urls,
    refuse,
)
from engine.server.reading.text_reader import TextReader, TokenizerSettings
from engine.server.reading.tools import NO_PLACE, Asking, ToolReader, check_calls

if TYPE_CHECKING:
    from engine.transformers_models.image_reader import ImageReader

COMPLETION_TOKENS = 16
"""Default limit of new tokens for a completion; a chat may use all remaining positions."""
MOST_ITEMS = 10_000
"""Maximum number of entries in a list that holds no tokens, if the model's length is below it."""
AnyBody = TypeVar("AnyBody", bound=Body)


@dataclass(frozen=True)
class ReadingSettings:
    """Facts about the model and the server that the reader of bodies needs."""

    tokenizer: TokenizerSettings
    model_name: str
    max_model_length: int
    max_queue: int
    most_skip_threshold: float | None
    """The server's own threshold, which is the maximum for a request; None if the engine itself checks it."""
    images_refusal: str | None = "the model has no part that reads images"
    """Why images cannot be read; None if they can be."""
    tool_parser: str = AUTO
    """Name of the form of calls, AUTO or NONE."""
    reasoning_parser: str = AUTO
    """Name of the form of reasoning, AUTO or NONE."""

    @classmethod
    def of_json(cls, data: bytes) -> ReadingSettings:
        """Return the settings that `to_json` wrote."""
        values = json.loads(data)
        return cls(**values | {"tokenizer": TokenizerSettings(**values["tokenizer"])})

    def to_json(self) -> bytes:
        """Return the settings as JSON, for another process."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Read:
    """A validated completion body with its prompts as tokens."""

    prompts: Sequence[Sequence[int]]
    new_tokens: Sequence[int]
    """Maximum number of new tokens for each prompt."""
    choices: int
    """Number of answers to each prompt."""
    seed: int | None
    sampling: dict[str, Any]
    """Fields of SamplingOptions, without the seed."""
    request: dict[str, Any]
    """Fields of Request that all requests of the body share."""
    echoes: Sequence[str] = ()
    """Text of each prompt, if the answers repeat it."""
    stream: bool = False
    include_usage: bool = False
    images: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the model for the images of the prompt, as tensors; empty without images."""
    form: ReplyForm | None = None
    """How replies are taken apart; None for text that is given on as it is."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the body that an answer in another form than a chat's repeats."""


class BodyReader:
    """Reads request bodies for one model and server."""

    def __init__(self, settings: ReadingSettings) -> None:
        self._settings = settings
        self._texts = TextReader(settings.tokenizer)
        self._tools = ToolReader(self._texts, settings.tool_parser, settings.reasoning_parser)
        self._images = _image_reader(settings)
        self._most_bytes = settings.max_model_length * self._texts.longest_token_bytes

    def prepare(self) -> None:
        """Import the modules that the first conversation needs."""
        if self._settings.tokenizer.chat_template is not None:
            import transformers.utils.chat_template_utils  # noqa: F401
        if self._images is not None:
            self._images.prepare()

    def read(self, path: str, data: bytes) -> Read | dict[str, Any]:
        """Return the content of a completion body, or the complete answer to another body.

        Raises ApiError for a refused body.
        """
        try:
            return self._through(INTERFACES[path], data) if path in INTERFACES else READERS[path](self, data)
        except CompressError as error:
            raise api_error(error) from error
        except RecursionError as error:
            raise ApiError(400, "the body is nested too deeply; send a flatter one", param=nested_field(data)) from error
        except MemoryError as error:
            raise ApiError(400, "the body takes too much memory to read; send less at once") from error

    def chat(self, data: bytes) -> Read:
        """POST /v1/chat/completions"""
        return self._chat(self._parsed(data, ChatCompletionRequest))

    def _chat(self, body: ChatCompletionRequest) -> Read:
        refuse(body)
        self._check_count(1, body.n)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        top = (body.top_logprobs or 0) if body.logprobs else None
        asking = self._tools.asking(body)
        text, prompt, images = self._conversation(body.messages, asking)
        room = self._room(prompt, limit, self._settings.max_model_length, "messages")
        answer = grammar_of(body)
        if asking.forced and body.response_format is not None:
            answer = ""  # agents give the format of their last answer with every request, and a forced call has no content
        form = self._tools.reply_form(asking, text, is_constrained=bool(answer))
        grammar = self._tools.grammar(asking, form, answer)
        read = self._read(body, [prompt], [room], top, grammar=grammar, images=images)
        read.request["shown_special_tokens"] = self._tools.shown(form)
        return replace(read, form=form)

    def _through(self, interface: Interface, data: bytes) -> Read | dict[str, Any]:
        """Read a body of another interface by way of a chat completion."""
        own = interface.read(self._values(data))
        self._check_model(own.model)
        kept, chat = interface.kept(own), interface.chat(own)
        with interface.naming():
            body = _validated(ChatCompletionRequest, chat)
            if interface.counted is not None:
                refuse(body)
                return interface.counted(len(self._conversation(body.messages, self._tools.asking(body))[1]))
            read = self._chat(body)
        if interface.most_tokens is not None:
            (fits,), most = read.new_tokens, interface.most_tokens(own)
            read, kept = replace(read, new_tokens=[min(fits, most)]), kept | {"is_lowered": fits < most}
        return replace(read, repeated=kept)

    def completion(self, data: bytes) -> Read:
        """POST /v1/completions"""
        body = self._parsed(data, CompletionRequest)
        refuse(body)
        given = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
        self._check_count(len(given), body.n)
        prompts, texts = [], []
        room = []
        for each in given:
            ids = self._encoded(each, "prompt") if isinstance(each, str) else self._known(each, "prompt")
            room.append(self._room(ids, body.max_tokens, COMPLETION_TOKENS, "prompt"))
            prompts.append(ids)
            if body.echo:
                texts.append(each if isinstance(each, str) else self._texts.text(ids))
        scored = bool(body.echo) and body.logprobs is not None
        grammar = grammar_of(body)
        return self._read(body, prompts, room, body.logprobs, echoes=texts, prompt_logprobs=scored, grammar=grammar)

    def tokenize(self, data: bytes) -> dict[str, Any]:
        """POST /tokenize"""
        body = self._parsed(data, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            _, ids, _ = self._conversation(body.messages, self._tools.asking(body))
        else:
            self._check_bytes(body.prompt or "", "prompt")
            ids = self._texts.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._settings.max_model_length}

    def detokenize(self, data: bytes) -> dict[str, Any]:
        """POST /detokenize"""
        return {"prompt": self._texts.text(self._known(self._parsed(data, DetokenizeRequest).tokens, "tokens"))}

    def _parsed(self, data: bytes, kind: type[AnyBody]) -> AnyBody:
        body = _validated(kind, self._values(data))
        self._check_model(getattr(body, "model", None))
        return body

    def _values(self, data: bytes) -> dict[str, Any]:
        values = body_values(data)
        self._check_lists(values)
        return values

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._settings.model_name:
            raise unknown_model(name, [self._settings.model_name])

    def _check_lists(self, values: dict[str, Any]) -> None:
        most = max(MOST_ITEMS, self._settings.max_model_length)
        for name, value in _lists(values):
            if len(value) > most:
                raise ApiError(400, f"{name} has {len(value)} entries, and at most {most} are read; send fewer", param=name)

    def _check_count(self, prompts: int, choices: int | None) -> None:
        """Raise OptionError if there are more requests than the queue can ever hold: retrying later would not help."""
        count = prompts * (choices or 1)
        if count > self._settings.max_queue:
            raise OptionError(
                f"prompts times n are {count}, and this server takes {self._settings.max_queue} at once; send fewer"
            )

    def _check_bytes(self, text: str, param: str) -> None:
        """Raise ApiError for a text that is too long, whatever its tokens are."""
        size = len(text) if len(text) > self._most_bytes else len(text.encode())
        if size > self._most_bytes:
            raise ApiError(
                400,
                f"{param} has {size} bytes, and {self._settings.max_model_length} tokens of this model hold at most "
                f"{self._most_bytes} bytes; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def _conversation(self, messages: Sequence[Message], asking: Asking) -> tuple[str, list[int], Mapping[str, Any]]:
        """Return messages as text and as token ids, and the model's inputs of their images."""
        check_calls(messages)
        urls, turns = image_urls(messages), []
        if urls and self._images is None:
            why = self._settings.images_refusal
            raise ApiError(400, f"messages have images, and this server reads text only: {why}", param="messages")
        for message in messages:
            role = "system" if message.role == "developer" else message.role
            turn = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
            calls = [call.model_dump() for call in message.tool_calls or ()]
            turns.append(turn | {"role": role, "content": content_parts(message)} | ({"tool_calls": calls} if calls else {}))
            self._check_bytes(content_text(message), "messages")
        if urls and self._images is not None:
            if asking.tools and not takes_tools(self._images.template or ""):
                raise ApiError(400, NO_PLACE, param="tools", code="unsupported_parameter")
            text = self._images.conversation_text(turns, asking.tools, asking.variables)
            self._check_bytes(text, "messages")
            return text, *self._images.conversation(text, decoded_images(image_files(urls)))
        text = self._texts.conversation(turns, asking.tools, asking.variables)
        self._check_bytes(text, "messages")
        return text, self._texts.conversation_ids(text), {}

    def _encoded(self, text: str, param: str) -> list[int]:
        self._check_bytes(text, param)
        return self._texts.prompt(text)

    def _known(self, tokens: list[int], param: str) -> list[int]:
        vocabulary = self._settings.tokenizer.vocabulary
        if tokens and max(tokens) >= vocabulary:
            message = f"{param} has token {max(tokens)}, and the model's tokens are below {vocabulary}"
            raise ApiError(400, message, param=param)
        return tokens

    def _room(self, prompt: list[int], limit: int | None, default: int, param: str) -> int:
        """Return the maximum number of new tokens.

        Raises ApiError if prompt and limit together exceed the model's length.
        """
        most = self._settings.max_model_length
        left, least = most - len(prompt), 1 if limit is None else limit
        if left < least:
            message = (
                f"the prompt has {len(prompt)} tokens and {least} new ones are requested, which make "
                f"{len(prompt) + least}; the maximum is {most}; shorten the prompt or request fewer"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return min(default, left) if limit is None else limit

    def _read(
        self,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        new_tokens: Sequence[int],
        top_logprobs: int | None,
        *,
        echoes: Sequence[str] = (),
        prompt_logprobs: bool = False,
        grammar: str = "",
        images: Mapping[str, Any] | None = None,
    ) -> Read:
        return Read(
            prompts=prompts,
            new_tokens=new_tokens,
            choices=body.n or 1,
            seed=None if body.seed is None else body.seed % 2**63,
            sampling=self._sampling(body),
            request={
                "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
                "stop_tokens": self._known(body.stop_token_ids or [], "stop_token_ids"),
                "min_new_tokens": _at_most(body.min_tokens or 0, new_tokens),
                "top_logprobs": top_logprobs,
                "prompt_logprobs": prompt_logprobs,
                "skip_threshold": self._threshold(body.skip_threshold),
                "ignore_end_tokens": bool(body.ignore_eos),
                "grammar": grammar,
            },
            echoes=echoes,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            images=images or {},
        )

    def _sampling(self, body: GenerationBody) -> dict[str, Any]:
        """Return the fields of SamplingOptions, without the seed."""
        given = body.logit_bias if isinstance(body.logit_bias, dict) else {}
        bias = {int(token): value for token, value in given.items()}
        self._known(list(bias), "logit_bias")
        repetition = body.repeat_penalty if body.repetition_penalty is None else body.repetition_penalty
        return {
            "temperature": TEMPERATURE if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_k": max(0, body.top_k or 0),
            "min_p": body.min_p or 0.0,
            "top_n_sigma": max(0.0, body.top_n_sigma or 0.0),
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "repetition_penalty": 1.0 if repetition is None else repetition,
            "logit_bias": list(bias.items()),
        }

    def _threshold(self, asked: float | None) -> float | None:
        most = self._settings.most_skip_threshold
        if asked is not None and most is not None and asked > most:
            message = (
                f"skip_threshold is {asked}, and this server allows at most its own, {most}; ask for less, or start it with "
                "a higher --skip-threshold"
            )
            raise ApiError(400, message, param="skip_threshold")
        return asked


def _at_most(least: int, new_tokens: Sequence[int]) -> int:
    """Return the minimum length of answers. Raises ApiError if it is above their maximum."""
    most = min(new_tokens)
    if least > most:
        raise ApiError(
            400, f"min_tokens is {least} and the answer has at most {most} tokens; ask for fewer", param="min_tokens"
        )
    return least


READERS: dict[str, Callable[[BodyReader, bytes], Read | dict[str, Any]]] = {
    "/v1/chat/completions": BodyReader.chat,
    "/v1/completions": BodyReader.completion,
    "/tokenize": BodyReader.tokenize,
    "/detokenize": BodyReader.detokenize,
}
"""Methods that read the body, by path of the endpoint."""


def _validated(kind: type[AnyBody], values: dict[str, Any]) -> AnyBody:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise body_error(error.errors(include_url=False, include_context=False, include_input=False)) from error


def _lists(values: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists in a body that validation traverses, each with the name of its field."""
    yield from ((name, value) for name, value in values.items() if isinstance(value, list))
    for name in ("messages", "input"):
        turns = values.get(name)
        for turn in turns if isinstance(turns, list) else ():
            parts = (turn.get(key) for key in ("content", "tool_calls")) if isinstance(turn, dict) else ()
            yield from ((name, part) for part in parts if isinstance(part, list))


def _image_reader(settings: ReadingSettings) -> ImageReader | None:
    """Return the model's processor of images; None for a model that reads text only."""
    if settings.images_refusal is not None:
        return None
    import torch

    from engine.transformers_models.image_reader import ImageReader

    torch.set_num_threads(1)  # the others belong to the model
    return ImageReader(Path(settings.tokenizer.directory), settings.tokenizer.vocabulary)
