"""A tool of a Response with a schema that is nested 900 levels deep, which the answer would repeat."""

PATH = "/v1/responses"
STATUS = 400
SAYS = "tools"


def body() -> bytes:
    schema = b'{"a":' * 900 + b"{}" + b"}" * 900
    return b'{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": ' + schema + b"}]}"
