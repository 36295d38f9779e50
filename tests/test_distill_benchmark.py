"""Prompts of the distillation benchmark are held out with their documents."""

from __future__ import annotations

from collections.abc import Iterator

import distill
import pytest

DOCUMENTS = {
    "held-out": ["def reads(path):\n    'Read a file.'\n", "def twice(path):\n    'Read two files.'\n"],
    "validation": ["def twice(path):\n    'Read two files.'\n", "def skips(n):\n    'Skip n.'\n"],
    "training": ["def reads(path):\n    'Read a file.'\ndef writes(text):\n    'Write it.'\n", "not python ("],
}


def test_held_out_prompts_are_of_held_out_documents_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def documents(source: str, *, split: str) -> Iterator[str]:
        assert source == "stdlib"
        return iter(DOCUMENTS[split])

    monkeypatch.setattr(distill, "load_documents", documents)
    asked = {name: [row["input"] for row in rows] for name, rows in distill.examples_by_file().items()}
    assert asked["test"] == ["reads: Read a file.", "twice: Read two files."]
    assert asked["validation"] == ["skips: Skip n."]
    assert asked["train"] == ["writes: Write it."]
