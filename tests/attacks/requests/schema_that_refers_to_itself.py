"""Schemas of references in a circle, which no value ends."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "guided_json"


def body() -> bytes:
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    return json.dumps({"prompt": "a", "max_tokens": 4, "guided_json": circle}).encode()
