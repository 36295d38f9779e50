"""A message of several hundred thousand parts that are none."""

PATH = "/v1/chat/completions"
STATUS = 400
SAYS = "messages"


def body() -> bytes:
    return b'{"messages": [{"role": "user", "content": [' + b",".join([b"{}"] * 660_000) + b"]}]}"
