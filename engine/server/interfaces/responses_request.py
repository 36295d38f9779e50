"""Bodies of OpenAI's Responses interface, and the chat completions that they ask for.

Nothing is stored between requests: a client sends the whole conversation as `input`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from engine.server.errors import ApiError
from engine.server.interfaces.interface import Json, Unavailable, chat_effort, extensions, without_none
from engine.server.interfaces.turns import Content, Turns, image_part, joined_parts, text_part
from engine.server.reading.schema import INT64, MOST_LOGPROBS, TEMPERATURE, Body, Several, Text

LOGPROBS = "message.output_text.logprobs"
_NOT_STORED = "responses are not stored here; send the whole conversation as input"
UNAVAILABLE = {
    "background": Unavailable("wait for the answer, or stream it", neutral=(False,)),
    "context_management": Unavailable("shorten the input", neutral=([],)),
    "conversation": Unavailable(_NOT_STORED),
    "moderation": Unavailable("leave it out"),
    "previous_response_id": Unavailable(_NOT_STORED),
    "prompt": Unavailable("prompts are not stored here; send instructions and input"),
    "store": Unavailable(_NOT_STORED, neutral=(False,)),
    "truncation": Unavailable("leave it out, and shorten the input", neutral=("disabled",)),
}
INSTEAD: dict[str, str | None] = {
    "logprobs": f"include {LOGPROBS}",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "n": None,
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Parameters of chat completions that this interface has under another name."""
REPEATED_IDS = ("prompt_cache_key", "safety_identifier", "user")


