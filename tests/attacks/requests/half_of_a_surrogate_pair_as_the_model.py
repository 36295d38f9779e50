"""A model's name that is no text, and would be repeated in the answer."""

PATH = "/v1/completions"
STATUS = 404
SAYS = "is not served here"


def body() -> bytes:
    return rb'{"prompt": "a", "model": "\ud800"}'
