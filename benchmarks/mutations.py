"""Mutations of a file's content: of bytes, of JSON, of safetensors headers and of ONNX graphs. Used by other scripts.

Each mutation is a function of the content and a random generator, and returns the changed content. Those of tokenizers and
templates are in tokenizer_mutations.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Change = Callable[[bytes, random.Random], bytes]
ABSURD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63, -(2**63), 10**12, 10**30, 10**400, -(10**9)),
    *(0.0, -0.5, 1e-38, 1e38, 1e308, float("nan"), float("inf"), True, False, None),
    *(
        "",
        "x",
        "NaN",
        "1e999",
        "../x",
        "/etc/passwd",
        "..",
        "a\nb",
        "\x00",
        "\ud800",
        "\u202e",
        "{{ 1 / 0 }}",
        "a" * 100_000,
    ),
    *([], {}, [None], [[]], {"": {}}, [0] * 10_000, ["x", 1, None], {"type": "Sequence"}),
)
VERY_DEEP = "lists, deeper than Python writes them"


def change_bytes(data: bytes, chosen: random.Random) -> bytes:
    """Change the bytes in one place. Half of the places are near the beginning, where headers are."""
    place = chosen.randrange(max(1, len(data) if chosen.random() < 0.5 else min(len(data), 2_000)))
    size = chosen.choice((1, 1, 2, 8, 100))
    match chosen.choice(("flip", "cut", "insert", "splice", "repeat", "empty" if chosen.random() < 0.1 else "flip")):
        case "flip":
            piece = bytes(byte ^ chosen.randrange(1, 256) for byte in data[place : place + min(size, 8)])
            return data[:place] + piece + data[place + len(piece) :]
        case "cut":
            return data[:place] + (data[place + size :] if chosen.random() < 0.5 else b"")
        case "insert":
            return data[:place] + chosen.randbytes(size) + data[place:]
        case "splice":
            other = chosen.randrange(max(1, len(data)))
            return data[:place] + data[other : other + size] + data[place + size :]
        case "repeat":
            return data[:place] + data[place : place + size] * chosen.choice((2, 50, 5_000)) + data[place + size :]
        case _:
            return b""


def deep(levels: int) -> Any:
    """Return lists in lists."""
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def change_json(data: bytes, chosen: random.Random) -> bytes:
    """Make one to three changes of structure, or change bytes if the data is not JSON."""
    try:
        values = json.loads(data)
    except ValueError:
        return change_bytes(data, chosen)
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        change_values(values, chosen)
    text = json.dumps(values).replace(json.dumps(VERY_DEEP), "[" * 5_000 + "]" * 5_000)
    if chosen.random() < 0.05 and isinstance(values, dict) and values:  # a duplicate key
        key = chosen.choice(list(values))
        text = f"{{{json.dumps(key)}: {json.dumps(chosen.choice(ABSURD))}, {text[1:]}"
    return text.encode()


def change_values(values: Any, chosen: random.Random) -> None:
    """Make one change in place, somewhere in a tree."""
    place, key = values, None
    while isinstance(place, dict | list) and place:
        key = chosen.choice(list(place)) if isinstance(place, dict) else chosen.randrange(len(place))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or chosen.random() < 0.3:
            break
        place = inner
    if key is None:
        return
    match chosen.choice(("replace", "replace", "replace", "near", "remove", "rename", "swap", "copy", "deep")):
        case "replace":
            place[key] = chosen.choice(ABSURD)
        case "near":
            near = place[key]
            number = isinstance(near, int | float) and not isinstance(near, bool)
            place[key] = chosen.choice((near + 1, near - 1, near * 2, -near, str(near))) if number else [near]
        case "remove":
            del place[key]
        case "rename" if isinstance(place, dict):
            place[chosen.choice(("", "type", "x" * 300, key.upper(), f"{key} "))] = place.pop(key)
        case "swap":
            other = chosen.choice(list(place)) if isinstance(place, dict) else chosen.randrange(len(place))
            place[key], place[other] = place[other], place[key]
        case "copy" if isinstance(place, list):
            place.extend(place[:1_000] * chosen.choice((1, 3)))
        case "deep":
            place[key] = (
                chosen.choice((deep(3), deep(400), VERY_DEEP)) if chosen.random() < 0.5 else {"a": {"a": place[key]}}
            )


def change_header(data: bytes, chosen: random.Random) -> bytes:
    """Change the header of a safetensors file, and its length with it."""
    length = int.from_bytes(data[:8], "little")
    header = change_json(data[8 : 8 + length], chosen)
    length = len(header) if chosen.random() < 0.9 else chosen.choice((0, 2**63, len(data), len(header) + 1))
    return length.to_bytes(8, "little") + header + data[8 + int.from_bytes(data[:8], "little") :]


def change_digested(data: bytes, chosen: random.Random) -> bytes:
    """Change the header of a state file, and remove the digest that would reveal the change."""
    changed = change_header(data, chosen)
    length = int.from_bytes(changed[:8], "little")
    try:
        header = json.loads(changed[8 : 8 + length])
        header["__metadata__"].pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return changed
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + changed[8 + length :]


def change_graph(data: bytes, chosen: random.Random) -> bytes:
    """Change nodes, attributes, weights and metadata of an ONNX graph."""
    import onnx

    model = onnx.load_from_string(data)
    graph = model.graph
    for _ in range(chosen.choice((1, 1, 2, 4))):
        node, tensor = chosen.choice(graph.node), chosen.choice(graph.initializer)
        match chosen.randrange(10):
            case 0:
                node.op_type = chosen.choice(
                    ("Loop", "If", "Scan", "Identity", "Tile", "Expand", "Exp", "Nope", node.op_type)
                )
            case 1:
                graph.node.remove(node)
            case 2:
                other = chosen.choice(graph.node)
                if node.input and other.output:
                    node.input[chosen.randrange(len(node.input))] = chosen.choice(other.output)
            case 3 if node.attribute:
                attribute = chosen.choice(node.attribute)
                attribute.i = chosen.choice((0, -1, 2**31, 2**62, attribute.i + 1))
                attribute.f = chosen.choice((0.0, float("nan"), 1e38))
            case 4 if tensor.dims:
                tensor.dims[chosen.randrange(len(tensor.dims))] = chosen.choice((0, -1, 1, 2**31, 2**62))
            case 5 if tensor.external_data:
                entry = chosen.choice(tensor.external_data)
                entry.value = chosen.choice(("-1", "0", str(2**62), "../text.txt", "/etc/passwd", "model.onnx", "", "x"))
            case 6:
                tensor.data_type = chosen.randrange(25)
            case 7:
                tensor.raw_data = chosen.randbytes(chosen.choice((0, 1, 8, 100)))
            case 8:
                value = chosen.choice((*graph.input, *graph.output))
                value.name = chosen.choice(("input_ids", "logits", "", "x"))
            case _:
                double = onnx.helper.make_node("Concat", [node.output[0]] * 100, [f"{node.output[0]}_long"], axis=0)
                graph.node.insert(list(graph.node).index(node) + 1, double)
                for later in graph.node:
                    for place, name in enumerate(later.input):
                        if later is not double and name == node.output[0] and later.output[0] != double.output[0]:
                            later.input[place] = double.output[0]
    return model.SerializeToString()
