"""The compiled step of the gated delta rule, against the same layer through torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from torch import Tensor

from engine.decoder.attention import Positions
from engine.decoder.block_pool import BlockTable
from engine.decoder.gated_delta import GatedDelta, SplitGatedDelta
from engine.decoder.kv_cache import KeyValueCache, position_bytes
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.families.config import DecoderConfig
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import layer_tensors
from engine.kernels.kernel_choice import DECODING, TORCH, KernelChoice

HIDDEN = 64
SIZES: dict[str, dict[str, int]] = {
    "as published, and smaller": {},
    "odd sizes": {"linear_key_head_dim": 5, "linear_value_head_dim": 19, "linear_num_value_heads": 6},
    "a head of keys for each head of values": {"linear_num_key_heads": 4},
    "a filter of two positions": {"linear_conv_kernel_dim": 2},
    "no convolution": {"linear_conv_kernel_dim": 1},
}


def config_of(model_type: str, **changes: int) -> DecoderConfig:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "vocab_size": 100, "linear_value_head_dim": 24} | heads
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    return decoder_config({"model_type": model_type} | sizes | kinds | changes)


def layer_of(config: DecoderConfig) -> Any:
    """Return a layer with random weights: the bias and the rates of decay in float32, all others in bfloat16."""
    generator, shapes = torch.Generator().manual_seed(0), layer_tensors(config, 0)

    def tensor(name: str) -> Tensor:
        made = torch.randn(shapes[name], generator=generator) * (0.15 if len(shapes[name]) == 2 else 0.5)
        return made if name.endswith(("A_log", "dt_bias")) else made.bfloat16()

    kind = SplitGatedDelta if config.architecture.model_type == "qwen3_5_moe_text" else GatedDelta
    return kind(config, 0, tensor).eval()


def positions(choice: KernelChoice) -> Positions:
    return Positions(torch.empty(0), torch.empty(0), False, {}, choice=choice)


def texts(sequences: int) -> Tensor:
    return torch.randn(sequences, 9, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def stepped(layer: Any, config: DecoderConfig, x_BLD: Tensor, choice: KernelChoice) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of five steps after a prompt of four positions, and the state after them."""
    cache = KeyValueCache(config, len(x_BLD), 9, torch.bfloat16)
    with torch.inference_mode():
        layer(x_BLD[:, :4], positions(TORCH), cache)
        outputs = [layer(x_BLD[:, place : place + 1], positions(choice), cache) for place in range(4, 9)]
    return torch.cat(outputs, dim=1).float(), cache.state(0)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of sequences of each compiled call."""
    seen, own = [], kernels.recur

    def recur(kernel: str, record: Any, inputs: int, states: tuple[int, int], shape: tuple[int, int]) -> Any:
        seen.append(shape[0])
        return own(kernel, record, inputs, states, shape)

    monkeypatch.setattr(kernels, "recur", recur)
    return seen


@needs_numba
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_compiled_step_is_the_step_of_torch(
    sizes: dict[str, int], threads: int, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states differ by rounding in float32, and the outputs at most by a rounding to bfloat16."""
    config = config_of(model_type, **sizes)
    layer, seen = layer_of(config), counted(monkeypatch)
    expected, wanted = stepped(layer, config, texts(3), TORCH)
    assert not seen
    found, state = stepped(layer, config, texts(3), DECODING.with_threads(threads))
    assert seen == [3] * 5
    assert float((found - expected).abs().max()) <= 2.0**-7 * float(expected.abs().max())
    for one, other in zip(state, wanted, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, atol=1e-5)


@needs_numba
def test_sequences_of_a_paged_cache_are_stepped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence gets the bits that it gets alone, and its state is stored."""
    config = config_of("qwen3_next")
    layer, x_BLD = layer_of(config), texts(3)
    alone = torch.cat([stepped(layer, config, x_BLD[row : row + 1], DECODING)[0] for row in range(3)])
    cache = PagedCache(config, position_bytes(config, torch.bfloat16) * 96, torch.bfloat16, sequences=3)
    tables, outputs, seen = [BlockTable() for _ in range(3)], [], counted(monkeypatch)
    with torch.inference_mode():
        for row, table in enumerate(tables):
            layer(x_BLD[row : row + 1, :4], positions(TORCH), PagedBatch(cache, [table], [4], [0]))
        for place in range(4, 9):
            batch = PagedBatch(cache, tables, None, [0, 0, 0])
            outputs.append(layer(x_BLD[:, place : place + 1], positions(DECODING), batch))
    assert seen == [3] * 5 and torch.equal(torch.cat(outputs, dim=1).float(), alone)
