"""An expression whose automaton has a million states, after a first letter that hides it."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "structured_outputs"


def body() -> bytes:
    regex = "x(a{1000}){1000}"
    return json.dumps({"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": regex}}).encode()
