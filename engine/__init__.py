"""Load and run any checkpoint, artifact or export: `from engine import Engine`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `Engine` on first access: the vLLM plugin and other parts of this package do not need torch."""
    if name == "Engine":
        from engine.generation.generate import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
