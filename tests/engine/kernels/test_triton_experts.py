"""The GPU kernels on machines without a GPU: they are interpreted and compared with torch, and compiled for two GPUs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packages_for_tests import needs_triton
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton_for_tests import Launches, check_interpreted, compiled

from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.gpu import triton_experts
from engine.decoder.gpu.triton_experts import TritonExperts, can_serve, sizes, tiles, use_triton
from engine.decoder.routing import NO_EXPERT, Selection, Skipping, TopK
from engine.errors import OptionError
from engine.families.layer_config import ClampedSwiglu
from engine.kernels.stored.quantized_weight import quantise


@pytest.mark.slow
@needs_triton
def test_equals_torch_where_it_is_interpreted() -> None:
    check_interpreted("tests/support/interpreted_triton.py", seconds=300)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(triton_experts, "_kernels", lambda: made)
    return made


def some_experts(sizes: tuple[int, ...], dtype: torch.dtype, swiglu: ClampedSwiglu | None = None) -> nn.ModuleList:
    """Return experts of zeros. sizes: hidden size, and one width for all three experts or one for each expert."""
    hidden, *widths = sizes
    experts = []
    for width in widths * (3 // len(widths)):
        shapes: list[tuple[int, ...]] = [(width, hidden), (width, hidden), (hidden, width)]
        shapes += [(width,), (width,), (hidden,)] if swiglu else []
        experts.append(Expert(*(torch.zeros(shape, dtype=dtype) for shape in shapes), swiglu=swiglu))
    return nn.ModuleList(experts)


@needs_triton
@pytest.mark.parametrize("card", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sizes", "dtype", "swiglu"),
    [
        ((1024, 3584), torch.bfloat16, None),
        ((1024, 3584), torch.float32, None),
        ((2880, 2880), torch.bfloat16, ClampedSwiglu(1.702, 7.0)),
        ((1024, 3584, 96, 512), torch.bfloat16, None),
        ((1024, 3584, 96, 512), torch.float32, None),
    ],
    ids=["bfloat16", "float32", "clamped with biases", "differing widths in bfloat16", "differing widths in float32"],
)
def test_compiles_for_cards_that_are_not_here(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    swiglu: ClampedSwiglu | None,
    card: int,
    launches: Launches,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels are compiled with the launches' arguments. Matrices are read 16 bytes at a time and use tensor cores."""
    from engine.kernels.gpu import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    experts = some_experts(sizes, dtype, swiglu)
    for tokens in (1, 20):
        chosen = Selection(torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2))
        TritonExperts()(torch.zeros(tokens, sizes[0], dtype=dtype), chosen, experts)
    assert list(launches.made) == ["gate_up_of_few", "down_of_few", "gate_up_of_many", "down_of_many"]
    for name, (_, given, constants) in launches.made.items():
        ptx = compiled(getattr(triton_kernels, name), given, constants, card).asm["ptx"]
        if name.endswith("few"):
            assert ".v4.b32" in ptx
        else:
            assert "cp.async.cg.shared.global" in ptx
            product = {80: "mma.sync", 90: "wgmma.mma_async"}[card]
            assert dtype == torch.float32 or product in ptx
        assert "ld.global.b16" not in ptx or swiglu is not None, "but for biases"


class NeverWaits(TorchDispatchMode):
    """Refuses every operation whose result, or its shape, the host would have to wait for."""

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        looks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags)
        if function is torch.ops.aten.index.Tensor:  # boolean masks only
            looks = looks if any(each is not None and each.dtype == torch.bool for each in given[1]) else set()
        assert not looks, f"{function} waits for the device"
        return function(*given, **(named or {}))


@pytest.mark.parametrize("tokens", [1, 20])
def test_nothing_waits_for_the_device(tokens: int, launches: Launches) -> None:
    torch.manual_seed(0)
    experts = some_experts((32, 24), torch.float32)
    routing = Skipping(TopK(2, True), torch.ones(1), torch.ones(3, 3), 1.0, True)
    block = MoeBlock(torch.randn(3, 32), list(experts), routing, shared=some_experts((32, 24), torch.float32)[0])
    block.on_gpu = TritonExperts()
    x_TD = torch.randn(tokens, 32)
    with torch.no_grad():
        block(x_TD)
        with NeverWaits():
            block(x_TD)
        kind = "few" if tokens == 1 else "many"
        assert list(launches.made) == [f"gate_up_of_{kind}", f"down_of_{kind}"]
        block.on_gpu = None
        with NeverWaits(), pytest.raises(AssertionError, match="waits for the device"):
            block(torch.randn(20, 32))


