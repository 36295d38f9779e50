"""A schema of 50 bytes whose automaton has ten million states."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "guided_json"


def body() -> bytes:
    schema = {"type": "integer", "multipleOf": 9_999_991}
    return json.dumps({"prompt": "a", "max_tokens": 4, "guided_json": schema}).encode()
