"""The compiled step of Mamba-2, against the same layer through torch and against the recurrence written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from torch import Tensor

from engine.decoder.attention import Positions
from engine.decoder.block_pool import BlockTable
from engine.decoder.kv_cache import KeyValueCache, position_bytes
from engine.decoder.mamba2 import Mamba2
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.families.config import DecoderConfig
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import layer_tensors
from engine.kernels.kernel_choice import DECODING, TORCH, KernelChoice

HIDDEN, KINDS = 64, ["linear_attention", "moe", "full_attention"]
SIZES: dict[str, dict[str, Any]] = {
    "two heads of a group": {},
    "odd sizes": {"mamba_num_heads": 6, "mamba_head_dim": 19, "ssm_state_size": 5},
    "one group": {"n_groups": 1},
    "a filter of two positions": {"conv_kernel": 2},
    "a large minimum of the step": {"time_step_min": 0.7},
}


def config_of(**changes: Any) -> DecoderConfig:
    mixer = {"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4}
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "vocab_size": 100, "layers_block_type": KINDS}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "time_step_min": 0.001}
    return decoder_config({"model_type": "nemotron_h"} | sizes | mixer | attention | experts | changes)


def layer_of(config: DecoderConfig, numbers: torch.dtype = torch.float32) -> Mamba2:
    """Return a layer with random weights in bfloat16; numbers: dtype of those that are one for each head."""
    generator, shapes = torch.Generator().manual_seed(0), layer_tensors(config, 0)

    def tensor(name: str) -> Tensor:
        made = torch.randn(shapes[name], generator=generator) * (0.15 if len(shapes[name]) == 2 else 0.5)
        return made.to(numbers if name.endswith(("A_log", "dt_bias", ".D")) else torch.bfloat16)

    return Mamba2(config, 0, tensor).eval()


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
@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_compiled_step_is_the_step_of_torch(
    sizes: dict[str, Any], threads: int, numbers: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states differ by rounding in float32, and the outputs at most by a rounding to bfloat16."""
    config = config_of(**sizes)
    layer, seen = layer_of(config, numbers), counted(monkeypatch)
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
    config = config_of()
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


@needs_numba
def test_one_head_by_hand() -> None:
    """One head with one element of x and one of its state, without a position before, is the formula in five numbers."""
    config = config_of(mamba_num_heads=1, mamba_head_dim=1, ssm_state_size=1, n_groups=1, conv_kernel=1)
    gate, x, into, out, logit = 0.5, 1.5, -0.75, 0.25, 1.0
    bias, log_rate, through, state = 0.125, -0.5, 2.0, 3.0
    halves = [torch.tensor([gate, x, into, out, logit]), torch.ones(3), torch.zeros(3), torch.tensor([0.5])]
    halves = [part.bfloat16() for part in halves]
    numbers = [torch.tensor([number]) for number in (bias, log_rate, through)]
    own, last = torch.tensor([[[[state]]]]), torch.empty(1, 0, 3)
    projected, *parameters = (part.data_ptr() for part in (*halves, *numbers))
    names = "filters", "filter_bias", "norm", "step_bias", "log_rate", "through"
    sizes = dict.fromkeys(("heads", "groups", "key_size", "value_size", "filter_size"), 1)
    fields = dict(zip(names, parameters, strict=True)) | sizes | {"least_step": 0.001, "epsilon": config.norm_epsilon}
    record = kernels.recurrent_record("mamba2", **fields)
    made = kernels.recur("mamba2", record, projected, np.array([[own.data_ptr()], [last.data_ptr()]]), (1, 1))

    def silu(number: float) -> float:
        return number / (1.0 + math.exp(-number))

    step = math.log1p(math.exp(logit + bias))
    now = state * math.exp(-math.exp(log_rate) * step) + silu(into) * step * silu(x)
    y = (silu(out) * now + through * silu(x)) * silu(gate)
    expected = 0.5 * y / math.sqrt(y * y + config.norm_epsilon)
    assert math.isclose(float(own), now, rel_tol=1e-6)
    found = torch.from_numpy(made).view(torch.bfloat16)
    assert math.isclose(float(found), expected, rel_tol=2.0**-8)
