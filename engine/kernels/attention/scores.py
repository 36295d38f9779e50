"""Products of the keys of a cache with several queries: four queries lie in a register, and 16 bytes of a key are repeated
beside them.

Four lanes of a register are one query's, so a sum of four lanes is a product; with one query in a register it would be a
sum of 16. Keys are bfloat16 (AVX512-BF16, BFDOT of ARM), or integers of 8 bits (AVX512-VNNI, dot products of ARM). For the
latter a query is rounded to 15 bits, q = step · (128·high + low), so that its two bytes are multiplied with the keys as
stored:

    q · (s·k) = s · step · (128 · Σ high·k + Σ low·k)

One of the factors must have no sign. 128 is added to the integers of a key, and −128 · Σ (128·high + low) is where the sum
starts.

Shape suffixes: R queries, Q registers of four queries, E size of a key.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compiler.arithmetic import largest_magnitude, narrow, two_bytes
from engine.kernels.compiler.compiling import add_kernel, helper, inline
from engine.kernels.compiler.instructions import (
    AHEAD,
    FLOAT,
    FLOATS,
    IN_ORDER,
    INDEX,
    INT,
    INTS,
    LANES,
    add_pairs,
    add_quadruples,
    at,
    fetch,
    load,
    loop,
    parts,
    repeated,
    same,
    taken,
)
from engine.kernels.compiler.memory import floats, halves, numbers, signed_bytes

IN_A_REGISTER = 4
"""Queries in a register."""
_CHUNK, _REGISTER = 16, 64
"""Bytes of a key that are multiplied at once, and bytes of a register."""
_KEYS = 16
"""Keys that all queries are multiplied with before the next keys, so that they come from the first-level cache."""
LARGEST_QUERY = np.float32(127 * 128 + 63)
"""Magnitude of a query's largest number, in steps."""
MOST_OF_BYTES = 1024
"""Maximum size of keys of 8 bits. Sums of more products may need more than 32 bits."""


class _Pairs:
    """Keys and queries of bfloat16, whose products are added up two by two."""

    width, levels, behind, registers = 2, 1, 0, (4, 2, 1)
    """Bytes of a number of a key, registers of numbers of four queries for one of a key, bytes behind these, and how many
    times four queries a tile has."""
    add = staticmethod(add_pairs)

    @staticmethod
    def starts(builder: Any, behind: Any) -> list[Any]:
        """Return where the sums of each level start."""
        return [same(FLOATS, 0.0)]

    @staticmethod
    def key(builder: Any, address: Any) -> Any:
        """Return 16 bytes of a key beside each of four queries."""
        return _four_times(builder, load(builder, address, ir.VectorType(INT, 4)))

    @staticmethod
    def plus(builder: Any, a: Any, b: Any) -> Any:
        return builder.fadd(a, b, flags=IN_ORDER)

    @staticmethod
    def of_levels(builder: Any, sums: list[Any]) -> Any:
        """Return the sums of all levels of the queries."""
        return sums[0]

    @staticmethod
    def scaled(builder: Any, sums: Any, behind: Any, scales: Any, keys: int) -> Any:
        """Return the products of the numbers that these sums of one key, or of four, stand for."""
        return sums


