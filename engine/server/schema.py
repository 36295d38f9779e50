"""Request bodies in OpenAI's format, validated by pydantic; unsupported options that change the answer are refused.

Fields with the value null count as absent. Unknown fields are accepted: clients made for other servers send them, and
they have no effect here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from engine.server.errors import ApiError

TEMPERATURE = 1.0
"""Default temperature, as clients of OpenAI's API expect."""
MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_STOPS = 4
MOST_STOP_CHARACTERS = 1_000
INT64 = 2**63
NO_FORMAT = "response_format {!r} is not available: the output cannot be constrained to a grammar; use text"

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "bad_words": (None, []),
    "function_call": (None, "none", "auto"),
    "grammar": (None, ""),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "json_schema": (None, {}),
    "logit_bias": (None, {}, []),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "mirostat": (None, 0),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None,),
    "repeat_penalty": (None, 1),
    "repetition_penalty": (None, 1),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Parameters that this server does not support, with the values at which they have no effect."""


def _whole(text: str) -> str:
    """Raise ValueError for half of a surrogate pair, which JSON can encode and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half of a surrogate pair, which is not a character") from error
    return text


Text = Annotated[str, AfterValidator(_whole)]
Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose validation ends at the first invalid entry: a body may have a million entries."""


class Body(BaseModel):
    """Base of all bodies. Values are not converted: the string "1" is not a number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class ResponseFormat(Body):
    """Format of the generated text."""

    type: Literal["text", "json_object", "json_schema"]


Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


class GenerationBody(Body):
    """Fields that both kinds of completion share."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(None, ge=1, lt=INT64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, lt=INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64, description="0 or -1 for all tokens.")
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Stop | Annotated[Several[Stop], Field(max_length=MOST_STOPS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    response_format: ResponseFormat | None = None
    ignore_eos: bool | None = None
    skip_threshold: float | None = Field(None, ge=0, description="Threshold of adaptive skipping; at most the server's own.")


class ImageUrl(Body):
    """The place of an image: a data URL."""

    url: str


class ContentPart(Body):
    """A part of a message, of type "text" or "image_url"."""

    type: str
    text: Text | None = None
    image_url: ImageUrl | str | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Several[ContentPart] | None = None


class ChatCompletionRequest(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Several[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


Token = Annotated[int, Field(ge=0, lt=INT64)]
Tokens = Annotated[Several[Token], Field(min_length=1)]


class CompletionRequest(GenerationBody):
    """POST /v1/completions"""

    prompt: Text | Annotated[Several[Text], Field(min_length=1)] | Tokens | Annotated[Several[Tokens], Field(min_length=1)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[Several[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Several[Token]


def refuse(body: GenerationBody) -> None:
    """Raise ApiError for options that would change the answer and are not supported."""
    for name, value in (body.model_extra or {}).items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise ApiError(400, f"{name} is not available; leave it out", param=name, code="unsupported_parameter")
    if body.response_format is not None and body.response_format.type != "text":
        message = NO_FORMAT.format(body.response_format.type)
        raise ApiError(400, message, param="response_format", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of is {body.best_of} and n is {body.n or 1}; choosing among additional answers is not available"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is for streams; set stream, or leave it out", param="stream_options")
    if isinstance(body, ChatCompletionRequest) and body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")


def content_text(message: Message) -> str:
    """Return the text of a message without images."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(part.text or "" for part in message.content)


def content_parts(message: Message) -> str | list[dict[str, str]]:
    """Return the content of a message for a chat template: its text, or its parts where some of them are images."""
    if not image_urls([message]):
        return content_text(message)
    assert isinstance(message.content, list)
    return [
        {"type": "image"} if part.type == "image_url" else {"type": "text", "text": part.text or ""}
        for part in message.content
    ]


def image_urls(messages: Sequence[Message]) -> list[str]:
    """Return the URLs of the images in messages. Raises ApiError for parts that are neither text nor an image."""
    urls: list[str] = []
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.type == "image_url" and part.image_url is not None:
                urls.append(part.image_url if isinstance(part.image_url, str) else part.image_url.url)
            elif part.type != "text" or part.text is None:
                kind = part.type if part.type not in ("text", "image_url") else f"{part.type} without its {part.type}"
                said = f"messages has a part of type {kind!r:.40}; only text and image_url can be read"
                raise ApiError(400, said, param="messages")
    return urls
