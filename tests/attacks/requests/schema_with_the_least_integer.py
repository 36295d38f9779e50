"""The least integer of 64 bits as a constant, at which the library that compiles schemas crashed its process."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "guided_json"


def body() -> bytes:
    schema = {"enum": [{"k": 1, "default": -(2**63)}]}
    return json.dumps({"prompt": "a", "max_tokens": 4, "guided_json": schema}).encode()
