"""From the messages of a conversation to the one text that a model continues.

A chat template is a program that comes with the model. It runs in jinja2's sandbox, in the process that reads requests.
"""

from __future__ import annotations

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
"""For models that bring no template of their own, such as base models: one line a message. Documented in docs/serving.md."""
TEMPLATE_SECONDS = 0.5
"""Processor time that a template may take; a usual one takes about a millisecond."""
REASON_CHARACTERS = 200


def render(template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str]) -> str:
    """The text of the messages, ready for the answer. Must run in the main thread of its process.

    Raises OptionError for messages that the template refuses, fails at, or takes longer than TEMPLATE_SECONDS for.
    """
    from transformers.utils import chat_template_utils

    said = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        with _processor_time(TEMPLATE_SECONDS):
            options: dict[str, Any] = {"add_generation_prompt": True} | dict(special_tokens)
            texts: Any = chat_template_utils.render_jinja_template([said], chat_template=template, **options)
        text = str(texts[0][0])
        text.encode()  # a half of a surrogate pair, which JSON can write, is no character
    except _TooLong as error:
        raise OptionError(
            f"the model's chat template takes longer than {TEMPLATE_SECONDS:g} s for these messages; change them"
        ) from error
    except Exception as error:  # a template may divide by zero, recurse without end, or run out of memory
        reason = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
        raise OptionError(f"the model's chat template cannot take these messages: {reason}; change them") from error
    return text


class _TooLong(BaseException):
    """The time is over. It is no Exception, so that nothing in between takes it for its own."""


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the body once it has taken so much processor time; code that is not Python's is not interrupted."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