def test_tiles_by_hand() -> None:
    """Experts 0, 1 and 3 have three, one and five slots, in tiles of up to two. Expert 2 has none. Two slots are empty."""
    chosen_R = torch.tensor([3, 0, NO_EXPERT, 3, 0, 1, 3, 0, 3, NO_EXPERT, 3])
    order_R, tiles_M3 = tiles(chosen_R, 4, 2)
    assert order_R.tolist() == [2, 9, 1, 4, 7, 5, 0, 3, 6, 8, 10]
    used = [[0, 2, 5], [0, 4, 5], [1, 5, 6], [3, 6, 11], [3, 8, 11], [3, 10, 11]]
    assert tiles_M3[:6].tolist() == used and len(tiles_M3) == 11 // 2 + 4
    assert (tiles_M3[6:, 0] == NO_EXPERT).all()


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_there_are_always_enough_tiles(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for slots in (1, 2, 3, 16, 17, 40):
        for count in (1, 4, 50):
            chosen_R = torch.randint(-1, count, (slots,), generator=generator)
            order_R, tiles_M3 = tiles(chosen_R, count, rows)
            covered = [
                (expert, int(order_R[place]))
                for expert, first, last in tiles_M3.tolist()
                if expert != NO_EXPERT
                for place in range(first, min(first + rows, last))
            ]
            assert sorted(covered) == sorted((e, slot) for slot, e in enumerate(chosen_R.tolist()) if e != NO_EXPERT)


def test_what_is_not_served() -> None:
    plain = some_experts((32, 64), torch.bfloat16)
    assert can_serve(plain) and can_serve(some_experts((32, 64), torch.float32, ClampedSwiglu(1.7, 7.0)))
    assert can_serve([*plain, *some_experts((32, 47), torch.bfloat16)]), "two widths"
    assert not can_serve([*plain, *some_experts((32, 64), torch.float32)]), "two dtypes"
    assert not can_serve([Expert(*(quantise(torch.randn(32, 32), 8, 32) for _ in range(3)))]), "low-bit weights"
    apart = torch.zeros(1 + 3 * 32 * 32, dtype=torch.bfloat16)[1:].view(3, 32, 32)
    assert not can_serve([Expert(*apart)]), "at odd addresses"


def test_layers_of_differing_widths_share_compiled_kernels() -> None:
    """The width of all experts is compiled into the kernels, but of differing widths only what reads have to know."""
    plain = {"D": 32, "A": 3}
    assert sizes(some_experts((32, 48), torch.bfloat16)) == plain | {"F": 48, "MULTIPLE": None}
    assert sizes(some_experts((32, 96, 48, 80), torch.bfloat16)) == plain | {"F": 128, "MULTIPLE": 16}
    assert sizes(some_experts((32, 128, 64, 32), torch.bfloat16)) == plain | {"F": 128, "MULTIPLE": 16}
    assert sizes(some_experts((32, 12, 20, 47), torch.bfloat16)) == plain | {"F": 64, "MULTIPLE": 1}


def test_the_grid_is_made_for_the_widest_expert(launches: Launches) -> None:
    experts = some_experts((32, 40, 640, 64), torch.float32)
    for tokens, kind, rows in ((1, "few", triton_experts.GATE_UP["ROWS"]), (20, "many", triton_experts.MANY["OUTPUTS"])):
        chosen = Selection(torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2))
        TritonExperts()(torch.zeros(tokens, 32), chosen, experts)
        grid, given, _ = launches.made[f"gate_up_of_{kind}"]
        assert grid[1] == 640 / rows
        assert given[1][:, -1].tolist() == [40, 640, 64]


def a_block() -> MoeBlock:
    return MoeBlock(torch.randn(3, 32), list(some_experts((32, 64), torch.float32)), TopK(2, True))


@needs_triton
def test_kernels_that_fail_leave_it_to_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """This machine has no GPU to launch kernels on, so Triton raises an exception."""
    monkeypatch.setenv("COMPRESS_KERNELS", "compiled")
    block = a_block()
    with caplog.at_level(logging.WARNING):
        use_triton([block, a_block()])
    (record,) = caplog.records
    assert record.getMessage().startswith("experts run through torch: Triton's kernels failed on this GPU (")
    assert block.on_gpu is None and block(torch.randn(2, 32)).shape == (2, 32)


def test_without_triton_one_line_says_what_would_help(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COMPRESS_KERNELS", "auto")
    monkeypatch.setitem(sys.modules, "engine.kernels.gpu.triton_kernels", None)
    monkeypatch.delattr(sys.modules["engine.kernels.gpu"], "triton_kernels", raising=False)
    triton_experts._kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        use_triton([a_block(), a_block()])
    (record,) = caplog.records
    assert "pip install triton" in record.getMessage()


def test_torch_alone_and_other_words(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    block = a_block()
    monkeypatch.setenv("COMPRESS_KERNELS", "torch")
    use_triton([block])
    assert block.on_gpu is None and not launches.made
    monkeypatch.setenv("COMPRESS_KERNELS", "fast")
    with pytest.raises(OptionError, match="must be auto, compiled or torch"):
        use_triton([block])
