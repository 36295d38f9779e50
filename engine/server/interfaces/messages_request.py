"""Bodies of Anthropic's Messages interface, and the chat completions that they ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.server.errors import ApiError
from engine.server.interfaces.interface import Json, Unavailable, chat_effort, extensions, without_none
from engine.server.interfaces.turns import Content, Turns, image_part, joined_parts, text_part
from engine.server.reading.schema import INT64, Body, Several, Stop, Text

UNAVAILABLE = {
    "container": Unavailable("code runs on the client's side only"),
    "mcp_servers": Unavailable("the server connects to no others; give the tools themselves", neutral=([],)),
    # The client of Anthropic sends the whole conversation once it reads this code.
    "thread": Unavailable("nothing is stored here; send the whole conversation", code="thread_unsupported_request"),
}
INSTEAD: dict[str, str | None] = {
    "logprobs": None,
    "max_completion_tokens": "max_tokens",
    "n": None,
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "stream_options": None,
    "top_logprobs": None,
}
"""Parameters of chat completions that this interface has under another name, or not at all."""
BETWEEN_BLOCKS = "\n"
"""Text between two blocks of text in one message."""


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: Text


class Base64Source(Body):
    """An image in base64."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Body):
    """An image by its URL, which must be a data URL."""

    type: Literal["url"]
    url: str


class ImageBlock(Body):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | Several[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None


class ThinkingBlock(Body):
    """Reasoning of an earlier answer. Its text is shown to the model; the signature is not checked."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Body):
    """Reasoning that cannot be read, which is not shown to the model."""

    type: Literal["redacted_thinking"]


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserTurn(Body):
    """A turn of the user: text, images and results of calls."""

    role: Literal["user"]
    content: Text | Several[UserBlock]


class AssistantTurn(Body):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Text | Several[AssistantBlock]


class SystemTurn(Body):
    """An instruction within the conversation."""

    role: Literal["system"]
    content: Text | Several[TextBlock]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CustomTool(Body):
    """A tool of the client. Tools that a server would run or that have a schema of their own are not available."""

    type: Literal["custom"] | None = None
    name: str
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AutoChoice(Body):
    """The model decides whether to call tools (`auto`), or must not (`none`)."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Body):
    """The model must call some tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Body):
    """The model must call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons, and whether the answer shows it. A budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Body):
    """A schema that the answer's text follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The format of the answer, and how much the model reasons."""

    effort: str | None = None
    format: JsonFormat | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: Annotated[Several[Turn], Field(min_length=1)]
    system: Text | Several[TextBlock] | None = None
    tools: Several[CustomTool] | None = None
    tool_choice: Annotated[AutoChoice | AnyChoice | ToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, lt=INT64)
    stop_sequences: Several[Stop] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64)


def messages_chat(body: MessagesRequest) -> Json:
    """Return the body of the chat completion, without its limit of new tokens. Raises ApiError for what is not available."""
    return messages_count_chat(body) | without_none(
        stream=body.stream,
        stream_options={"include_usage": True} if body.stream else None,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def messages_count_chat(body: CountTokensRequest) -> Json:
    """Return the fields of the chat completion that decide its prompt. Raises ApiError as `messages_chat` does."""
    choice, config = body.tool_choice, body.output_config
    tools = [{"type": "function", "function": _function(tool)} for tool in body.tools or ()]
    chat = extensions(body, INSTEAD, UNAVAILABLE)
    return chat | without_none(
        model=body.model,
        messages=_messages(body),
        tools=tools or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_response_format(config.format if config else None),
        reasoning_effort=chat_effort(config.effort if config else None),
        chat_template_kwargs=_template_options(body.thinking, chat.get("chat_template_kwargs")),
    )


def messages_repeated(body: MessagesRequest) -> Json:
    """Return how the answer shows reasoning: `shown`, `omitted` (without its text), or `left_out`."""
    thinking = body.thinking
    if thinking is not None and thinking.type == "disabled":
        return {"thinking": "left_out"}
    return {"thinking": "omitted" if thinking is not None and thinking.display == "omitted" else "shown"}


def _messages(body: CountTokensRequest) -> list[Json]:
    if body.messages[-1].role == "assistant":
        message = (
            "messages end with an assistant turn, and an answer that continues it is not available; end with a user turn"
        )
        raise ApiError(400, message, param="messages", code="unsupported_parameter")
    turns = Turns()
    if body.system:
        turns.say("system", _text(body.system))
    previous: list[Json] = []  # parts of the user's turn so far; consecutive turns of the user are one
    for place, turn in enumerate(body.messages):
        if isinstance(turn, UserTurn):
            previous += _user(turns, turn, f"messages[{place}]")
            following = body.messages[place + 1] if place + 1 < len(body.messages) else None
            if previous and not isinstance(following, UserTurn):
                turns.say("user", joined_parts(previous, BETWEEN_BLOCKS))
                previous = []
        elif isinstance(turn, SystemTurn):
            turns.say("system", _text(turn.content))
        else:
            _assistant(turns, turn)
    if not turns.messages:
        raise ApiError(400, "messages have no content; add some text", param="messages")
    return turns.messages


def _user(turns: Turns, turn: UserTurn, place: str) -> list[Json]:
    """Add the results of calls, which follow the calls at once, and return the other parts. `place`: that of the turn."""
    if isinstance(turn.content, str):
        return [text_part(turn.content)]
    parts: list[Json] = []
    for number, block in enumerate(turn.content):
        if isinstance(block, ToolResultBlock):
            turns.answer(block.tool_use_id, _result(block.content or ""), f"{place}.content[{number}].tool_use_id")
        else:
            parts.append(_part(block))
    return parts


def _assistant(turns: Turns, turn: AssistantTurn) -> None:
    if isinstance(turn.content, str):
        turns.say("assistant", turn.content)
        return
    for block in turn.content:
        if isinstance(block, ThinkingBlock) and block.thinking:
            turns.think(block.thinking)
    if text := BETWEEN_BLOCKS.join(block.text for block in turn.content if isinstance(block, TextBlock)):
        turns.say("assistant", text)
    for block in turn.content:
        if isinstance(block, ToolUseBlock):
            turns.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


def _part(block: TextBlock | ImageBlock) -> Json:
    if isinstance(block, TextBlock):
        return text_part(block.text)
    source = block.source
    return image_part(source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}")


def _result(given: str | Sequence[TextBlock | ImageBlock]) -> Content:
    return given if isinstance(given, str) else joined_parts([_part(block) for block in given], BETWEEN_BLOCKS)


def _text(given: str | Sequence[TextBlock]) -> str:
    return given if isinstance(given, str) else BETWEEN_BLOCKS.join(block.text for block in given)


def _function(tool: CustomTool) -> Json:
    return without_none(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)


def _choice(choice: AutoChoice | AnyChoice | ToolChoice | None) -> Json | str | None:
    if choice is None or isinstance(choice, AutoChoice):
        return None if choice is None else choice.type
    if isinstance(choice, AnyChoice):
        return "required"
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(given: JsonFormat | None) -> Json | None:
    if given is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.schema_, "strict": True}}


def _template_options(thinking: Thinking | None, given: Any) -> Any:
    """Return the options of the chat template by which models of several families begin to reason, or do not."""
    if thinking is None:
        return given
    reasons = thinking.type != "disabled"
    own = {"enable_thinking": reasons, "thinking": reasons}
    return own | given if isinstance(given, dict) else own
