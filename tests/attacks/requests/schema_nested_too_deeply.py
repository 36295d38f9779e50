"""A schema of 1,000 objects, one in the other: it ended the parser of the body, or the library that compiles it."""

PATH = "/v1/completions"
STATUS = 400
SAYS = "json_schema"


def body() -> bytes:
    schema = b'{"type": "object", "properties": {"a": ' * 500 + b"true" + b"}}" * 500
    return b'{"prompt": "a", "max_tokens": 4, "json_schema": ' + schema + b"}"
