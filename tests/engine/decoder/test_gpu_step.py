"""The graphs of a GPU on machines without a GPU: their kernels are interpreted, and compiled for two GPUs."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
from conftest import save_reference
from packages_for_tests import needs_triton
from triton_for_tests import Launches, check_interpreted, compiled

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.gpu import layers as gpu_layers
from engine.decoder.gpu import trial, triton_experts
from engine.decoder.gpu.layers import Product
from engine.decoder.gpu.step import GpuStep, can_step, use_gpu_steps
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.decoder.routing import GroupedTopK
from engine.kernels.gpu import launching
from engine.kernels.kernel_choice import DECODING, PROMPT
from engine.kernels.stored.quantized_weight import frozen, quantise


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("which", ["equals or longer", "not equals and not longer"])
def test_equals_the_layers_where_it_is_interpreted(which: str) -> None:
    check_interpreted("tests/support/interpreted_gpu_step.py", "-k", which, seconds=900)


def opened(family: str, place: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    save_reference(family, place)
    checkpoint = Checkpoint(place)
    source = checkpoint.source(dtype)
    return Decoder(checkpoint.config, lambda name: source(name).clone()).eval()


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("card", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("family", "batch"), [("qwen2_moe", 1), ("qwen3_moe", 64), ("olmoe", 2), ("gpt_oss", 6)])
def test_compiles_for_cards_that_are_not_here(
    family: str, batch: int, dtype: torch.dtype, card: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of a step is compiled with the arguments of its launch, those of the largest models' shapes included."""
    from engine.kernels.gpu import triton_kernels, triton_step

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "compiled"))
    launches = Launches()
    monkeypatch.setattr(gpu_layers, "step_kernels", lambda: launches)
    monkeypatch.setattr(launching, "step_kernels", lambda: launches)
    monkeypatch.setattr(triton_experts, "_kernels", lambda: launches)
    decoder = opened(family, tmp_path / "model", dtype)
    step, cache = GpuStep(decoder), KeyValueCache(decoder.config, batch, 8, dtype)
    with torch.inference_mode():
        hidden_BLD = step(torch.zeros(batch, 1, dtype=torch.int64), None, cache, DECODING)
        assert hidden_BLD is not None
        large = Product([torch.zeros(512, 4096, dtype=dtype) for _ in range(3)], [None] * 3)
        large(torch.zeros(batch, 4096, dtype=dtype), (torch.zeros(4096, dtype=dtype), 1e-5))
    few = batch <= 4
    experts = {"gate_up_of_few", "down_of_few"} if few else {"gate_up_of_some", "down_of_some", "add_slots"}
    products = "products_of_few" if few else "products_of_many"
    assert set(launches.made) >= {products, "attend_next", "join_splits", "norm_rows", *experts}
    for name, (_, given, constants) in launches.made.items():
        compiled(getattr(triton_step, name, None) or getattr(triton_kernels, name), given, constants, card)


@pytest.mark.parametrize(
    ("family", "is_served"),
    [
        ("mixtral", True),
        ("gpt_oss", True),
        ("deepseek_v2", False),  # latent attention
        ("qwen3_next", False),  # linear attention
        ("llama4_text", False),  # scaled inputs of experts
    ],
)
def test_which_decoders_are_served(family: str, is_served: bool, tmp_path: Path) -> None:
    assert can_step(opened(family, tmp_path)) == is_served


def test_low_bit_weights_are_not_served(tmp_path: Path) -> None:
    decoder = opened("mixtral", tmp_path)
    attention: Any = decoder.layers[1].attention
    own = attention.output.detach()
    del attention.output
    attention.output = frozen(quantise(own, 8, 32))
    assert not can_step(decoder)


@needs_triton
def test_kernels_that_fail_leave_it_to_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This machine has no GPU to launch kernels on, so Triton raises an exception."""
    monkeypatch.setenv("COMPRESS_KERNELS", "compiled")
    decoder = opened("mixtral", tmp_path)
    with caplog.at_level(logging.WARNING):
        use_gpu_steps(decoder)
    assert decoder.gpu_step is None
    assert "layer by layer, because a graph failed on this GPU (" in caplog.text


@needs_triton
def test_an_error_of_the_trial_leaves_no_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COMPRESS_KERNELS", "compiled")
    decoder, calls = opened("mixtral", tmp_path), 0

    def full(*given: Any) -> KeyValueCache:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise MemoryError("out of memory")
        return KeyValueCache(*given)

    monkeypatch.setattr(trial, "KeyValueCache", full)
    use_gpu_steps(decoder)
    assert decoder.gpu_step is None and "its trial failed on this GPU (MemoryError: out of memory)" in caplog.text


def test_a_decoder_goes_with_its_last_reference(tmp_path: Path) -> None:
    decoder = opened("mixtral", tmp_path)
    decoder.gpu_step = GpuStep(decoder)
    weight, gone = decoder.norm, []
    finalize(weight, gone.append, True)
    gc.collect()
    gc.disable()
    try:
        del decoder, weight
        assert gone, "a cycle of references keeps the weights"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "change",
    [
        lambda decoder: setattr(decoder, "watch", print),
        lambda decoder: setattr(decoder.moe_blocks[1], "expert_observer", print),
        lambda decoder: setattr(decoder.moe_blocks[1].experts[0], "unit_observer", None),
        lambda decoder: setattr(decoder.moe_blocks[1], "routing", GroupedTopK(2, ((0, 1, 2), (3, 4, 5)), 1)),
    ],
    ids=["a watcher", "an observer of experts", "none", "groups of experts"],
)
def test_which_passes_are_refused(change: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A pass that a graph cannot repeat runs through the layers; without the change, it reaches the kernels."""
    decoder = opened("mixtral", tmp_path)
    step, cache = GpuStep(decoder), KeyValueCache(decoder.config, 1, 3, torch.float32)
    token_11 = torch.zeros(1, 1, dtype=torch.int64)
    change(decoder)
    with torch.inference_mode():
        assert step(token_11, None, cache, DECODING) is None
        assert bool(step.failed) == request.node.callspec.id.startswith("none"), "there is no GPU, so the kernels fail"
    with torch.no_grad():
        assert GpuStep(decoder)(token_11, None, cache, DECODING) is None


def test_a_full_cache_is_left_to_the_layers(tmp_path: Path) -> None:
    decoder = opened("mixtral", tmp_path)
    step, cache = GpuStep(decoder), KeyValueCache(decoder.config, 1, 3, torch.float32)
    cache.length = 3
    with torch.inference_mode():
        assert step(torch.zeros(1, 1, dtype=torch.int64), None, cache, DECODING) is None
        assert step(torch.zeros(1, 2, dtype=torch.int64), None, cache, PROMPT) is None
    assert not step.failed


def test_torch_alone_has_no_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_KERNELS", "torch")
    decoder = opened("mixtral", tmp_path)
    use_gpu_steps(decoder)
    assert decoder.gpu_step is None
