"""Tools and reasoning of a request: what the chat template gets, and how the reply is taken apart.

Nothing here imports torch: it runs in the process that reads bodies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.checkpoint.chat_template import RESERVED, takes_tools
from engine.replies.grammar import Before, Writing, answer_grammar, calls_grammar
from engine.replies.reply import ReplyForm
from engine.replies.table import AUTO, NONE, REASONING_FORMS, TOOL_FORMS, reasoning_form_of, tool_form_of
from engine.server.errors import ApiError
from engine.server.reading.grammars import checked, lark_grammar
from engine.server.reading.schema import ChatCompletionRequest, ConversationBody, Message, NamedTool, Tool
from engine.server.reading.text_reader import TextReader

MOST_TOOLS = 1_024
MOST_VARIABLES_BYTES = 64_000
"""Limit on the JSON of `chat_template_kwargs`."""
MOST_LEVELS = 100
"""Limit on how deeply schemas of tools and variables of a template are nested."""
NO_PLACE = (
    "tools are given, and the model's chat template has no place for them, so the model would not see them; leave them "
    "out, or serve a model whose template takes tools"
)
NO_FORM = (
    "tools are given, and the form in which this model writes calls is not known from its chat template; start the server "
    "with --tool-parser"
)


@dataclass(frozen=True)
class Asking:
    """A conversation's wishes for the template and for the reply."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in OpenAI's form, for the chat template."""
    variables: Mapping[str, Any] | None = None
    """Further variables of the chat template."""
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    """Schemas of the tools that may be called, by name; None if calls are not looked for."""
    forced: bool = False
    """Whether the reply has to be a call of one of these tools."""
    several: bool = True
    """Whether it may have several calls."""


class ToolReader:
    """The forms of one model's calls and reasoning."""

    def __init__(self, texts: TextReader, tool_parser: str, reasoning_parser: str) -> None:
        """tool_parser, reasoning_parser: names of forms; AUTO for those of the chat template, NONE for none."""
        self._texts = texts
        self._tools = tool_form_of(texts.tool_template) if tool_parser == AUTO else tool_parser
        self._reasoning = reasoning_form_of(texts.template) if reasoning_parser == AUTO else reasoning_parser
        self._parses = tool_parser != NONE
        self._has_place = takes_tools(texts.tool_template)

    def asking(self, body: ConversationBody) -> Asking:
        """Return what a body asks for. Raises ApiError for tools and options that cannot be honored, by their parameter."""
        tools = body.tools or []
        _check_tools(tools)
        variables = self._variables(body)
        choice = body.tool_choice if isinstance(body, ChatCompletionRequest) else None
        if isinstance(choice, NamedTool):
            named = choice.function.name
            if not any(tool.function.name == named for tool in tools):
                raise ApiError(400, f"tool_choice names the tool {named!r:.80}, which is not in tools", param="tool_choice")
        elif choice == "required" and not tools:
            raise ApiError(400, "tool_choice is 'required' and there are no tools; give some", param="tool_choice")
        if not tools or (choice == "none" and not self._has_place):
            return Asking(variables=variables)
        self._check_support(choice)
        names = [choice.function.name] if isinstance(choice, NamedTool) else [tool.function.name for tool in tools]
        schemas = {tool.function.name: tool.function.parameters or _NO_ARGUMENTS for tool in tools}
        parallel = not isinstance(body, ChatCompletionRequest) or body.parallel_tool_calls is not False
        return Asking(
            tools=tuple(_described(tool) for tool in tools),
            variables=variables,
            schemas={name: schemas[name] for name in names} if choice != "none" and self._parses else None,
            forced=choice == "required" or isinstance(choice, NamedTool),
            several=parallel and not isinstance(choice, NamedTool),
        )

    def reply_form(self, asking: Asking, prompt: str, *, is_constrained: bool = False) -> ReplyForm:
        """Return how the reply is taken apart.

        prompt: the text of the conversation, ready for the answer. is_constrained: whether the answer follows a grammar, in
        which calls are written as forced ones.
        """
        form = ReplyForm(reasoning=self._reasoning, inside=self._begins_inside(prompt))
        if asking.schemas is None:
            return form
        tools = TOOL_FORMS[self._tools].forced if asking.forced or is_constrained else ""
        return replace(form, tools=tools or self._tools, schemas=asking.schemas, parallel=asking.several)

    def grammar(self, asking: Asking, form: ReplyForm, answer: str = "") -> str:
        """Return the grammar of a reply: one that has to be a call, or whose answer follows a grammar; empty for any other.

        answer: the grammar of the answer; empty for none. Raises ApiError for schemas of tools that cannot be held, and for
        a forced call beside a grammar of the answer.
        """
        if asking.forced and asking.schemas is not None:
            if answer:
                message = "tool_choice forces a call, and the format of the answer is constrained too; leave one of them out"
                raise ApiError(400, message, param="tool_choice")
            lark_grammar(self._calls(asking, form, {}), "tools")  # with marks as text, for the tokens of the check
            return self._calls(asking, form, self._texts.special_ids(form.marks))
        if not answer or (asking.schemas is None and form.reasoning == NONE):
            return answer
        return self._answer(asking, form, answer)

    def _calls(self, asking: Asking, form: ReplyForm, special: Mapping[str, int]) -> str:
        """Return the grammar of a forced call."""
        assert asking.schemas is not None
        writing = self._writing(form.tools)
        return calls_grammar(writing, asking.schemas, special, several=asking.several, before=self._before(form))

    def _answer(self, asking: Asking, form: ReplyForm, answer: str) -> str:
        """Return the grammar of an answer with what may stand before it or in its place."""
        reasoning = REASONING_FORMS.get(form.reasoning)
        calls = None
        if asking.schemas is not None:
            if TOOL_FORMS[form.tools].is_bare:
                message = "tools and a constrained answer exclude each other: this model writes calls as JSON without marks"
                raise ApiError(400, f"{message}; leave one of them out, or give tool_choice 'none'", param="tools")
            writing = self._writing(form.tools)
            lark_grammar(calls_grammar(writing, asking.schemas, {}, several=False, before=lambda rules: []), "tools")
            calls = writing, asking.schemas, asking.several

        def made(special: Mapping[str, int]) -> str:
            opening = "" if reasoning is None else reasoning.answer
            return answer_grammar(answer, special, before=self._before(form), opening=opening, calls=calls)

        checked(made({}), "response_format")
        return made(self._texts.special_ids(form.marks))

    def _writing(self, name: str) -> Writing:
        """Return how calls in a form are written."""
        writing = TOOL_FORMS[name].writing
        assert writing is not None, "calls in this form are forced in another"
        return writing(self._texts.tool_template)

    @staticmethod
    def _before(form: ReplyForm) -> Before:
        """Return a function of the parts before calls or an answer: the reasoning."""
        reasoning = REASONING_FORMS.get(form.reasoning)
        inside = form.inside or (reasoning is not None and reasoning.begins_inside)
        return lambda rules: [] if reasoning is None else reasoning.before(rules, inside)

    def shown(self, form: ReplyForm) -> list[str]:
        """Return the special tokens that the reply's parsers need."""
        return list(self._texts.special_ids(form.marks))

    def _check_support(self, choice: Any) -> None:
        if not self._has_place:
            raise ApiError(400, NO_PLACE, param="tools", code="unsupported_parameter")
        if self._parses and self._tools == NONE and choice != "none":
            raise ApiError(400, NO_FORM, param="tools", code="unsupported_parameter")
        if not self._parses and (choice == "required" or isinstance(choice, NamedTool)):
            message = "tool_choice forces a call, and this server was started with --tool-parser none; leave it out"
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")

    def _variables(self, body: ConversationBody) -> dict[str, Any]:
        """Return the variables that a body gives to the template. Raises ApiError for names that have another meaning."""
        given = body.chat_template_kwargs or {}
        name = "chat_template_kwargs"
        if taken := sorted(key for key in given if key in RESERVED or self._texts.is_special_name(key)):
            raise ApiError(400, f"{name} has {taken[0]!r:.80}, which the server sets; leave it out", param=name)
        if wrong := [key for key in given if not key.isidentifier()]:
            raise ApiError(400, f"{name} has {wrong[0]!r:.80}, which is no name of a variable", param=name)
        if _is_deep(given):
            raise ApiError(400, f"{name} is nested in more than {MOST_LEVELS} levels; give a flatter object", param=name)
        if len(json.dumps(given)) > MOST_VARIABLES_BYTES:
            raise ApiError(400, f"{name} is longer than {MOST_VARIABLES_BYTES} bytes, the limit; shorten it", param=name)
        effort = body.reasoning_effort
        if effort is None:
            return dict(given)
        off = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
        return off | {"reasoning_effort": effort} | given

    def _begins_inside(self, prompt: str) -> bool:
        reasoning = REASONING_FORMS.get(self._reasoning)
        return bool(reasoning and reasoning.opening) and prompt.rstrip().endswith(reasoning.opening if reasoning else "")


