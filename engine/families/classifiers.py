"""Classifiers: models of any family that transformers runs, recognized by the class that config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLASSIFIER_CLASSES = {"ForImageClassification": "images", "ForSequenceClassification": "texts"}
"""Suffixes of transformers' classifier class names, and the kind of input of such a model."""


def classified(config: Mapping[str, Any]) -> str | None:
    """Return the input that a model with this config.json classifies, "images" or "texts"; None if it is no classifier."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    found = (what for end, what in CLASSIFIER_CLASSES.items() if isinstance(name, str) and name.endswith(end))
    return next(found, None)
