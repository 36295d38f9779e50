"""Whether stored floating-point numbers are finite, read from their bytes with NumPy: torch takes seconds to import."""

from __future__ import annotations

from collections.abc import Iterator

from engine.files.element_type import BFLOAT16, FLOAT16, FLOAT32, ElementType
from engine.files.mapped_file import MappedFile

_EXPONENTS = {BFLOAT16: 0x7F80, FLOAT16: 0x7C00, FLOAT32: 0x7F80_0000, ElementType("float64", 8, True): 0x7FF0 << 48}
"""The bits of the exponent. Where all of them are ones the number is NaN or infinity (IEEE 754-2019, §3.4)."""
_ELEMENTS = 1 << 17
"""Elements that are looked at together: they and what is computed from them stay in the processor's cache."""


def can_check(element: ElementType) -> bool:
    """Whether `is_finite` knows this type."""
    return element in _EXPONENTS


def is_finite(file: MappedFile, name: str, release_every: int) -> bool:
    """Whether a tensor holds neither NaN nor infinity. At most `release_every` bytes of it become resident."""
    entry, read = file.entries[name], 0
    for part in _parts(file, name):
        if not _is_finite(part, entry.element):
            return False
        read += len(part)
        if read > release_every:
            file.release()
            read = 0
    return True


def _parts(file: MappedFile, name: str) -> Iterator[memoryview]:
    raw = file.raw(name)
    step = _ELEMENTS * file.entries[name].element.itemsize
    for start in range(0, len(raw), step):
        yield raw[start : start + step]


def _is_finite(raw: memoryview, element: ElementType) -> bool:
    import numpy as np  # here: most headers are read without looking at a value

    bits = np.frombuffer(raw, dtype=f"<u{element.itemsize}")
    # Without its sign, a number is finite where its bits are less than those of infinity.
    return bool(np.left_shift(bits, 1).max() < _EXPONENTS[element] << 1)
