"""A quarter of a million blocks of text in the result of a call, in a Message."""

PATH = "/v1/messages"
STATUS = 400
SAYS = "messages"


def body() -> bytes:
    block = b'{"type":"text","text":"a"}'
    result = b'{"type":"tool_result","tool_use_id":"a","content":[' + b",".join([block] * 250_000) + b"]}"
    return b'{"max_tokens": 1, "messages": [{"role": "user", "content": [' + result + b"]}]}"
