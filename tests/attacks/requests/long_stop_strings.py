"""Four stop strings of two million characters: comparing each of their beginnings with the text froze the engine."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "at most 1000 characters"


def body() -> bytes:
    return json.dumps({"prompt": "a", "stop": ["z" * 1_900_000] * 4, "max_tokens": 8}).encode()
