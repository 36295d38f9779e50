"""700 lists, one in the other, in a field that nobody knows: within JSON's depth, and beyond that of what reads it next."""

PATH = "/v1/completions"
STATUS = (200, 400)
SAYS = ""


def body() -> bytes:
    return b'{"prompt": "a", "max_tokens": 4, "unknown": ' + b"[" * 700 + b"]" * 700 + b"}"
