"""The instructions that kernels are built from."""

from __future__ import annotations

import pytest
from kernels_for_tests import kernels
from packages_for_tests import needs_numba

if kernels is not None:
    from llvmlite import ir

    from engine.kernels.compiler import instructions
    from engine.kernels.compiler.processor import FIRST_LEVEL, LONG_VECTOR, SECOND_LEVEL, Prefetching


CACHES = ["nowhere", "first", "second"]


@needs_numba
@pytest.mark.parametrize("vectors", [1, 2, 4])
@pytest.mark.parametrize("one_vector", CACHES)
@pytest.mark.parametrize("one_long_vector", CACHES)
@pytest.mark.parametrize("several", CACHES)
def test_weights_are_prefetched_as_the_processor_needs(
    several: str, one_long_vector: str, one_vector: str, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line once; into the second level from twice as far. Where one vector is multiplied, its bytes may decide it."""
    caches = dict(zip(CACHES, (None, FIRST_LEVEL, SECOND_LEVEL), strict=True))
    own = Prefetching(caches[one_vector], caches[one_long_vector], caches[several])
    monkeypatch.setattr(instructions, "PREFETCHING", own)
    kind = ir.FunctionType(ir.VoidType(), [instructions.INDEX] * 2)
    function = ir.Function(ir.Module(), kind, "fetched")
    builder = ir.IRBuilder(function.append_basic_block("begin"))
    instructions.fetch_weights(builder, function.args[0], 128, 1024, (vectors, function.args[1]))
    codes = {block.name: str(block) for block in function.blocks}
    if vectors > 1:
        expected = {"begin": several}
    elif one_vector == one_long_vector:
        expected = {"begin": one_vector}
    else:
        expected = {"begin": "nowhere", "begin.if": one_long_vector, "begin.else": one_vector, "begin.endif": "nowhere"}
        assert f'icmp sgt i64 %".2", {LONG_VECTOR}' in codes["begin"]
    assert codes.keys() == expected.keys()
    for name, cache in expected.items():
        assert codes[name].count('@"llvm.prefetch') == (0 if cache == "nowhere" else 2)
        for distance in {"nowhere": (), "first": (1024, 1088), "second": (2048, 2112)}[cache]:
            assert f", {distance}\n" in codes[name]
        assert cache == "nowhere" or f"i32 0, i32 {caches[cache]}, i32 1)" in codes[name]
