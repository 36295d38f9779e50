"""A message of 7.9 MB."""

import json

PATH = "/v1/chat/completions"
STATUS = 400
SAYS = "messages has 7900000 bytes"


def body() -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "some text " * 790_000}]}).encode()
