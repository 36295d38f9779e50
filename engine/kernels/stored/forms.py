"""Forms of weights, and for each form the kernels that multiply, prepare vectors and widen.

A form is two values: the bits of a weight, or the name of a dtype, or of a type of blocks or packed floats, and the number
of weights that share a scale. Packed floats have in the place of scales the address of a record, which says where their
scales lie. The kernels of a form are loaded when a product with such weights is first requested. Matrices in blocks that
are multiplied in one call may be of several types: the call has the form BLOCKS, and each matrix names its own. Experts
whose matrices have different bits are multiplied in one call of the form MIXED: each matrix has a record of its own, with
the address of its scales, and vectors are prepared for each matrix, not once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from engine.kernels.compiler.compiling import KERNELS, Kernel, inline
from engine.kernels.compiler.memory import record_at
from engine.kernels.compiler.processor import MULTIPLIES_INTEGERS
from engine.kernels.dot_products import VALUE_BYTES
from engine.kernels.stored.block_types import BLOCK_KINDS, RUN
from engine.kernels.stored.float_types import FLOAT_KINDS, TAKES_PAIRS

Form = tuple[int | str, int]
PLAIN: Form = (16, 1)
"""The form of bfloat16, whose values have no scales."""
FLOAT32: Form = ("float32", 1)
FLOAT16: Form = ("float16", 1)
"""The forms of plain weights in these dtypes."""
WIDE: Form = ("wide", 1)
"""The form of bfloat16 that is multiplied in float32."""
TAKE_FLOATS = (FLOAT32, FLOAT16, WIDE)
"""Calls with these forms take and return float32, all others bfloat16."""
BLOCKS: Form = ("blocks", RUN)
"""The form of matrices in blocks, which contain their scales."""
MIXED: Form = ("mixed", RUN)
"""The form of experts whose matrices have several forms."""
_ROUNDED_BYTES = 5
"""Bytes of four values of a vector that is rounded to 8 bits: each 32 have a scale and a sum."""
_HALF_BYTES = 10
"""Bytes of four values of a vector whose values become two bytes: each 16 have a scale and a sum."""
FORM = np.dtype(
    [
        ("bits", np.int64),  # of a weight; nominal for blocks
        ("group", np.int64),  # weights that share a scale
        ("numbers", np.int64),  # weights of a block, or that share a byte
        ("bytes", np.int64),  # of so many weights
        ("vector", np.int64),  # bytes of four values of a prepared vector
        ("by_matrix", np.int64),  # whether each matrix has the address of its own form in the place of scales
        ("own_vectors", np.int64),  # whether vectors are prepared for each matrix
        ("takes_floats", np.int64),  # whether a call takes and returns float32, not bfloat16
        ("scales", np.int64),  # address of the scales, in a record of one matrix
        ("multiply", np.int64),  # addresses of kernels
        ("prepare", np.int64),
        ("widen", np.int64),  # 0 for plain weights
        ("multiply_panel", np.int64),  # of prompts; 0 where torch computes them
    ]
)
form_at = record_at(FORM)


@inline
def form_of(form: Any, matrix: Any) -> Any:
    """Return the address of the form of a matrix, given that of the call."""
    return matrix.scales if form_at(form).by_matrix else form


@inline
def scales_of(form: Any, matrix: Any) -> Any:
    """Return the address of a matrix's scales, given the form of the call; 0 for none."""
    return form_at(matrix.scales).scales if form_at(form).by_matrix else matrix.scales


class _Row(NamedTuple):
    """A form's numbers, and names of its kernels. Fields: as in FORM."""

    bits: int
    numbers: int
    bytes: int
    vector: int
    multiply: str = ""
    prepare: str = ""
    widen: str = ""
    multiply_panel: str = "multiply_panel"


def _row(kind: int | str) -> _Row:
    if kind == 16:
        return _Row(16, 1, 2, 4 * VALUE_BYTES, "multiply_plain", "prepare_plain")
    if kind in (FLOAT32[0], FLOAT16[0], WIDE[0]):
        size, panel = (4, "multiply_float_panel") if kind == FLOAT32[0] else (2, "")
        return _Row(8 * size, 1, size, 16, f"multiply_{kind}", "prepare_wide", multiply_panel=panel)
    if kind == MIXED[0]:
        return _Row(8, 1, 1, max(_ROUNDED_BYTES, 4 * VALUE_BYTES, *(_row_of_floats(own).vector for own in FLOAT_KINDS)))
    if isinstance(kind, int):
        numbers, size = (8, kind) if 8 % kind else (8 // kind, 1)
        return _Row(kind, numbers, size, _ROUNDED_BYTES, f"multiply_{kind}", f"prepare_{kind}", f"widen_{kind}")
    vector, prepare, exact = (
        (_ROUNDED_BYTES, "prepare_blocks", "") if MULTIPLIES_INTEGERS else (16, "prepare_wide", "exact_")
    )
    if kind == BLOCKS[0]:
        return _Row(8, 1, 1, vector, prepare=prepare)
    if kind in FLOAT_KINDS:
        return _row_of_floats(kind)
    block = BLOCK_KINDS[kind]
    return _Row(8, block.numbers, block.bytes, vector, f"multiply_{exact}{block.key}", prepare, f"widen_{block.key}")


def _row_of_floats(kind: str) -> _Row:
    own = FLOAT_KINDS[kind]
    if TAKES_PAIRS:
        way, prepare, vector = "", "prepare_bytes" if own.bits == 8 else "prepare_halves", 8
    elif own.bits == 4 and MULTIPLIES_INTEGERS:
        way, prepare, vector = "rounded_", "prepare_rounded_halves", _HALF_BYTES
    else:
        way, prepare, vector = "exact_", "prepare_wide" if own.bits == 8 else "prepare_wide_halves", 16
    return _Row(own.bits, own.numbers, 1, vector, f"multiply_{way}{own.key}", prepare, f"widen_{own.key}")


def form_kernels(kind: int | str) -> list[Kernel]:
    """Return the kernels for weights of so many bits, or of this type, whose names its row has."""
    row = _row(kind)
    return [KERNELS[name] for name in (row.multiply, row.prepare, row.widen, row.multiply_panel) if name]


@cache
def _record(form: Form) -> Any:
    record, row = np.zeros(1, FORM), _row(form[0])
    for name in ("bits", "numbers", "bytes", "vector"):
        record[name] = getattr(row, name)
    record["group"], record["by_matrix"], record["own_vectors"] = form[1], form in (BLOCKS, MIXED), form == MIXED
    record["takes_floats"] = form in TAKE_FLOATS
    for name in ("multiply", "prepare", "widen", "multiply_panel"):
        record[name] = KERNELS[own].address if (own := getattr(row, name)) else 0
    return record


@cache
def form_address(form: Form) -> int:
    """Return the address of the form's record, which stays the same."""
    return int(_record(form).ctypes.data)


def own_forms(forms: Sequence[Form], scales: Sequence[int]) -> tuple[Any, list[int]]:
    """Return a record for each matrix of a call in the form MIXED, and the addresses of the records.

    forms, scales: form and address of the scales of each matrix. The records must outlive the calls.
    """
    records = np.concatenate([_record(form) for form in forms])
    records["scales"] = scales
    first = int(records.ctypes.data)
    return records, [first + place * FORM.itemsize for place in range(len(records))]