class _Bytes:
    """Keys of 8 bits and queries of two bytes, whose products are added up four by four. Its members are as in _Pairs."""

    width, levels, behind, registers = 1, 2, 2 * _REGISTER, (2, 1)

    @staticmethod
    def starts(builder: Any, behind: Any) -> list[Any]:
        return [same(INTS, 0), load(builder, behind, INTS)]

    @staticmethod
    def key(builder: Any, address: Any) -> Any:
        signed = _four_times(builder, load(builder, address, ir.VectorType(INT, 4)))
        return builder.xor(signed, same(INTS, -0x7F7F7F80))

    @staticmethod
    def add(builder: Any, total: Any, key: Any, queries: Any) -> Any:
        return add_quadruples(builder, total, key, queries, INTS)

    @staticmethod
    def plus(builder: Any, a: Any, b: Any) -> Any:
        return builder.add(a, b)

    @staticmethod
    def of_levels(builder: Any, sums: list[Any]) -> Any:
        high, low = sums
        return builder.add(builder.shl(high, same(INTS, 7)), low)

    @staticmethod
    def scaled(builder: Any, sums: Any, behind: Any, scales: Any, keys: int) -> Any:
        if keys == 1:
            factors = repeated(builder, load(builder, scales, FLOAT), LANES)
        else:
            factors = _four_times(builder, load(builder, scales, ir.VectorType(FLOAT, 4)))
        steps = load(builder, builder.add(behind, INDEX(_REGISTER)), FLOATS)
        return builder.fmul(builder.sitofp(sums, FLOATS), builder.fmul(factors, steps, flags=IN_ORDER), flags=IN_ORDER)


def _four_times(builder: Any, part: Any) -> Any:
    """Return a register that repeats four lanes."""
    return taken(builder, part, [*range(4)] * 4)


def _mixed(builder: Any, a: Any, b: Any, places: tuple[int, ...]) -> Any:
    """Return a register that takes, in each four lanes, the lanes of a and b (from 4 on) at these places."""
    every = [4 * part + place % 4 + (LANES if place >= 4 else 0) for part in range(4) for place in places]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, LANES), every))


def _added_up(builder: Any, kind: Any, sums: list[Any]) -> Any:
    """Return the sums of the four lanes of each query: for one register of sums in all four lanes, and for four registers
    in the lane of each. The order is (0 + 2) + (1 + 3) for both."""
    if len(sums) == 1:
        (own,) = sums
        halves = kind.plus(builder, own, _mixed(builder, own, own, (2, 3, 0, 1)))
        return kind.plus(builder, halves, _mixed(builder, halves, halves, (1, 0, 3, 2)))

    def joined(a: Any, b: Any) -> Any:
        return kind.plus(builder, _mixed(builder, a, b, (0, 4, 1, 5)), _mixed(builder, a, b, (2, 6, 3, 7)))

    first, second = joined(*sums[:2]), joined(*sums[2:])
    return kind.plus(builder, _mixed(builder, first, second, (0, 1, 4, 5)), _mixed(builder, first, second, (2, 3, 6, 7)))


