"""Ten thousand tools, whose descriptions alone would be longer than any prompt."""

import json

PATH = "/v1/chat/completions"
STATUS = 400
SAYS = "tools has 10000 entries"


def body() -> bytes:
    tools = [{"type": "function", "function": {"name": f"f{place}"}} for place in range(10_000)]
    return json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": tools}).encode()
