"""Whether rotary embeddings can be made of a config's parameters, found without torch where they are the plain ones."""

from __future__ import annotations

from engine.families.config import DecoderConfig

_USUAL_THETA = 1.0, 1e30
"""Bases between these give frequencies that are positive numbers in float32, whatever the dimension."""


def check_rotary(config: DecoderConfig) -> None:
    """Raise CheckpointError for rope_parameters that give no frequencies to rotate by."""
    parameters = config.transformers_config.rope_parameters
    theta, lowest, highest = parameters.get("rope_theta"), *_USUAL_THETA
    is_plain = parameters.get("rope_type", "default") == "default" and type(theta) in (int, float)
    if is_plain and lowest <= theta <= highest and config.rotary_dimension % 2 == 0:
        return
    from engine.families.rotary_embedding import Rotary  # here: it imports torch, headers are read without

    Rotary(config)  # made and dropped
