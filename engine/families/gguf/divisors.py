"""Rotation scaled as in Llama 3.1: GGUF files have the divisors of the frequencies, and not what they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from engine.errors import UnsupportedError
from engine.families.config import DecoderConfig

FREQUENCIES = "rope_freqs.weight"
KIND = "llama3"
"""Name of this scaling in `rope_parameters`."""
_LIMITS = ((1.0, 4.0), (1.0, 1.0))
"""`low_freq_factor` and `high_freq_factor` of Llama 3.1 to 3.3, and of Llama 4."""
_LENGTHS = (8192,)
"""`original_max_position_embeddings` of them."""
_OFF = 1e-4
"""Largest relative difference of a number that the same parameters give in float32."""


def divisors(parameters: Mapping[str, Any], pairs: int) -> tuple[float, ...]:
    """Return the divisor of the frequency of each pair of dimensions, by `rope_parameters` of this kind.

    Waves shorter than the original context over the high factor stay as they are; those longer than it over the low factor
    are stretched by `factor`; between the two the change is smooth (transformers, modeling_rope_utils.py).
    """
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    found = []
    for pair in range(pairs):
        waves = parameters["original_max_position_embeddings"] * parameters["rope_theta"] ** (-pair / pairs) / (2 * math.pi)
        if waves > high:
            found.append(1.0)
        elif waves < low or low == high:
            found.append(float(parameters["factor"]))
        else:
            smooth = (waves - low) / (high - low)
            found.append(1 / ((1 - smooth) / parameters["factor"] + smooth))
    return tuple(found)


def scaling_of(numbers: Sequence[float], base: float) -> dict[str, Any]:
    """Return the `rope_parameters` that give these divisors. Raises UnsupportedError if none that are known do."""
    for (low, high), length in product(_LIMITS, _LENGTHS):
        parameters = {
            "rope_type": KIND,
            "rope_theta": base,
            "factor": max(numbers, default=1.0),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
        same = zip(numbers, divisors(parameters, len(numbers)), strict=True)
        if all(math.isclose(own, known, rel_tol=_OFF) for own, known in same):
            return parameters
    raise UnsupportedError(
        f"its rotation is scaled by {FREQUENCIES} in a way that is not read: not as in Llama 3.1 to 4; take the model's "
        "safetensors"
    )


def divisors_of(config: DecoderConfig) -> dict[str, tuple[float, ...]]:
    """Return the numbers of a model's tensor of divisors by its name, or nothing if its rotation is not scaled so."""
    parameters = config.transformers_config.rope_parameters
    scaled = parameters.get("rope_type") == KIND
    return {FREQUENCIES: divisors(parameters, config.rotary_dimension // 2)} if scaled else {}
