"""Check that rotary embeddings can be made from a config's parameters, without torch if these are plain."""

from __future__ import annotations

from engine.families.config import DecoderConfig

_USUAL_THETA = 1.0, 1e30
"""Range of bases whose frequencies are positive numbers in float32, whatever the dimension."""


def check_rotary(config: DecoderConfig) -> None:
    """Raise CheckpointError for rope_parameters that give no frequencies to rotate by."""
    if not config.rotary_dimension:
        return
    parameters = config.transformers_config.rope_parameters
    theta, lowest, highest = parameters.get("rope_theta"), *_USUAL_THETA
    is_plain = parameters.get("rope_type", "default") == "default" and type(theta) in (int, float)
    if is_plain and lowest <= theta <= highest and config.rotary_dimension % 2 == 0:
        return
    from engine.families.rotary_embedding import Rotary  # imports torch; headers are read without it

    Rotary(config)  # the object is only constructed for its checks
