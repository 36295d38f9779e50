"""The device, the number of threads, and the cached shapes of products that a process computes with."""

from __future__ import annotations

import os

import torch

from engine.errors import OptionError

SHAPES_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables for the number of shapes whose compiled products oneDNN, and torch's layer above it, keep. Each
takes about 1 MB, and the default is 1,024 shapes."""


def resolve_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is CUDA where it is available.

    Raises OptionError for an unknown device, and for CUDA where it is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise OptionError(f"device {name!r} is not known; choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("device 'cuda' was asked for and torch finds none; use --device cpu")
    return torch.device(name)


def keep_few_shapes() -> None:
    """Let oneDNN keep the compiled products of 64 shapes, unless the environment says otherwise.

    Shapes vary in a mixture of experts: each expert of each batch has another number of tokens, and each block of a long
    prompt another number of keys. oneDNN reads the variables once, when the process computes its first product.
    """
    for name in SHAPES_KEPT:
        os.environ.setdefault(name, "64")


def set_threads(count: int | None) -> None:
    """Set the number of torch threads of the whole process; None leaves it. Raises OptionError below 1."""
    if count is not None and count < 1:
        raise OptionError(f"threads is {count}; it must be at least 1")
    if count is not None:
        torch.set_num_threads(count)
