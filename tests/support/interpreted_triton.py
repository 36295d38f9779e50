"""Tests that test_triton_experts.py runs in a process of its own, where Triton interprets its kernels on the CPU.

The interpreter is chosen by TRITON_INTERPRET=1 when Triton is imported, for a whole process.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from conftest import save_reference
from torch import Tensor, nn
from triton.runtime import interpreter

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import SPARSE_MAX_TOKENS, Expert, MoeBlock, grouped, sparse
from engine.decoder.gpu import triton_experts
from engine.decoder.gpu.triton_experts import TritonExperts, can_serve, use_triton
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.decoder.routing import NO_EXPERT, Selection, Skipping, TopK
from engine.families.layer_config import ClampedSwiglu

FEW, MANY = (44, 20), (72, 100)
"""Hidden size and width for so many tokens. They are no multiples of a block."""
HIDDEN, EXPERTS = MANY[0], 5
CLAMPED = ClampedSwiglu(1.7, 0.5)
TOKENS = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def bfloat16_as_on_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter round as GPUs do. It truncates, and its `dot` treats the bits of bfloat16 as integers."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data: Any, before: Any, after: Any, *rest: Any) -> Any:
        if (before, after) != (tl.float32, tl.bfloat16):
            return convert(data, before, after, *rest)
        return torch.tensor(data).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def widened(handle: Any) -> Any:
        if handle.data.dtype != np.uint16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def some_experts(dtype: torch.dtype, swiglu: ClampedSwiglu | None = None, sizes: tuple[int, ...] = MANY) -> nn.ModuleList:
    """Return random experts; with biases if they have a clamp, as in the families that have one.

    sizes: hidden size, and one width for all experts or one for each expert.
    """
    hidden, *widths = sizes
    experts = []
    for width in widths * (EXPERTS // len(widths)):
        shapes: list[tuple[int, ...]] = [(width, hidden), (width, hidden), (hidden, width)]
        shapes += [(width,), (width,), (hidden,)] if swiglu else []
        made = ((torch.randn(shape) * shape[-1] ** -0.5).to(dtype) for shape in shapes)
        experts.append(Expert(*made, swiglu=swiglu))
    return nn.ModuleList(experts)


def chosen_by(tokens: int, slots: int) -> Selection:
    """Let most tokens choose the first expert and none the last, and leave some slots empty."""
    rows = [torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(EXPERTS - 2)]) for _ in range(tokens)]
    experts_TS = torch.stack(rows)[:, :slots].clone()
    experts_TS[torch.rand(tokens, slots) < 0.3] = NO_EXPERT
    return Selection(experts_TS, torch.rand(tokens, slots))


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several blocks for each row, however short, because the interpreter also spends time on masked values."""
    monkeypatch.setitem(triton_experts.GATE_UP, "COLUMNS", 32)
    monkeypatch.setitem(triton_experts.DOWN, "COLUMNS", 32)


def check(x_TD: Tensor, selection: Selection, experts: nn.ModuleList, scales_TS: Tensor | None) -> None:
    """Compare both paths with torch: up to rounding in float32, and in bfloat16 at no larger error."""
    assert can_serve(experts)
    y_TD = TritonExperts()(x_TD, selection, experts, scales_TS)
    by_torch = [path(x_TD, selection, experts, scales_TS=scales_TS) for path in (grouped, sparse)]
    assert y_TD is not None and y_TD.dtype == x_TD.dtype and y_TD.shape == x_TD.shape
    assert all(not row.any() for row in y_TD[(selection.experts == NO_EXPERT).all(dim=1)])
    if x_TD.dtype == torch.float32:
        assert all(torch.allclose(y_TD, each, rtol=1e-5, atol=2e-6) for each in by_torch)
        return
    scaled = None if scales_TS is None else scales_TS.to(x_TD.dtype).double()
    exact = sparse(x_TD.double(), selection, experts.double(), scaled)
    errors = [(each.double() - exact).norm() / exact.norm().clamp_min(1e-9) for each in (y_TD, *by_torch)]
    assert errors[0] <= 1.1 * min(errors[1:]) and errors[0] < 0.01, errors


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "scaled, biased, clamped"])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (2, 4), (4, 1), (5, 2), (30, 4), (200, 1)])
def test_equals_torch(tokens: int, slots: int, is_plain: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    sizes = FEW if tokens <= SPARSE_MAX_TOKENS else MANY
    x_TD, selection = torch.randn(tokens, sizes[0]).to(dtype), chosen_by(tokens, slots)
    scales_TS = None if is_plain else torch.rand(tokens, slots)
    check(x_TD, selection, some_experts(dtype, None if is_plain else CLAMPED, sizes), scales_TS)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "scaled, biased, clamped"])
