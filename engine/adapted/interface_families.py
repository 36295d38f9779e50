"""The families of the installed transformers whose experts share the interface of `transformers/integrations/moe.py`.

The list is made from transformers, so that a new release adds families by itself. Nothing here imports a model's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

INTERFACE = "@use_experts_implementation"
"""The decorator of every class of experts that has the interface."""
_AUTO = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
"""Kinds of models that read text and return logits, best first: the names of transformers' mappings to their classes."""


class Family(NamedTuple):
    """One family: a folder of transformers' models."""

    name: str
    model_type: str
    """The model type of its language model, alone where there is a class for it; empty if there is none."""
    model_class: str
    """Name of the class of that model type; empty if no class of the family returns logits for text."""


def interface_families() -> list[Family]:
    """Return every family of the installed transformers whose modeling file decorates experts, in alphabetical order."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    files = sorted(root.glob("*/modeling_*.py"))
    names = dict.fromkeys(file.parent.name for file in files if INTERFACE in file.read_text(encoding="utf-8"))
    return [_family(name) for name in names]


def has_interface(model_type: str) -> bool:
    """Return whether a modeling file of a model type's folder decorates experts."""
    import transformers

    folder = Path(transformers.__file__).parent / "models" / str(_folder_of(model_type))
    return any(INTERFACE in file.read_text(encoding="utf-8") for file in folder.glob("modeling_*.py"))


def _family(name: str) -> Family:
    import transformers

    fitting = [
        Family(name, model_type, model_class)
        for model_type, model_class in dict.fromkeys(_classes_of(name))
        if getattr(getattr(transformers, model_class, None), "config_class", None) is transformers.CONFIG_MAPPING[model_type]
    ]
    alone = [each for each in fitting if not transformers.CONFIG_MAPPING[each.model_type].sub_configs]
    return next(iter([*alone, *fitting]), Family(name, "", ""))


def _classes_of(name: str) -> Iterator[tuple[str, str]]:
    """Yield the model types of a folder of transformers' models, each with its classes that read text."""
    for kind in _AUTO:
        for model_type, model_class in _mapping(kind).items():
            if _folder_of(model_type) == name:
                yield model_type, model_class


def classes_of(model_type: str) -> list[str]:
    """Return the names of transformers' classes that read text, for a model type of config.json, best first."""
    return [found[model_type] for kind in _AUTO if model_type in (found := _mapping(kind))]


def _mapping(kind: str) -> dict[str, str]:
    """Return the class of each model type of one kind; where there are several classes, the first one."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
    return {model_type: name if isinstance(name, str) else name[0] for model_type, name in found.items()}


def _folder_of(model_type: str) -> str | None:
    """Return the folder of transformers' models that a model type's config class lies in; None for an unknown one."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    module: str = CONFIG_MAPPING[model_type].__module__
    return module.split(".")[2]
