"""Widths of low-bit weights that differ from matrix to matrix of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.options.quantize import EMBEDDING, HEAD
from engine.checkpoint.pack_quantized import CONFIG_KEY, config_of
from engine.families.config import DecoderConfig
from engine.families.tensor_names import name_on_disk
from engine.families.tensor_shapes import expected_tensors
from engine.kernels.scheme import Scheme


@dataclass(frozen=True)
class MixedWidths:
    """Takes the place of QuantiserOptions."""

    widths: Mapping[str, int]
    group_size: int = 32
    experts_only: bool = False
    quantize_head: bool = False

    @property
    def bits(self) -> int:
        return max(self.widths.values())

    def check(self, config: DecoderConfig, matrices: Any = None) -> None:
        pass

    def scheme_of(self, name: str) -> Scheme:
        return Scheme(self.widths[name], self.group_size)

    def names(self, config: DecoderConfig) -> list[str]:
        return [*self.widths]

    def config(self, config: DecoderConfig) -> dict[str, Any]:
        rounded = set(self.widths)
        matrices = [name for name, shape in expected_tensors(config).items() if len(shape) == 2]
        kept = [name for name in matrices if name not in rounded and name not in (EMBEDDING, HEAD)]
        kept = [HEAD, *(name_on_disk(config.architecture, name) for name in kept)]
        return {
            CONFIG_KEY: config_of(Scheme(self.bits, self.group_size), kept, {name: self.scheme_of(name) for name in rounded})
        }
