"""A schema of 5,000 optional properties in any order: it compiles, and each of its masks takes long."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "guided_json"


def body() -> bytes:
    schema = {"type": "object", "properties": {f"name_{place}": {"type": "string"} for place in range(5000)}}
    return json.dumps({"prompt": "a", "max_tokens": 4, "guided_json": schema}).encode()
