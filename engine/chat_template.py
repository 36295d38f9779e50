"""From the messages of a conversation to the one text that a model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from engine.errors import OptionError

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models that bring no template of their own, such as base models: one line a message. Documented in docs/serving.md."""


def has_template(tokenizer: Any) -> bool:
    """Whether the model says how its conversations are written."""
    return bool(tokenizer.chat_template)


def conversation(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of the messages, ready for the answer. Raises OptionError for messages that the template refuses."""
    template = None if has_template(tokenizer) else DEFAULT_TEMPLATE
    try:
        text = tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OptionError(f"the model's chat template cannot take these messages: {reason}; change them") from error
    # A template writes the special tokens itself; the default one has none, so that the tokenizer's own are right.
    ids: list[int] = list(tokenizer(text, add_special_tokens=template is not None, verbose=False)["input_ids"])
    if not ids:
        raise OptionError("the messages make no token; say something in them")
    return ids
