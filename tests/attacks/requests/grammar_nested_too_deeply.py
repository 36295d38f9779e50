"""A grammar with 100,000 brackets, which a parser that calls itself does not survive."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "grammar"


def body() -> bytes:
    grammar = "start: " + "(" * 100_000 + '"a"' + ")" * 100_000
    return json.dumps({"prompt": "a", "max_tokens": 4, "guided_grammar": grammar}).encode()
