"""Two megabytes of prompts that are none: an error for each, of four kinds of prompt, took minutes and gigabytes."""

PATH = "/v1/completions"
STATUS = 400
SAYS = "prompt"


def body() -> bytes:
    return b'{"prompt": [' + b",".join([b"{}"] * 660_000) + b"]}"
