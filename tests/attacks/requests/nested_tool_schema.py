"""A schema of a tool that is nested 200 levels deep: within JSON's depth, and beyond that of whatever walks a schema."""

PATH = "/v1/chat/completions"
STATUS = 400
SAYS = "the parameters of 'f' are nested"


def body() -> bytes:
    schema = b'{"type": "object", "properties": {"a": ' * 200 + b"{}" + b"}}" * 200
    tools = b'[{"type": "function", "function": {"name": "f", "parameters": ' + schema + b"}}]"
    return b'{"messages": [{"role": "user", "content": "a"}], "tools": ' + tools + b"}"
