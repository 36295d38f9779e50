"""A million lists, one in the other."""

PATH = "/v1/completions"
STATUS = 400
SAYS = ""


def body() -> bytes:
    return b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
