"""A prompt of 7.9 MB: it was tokenized for 16 seconds, and then found to be too long."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "prompt has 7900000 bytes"


def body() -> bytes:
    return json.dumps({"prompt": "some text " * 790_000, "max_tokens": 1}).encode()
