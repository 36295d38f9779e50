"""Memory as kernels see it: addresses are integers, and arrays, records and other kernels are reached through them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from engine.kernels.compiler.compiling import inline

_CACHE_LINE = 64


def _pointer_to(value: Any) -> Any:
    """Return a function that returns a pointer to the values of this type at an address."""
    kind = types.CPointer(value)

    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return intrinsic(pointer)


halves, floats, integers = _pointer_to(types.uint16), _pointer_to(types.float32), _pointer_to(types.int64)
signed_bytes, numbers, pairs = _pointer_to(types.int8), _pointer_to(types.int32), _pointer_to(types.uint32)


def record_at(dtype: np.dtype[Any]) -> Any:
    """Return a function that maps an address to the NumPy record of this dtype there, to be read and written in place."""
    kind = numba.from_dtype(dtype)

    def record(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return intrinsic(record)


@intrinsic  # type: ignore[untyped-decorator]
def call(context: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an address with a tuple of arguments, which must have the kernel's own types."""
    given = types.Tuple([types.unliteral(each) for each in arguments])
    if any(each not in (types.int64, types.float32) for each in given):
        raise TypingError(f"kernels take int64 and float32, not {given}")

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        each = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in each])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), each)
        return context.get_dummy_value()

    return types.void(types.int64, given), generate


_INTEGER = ir.IntType(64)


def _shared(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _INTEGER.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def take_next(context: Any, address: Any) -> Any:
    """Return the integer at an address and add one to it, as one operation among all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _shared(builder, arguments[0]), _INTEGER(1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_shared(context: Any, address: Any, value: Any) -> Any:
    """Add to the integer at an address. All threads see this and the operations of the next two functions in one order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.atomic_rmw("add", _shared(builder, arguments[0]), arguments[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_shared(context: Any, address: Any, value: Any) -> Any:
    """Write the integer at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _shared(builder, arguments[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def read_shared(context: Any, address: Any) -> Any:
    """Return the integer at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_shared(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def keep(context: Any, array: Any) -> Any:
    """Keep an array alive until here. Numba frees an array after its last use, and does not see uses by address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), generate


@inline
def address_of(array: Any) -> Any:
    """Return the address of an array."""
    return np.int64(array.ctypes.data)


@inline
def aligned(size: Any) -> Any:
    """Return an array of so many bytes that begins at a cache line."""
    made = np.empty(size + _CACHE_LINE, np.uint8)
    return made[-address_of(made) & (_CACHE_LINE - 1) :]
