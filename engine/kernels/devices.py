"""The device and the number of threads that a process computes with."""

from __future__ import annotations

import torch

from engine.errors import OptionError


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


def set_threads(count: int | None) -> None:
    """Set the number of torch threads of the whole process; None leaves it. Raises OptionError below 1."""
    if count is not None and count < 1:
        raise OptionError(f"threads is {count}; it must be at least 1")
    if count is not None:
        torch.set_num_threads(count)
