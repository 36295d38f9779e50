"""Metadata of a GGUF file as one family's rows read it: numbers by key, each validated when it is read."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.checks import MAX_LIST
from engine.files.json_file import shown

ARCHITECTURE = "general.architecture"
_FLOAT = struct.Struct("<f")
_REQUIRED = object()


class Facts:
    """The metadata and the shapes of the tensors of a GGUF file. Keys are read without the architecture's name."""

    def __init__(
        self,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        numbers: Callable[[str], tuple[float, ...]] = lambda name: (),
    ) -> None:
        """numbers: returns the numbers of a tensor, for those that describe the model."""
        self.metadata, self.shapes, self.numbers = metadata, shapes, numbers
        name = metadata.get(ARCHITECTURE)
        if not isinstance(name, str):
            raise CheckpointError(f"metadata: {ARCHITECTURE} is {shown(name)}; the file is not of a language model")
        self.architecture = name
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether the file has the key."""
        return f"{self.architecture}.{key}" in self.metadata

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a number, a flag or a text, or the default if the file lacks the key.

        A list with one number for each layer is read if all of them are equal. A number that was stored in float32 is
        returned as the shortest decimal that means it. Raises CheckpointError and UnsupportedError.
        """
        whole = f"{self.architecture}.{key}"
        self._read.add(whole)
        if whole not in self.metadata and default is _REQUIRED:
            raise CheckpointError(f"metadata: {whole} is missing; fetch or convert the model again")
        value = self.metadata.get(whole, default)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                raise UnsupportedError(f"metadata: {whole} differs by layer, which is not read")
            value = value[0]
        if isinstance(value, float):
            if not math.isfinite(value):
                raise CheckpointError(f"metadata: {whole} is {value}; it must be a number")
            return decimal(value)
        return value

    def size(self, key: str, default: Any = _REQUIRED) -> int:
        """Return a number of things. Raises CheckpointError for anything else."""
        value = self.value(key, default)
        if type(value) is not int or value < 0:
            raise CheckpointError(f"metadata: {self.architecture}.{key} is {shown(value)}; it must be a number of things")
        return value

    def sizes(self, key: str) -> list[int]:
        """Return a list of numbers of things. Raises CheckpointError for anything else."""
        whole = f"{self.architecture}.{key}"
        self._read.add(whole)
        values = self.metadata.get(whole)
        if not isinstance(values, list) or any(type(each) is not int or each < 0 for each in values):
            raise CheckpointError(f"metadata: {whole} is {shown(values)}; it must be a list of numbers of things")
        return values

    @property
    def layers(self) -> int:
        """Number of layers, without those for multi-token prediction."""
        return self.size("block_count") - self.size("nextn_predict_layers", 0)

    @property
    def listed(self) -> range:
        """Indices of the layers, for lists with an entry for each of them. Models with more are refused later."""
        return range(min(self.layers, MAX_LIST))

    @property
    def _lengths(self) -> tuple[int, int]:
        """Lengths of lists by layer: with and without entries for multi-token prediction. llama.cpp asks for either."""
        return self.size("block_count"), len(self.listed)

    def by_layer(self, key: str) -> list[int]:
        """Return a number of things for each layer, which the file says once or in a list.

        Layers for multi-token prediction are left out. Raises CheckpointError for anything else.
        """
        layers = len(self.listed)
        is_list = isinstance(self.metadata.get(f"{self.architecture}.{key}"), list)
        found = self.sizes(key) if is_list else [self.size(key)] * layers
        if len(found) not in self._lengths:
            raise CheckpointError(
                f"metadata: {self.architecture}.{key} has {len(found)} numbers, and the model has {layers} layers"
            )
        return found[:layers]

    def shared(self, key: str) -> int:
        """Return the one number above 0 that `by_layer` returns, for whichever layers it is.

        Raises UnsupportedError for several such numbers, and CheckpointError for none.
        """
        found = sorted({each for each in self.by_layer(key) if each})
        if len(found) > 1:
            raise UnsupportedError(
                f"metadata: {self.architecture}.{key} differs by layer ({found[0]}, {found[1]}), which is not read"
            )
        if not found:
            raise CheckpointError(
                f"metadata: {self.architecture}.{key} is 0 in every layer; fetch or convert the model again"
            )
        return found[0]

    def flags(self, key: str) -> list[bool]:
        """Return a flag for each layer. Raises CheckpointError for anything else.

        Layers for multi-token prediction are left out.
        """
        whole = f"{self.architecture}.{key}"
        self._read.add(whole)
        found = self.metadata.get(whole)
        if not isinstance(found, list) or len(found) not in self._lengths or any(type(each) is not bool for each in found):
            raise CheckpointError(f"metadata: {whole} is {shown(found)}; it must be a list with a flag for each layer")
        return found[: len(self.listed)]

    def only(self, key: str, *allowed: Any) -> None:
        """Raise UnsupportedError if the file has the key with another value than these."""
        if self.has(key) and (value := self.value(key)) not in allowed:
            raise UnsupportedError(f"metadata: {self.architecture}.{key} is {shown(value)}, which the engine does not have")

    def refuse_unread(self, harmless: Iterable[str]) -> None:
        """Raise UnsupportedError naming keys of the architecture that nothing has read: the model may need them."""
        known = self._read | {f"{self.architecture}.{key}" for key in harmless}
        unread = [key for key in self.metadata if key.startswith(f"{self.architecture}.") and key not in known]
        if unread:
            raise UnsupportedError(
                f"metadata asks for what the engine does not have: {', '.join(map(shown, unread))[:500]}; take the model's "
                "safetensors"
            )


def decimal(value: float) -> float:
    """Return the shortest decimal number that is stored as this float32; a number of higher precision as it is."""
    try:
        stored = _FLOAT.pack(value)
    except OverflowError:
        return value
    if _FLOAT.unpack(stored)[0] != value:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((each for each in candidates if _FLOAT.pack(each) == stored), value)
