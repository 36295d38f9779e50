"""Chat templates: the messages of a conversation rendered as the one text that a model continues.

A chat template is a program that comes with the model. It runs in jinja2's sandbox, in the process that reads requests.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from engine.errors import OptionError

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Template for models without one, such as base models: one line per message. Documented in docs/serving.md."""
TEMPLATE_SECONDS = 0.5
"""Limit on the processor time of a template; a typical template takes about a millisecond."""
REASON_CHARACTERS = 200
RESERVED = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "messages",
        "raise_exception",
        "return_assistant_tokens_mask",
        "strftime_now",
        "tools",
    )
)
"""Variables and options of a template that have their value from elsewhere."""
_TOOLS = re.compile(r"\btools\b")


def takes_tools(template: str) -> bool:
    """Return whether a template has a place for tools."""
    return _TOOLS.search(template) is not None


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of the messages, ready for the model's answer. Must run in the main thread of its process.

    Arguments of calls in messages are JSON texts; templates get them as objects, unless they only take texts.
    tools: descriptions of tools in OpenAI's form. variables: further variables of the template, with no RESERVED name.
    Raises OptionError if the template refuses the messages, fails, or takes longer than TEMPLATE_SECONDS.
    """
    import transformers.utils.chat_template_utils  # noqa: F401  # before the time is measured

    said: list[Mapping[str, Any]] = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    options: dict[str, Any] = {**(variables or {}), **special_tokens, "add_generation_prompt": True}
    try:
        with _processor_time(TEMPLATE_SECONDS):
            return _rendered_with_calls(template, said, tools, options)
    except _TooLong as error:
        raise OptionError(
            f"the model's chat template takes longer than {TEMPLATE_SECONDS:g} s for these messages; change them"
        ) from error


def _rendered_with_calls(
    template: str, messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """Return the text of messages with the arguments of their calls as objects, or as texts if the template takes those."""
    objects, found = _with_objects(messages)
    try:
        text = _rendered(template, objects, tools, options)
        if not any(repr(each) in text for each in found):
            return text
    except OptionError:
        if objects == messages:
            raise
    return _rendered(template, messages, tools, options)  # the template appends arguments to other text, or prints them


def _with_objects(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
    """Return messages with the arguments of calls as objects, which most templates want, and the objects that have keys."""
    made: list[Mapping[str, Any]] = []
    found: list[dict[str, Any]] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = _object(call["function"]["arguments"])
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
            if isinstance(arguments, dict) and arguments:
                found.append(arguments)
        made.append({**message, "tool_calls": calls} if calls else message)
    return made, found


def _object(arguments: str) -> Any:
    """Return the object in the JSON text of arguments; a text that has none, as models may write it, is returned itself."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _rendered(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    from transformers.utils import chat_template_utils

    try:
        given: Any = list(tools) or None
        said: Any = [list(messages)]
        texts: Any = chat_template_utils.render_jinja_template(said, given, chat_template=template, **options)
        text = str(texts[0][0])
        text.encode()  # JSON can encode half of a surrogate pair, which is not a character
    except Exception as error:  # a template may divide by zero, recurse without end, or run out of memory
        reason = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
        raise OptionError(f"the model's chat template cannot take these messages: {reason}; change them") from error
    return text


class _TooLong(BaseException):
    """The time limit is exceeded. Not a subclass of Exception, so that no handler in between catches it."""


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the body after this much processor time; code that is not Python is not interrupted."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
