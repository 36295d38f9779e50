"""Chat templates: the messages of a conversation rendered as the one text that a model continues.

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
"""Template for models without one, such as base models: one line per message. Documented in docs/serving.md."""
TEMPLATE_SECONDS = 0.5
"""Limit on the processor time of a template; a typical template takes about a millisecond."""
REASON_CHARACTERS = 200


def render(template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str]) -> str:
    """Return the text of the messages, ready for the model's answer. Must run in the main thread of its process.

    Raises OptionError if the template refuses the messages, fails, or takes longer than TEMPLATE_SECONDS.
    """
    from transformers.utils import chat_template_utils

    said = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        with _processor_time(TEMPLATE_SECONDS):
            options: dict[str, Any] = {"add_generation_prompt": True} | dict(special_tokens)
            texts: Any = chat_template_utils.render_jinja_template([said], chat_template=template, **options)
        text = str(texts[0][0])
        text.encode()  # JSON can encode half of a surrogate pair, which is not a character
    except _TooLong as error:
        raise OptionError(
            f"the model's chat template takes longer than {TEMPLATE_SECONDS:g} s for these messages; change them"
        ) from error
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
