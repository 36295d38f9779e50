"""Messages that are none, to the endpoint that only tokenizes."""

PATH = "/tokenize"
STATUS = 400
SAYS = "messages"


def body() -> bytes:
    return b'{"messages": [' + b",".join([b"[]"] * 660_000) + b"]}"
