"""How deeply JSON is nested, without recursion."""

from __future__ import annotations

import re
from typing import Any

DEEP = 200
"""Arrays and objects within each other in a body that nobody means to send; json.loads gives up at about 1,000."""
_BRACKETS = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*(:?)|[\[\]{}]', re.DOTALL)


def depth_of(value: Any) -> int:
    """Return how many arrays and objects are within each other in a value from json.loads."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def nested_field(data: bytes) -> str | None:
    """Return the field of a body in which JSON is nested too deeply to be parsed; None if there is none."""
    depth, field = 0, None
    for found in _BRACKETS.finditer(data):
        if found[0][:1] == b'"':
            if depth == 1 and found[2]:
                field = found[1].decode(errors="replace")
            continue
        depth += 1 if found[0] in b"[{" else -1
        if depth > DEEP:  # what follows was not parsed, and may be no JSON
            return field
    return None
