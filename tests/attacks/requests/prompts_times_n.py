"""Prompts times answers to each: they were all made before they were counted."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "prompts times n are 1280000"


def body() -> bytes:
    return json.dumps({"prompt": ["a"] * 10_000, "n": 128, "max_tokens": 1}, separators=(",", ":")).encode()
