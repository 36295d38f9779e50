"""More tokens than any sequence of the model has."""

PATH = "/detokenize"
STATUS = 400
SAYS = "tokens has 3000000 entries"


def body() -> bytes:
    return b'{"tokens": [' + b",".join([b"1"] * 3_000_000) + b"]}"