@pytest.mark.parametrize("widths", [(7, 33, 12, 64, 20), (16, 80, 48, 16, 96)], ids=["odd", "multiples of 16"])
@pytest.mark.parametrize(("tokens", "slots"), [(2, 4), (30, 3)])
def test_differing_widths_equal_torch(
    tokens: int, slots: int, widths: tuple[int, ...], is_plain: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    x_TD, selection = torch.randn(tokens, 44).to(dtype), chosen_by(tokens, slots)
    scales_TS = None if is_plain else torch.rand(tokens, slots)
    check(x_TD, selection, some_experts(dtype, None if is_plain else CLAMPED, (44, *widths)), scales_TS)


@pytest.mark.parametrize(("tokens", "sizes"), [(5, FEW), (1, (520, 12)), (1, (12, 520))])
def test_blocks_as_they_are(tokens: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare vector by vector, also for more tokens than use this path by default."""
    monkeypatch.setattr(triton_experts, "SPARSE_MAX_TOKENS", 5)
    torch.manual_seed(0)
    check(torch.randn(tokens, sizes[0]), chosen_by(tokens, 2), some_experts(torch.float32, sizes=sizes), None)


@pytest.mark.parametrize("tokens", [3, 9])
def test_no_token_and_no_expert(tokens: int) -> None:
    experts, nobody = some_experts(torch.float32), torch.full((tokens, 2), NO_EXPERT)
    x_TD, kernels = torch.randn(tokens, HIDDEN), TritonExperts()
    assert torch.equal(kernels(x_TD, Selection(nobody, torch.rand(tokens, 2)), experts), torch.zeros_like(x_TD))
    assert kernels(x_TD[:0], Selection(nobody[:0], torch.rand(0, 2)), experts).shape == (0, HIDDEN)


@pytest.mark.parametrize("tokens", [2, 9])
def test_skipped_experts_are_not_read(tokens: int) -> None:
    """NaN in the weights of an expert reaches the tokens that chose the expert and no others."""
    experts = some_experts(torch.float32, CLAMPED)
    experts[2].up_FD.fill_(torch.nan)
    x_TD, chosen_TS = torch.randn(tokens, HIDDEN), torch.tensor([[0, 1]]).repeat(tokens, 1)
    chosen_TS[0] = torch.tensor([NO_EXPERT, 2])
    y_TD = TritonExperts()(x_TD, Selection(chosen_TS, torch.ones(tokens, 2)), experts)
    assert y_TD[0].isnan().all() and not y_TD[1:].isnan().any()


def test_weights_that_moved_are_found_again() -> None:
    experts, kernels = some_experts(torch.float32), TritonExperts()
    x_TD, selection = torch.randn(2, HIDDEN), chosen_by(2, 2)
    kernels(x_TD, selection, experts)
    other = some_experts(torch.float32)
    assert torch.allclose(kernels(x_TD, selection, other), sparse(x_TD, selection, other), atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text"])
def test_models_equal_torch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a prompt and then steps, with adaptive skipping in models whose weights can be skipped."""
    save_reference(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    source = checkpoint.source(torch.float32)
    decoder = Decoder(checkpoint.config, lambda name: source(name).clone())
    skipped = 0
    for block in decoder.moe_blocks:
        if isinstance(block.routing, TopK):
            gamma1, gamma2 = torch.ones(1), torch.ones(len(block.experts), len(block.experts))
            block.routing = Skipping(block.routing, gamma1, gamma2, 0.6, block.routing.normalise)

    def logits() -> Tensor:
        cache = KeyValueCache(checkpoint.config, 1, TOKENS.shape[1], torch.float32)
        return torch.cat([decoder(part, None, cache) for part in TOKENS.split([9, 1, 1, 1], dim=1)], dim=1)

    expected, calls = logits(), []
    ours = TritonExperts.__call__

    def counted(self: TritonExperts, x_TD: Tensor, selection: Selection, *rest: Any) -> Tensor | None:
        nonlocal skipped
        calls.append(len(x_TD))
        skipped += int((selection.experts == NO_EXPERT).sum())
        return ours(self, x_TD, selection, *rest)

    monkeypatch.setattr(TritonExperts, "__call__", counted)
    for block in decoder.moe_blocks:
        block.on_gpu = TritonExperts()
    assert (logits() - expected).abs().max() < 1e-4
    assert calls == [length for length in (9, 1, 1, 1) for _ in decoder.moe_blocks]
    assert skipped > 0 or not isinstance(decoder.moe_blocks[0].routing, Skipping)


def a_block() -> MoeBlock:
    return MoeBlock(torch.randn(EXPERTS, HIDDEN), list(some_experts(torch.float32)), TopK(2, True))


def test_kernels_serve_where_they_are_right(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("COMPRESS_KERNELS", "compiled")
    monkeypatch.setattr(triton_experts, "TRIALS", (1, 9))
    torch.manual_seed(0)
    blocks = [a_block(), a_block()]
    use_triton(blocks)
    assert all((block.on_gpu.serves_few, block.on_gpu.serves_many) == (True, True) for block in blocks)
    assert not caplog.records
    many = TritonExperts.many
    monkeypatch.setattr(TritonExperts, "many", lambda *given: many(*given) * 1.01)
    with caplog.at_level(logging.WARNING):
        use_triton(blocks := [a_block(), a_block()])
    assert all((block.on_gpu.serves_few, block.on_gpu.serves_many) == (True, False) for block in blocks)
    (record,) = caplog.records
    assert "9 tokens" in record.getMessage() and "an error of 1.0e-02" in record.getMessage()
    x_TD = torch.randn(9, HIDDEN)
    assert torch.equal(blocks[0](x_TD), grouped(x_TD, blocks[0].routing(blocks[0].logits(x_TD)), blocks[0].experts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "biased, clamped"])
@pytest.mark.parametrize("widths", [(100,), (7, 33, 12, 64, 20)], ids=["one width", "several widths"])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (6, 3), (20, 4)])
def test_the_experts_of_a_step_are_added(
    tokens: int, slots: int, widths: tuple[int, ...], is_plain: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens share experts, which are then read once; a residual and a factor are part of the sum."""
    torch.manual_seed(tokens)
    for sizes in (triton_experts.GATE_UP, triton_experts.DOWN):
        monkeypatch.setitem(sizes, "COLUMNS", 32)
    experts = some_experts(dtype, None if is_plain else CLAMPED, (HIDDEN, *widths))
    x_TD, residual_TD, selection = (
        torch.randn(tokens, HIDDEN).to(dtype),
        torch.randn(tokens, HIDDEN).to(dtype),
        chosen_by(tokens, slots),
    )
    y_TD = TritonExperts().added(residual_TD, 0.5, x_TD, selection, experts)
    exact = residual_TD.double() + 0.5 * sparse(x_TD.double(), selection, experts.double())
    error = (y_TD.double() - exact).norm() / exact.norm()
    assert y_TD.dtype == dtype and error < (1e-6 if dtype == torch.float32 else 4e-3)
