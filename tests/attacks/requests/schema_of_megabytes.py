"""A schema of 6 MB, which takes long to compile."""

import json

PATH = "/v1/chat/completions"
STATUS = 400
SAYS = "response_format"


def body() -> bytes:
    schema = {"type": "object", "properties": {f"name_{place}": {"type": "string"} for place in range(180_000)}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return json.dumps({"messages": [{"role": "user", "content": "a"}], "response_format": form}).encode()
