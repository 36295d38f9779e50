"""Two megabytes of messages that are none."""

PATH = "/v1/chat/completions"
STATUS = 400
SAYS = "messages"


def body() -> bytes:
    return b'{"messages": [' + b",".join([b"{}"] * 660_000) + b"]}"