class InputText(Body):
    """A text: of a client (`input_text`), or of an earlier answer (`output_text`)."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class InputImage(Body):
    """An image, as a data URL."""

    type: Literal["input_image"]
    image_url: str


class InputRefusal(Body):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: Text


InputPart = Annotated[InputText | InputImage | InputRefusal, Field(discriminator="type")]


class InputMessage(Body):
    """One message; `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Several[InputPart]


class InputCall(Body):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Text


class InputCallOutput(Body):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text | Several[InputPart]


class ReasoningText(Body):
    """A part of the reasoning of an earlier answer."""

    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Body):
    """Reasoning of an earlier answer. Its text is shown to the model; summaries and encrypted content are not."""

    type: Literal["reasoning"]
    content: Several[ReasoningText] | None = None


def _kind(item: Any) -> str | None:
    """Return the kind of an item; items without a type are messages."""
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if given is None else str(given)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Body):
    """A function that the model may call. Tools that a server would run itself, such as `web_search`, are not available."""

    type: Literal["function"]
    name: str
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """The functions that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Several[ChosenFunction]


class TextFormat(Body):
    """The format of the answer's text: `text`, `json_object`, or `json_schema` with a name and a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """Options of reasoning; a summary is never written, because the reasoning itself is returned."""

    effort: str | None = None
    summary: str | None = None


class InputTokensRequest(Body):
    """POST /v1/responses/input_tokens"""

    model: str | None = None
    input: Text | Annotated[Several[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    tools: Several[FunctionTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ChosenFunction | AllowedFunctions, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None


class ResponsesRequest(InputTokensRequest):
    """POST /v1/responses"""

    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    include: (
        Several[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "message.input_image.image_url",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = Field(None, description=f"Only {LOGPROBS} has an effect.")
    metadata: (
        Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)]
        | None
    ) = None


def responses_chat(body: ResponsesRequest) -> Json:
    """Return the body of the chat completion. Raises ApiError for parameters that are not available."""
    return responses_prompt(body) | without_none(
        stream=body.stream,
        stream_options={"include_usage": True} if body.stream else None,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        **_logprobs(body),
    )


def responses_prompt(body: InputTokensRequest) -> Json:
    """Return the fields of the chat completion that decide its prompt. Raises ApiError as `responses_chat` does."""
    tools, choice = _tools(body)
    return extensions(body, INSTEAD, UNAVAILABLE) | without_none(
        model=body.model,
        messages=_messages(body),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text.format if body.text else None),
        reasoning_effort=chat_effort(body.reasoning.effort if body.reasoning else None),
    )


def responses_repeated(body: ResponsesRequest) -> Json:
    """Return the fields of the body that the Response repeats, with their defaults."""
    extra = body.model_extra or {}
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "temperature": TEMPERATURE if body.temperature is None else body.temperature,
        "text": {"format": _repeated_format(body.text.format if body.text else None)},
        "tool_choice": choice if isinstance(choice, str) else _repeated_choice(choice),
        "tools": [{"type": "function", **_function(tool, all_fields=True)} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        **{name: extra[name] for name in REPEATED_IDS if isinstance(extra.get(name), str)},
    }


def _messages(body: InputTokensRequest) -> list[Json]:
    turns = Turns()
    if body.instructions:
        turns.say("system", body.instructions)
    if isinstance(body.input, str):
        turns.say("user", body.input)
        return turns.messages
    for place, item in enumerate(body.input):
        if isinstance(item, InputMessage):
            turns.say(item.role, _content(item.content))
        elif isinstance(item, InputCall):
            turns.call(item.call_id, item.name, item.arguments)
        elif isinstance(item, InputCallOutput):
            turns.answer(item.call_id, _content(item.output), f"input[{place}].call_id")
        elif text := "".join(part.text for part in item.content or ()):
            turns.think(text)
    if not turns.messages:
        raise ApiError(400, "input has only reasoning without text; add a message", param="input")
    return turns.messages


def _content(given: str | Sequence[InputText | InputImage | InputRefusal]) -> Content:
    if isinstance(given, str):
        return given
    return joined_parts([_part(part) for part in given], "")


def _part(part: InputText | InputImage | InputRefusal) -> Json:
    if isinstance(part, InputImage):
        return image_part(part.image_url)
    return text_part(part.text if isinstance(part, InputText) else part.refusal)


def _function(tool: FunctionTool, *, all_fields: bool = False) -> Json:
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return fields if all_fields else without_none(**fields)


def _tools(body: InputTokensRequest) -> tuple[list[Json] | None, Json | str | None]:
    """Return tools and their choice. A choice of allowed tools leaves out the others."""
    given, choice = body.tools, body.tool_choice
    if isinstance(choice, AllowedFunctions):
        allowed, known = {tool.name for tool in choice.tools}, {tool.name for tool in given or ()}
        if not allowed or allowed - known:
            name = min(allowed - known, default="")
            message = f"tool_choice allows {name!r:.60}, which is not among tools" if name else "tool_choice allows no tools"
            raise ApiError(400, f"{message}; name functions of tools", param="tool_choice")
        given = [tool for tool in given or () if tool.name in allowed]
    tools = [{"type": "function", "function": _function(tool)} for tool in given or ()]
    if isinstance(choice, AllowedFunctions):
        return tools, choice.mode
    if isinstance(choice, ChosenFunction):
        return tools or None, {"type": "function", "function": {"name": choice.name}}
    return tools or None, choice


def _response_format(given: TextFormat | None) -> Json | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.schema_ is None:
        raise ApiError(400, "text.format.schema: Field required", param="text.format.schema")
    own = without_none(name=given.name or "answer", description=given.description, schema=given.schema_, strict=given.strict)
    return {"type": "json_schema", "json_schema": own}


def _logprobs(body: ResponsesRequest) -> Json:
    wanted = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wanted:
        raise ApiError(400, f"top_logprobs needs include to have {LOGPROBS}", param="top_logprobs")
    return {"logprobs": True, "top_logprobs": body.top_logprobs} if wanted else {}


def _repeated_format(given: TextFormat | None) -> Json:
    if given is None or given.type != "json_schema":
        return {"type": given.type if given else "text"}
    named = without_none(description=given.description, strict=given.strict)
    return {"type": "json_schema", "name": given.name or "answer", "schema": given.schema_, **named}


def _repeated_choice(choice: ChosenFunction | AllowedFunctions | None) -> Json | str:
    if choice is None:
        return "auto"
    if isinstance(choice, ChosenFunction):
        return {"type": "function", "name": choice.name}
    tools = [{"type": "function", "name": tool.name} for tool in choice.tools]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
