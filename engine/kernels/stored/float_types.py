"""Packed floats as instructions: numbers of 8 or 4 bits become registers of bfloat16 or float32, which hold them exactly.

Three storage types: E4M3 with a float32 scale for a block of rows and columns (FP8), E2M1 with a power of two for each 32
weights (MXFP4, OCP Microscaling Formats v1.0), and E2M1 with an E4M3 scale for each 16 weights (NVFP4).

The weights of a unit lie in registers in the order in which their bytes are unpacked; `place` is that order, in which the
values of a vector are written too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from engine.kernels.compiler.instructions import (
    BYTE,
    FLOAT,
    IN_ORDER,
    INDEX,
    INT,
    INTS,
    LANES,
    SHORT,
    joined,
    read,
    repeated,
    same,
    taken,
    wide_halves,
)
from engine.kernels.compiler.memory import record_at
from engine.kernels.compiler.processor import MULTIPLIES_BFLOAT16, SHIFTS_BYTES
from engine.kernels.stored.code_levels import MAGNITUDES

UNIT = 64
"""Number of weights that are unpacked together."""
REST = 32
"""Number of weights of 4 bits that may be left at the end of a row."""
TAKES_PAIRS = MULTIPLIES_BFLOAT16 and SHIFTS_BYTES
"""Whether weights become bfloat16, whose pairs the processor multiplies. Elsewhere they become float32, and those of 4 bits
integers (half_byte_products.py) where it multiplies integers."""
FLOATS_OF_MATRIX = np.dtype(
    [
        ("values", np.int64),  # address of the first row
        ("row", np.int64),  # bytes from a row to the next
        ("scales", np.int64),  # address of the first row's scales
        ("scale_row", np.int64),  # bytes from a row of scales to the next
        ("scaled_rows", np.int64),  # rows that share a row of scales
        ("shift", np.int64),  # logarithm of the number of columns that share a scale, for E4M3
        ("divisor", np.float32),  # divides all weights
        ("unused", np.float32),
    ]
)
"""Where the numbers and scales of a matrix lie."""
floats_of_matrix_at = record_at(FLOATS_OF_MATRIX)
WHOLE_ROWS = 1 << 40
"""The group size in the form of packed floats, so large that callers take no steps along the scales."""
WHOLE_SHIFT = 62
"""The shift of scales that hold for whole rows."""
_E4M3_NAN = 0x7F


@dataclass(frozen=True)
class FloatKind:
    """One storage type of packed floats."""

    name: str
    bits: int
    group: int
    """Weights that share a scale; 0 where the matrix says how many columns do."""
    step: int
    """Weights in one step of a product."""
    scales_of: Callable[[Any, Any, int], Any]
    """Returns float32 scales, given a builder, an address and how many."""

    @property
    def key(self) -> str:
        """The type's name in names of kernels."""
        return self.name.lower()

    @property
    def numbers(self) -> int:
        """Weights that share a byte."""
        return 8 // self.bits

    def place(self, weight: int, unit: int, *, pairs: bool) -> int:
        """Return the place in the registers of one weight of a unit."""
        if self.bits == 4:
            return weight // 2 + weight % 2 * (unit // 2)
        # Bytes are interleaved within 16 bytes: the first eight go to the first register.
        return weight % 16 // 8 * (unit // 2) + weight // 16 * 8 + weight % 8 if pairs else weight

    def groups(self, unit: int, register: int, *, pairs: bool) -> tuple[int, ...]:
        """Return for each lane of one register of a unit which of the unit's scales its weights have."""
        if not self.group:
            return (0,) * LANES
        each = 2 if pairs else 1
        weights = {self.place(weight, unit, pairs=pairs): weight for weight in range(unit)}
        first = register * LANES * each
        return tuple(weights[first + each * lane] // self.group for lane in range(LANES))

    def registers(self, builder: Any, address: Any, unit: int, *, pairs: bool) -> list[Any]:
        """Return the weights of a unit without their scales: 32 bfloat16 or 16 float32 in each register."""
        data = read(builder, address, ir.VectorType(BYTE, unit // self.numbers))
        if self.bits == 8:
            return _pairs_of_bytes(builder, data) if pairs else [wide_e4m3(builder, part) for part in _parts(builder, data)]
        return _pairs_of_halves(builder, data) if pairs else _wide_halves_of_bytes(builder, data)


def _bytes(values: list[int]) -> Any:
    return ir.Constant(ir.VectorType(BYTE, len(values)), values)


def _parts(builder: Any, data: Any) -> list[Any]:
    """Return 16 values of a vector after the other."""
    return [taken(builder, data, [*range(first, first + LANES)]) for first in range(0, data.type.count, LANES)]


def wide_e4m3(builder: Any, data: Any) -> Any:
    """Return float32 values of a vector of bytes in E4M3: four bits of exponent with a bias of 7, no infinity, one NaN.

    Their bits are those of a float16 that is 2⁻⁸ times as large, whose exponent has five bits and a bias of 15.
    """
    shorts, wide = ir.VectorType(SHORT, data.type.count), ir.VectorType(FLOAT, data.type.count)
    bits, largest = builder.shl(builder.sext(data, shorts), same(shorts, 7)), same(shorts, _E4M3_NAN << 7)
    is_nan = builder.icmp_unsigned("==", builder.and_(bits, largest), largest)
    half = builder.select(is_nan, same(shorts, 0x7E00), builder.and_(bits, same(shorts, 0xBFFF)))
    return builder.fmul(wide_halves(builder, half), ir.Constant(wide, [256.0] * data.type.count), flags=IN_ORDER)


def _bfloat16(value: float) -> int:
    """Return the bits of a float32 number that bfloat16 represents exactly."""
    return int(np.float32(value).view(np.uint32)) >> 16


def _e4m3_bits() -> list[int]:
    """Return the bits in bfloat16 of the magnitude of each of 128 bytes."""
    made = []
    for byte in range(0x80):
        exponent, mantissa = byte >> 3, byte & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        made.append(0x7FC0 if byte == _E4M3_NAN else _bfloat16(value))
    return made


def _looked_up(builder: Any, places: Any, table: list[int]) -> Any:
    """Return the byte of a table of 128 bytes at the place in the low seven bits of each of 64 bytes (AVX512-VBMI)."""
    kind = places.type
    look_up = ir.FunctionType(kind, [kind] * 3)
    return builder.asm(look_up, "vpermi2b $3, $2, $0", "=v,0,v,v", [places, _bytes(table[:64]), _bytes(table[64:])], False)


def _pairs_of_bytes(builder: Any, data: Any) -> list[Any]:
    """Return 64 numbers in E4M3 as two registers of bfloat16, by a table of their magnitudes."""
    bits = _e4m3_bits()
    low = _looked_up(builder, data, [each & 0xFF for each in bits])
    high = _looked_up(builder, data, [each >> 8 for each in bits])
    high = builder.or_(high, builder.and_(data, same(data.type, 0x80)))
    made = []
    for half in range(2):
        places = [each for lane in range(4) for byte in range(8) for each in (16 * lane + 8 * half + byte,) * 2]
        both = [place + (UNIT if index % 2 else 0) for index, place in enumerate(places)]
        mixed = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(INT, UNIT), both))
        made.append(builder.bitcast(mixed, INTS))
    return made


def _pairs_of_halves(builder: Any, data: Any) -> list[Any]:
    """Return numbers in E2M1 as registers of bfloat16: the low halves of all bytes, and then the high ones."""
    shorts = ir.VectorType(SHORT, data.type.count)
    low = builder.zext(data, shorts)
    high = builder.lshr(low, same(shorts, 4))
    if data.type.count < 2 * LANES:  # both fill one register
        return [_of_halves(builder, joined(builder, [low, high]))]
    return [_of_halves(builder, low), _of_halves(builder, high)]


def _of_halves(builder: Any, places: Any) -> Any:
    """Return the numbers of 32 codes, each in the low four bits of 16. The table ignores bit 4, and the instruction ignores
    the bits above."""
    signed = [_bfloat16(size) for size in MAGNITUDES]
    table = ir.Constant(places.type, (signed + [size | 0x8000 for size in signed]) * 2)
    look_up = ir.FunctionType(places.type, [places.type] * 2)
    found = builder.asm(look_up, "vpermw $1, $2, $0", "=v,v,v", [table, places], False)
    return builder.bitcast(found, INTS)


def _wide_halves_of_bytes(builder: Any, data: Any) -> list[Any]:
    """Return numbers in E2M1 as registers of float32, in the order of `_pairs_of_halves`."""
    low, upper = same(data.type, 15), builder.lshr(data, same(data.type, 4))
    return [_wide_e2m1(builder, part) for codes in (builder.and_(data, low), upper) for part in _parts(builder, codes)]


def _wide_e2m1(builder: Any, codes: Any) -> Any:
    numbers, wide = ir.VectorType(INT, LANES), ir.VectorType(FLOAT, LANES)
    bits = builder.zext(codes, numbers)
    size = builder.and_(bits, same(numbers, 7))
    sign = builder.shl(builder.and_(bits, same(numbers, 8)), same(numbers, 28))
    normal = builder.add(builder.shl(size, same(numbers, 22)), same(numbers, 126 << 23))
    small = builder.fmul(builder.uitofp(size, wide), ir.Constant(wide, [0.5] * LANES), flags=IN_ORDER)
    value = builder.select(builder.icmp_unsigned("<", size, same(numbers, 2)), builder.bitcast(small, numbers), normal)
    return builder.bitcast(builder.or_(value, sign), wide)


def _powers(builder: Any, address: Any, count: int) -> Any:
    """Return scales in E8M0, bytes whose value is 2 to the power of the byte minus 127; 255 is NaN."""
    numbers = ir.VectorType(INT, count)
    bits = builder.zext(read(builder, address, ir.VectorType(BYTE, count)), numbers)
    power = builder.shl(bits, same(numbers, 23))
    power = builder.select(builder.icmp_unsigned("==", bits, same(numbers, 0)), same(numbers, 1 << 22), power)
    power = builder.select(builder.icmp_unsigned("==", bits, same(numbers, 255)), same(numbers, 0x7FC00000), power)
    return builder.bitcast(power, ir.VectorType(FLOAT, count))


def _small_scales(builder: Any, address: Any, count: int) -> Any:
    return wide_e4m3(builder, read(builder, address, ir.VectorType(BYTE, count)))


def _plain_scales(builder: Any, address: Any, count: int) -> Any:
    return read(builder, address, ir.VectorType(FLOAT, count))


FLOAT_KINDS = {
    kind.name: kind
    for kind in (
        FloatKind("FP8", 8, 0, 2 * UNIT, _plain_scales),
        FloatKind("MXFP4", 4, 32, 8 * UNIT, _powers),
        FloatKind("NVFP4", 4, 16, 4 * UNIT, _small_scales),
    )
}
"""The types that products read as they are stored, by name."""


def lanes_of(builder: Any, scales: Any, places: list[int]) -> Any:
    """Return a register of the scales at these places."""
    if scales.type.count == 1:
        return repeated(builder, builder.extract_element(scales, INT(0)), LANES)
    return taken(builder, scales, places)


def field(builder: Any, matrix: Any, name: str) -> Any:
    """Return a field of the FLOATS_OF_MATRIX at an address."""
    kind, offset = FLOATS_OF_MATRIX.fields[name][:2]  # type: ignore[index]
    return read(builder, builder.add(matrix, INDEX(offset)), FLOAT if kind == np.float32 else INDEX)
