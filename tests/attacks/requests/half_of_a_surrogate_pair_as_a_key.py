"""An unknown field whose name is no text: it was read, and failed later."""

PATH = "/v1/completions"
STATUS = 400
SAYS = "unicode"


def body() -> bytes:
    return rb'{"prompt": "a", "max_tokens": 4, "\ud800": 1}'
