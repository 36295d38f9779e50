"""NVFP4 as compressed-tensors stores it ("nvfp4-pack-quantized"): weights in E2M1 with an E4M3 scale for each 16 of a row.

A weight X [O, I] is stored as three tensors: X_packed, uint8 [O, I / 2], whose low halves hold the first number of each
pair; X_scale, E4M3 [O, I / 16]; and X_global_scale, one float32. weight = number · (scale / global scale).

Shape suffixes: O outputs, I inputs, B bytes of a row, C groups of a row.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from functools import partial
from typing import TYPE_CHECKING

from engine.checkpoint.pack_quantized import PACKED, SCALE
from engine.checkpoint.stored_views import SAME_MODEL, StoredView
from engine.errors import CheckpointError
from engine.files.element_type import FLOAT8, FLOAT32, UINT8, ElementType
from engine.files.mapped_file import MappedFile
from engine.kernels.stored.code_levels import MAGNITUDES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.kernels.stored.quantized_weight import LowBitWeight

FORMAT = "nvfp4-pack-quantized"
GLOBAL = "_global_scale"
GROUP = 16
NVFP4 = "NVFP4"
"""Name of the type, as in engine/kernels/stored/float_weight.py."""


class Nvfp4View(StoredView):
    """Location of a weight in NVFP4."""

    is_packed = True

    def __init__(self, name: str, shape: tuple[int, ...], by_name: Mapping[str, MappedFile], element: ElementType) -> None:
        """element: the type to which the weight is dequantized. Raises CheckpointError unless the three tensors fit."""
        self._names = tuple(name + suffix for suffix in (PACKED, SCALE, GLOBAL))
        missing = [stored for stored in self._names if stored not in by_name]
        if missing:
            raise CheckpointError(f"tensor {missing[0]} is missing, which belongs to {self._names[0]}")
        self._files = tuple(by_name[stored] for stored in self._names)
        super().__init__(self._files[0], self._names[0], shape)
        self.element, self._name = element, name
        entries = [file.entries[stored] for file, stored in zip(self._files, self._names, strict=True)]
        outputs, inputs = shape if len(shape) == 2 else (0, 1)
        fits = inputs % GROUP == 0 and entries[2].shape in ((), (1,))
        fits = fits and [entry.shape for entry in entries[:2]] == [(outputs, inputs // 2), (outputs, inputs // GROUP)]
        if not fits or [entry.element for entry in entries] != [UINT8, FLOAT8, FLOAT32]:
            kinds = ", ".join(f"{entry.element} {list(entry.shape)}" for entry in entries)
            raise CheckpointError(
                f"tensors {', '.join(self._names)} are {kinds}; a weight {list(shape)} in NVFP4 has {UINT8} "
                f"[{outputs}, {inputs // 2}], {FLOAT8} [{outputs}, {inputs // GROUP}] and one {FLOAT32}; {SAME_MODEL}"
            )
        self._bytes = sum(entry.nbytes for entry in entries)

    @property
    def stored_names(self) -> tuple[str, ...]:
        return self._names

    @property
    def bytes(self) -> int:
        """Stored size in bytes."""
        return self._bytes

    @property
    def floats(self) -> None:
        """None: the weight itself is computed."""
        return None

    def stored_parts(self, name: str) -> dict[str, Tensor]:
        """Return the stored tensors, as those of a weight `name` are called."""
        stored = zip((PACKED, SCALE, GLOBAL), self._files, self._names, strict=True)
        return {name + suffix: file.tensor(place) for suffix, file, place in stored}

    def _stored(self) -> tuple[Tensor, Tensor, float]:
        """Return the bytes, the scales as bytes, and the divisor of all weights."""
        import torch  # here: headers are read without it

        packed, scales, whole = (file.tensor(name) for file, name in zip(self._files, self._names, strict=True))
        divisor = float(whole)
        if not math.isfinite(divisor) or divisor == 0.0:
            raise CheckpointError(f"{self._files[2].path}: tensor {self._names[2]} is {divisor}; the file is damaged")
        return packed, scales.view(torch.uint8), divisor

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantized weight."""
        packed, scales, divisor = self._stored()
        return dequantised(packed, scales, dtype or self.element.torch, divisor=divisor)

    def weight(self, kinds: Container[str]) -> LowBitWeight | None:
        """Return the matrix as it is stored, mapped; None if the kernels do not multiply it so."""
        from engine.kernels.stored.float_weight import FloatWeight, fits_kernels  # here: headers are read without torch

        if NVFP4 not in kinds or not fits_kernels(NVFP4, self.shape):
            return None
        packed, scales, divisor = self._stored()
        numbers = partial(dequantised, divisor=divisor)
        return FloatWeight(packed, scales, NVFP4, self.shape[1], numbers, divisor=divisor)


def dequantised(packed_OB: Tensor, scales_OC: Tensor, dtype: torch.dtype, *, divisor: float) -> Tensor:
    """Return number · (scale / divisor), [O, I], rounded once to `dtype`. scales_OC: bytes of E4M3."""
    import torch  # here: headers are read without it

    numbers = torch.tensor([*MAGNITUDES, *(-number for number in MAGNITUDES)])
    wide_OI = torch.stack((numbers[(packed_OB & 15).int()], numbers[(packed_OB >> 4).int()]), dim=-1).flatten(1)
    scales = scales_OC.view(torch.float8_e4m3fn).float() / divisor
    weight_OI: Tensor = wide_OI.unflatten(1, (-1, GROUP)).mul_(scales[:, :, None]).flatten(1)
    return weight_OI.to(dtype)
