"""Two megabytes of items of a Response's input that are none."""

PATH = "/v1/responses"
STATUS = 400
SAYS = "input has 660000 entries"


def body() -> bytes:
    return b'{"input": [' + b",".join([b"{}"] * 660_000) + b"]}"
