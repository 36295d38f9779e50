"""7.9 MB to the endpoint that only tokenizes."""

import json

PATH = "/tokenize"
STATUS = 400
SAYS = "prompt has 7900000 bytes"


def body() -> bytes:
    return json.dumps({"prompt": "some text " * 790_000}).encode()
