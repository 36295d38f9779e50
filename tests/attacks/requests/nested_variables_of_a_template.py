"""Variables of the chat template that are nested 900 levels deep."""

PATH = "/v1/chat/completions"
STATUS = 400
SAYS = "chat_template_kwargs is nested"


def body() -> bytes:
    value = b"[" * 900 + b"]" * 900
    return b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ' + value + b"}}"