def _dots(builder: Any, kind: Any, keys: int, registers: int, part: Any) -> list[Any]:
    """Return the products of so many keys with so many times four queries: for each four queries those with each four keys,
    or with the one key.

    part: addresses of the first key, of its scale and of the first queries, and their size.
    """
    key_address, scales, query_address, size = part
    chunks = parts(builder, size, _CHUNK, kind.width)
    level_bytes = builder.mul(chunks, INDEX(_REGISTER))
    rows = [at(builder, key_address, builder.mul(size, INDEX(k)), kind.width) for k in range(keys)]
    fours = [at(builder, query_address, _bytes_of_four(builder, kind, size), r) for r in range(registers)]
    begins = [at(builder, four, level_bytes, level) for four in fours for level in range(kind.levels)]
    behind = [at(builder, four, level_bytes, kind.levels) for four in fours]

    def body(chunk: Any, sums: list[Any]) -> list[Any]:
        for line in range(keys // 4):  # as many lines as the keys have, one after the other
            ahead = at(builder, key_address, chunk, _CHUNK * keys)
            fetch(builder, builder.add(ahead, INDEX(AHEAD[16] + 64 * line)))
        queries = [load(builder, at(builder, begin, chunk, _REGISTER), INTS) for begin in begins]
        made: list[Any] = []
        for row in rows:
            key = kind.key(builder, at(builder, row, chunk, _CHUNK))
            made += [kind.add(builder, sums[len(made) + number], key, query) for number, query in enumerate(queries)]
        return made

    starts = [start for place in behind for start in kind.starts(builder, place)] * keys
    sums = loop(builder, INDEX(0), chunks, 1, starts, body)
    every = [kind.of_levels(builder, sums[first : first + kind.levels]) for first in range(0, len(sums), kind.levels)]
    together = 1 if keys == 1 else 4
    return [
        kind.scaled(
            builder,
            _added_up(builder, kind, every[r::registers][first : first + together]),
            behind[r],
            at(builder, scales, INDEX(first), 4),
            keys,
        )
        for r in range(registers)
        for first in range(0, keys, together)
    ]


def _bytes_of_four(builder: Any, kind: Any, size: Any) -> Any:
    """Return the bytes of four prepared queries."""
    return at(builder, INDEX(kind.behind), size, 4 * kind.width * kind.levels)


def _write(builder: Any, keys: int, registers: int, totals: list[Any], results: Any, stride: Any) -> None:
    """Write the products of each query with the keys."""
    groups = len(totals) // registers
    for r in range(registers):
        for query in range(IN_A_REGISTER):
            row = at(builder, results, builder.mul(stride, INDEX(IN_A_REGISTER * r + query)), 4)
            for group in range(groups):
                own = totals[r * groups + group]
                place = builder.add(row, INDEX(16 * group))
                if keys == 1:
                    value, kind = builder.extract_element(own, INT(4 * query)), FLOAT
                else:
                    value, kind = taken(builder, own, [*range(4 * query, 4 * query + 4)]), ir.VectorType(FLOAT, 4)
                builder.store(value, builder.inttoptr(place, kind.as_pointer()), align=4)


def _scorer(kind: Any) -> Any:
    """Return a function of (address of keys, of their scales, of prepared queries, size of these; the same of more keys and
    queries; number of keys, number of registers of queries, address of the results, stride)."""

    def score(
        context: Any,
        keys: Any,
        scales: Any,
        queries: Any,
        size: Any,
        more_keys: Any,
        more_scales: Any,
        more_queries: Any,
        more_size: Any,
        count: Any,
        registers: Any,
        results: Any,
        stride: Any,
    ) -> Any:
        return types.void(*[types.int64] * 12), generate

    def tile(builder: Any, keys: int, registers: int, both: Any, key: Any, first: Any, to: Any) -> None:
        def products(part: Any) -> list[Any]:
            key_address, scales, queries, size = part
            own_keys = at(builder, key_address, builder.mul(size, key), kind.width)
            own_queries = builder.add(queries, builder.mul(first, _bytes_of_four(builder, kind, size)))
            return _dots(builder, kind, keys, registers, (own_keys, at(builder, scales, key, 4), own_queries, size))

        own, more = both
        totals = products(own)
        before = builder.block
        with builder.if_then(builder.icmp_signed("!=", more[3], INDEX(0))):
            added = [builder.fadd(a, b, flags=IN_ORDER) for a, b in zip(totals, products(more), strict=True)]
            inside = builder.block
        joined = [builder.phi(FLOATS) for _ in totals]
        for each, plain, sum_of_both in zip(joined, totals, added, strict=True):
            each.add_incoming(plain, before)
            each.add_incoming(sum_of_both, inside)
        results, stride = to
        place = at(builder, results, builder.add(builder.mul(first, builder.mul(stride, INDEX(IN_A_REGISTER))), key), 4)
        _write(builder, keys, registers, joined, place, stride)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        both, (count, registers, *to) = (arguments[:4], arguments[4:8]), arguments[8:]
        whole = builder.and_(count, INDEX(-_KEYS))

        def all_queries(begin: Any, end: Any, sums: int) -> None:
            """Emit the products of the keys from `begin` to `end` with all queries, so many sums at a time."""

            def taking(vectors: int) -> Any:
                own = max(1, sums // (vectors * kind.levels))

                def some(first: Any, _: list[Any]) -> list[Any]:
                    def step(key: Any, _: list[Any]) -> list[Any]:
                        tile(builder, own, vectors, both, key, first, to)
                        return []

                    loop(builder, begin, end, own, [], step)
                    return []

                return some

            begun = INDEX(0)
            for vectors in kind.registers:
                whole = builder.and_(registers, INDEX(-vectors))
                loop(builder, begun, whole, vectors, [], taking(vectors))
                begun = whole

        def sixteen(first: Any, _: list[Any]) -> list[Any]:
            all_queries(first, builder.add(first, INDEX(_KEYS)), _KEYS)
            return []

        loop(builder, INDEX(0), whole, _KEYS, [], sixteen)
        all_queries(whole, count, 1)
        return context.get_dummy_value()

    return intrinsic(score)


WORK: Any = None
"""The code of a kernel, which `add_kernel` puts in this place."""


def _score(
    keys: Any,
    scales: Any,
    queries: Any,
    size: Any,
    more_keys: Any,
    more_scales: Any,
    more_queries: Any,
    more_size: Any,
    count: Any,
    registers: Any,
    results: Any,
    stride: Any,
) -> None:
    """Multiply `count` keys with four queries of each register, and add the products of more keys and queries.

    scales: addresses of the float32 scales of keys of 8 bits. The sizes are multiples of 16; the further one may be 0. The
    product of key k and query r goes to place `k + r · stride` of the float32 results, for all four queries of a register.
    """
    WORK(*(keys, scales, queries, size, more_keys, more_scales, more_queries, more_size, count, registers, results, stride))


_SIGNATURE = f"void({', '.join(['int64'] * 12)})"
add_kernel("score_pairs", _SIGNATURE, _score, _scorer(_Pairs))
add_kernel("score_bytes", _SIGNATURE, _score, _scorer(_Bytes))


@inline
def registers_of(rows: Any) -> Any:
    """Return the number of registers of so many queries."""
    return (rows + IN_A_REGISTER - 1) // IN_A_REGISTER


@inline
def bytes_of_pairs(size: Any, rows: Any) -> Any:
    """Return the bytes of so many queries of bfloat16."""
    return registers_of(rows) * 8 * size


@inline
def bytes_of_bytes(size: Any, rows: Any) -> Any:
    """Return the bytes of so many queries of two bytes a number."""
    return registers_of(rows) * (2 * 4 * size + 2 * _REGISTER)


@helper
def keep_pairs(x_E: Any, queries: Any, row: Any) -> None:
    """Write a query as bfloat16 to its place among the prepared queries."""
    size, lane, each = x_E.shape[0], row % IN_A_REGISTER, _CHUNK // 2
    own = numba.carray(halves(queries + bytes_of_pairs(size, row - lane)), (size // each, IN_A_REGISTER, each))
    for index in range(size):
        own[index // each, lane, index % each] = narrow(x_E[index])


@helper
def keep_bytes(x_E: Any, queries: Any, row: Any) -> None:
    """Round a query to 15 bits, and write the two bytes of its numbers, the starts of its sums and its steps."""
    size, lane = x_E.shape[0], row % IN_A_REGISTER
    largest, zero = largest_magnitude(x_E, 0, size)
    inverse = LARGEST_QUERY / largest if largest > np.float32(0.0) else np.float32(0.0)
    step = largest / LARGEST_QUERY + zero  # NaN where a number is not finite
    begin = queries + bytes_of_bytes(size, row - lane)
    behind = begin + 2 * 4 * size
    high = numba.carray(signed_bytes(begin), (size // _CHUNK, IN_A_REGISTER, _CHUNK))
    low = numba.carray(signed_bytes(begin + 4 * size), (size // _CHUNK, IN_A_REGISTER, _CHUNK))
    start_RL = numba.carray(numbers(behind), (IN_A_REGISTER, 4))
    step_RL = numba.carray(floats(behind + _REGISTER), (IN_A_REGISTER, 4))
    start_RL[lane, :] = np.int32(0)
    step_RL[lane, :] = step
    for index in range(size):
        number = np.int32(np.rint(x_E[index] * inverse))
        chunk, place = index // _CHUNK, index % _CHUNK
        high[chunk, lane, place], low[chunk, lane, place] = two_bytes(number)
        start_RL[lane, place // 4] -= np.int32(128) * number
