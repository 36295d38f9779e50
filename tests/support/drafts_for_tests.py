"""Pairs of a model and a draft of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conftest import save_reference
from tokenizers_for_tests import VOCABULARY, add_tokenizer

LONGROPE: dict[str, Any] = {
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 24,
    },
}
"""The frequencies switch after 24 positions, among the generated tokens."""


def save_pair(path: Path, family: str = "mixtral", noise: float = 0.02, **changes: Any) -> tuple[Path, Path]:
    """Save a target, and a draft that is close enough to the target to be right sometimes."""
    model = save_reference(family, path / "target", vocab_size=VOCABULARY, **changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(path / "draft")
    for name in ("target", "draft"):
        add_tokenizer(path / name)
    return path / "target", path / "draft"
