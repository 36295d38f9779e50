"""Families whose models contain a language model of a row of the table. The other parts of these models are not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError


@dataclass(frozen=True)
class Wrapper:
    """The place of the config and of the tensors of such a language model."""

    config_key: str
    """Key of the language model's own config."""
    prefix: str
    """Prefix of the language model's tensors."""
    others: tuple[str, ...]
    """Prefixes of all other tensors."""


WRAPPERS = {"llama4": Wrapper("text_config", "language_model.", ("vision_model.", "multi_modal_projector."))}


def language_model(config: dict[str, Any]) -> tuple[dict[str, Any], Wrapper | None]:
    """Return the config of the language model in a raw config.json, and the family around it, if there is one."""
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return config, None
    own = config.get(wrapper.config_key)
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json: {wrapper.config_key} is missing; give the config.json of the whole model")
    shared = ("quantization_config", "dtype", "torch_dtype")
    return {key: config[key] for key in shared if key in config} | own, wrapper
