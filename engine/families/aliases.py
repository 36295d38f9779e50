"""The words of a family's config.json, as a part of the family: names, keys of its authors, settings with one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = dict[str, tuple[Any, ...] | None]
"""Config keys that the transformers config does not know or does not check, each with the values that the decoder honors,
also as entries of a list; None where any value will do."""


def only(**honored: Any) -> Settings:
    """Settings that have one value, or one of a tuple."""
    return {key: value if isinstance(value, tuple) else (value,) for key, value in honored.items()}


def unused(*keys: str) -> Settings:
    """Settings that may have any value: they matter only in training, or to nobody."""
    return dict.fromkeys(keys)


@dataclass(frozen=True)
class OwnWords:
    """transformers has the family, under its own name."""

    read_as: str | None = None
    """model_type whose transformers config reads the family's config.json, where transformers has none for the family."""
    written_as: str | None = None
    """model_type that results are given, where the family is another one under a name of its own."""

    @property
    def renames(self) -> bool:
        """Whether config.json may have keys that are not those of transformers."""
        return False

    def renamed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config with transformers' keys in the place of the authors'."""
        return dict(config)


def another_name(model_type: str) -> OwnWords:
    """The family is another one under a name of its own."""
    return OwnWords(model_type, model_type)


@dataclass(frozen=True)
class AuthorsWords(OwnWords):
    """config.json has the words of its authors' own code."""

    names: tuple[tuple[str, str], ...] = ()
    """The authors' key and transformers', of each setting that has two."""
    kinds: tuple[str, ...] = ()
    """`layer_types` by the numbers that the authors have for them."""

    @property
    def renames(self) -> bool:
        """Whether config.json may have keys that are not those of transformers."""
        return True

    def renamed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config with transformers' keys in the place of the authors'."""
        names = dict(self.names)
        values = {names.get(key, key): value for key, value in config.items()}
        kinds, own = values.get("layer_types"), dict(enumerate(self.kinds))
        if isinstance(kinds, list):
            values["layer_types"] = [own.get(kind, kind) if isinstance(kind, int) else kind for kind in kinds]
        return values
