"""Invalid prompts one level deeper, where the number of prompts is one."""

PATH = "/v1/completions"
STATUS = 400
SAYS = "prompt"


def body() -> bytes:
    return b'{"prompt": [[' + b",".join([b"{}"] * 660_000) + b"]]}"
