"""GGUF files made for tests, with as much damage as a test wants. The format is that of `engine/files/gguf_header.py`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

F32, F16, BF16, STRING, ARRAY = 0, 1, 30, 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TYPES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
Tensors = Mapping[str, "torch.Tensor | tuple[int, tuple[int, ...], bytes]"]
"""Plain tensors, or a type, a shape (the outermost dimension first) and bytes."""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def scalar(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(f"<{CODES[kind]}", value)


def kind_of(value: Any) -> int:
    kinds: dict[type, int] = {bool: 7, int: 4, float: 6, str: STRING, bytes: STRING}
    return kinds[type(value)]


def encoded(value: Any) -> bytes:
    """Return a metadata value with its type. A list's numbers are of one type; a pair is (type, value)."""
    if isinstance(value, tuple):
        return struct.pack("<I", value[0]) + scalar(*value)
    if isinstance(value, list):
        kind = kind_of(value[0]) if value else STRING
        kind = 5 if kind == 4 else kind  # negative numbers are lists only
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(scalar(kind, each) for each in value)
    return struct.pack("<I", kind_of(value)) + scalar(kind_of(value), value)


def entries(metadata: Mapping[str, Any]) -> list[bytes]:
    return [text(key) + encoded(value) for key, value in metadata.items()]


def described(name: str | bytes, kind: int, shape: Iterable[int], offset: int) -> bytes:
    sizes = list(shape)[::-1]
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def raw(tensor: Any) -> tuple[int, tuple[int, ...], bytes]:
    """Return the type, the shape and the bytes of a tensor."""
    if isinstance(tensor, tuple):
        return tensor
    return TYPES[tensor.dtype], tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def start(tensors: int, metadata: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return struct.pack("<4sIQQ", magic, version, tensors, metadata)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Tensors, *, alignment: int = 32) -> bytes:
    """Return a good file."""
    descriptions, data = [], b""
    for name, tensor in tensors.items():
        kind, shape, content = raw(tensor)
        descriptions.append(described(name, kind, shape, len(data)))
        data += content + bytes(-len(content) % alignment)
    header = start(len(tensors), len(metadata)) + b"".join([*entries(metadata), *descriptions])
    return header + bytes(-len(header) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def q8_0(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], bytes]:
    """Return a tensor in blocks of type Q8_0: a float16 scale and 32 numbers of eight bits each."""
    blocks = tensor.float().reshape(-1, 32)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
    numbers = (blocks / scales.float().clamp_min(1e-8)).round().clamp(-127, 127).to(torch.int8)
    data = np.concatenate([scales.view(torch.uint8).numpy(), numbers.view(torch.uint8).numpy()], axis=1)
    return 8, tuple(tensor.shape), data.tobytes()
