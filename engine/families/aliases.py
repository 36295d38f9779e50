"""The vocabulary of a family's config.json, as a part of the family: names, the authors' own keys, and fixed settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = dict[str, tuple[Any, ...] | None]
"""Config keys that the transformers config does not know or does not check. Each has the values that the decoder honors,
also as entries of a list, or None if any value is accepted."""


def only(**honored: Any) -> Settings:
    """Return settings that may have one value, or any value of a tuple."""
    return {key: value if isinstance(value, tuple) else (value,) for key, value in honored.items()}


def unused(*keys: str) -> Settings:
    """Return settings that may have any value, because they matter only in training or nowhere."""
    return dict.fromkeys(keys)


@dataclass(frozen=True)
class OwnWords:
    """A family that transformers has under its own name."""

    read_as: str | None = None
    """model_type whose transformers config reads the family's config.json, if transformers has no config for the family."""
    written_as: str | None = None
    """model_type that results are given, if the family is another family under a name of its own."""

    @property
    def renames(self) -> bool:
        """Whether config.json may have keys that differ from those of transformers."""
        return False

    def renamed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with transformers' keys in the place of the authors'."""
        return dict(config)


def another_name(model_type: str) -> OwnWords:
    """Return the part of a family that is another family under a name of its own."""
    return OwnWords(model_type, model_type)


@dataclass(frozen=True)
class AuthorsWords(OwnWords):
    """A family whose config.json uses the vocabulary of its authors' own code."""

    names: tuple[tuple[str, str], ...] = ()
    """Pairs of the authors' key and transformers' key, for each setting whose two keys differ."""
    kinds: tuple[str, ...] = ()
    """Entries of `layer_types`, indexed by the authors' numbers for them."""

    @property
    def renames(self) -> bool:
        """Whether config.json may have keys that differ from those of transformers."""
        return True

    def renamed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with transformers' keys in the place of the authors'."""
        names = dict(self.names)
        values = {names.get(key, key): value for key, value in config.items()}
        kinds, own = values.get("layer_types"), dict(enumerate(self.kinds))
        if isinstance(kinds, list):
            values["layer_types"] = [own.get(kind, kind) if isinstance(kind, int) else kind for kind in kinds]
        return values
