"""Low-bit integers as instructions: consecutive weights of a matrix row become registers of bytes.

A row is one long number, whose lowest bits are its first weight. With 8, 4 and 2 bits, a weight lies within a byte. With 3
bits it may lie in two bytes: eight weights take three. Registers are in the order of `rounded_vectors`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.kernels.compiler.instructions import BYTE, INDEX, INT, SHORT, at, load
from engine.kernels.compiler.processor import SHIFTS_BYTES
from engine.kernels.stored.rounded_vectors import ROUNDED, UNIT, place_in_unit

REGISTER = 64
"""Bytes of a register."""


def unit_of_row(builder: Any, address: Any, bits: int) -> list[Any]:
    """Return the weights of one unit, 64 in a register."""
    if bits != 3:
        return _within_bytes(builder, load(builder, address, _bytes(REGISTER)), bits)
    # Two registers overlap, so that nothing behind the unit is read: the row may end there, and with it the file.
    size = UNIT[bits] * bits // 8
    data = [load(builder, at(builder, address, INDEX(first), 1), _bytes(REGISTER)) for first in (0, size - REGISTER)]
    groups, made = range(0, size, ROUNDED * bits // 8), []
    for half in (0, 6):
        begins = [begin if begin + 6 <= REGISTER else begin + 2 * REGISTER - size for begin in (g + half for g in groups)]
        made += _across_bytes(builder, data, begins, (0, 1))
    return made


def rest_of_row(builder: Any, address: Any, bits: int) -> list[Any]:
    """Return 32 weights: 32 in a register, or with 4 bits 16 in each of two."""
    if bits == 3:
        words = load(builder, address, ir.VectorType(INT, 3))
        data = builder.bitcast(words, _bytes(12))
        return _across_bytes(builder, [data, data], [0, 3, 6, 9], (0,))
    if bits != 2:
        return _within_bytes(builder, load(builder, address, _bytes(ROUNDED * bits // 8)), bits)
    # The eight bytes are repeated, and each copy is shifted to its own weights.
    copies = ir.VectorType(INDEX, 4)
    one = builder.insert_element(ir.Constant(copies, ir.Undefined), load(builder, address, INDEX), INT(0))
    four = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, 4), [0] * 4))
    moved = builder.lshr(four, ir.Constant(copies, [0, 2, 4, 6]))
    return [builder.and_(builder.bitcast(moved, _bytes(ROUNDED)), ir.Constant(_bytes(ROUNDED), [3] * ROUNDED))]


def rest_places(bits: int) -> list[int]:
    """Return where each of 32 weights lies in the registers of `rest_of_row`, counted through them."""
    return [place_in_unit.py_func(weight, bits, ROUNDED) for weight in range(ROUNDED)]


def _bytes(size: int) -> Any:
    return ir.VectorType(BYTE, size)


def _within_bytes(builder: Any, loaded: Any, bits: int) -> list[Any]:
    """Return registers of the first weight of each byte, of the second one, and so on."""
    if bits == 8:
        return [loaded]
    kind, pairs = loaded.type, ir.VectorType(SHORT, loaded.type.count // 2)
    low, made = ir.Constant(kind, [2**bits - 1] * kind.count), []
    for shift in range(0, 8, bits):
        moved = loaded
        if shift:  # there is no shift of bytes
            amount = ir.Constant(pairs, [shift] * pairs.count)
            moved = builder.bitcast(builder.lshr(builder.bitcast(loaded, pairs), amount), kind)
        made.append(builder.and_(moved, low))
    return made


def _across_bytes(builder: Any, data: list[Any], begins: list[int], eights: tuple[int, ...]) -> list[Any]:
    """Return registers of weights of 3 bits: for each number of `eights`, those eight weights after each of some bytes.

    data: two vectors, counted through by `begins`.
    """
    count, last = 8 * len(begins), 3 * len(eights) - 1
    kind, made = _bytes(count), []
    low = ir.Constant(kind, [7] * count)
    if SHIFTS_BYTES:
        # A lane of 64 bits gets the bytes of its weights, and takes bytes from any bit of them.
        places = [begin + min(lane, last) for begin in begins for lane in range(8)]
        lanes = builder.shuffle_vector(*data, ir.Constant(ir.VectorType(INT, count), places))
        shift = ir.FunctionType(kind, [kind, kind])
        for eight in eights:
            shifts = ir.Constant(kind, [24 * eight + 3 * lane for lane in range(8)] * len(begins))
            moved = builder.asm(shift, "vpmultishiftqb $1, $2, $0", "=v,v,v", [lanes, shifts], False)
            made.append(builder.and_(moved, low))
        return made
    pairs = ir.VectorType(SHORT, count)
    for eight in eights:
        bits = [24 * eight + 3 * lane for lane in range(8)]
        places = [begin + min(bit // 8 + half, last) for begin in begins for bit in bits for half in (0, 1)]
        both = builder.shuffle_vector(*data, ir.Constant(ir.VectorType(INT, 2 * count), places))
        amounts = ir.Constant(pairs, [bit % 8 for bit in bits] * len(begins))
        moved = builder.trunc(builder.lshr(builder.bitcast(both, pairs), amounts), kind)
        made.append(builder.and_(moved, low))
    return made
