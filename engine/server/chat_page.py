"""The chat page: one HTML document without external resources, made of the files in engine/server/page."""

from __future__ import annotations

from functools import cache
from importlib import resources

SCRIPTS = ("elements", "markdown", "figures", "conversations", "models", "chat")
"""Scripts of the page, in the order in which they run."""


@cache
def chat_page() -> str:
    """Return the document."""
    scripts = "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    return _file("index.html").replace("/* style.css */", _file("style.css")).replace("/* scripts */", scripts)


def _file(name: str) -> str:
    return resources.files("engine.server").joinpath("page", name).read_text(encoding="utf-8")
