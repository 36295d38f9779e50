"""Memory as kernels see it: addresses are whole numbers, behind which lie arrays, records and other kernels."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from engine.kernels.compiling import inline

_CACHE_LINE = 64


def _pointer_to(value: Any) -> Any:
    """A function that gives the values of a type that begin at an address."""
    kind = types.CPointer(value)

    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return intrinsic(pointer)


halves, floats, integers = _pointer_to(types.uint16), _pointer_to(types.float32), _pointer_to(types.int64)
signed_bytes, pairs = _pointer_to(types.int8), _pointer_to(types.uint32)


def record_at(dtype: np.dtype[Any]) -> Any:
    """A function that gives the record of a NumPy dtype that begins at an address, to be read and written in its place."""
    kind = numba.from_dtype(dtype)

    def record(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return intrinsic(record)


@intrinsic  # type: ignore[untyped-decorator]
def call(context: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an address with a tuple of arguments, which have to be of its own types."""
    given = types.Tuple([types.unliteral(each) for each in arguments])
    if any(each not in (types.int64, types.float32) for each in given):
        raise TypingError(f"kernels take int64 and float32, not {given}")

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        each = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in each])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), each)
        return context.get_dummy_value()

    return types.void(types.int64, given), generate


@intrinsic  # type: ignore[untyped-decorator]
def keep(context: Any, array: Any) -> Any:
    """Nothing, but an array lives until here: Numba frees one after its last use, and does not see uses by address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), generate


@inline
def address_of(array: Any) -> Any:
    """Where an array begins."""
    return np.int64(array.ctypes.data)


@inline
def aligned(size: Any) -> Any:
    """So many bytes, from the start of a cache line."""
    made = np.empty(size + _CACHE_LINE, np.uint8)
    return made[-address_of(made) & (_CACHE_LINE - 1) :]
