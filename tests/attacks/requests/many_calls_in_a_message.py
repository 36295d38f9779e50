"""A message with a hundred thousand invalid calls, each of which would be an error to describe."""

PATH = "/v1/chat/completions"
STATUS = 400
SAYS = "messages has 100000 entries"


def body() -> bytes:
    calls = b", ".join([b'{"id": 1}'] * 100_000)
    return b'{"messages": [{"role": "assistant", "tool_calls": [' + calls + b"]}]}"
