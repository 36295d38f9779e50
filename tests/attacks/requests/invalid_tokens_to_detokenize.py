"""Two megabytes of tokens that are none."""

PATH = "/detokenize"
STATUS = 400
SAYS = "tokens"


def body() -> bytes:
    return b'{"tokens": [' + b",".join([b"{}"] * 660_000) + b"]}"
