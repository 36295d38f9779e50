"""A number whose conversion takes time that grows with the square of its digits."""

PATH = "/v1/completions"
STATUS = 400
SAYS = "JSON"


def body() -> bytes:
    return b'{"prompt": "a", "max_tokens": ' + b"9" * 4_000_000 + b"}"
