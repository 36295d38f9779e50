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
    own_prefix: str = ""
    """Prefix of the language model's tensors in a checkpoint of it alone."""

    def own_name(self, name: str) -> str:
        """Return the name of a tensor in a checkpoint of the language model alone."""
        return self.own_prefix + name.removeprefix(self.prefix) if name.startswith(self.prefix) else name


_QWEN3_5 = Wrapper("text_config", "model.language_model.", ("model.visual.",), own_prefix="model.")
WRAPPERS = {
    "gemma4": Wrapper(
        "text_config",
        "model.language_model.",
        ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
        own_prefix="model.",
    ),
    "llama4": Wrapper("text_config", "language_model.", ("vision_model.", "multi_modal_projector.")),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
}


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
