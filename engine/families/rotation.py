"""Rotary positions as a part of a family: the layers and dimensions that are rotated, and the scalings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.errors import CheckpointError
from engine.families.layer_config import Temperature
from engine.families.values import above_zero, keys, natural, number, of_layer
from engine.files.json_file import shown

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class Rotation:
    """All dimensions of every head are rotated in every layer (Su et al. 2021)."""

    is_partial: ClassVar[bool] = False
    """Whether `partial_rotary_factor` is honored."""
    has_mscales: ClassVar[bool] = False
    """Whether the short and the long form of `longrope` have a factor each, `short_mscale` and `long_mscale`."""
    unknown_to_transformers: ClassVar[bool] = False
    """Whether the family's transformers class rotates all dimensions, whatever the config says."""
    pairs: bool | str = False
    """Whether rotated dimensions are paired with neighbors, instead of half against half: True, False, or the config key."""
    types: tuple[str, ...] = ROPE_TYPES

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return keys(self.pairs)

    def lacking(self, family: Any) -> Iterator[str]:
        """Yield the settings of the config that cannot be honored."""
        rope = family.rope_parameters or {}
        if rope.get("rope_type", "default") not in self.types:
            yield f"rope_type={rope.get('rope_type')!r}"
        if any(isinstance(value, dict) for value in rope.values()):
            yield "rope_parameters for each kind of layer"
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and not self.is_partial:
            yield f"partial_rotary_factor={rope['partial_rotary_factor']}"

    def dimension(self, family: Any, size: int) -> int:
        """Return how many of a head's `size` dimensions are rotated. The first ones are."""
        return size

    def of_layer(self, family: Any, index: int) -> tuple[bool, bool]:
        """Return whether a layer rotates, and whether rotated queries and keys are divided by their root mean square."""
        return True, False

    def kind(self, family: Any, index: int) -> str | None:
        """Return the kind of a layer, where each kind has parameters of its own; None where all layers share them."""
        return None

    def temperature(self, family: Any) -> Temperature | None:
        """Return how queries of layers that do not rotate grow with their position; None if they do not grow."""
        return None


@dataclass(frozen=True)
class NoRotation(Rotation):
    """No layer rotates. Keys of config.json about rotations mean nothing."""

    def lacking(self, family: Any) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def dimension(self, family: Any, size: int) -> int:
        """Return 0."""
        return 0

    def of_layer(self, family: Any, index: int) -> tuple[bool, bool]:
        """Return that a layer neither rotates nor divides queries and keys by their root mean square."""
        return False, False


@dataclass(frozen=True)
class PartialRotation(Rotation):
    """The fraction `partial_rotary_factor` of a head's dimensions is rotated."""

    is_partial: ClassVar[bool] = True

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, "partial_rotary_factor")

    def dimension(self, family: Any, size: int) -> int:
        """Return the fraction of `size`."""
        return int(size * family.rope_parameters.get("partial_rotary_factor", 1.0))


@dataclass(frozen=True)
class CountedRotation(Rotation):
    """The config has the number of rotated dimensions of a head."""

    unknown_to_transformers: ClassVar[bool] = True
    count: str = "rotary_dim"
    """Config key of the number; all dimensions are rotated if config.json does not have the key."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.count)

    def dimension(self, family: Any, size: int) -> int:
        """Return the config's number. Raises CheckpointError if it is odd or exceeds the head's dimensions."""
        rotated = natural(family, self.count) or size
        if rotated > size or rotated % 2:
            raise CheckpointError(
                f"config.json: {self.count} is {rotated}; of {size} dimensions an even number can be rotated"
            )
        return rotated


@dataclass(frozen=True)
class LongRotation(Rotation):
    """Rotation of kind `longrope`, whose two forms have a factor each."""

    has_mscales: ClassVar[bool] = True
    types: tuple[str, ...] = ("default", "longrope")


@dataclass(frozen=True)
class RotationByKind(Rotation):
    """Each kind of layer in `layer_types` has parameters of its own."""

    types: tuple[str, ...] = ("default", "proportional", "linear")

    def lacking(self, family: Any) -> Iterator[str]:
        """Yield the settings of the config that cannot be honored."""
        rope = family.rope_parameters
        for kind in sorted(set(family.layer_types)):
            own = rope.get(kind) if isinstance(rope, dict) else None
            if not isinstance(own, dict) or own.get("rope_type", "default") not in self.types:
                yield f"rope_parameters[{kind!r}]={shown(own)}"
            elif own.get("rope_type") != "proportional" and own.get("partial_rotary_factor", 1.0) != 1.0:
                yield f"rope_parameters[{kind!r}] with partial_rotary_factor={shown(own['partial_rotary_factor'])}"

    def kind(self, family: Any, index: int) -> str:
        """Return the layer's entry in `layer_types`."""
        return str(of_layer(family, "layer_types", index))


@dataclass(frozen=True)
class SomeLayersRotate(Rotation):
    """Some layers rotate. In the others queries may grow with their position (arXiv 2501.19399)."""

    layers: str = "no_rope_layers"
    """Config key of a list with a 0 for each layer that does not rotate."""
    unit_norm: str = "use_qk_norm"
    """Config key of the flag for dividing rotated queries and keys by their root mean square."""
    grows: str = "attn_temperature_tuning"
    """Config key of the flag for queries that grow with their position in layers that do not rotate."""
    floor: str = "floor_scale"
    slope: str = "attn_scale"

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.layers, self.unit_norm, self.grows, self.floor, self.slope)

    def of_layer(self, family: Any, index: int) -> tuple[bool, bool]:
        """Return whether a layer rotates, and whether rotated queries and keys are divided by their root mean square."""
        rotates = bool(of_layer(family, self.layers, index))
        return rotates, rotates and bool(getattr(family, self.unit_norm))

    def temperature(self, family: Any) -> Temperature | None:
        """Return the config's floor and slope. Raises CheckpointError if they are not numbers, or if the floor is 0."""
        if not getattr(family, self.grows):
            return None
        floor, slope = above_zero(family, self.floor), number(self.slope, getattr(family, self.slope))
        return Temperature(floor, slope)
