"""A message that only a template looks at has a name that is no text."""

PATH = "/v1/chat/completions"
STATUS = 200
SAYS = "chat.completion"


def body() -> bytes:
    return rb'{"messages": [{"role": "user", "content": "a", "name": "\ud800"}], "max_tokens": 4}'