_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools has {len(tools)} entries, and at most {MOST_TOOLS} are read; give fewer", param="tools")
    names: set[str] = set()
    for tool in tools:
        name, parameters = tool.function.name, tool.function.parameters
        if name in names:
            raise ApiError(400, f"tools has the name {name!r} twice; names must differ", param="tools")
        names.add(name)
        kind = (parameters or {}).get("type", "object")
        if kind != "object":
            said = f"tools: the parameters of {name!r} have the type {kind!r:.40}; arguments are an object"
            raise ApiError(400, said, param="tools")
        if not isinstance((parameters or {}).get("properties", {}), dict):
            raise ApiError(400, f"tools: the properties of {name!r} are no object", param="tools")
        if _is_deep(parameters):
            said = f"tools: the parameters of {name!r} are nested in more than {MOST_LEVELS} levels; give a flatter schema"
            raise ApiError(400, said, param="tools")


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested in more than MOST_LEVELS levels."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [each for one in level if isinstance(one, dict | list) for each in _members(one)]
        if not level:
            return False
    return True


def _members(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _described(tool: Tool) -> dict[str, Any]:
    """Return a tool for a chat template, in OpenAI's form."""
    own = tool.function
    about = {"name": own.name, "description": own.description, "parameters": own.parameters, "strict": own.strict}
    return {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}


def check_calls(messages: Sequence[Message]) -> None:
    """Raise ApiError for a result of a tool that no earlier message has called, and for calls by others than the model."""
    called: set[str] = set()
    for place, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            raise ApiError(400, f"messages[{place}] has tool_calls, and its role is {message.role!r}", param="messages")
        called |= {call.id for call in message.tool_calls or ()}
        if message.role != "tool":
            continue
        if message.tool_call_id is None:
            raise ApiError(400, f"messages[{place}] is a tool's result without tool_call_id; give it", param="messages")
        if message.tool_call_id not in called:
            said = f"messages[{place}] answers the call {message.tool_call_id!r:.80}, which no earlier message makes"
            raise ApiError(400, said, param="messages")
