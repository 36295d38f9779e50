"""Tokens that the model's embeddings have no row for."""

import json

PATH = "/v1/completions"
STATUS = 400
SAYS = "the model's tokens are below"


def body() -> bytes:
    return json.dumps({"prompt": [[2**62]], "max_tokens": 4}).encode()
