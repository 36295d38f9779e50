"""The instructions that kernels are built from."""

from __future__ import annotations

import pytest
from kernels_for_tests import kernels
from packages_for_tests import needs_numba

if kernels is not None:
    from llvmlite import ir

    from engine.kernels.compiler import instructions
    from engine.kernels.compiler.processor import FIRST_LEVEL, SECOND_LEVEL, Prefetching


@needs_numba
@pytest.mark.parametrize("vectors", [1, 2, 4])
@pytest.mark.parametrize("one_vector", ["nowhere", "first", "second"])
@pytest.mark.parametrize("several", ["nowhere", "first", "second"])
def test_weights_are_prefetched_as_the_processor_needs(
    several: str, one_vector: str, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of several vectors may go to another cache than those of one, and into the second level from twice as far."""
    caches = {"nowhere": None, "first": FIRST_LEVEL, "second": SECOND_LEVEL}
    monkeypatch.setattr(instructions, "PREFETCHING", Prefetching(caches[one_vector], caches[several]))
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), [instructions.INDEX]), "fetched")
    builder = ir.IRBuilder(function.append_basic_block())
    instructions.fetch_weights(builder, function.args[0], 1024, vectors)
    code = str(function)
    name = one_vector if vectors == 1 else several
    assert ("llvm.prefetch" in code) == (name != "nowhere")
    if name != "nowhere":
        distance = {"first": 1024, "second": 2048}[name]
        assert f", {distance}\n" in code and f"i32 0, i32 {caches[name]}, i32 1)" in code
