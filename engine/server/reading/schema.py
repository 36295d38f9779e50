"""Request bodies in OpenAI's format, validated by pydantic; unsupported options that change the answer are refused.

Fields with the value null count as absent. Unknown fields are accepted: clients made for other servers send them, and
they have no effect here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from engine.generation.options import LEAST_REPETITION_PENALTY, MOST_BIAS, MOST_REPETITION_PENALTY
from engine.server.errors import ApiError

TEMPERATURE = 1.0
"""Default temperature, as clients of OpenAI's API expect."""
MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_STOPS = 4
MOST_STOP_CHARACTERS = 1_000
INT64 = 2**63
MOST_BIASES = 1_024
MOST_STOP_TOKENS = 256

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "bad_words": (None, []),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "mirostat": (None, 0),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
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


class JsonSchema(Body):
    """A schema with OpenAI's fields around it. It is always held to, `strict` or not."""

    name: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """Format of the generated text; a schema in json_schema, or beside the type as for llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class StructuredOutputs(Body):
    """A constraint in vLLM's form: one of the fields."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Several[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


Token = Annotated[int, Field(ge=0, lt=INT64)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
Penalty = Annotated[float, Field(ge=LEAST_REPETITION_PENALTY, le=MOST_REPETITION_PENALTY)]
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
    min_p: float | None = Field(None, ge=0, le=1)
    top_n_sigma: float | None = Field(None, ge=-1, le=1e6, description="0 or -1 for all tokens.")
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = Field(None, description="llama.cpp's name of repetition_penalty.")
    logit_bias: (
        Annotated[dict[TokenName, Bias], Field(max_length=MOST_BIASES)] | Annotated[list[Any], Field(max_length=0)] | None
    ) = None
    stop_token_ids: Annotated[Several[Token], Field(max_length=MOST_STOP_TOKENS)] | None = None
    min_tokens: int | None = Field(None, ge=0, lt=INT64)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Several[Text] | None = None
    guided_grammar: Text | None = None
    json_schema: dict[str, Any] | bool | Text | None = Field(None, description="llama.cpp's name of guided_json.")
    grammar: Text | None = Field(None, description="A grammar in Lark; GBNF is not read.")
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


class CalledFunction(Body):
    """Name and arguments of a call."""

    name: Text
    arguments: Text = Field(description="A JSON object as text.")


class ToolCall(Body):
    """A call that the model made."""

    id: Text = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Several[ContentPart] | None = None
    reasoning_content: Text | None = None
    tool_calls: Several[ToolCall] | None = None
    tool_call_id: Text | None = None


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments, which are an object.")
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class ConversationBody(Body):
    """Fields that shape the prompt of a conversation."""

    tools: Several[Tool] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")


class ChatCompletionRequest(GenerationBody, ConversationBody):
    """POST /v1/chat/completions"""

    messages: Several[Message] = Field(min_length=1)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


Tokens = Annotated[Several[Token], Field(min_length=1)]


class CompletionRequest(GenerationBody):
    """POST /v1/completions"""

    prompt: Text | Annotated[Several[Text], Field(min_length=1)] | Tokens | Annotated[Several[Tokens], Field(min_length=1)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class TokenizeRequest(ConversationBody):
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
    if body.repeat_penalty is not None and body.repetition_penalty not in (None, body.repeat_penalty):
        raise ApiError(400, "repeat_penalty and repetition_penalty differ; give one of them", param="repeat_penalty")
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
