"""A temperature by which every logit becomes infinite."""

import json

PATH = "/v1/completions"
STATUS = 200
SAYS = "text_completion"


def body() -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 4, "temperature": 1e-38, "seed": 1}).encode()
