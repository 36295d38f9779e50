"""Numbers, flags and lists of a config.json, each validated when it is read.

`family` is the family's transformers config, which has the defaults of keys that config.json omits.
"""

from __future__ import annotations

from math import inf
from typing import Any

from engine.errors import CheckpointError
from engine.files.json_file import shown

_FLOATS = {"Infinity": inf, "-Infinity": -inf}


def with_floats(value: Any) -> Any:
    """Return a value of config.json with the infinities for which transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("__float__")
    return _FLOATS[tag] if len(value) == 1 and tag in _FLOATS else {key: with_floats(each) for key, each in value.items()}


def positive(family: Any, key: str) -> int:
    """Return a required positive number. Raises CheckpointError for anything else."""
    value = getattr(family, key, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def natural(family: Any, key: str) -> int:
    """Return a number that may be 0; a missing one is 0. Raises CheckpointError for anything else."""
    return 0 if getattr(family, key, None) in (None, 0) else positive(family, key)


def number(key: str, value: Any) -> float:
    """Return a finite number of at least 0 that was found under this key. Raises CheckpointError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e38:
        raise CheckpointError(f"config.json: {key} is {shown(value)}; it must be a number from 0, or one for each layer")
    return float(value)


def above_zero(family: Any, key: str) -> float:
    """Return a finite number above 0. Raises CheckpointError for anything else."""
    if not (value := number(key, getattr(family, key))):
        raise CheckpointError(f"config.json: {key} is {value}; it must be a positive number")
    return value


def flag(rule: bool | str, family: Any) -> bool:
    """Return a rule that is fixed for the family, or the flag under the config key."""
    return bool(getattr(family, rule, False)) if isinstance(rule, str) else rule


def of_layer(family: Any, key: str, index: int) -> Any:
    """Return an entry of a list with one entry for each layer. Raises CheckpointError if there is no such list."""
    values = getattr(family, key, None)
    if not isinstance(values, list) or len(values) < positive(family, "num_hidden_layers"):
        raise CheckpointError(f"config.json: {key} must be a list with an entry for each layer")
    return values[index]


def keys(*rules: bool | str | None) -> tuple[str, ...]:
    """Return the config keys among some rules."""
    return tuple(rule for rule in rules if isinstance(rule, str))
