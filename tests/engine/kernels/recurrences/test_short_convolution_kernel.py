"""The compiled step of a short convolution, against the same layer through torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_for_tests import kernels
from packages_for_tests import needs_numba
from torch import Tensor

from engine.decoder.attention import Positions
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.short_convolution import ShortConvolution
from engine.families.resolve import decoder_config
from engine.families.tensor_shapes import layer_tensors
from engine.kernels.kernel_choice import DECODING, TORCH, KernelChoice


def layer_of(filter_size: int, hidden: int) -> tuple[ShortConvolution, Any]:
    """Return a layer with random weights, and its config."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    sizes = {"hidden_size": hidden, "num_hidden_layers": 2, "vocab_size": 100, "conv_L_cache": filter_size}
    config = decoder_config({"model_type": "lfm2_moe", "num_dense_layers": 0} | sizes | heads)
    generator, shapes = torch.Generator().manual_seed(0), layer_tensors(config, 0)

    def tensor(name: str) -> Tensor:
        return (torch.randn(shapes[name], generator=generator) * 0.3).bfloat16()

    return ShortConvolution(config, 0, tensor).eval(), config


def stepped(layer: ShortConvolution, config: Any, x_BLD: Tensor, choice: KernelChoice) -> tuple[Tensor, Tensor]:
    """Return the outputs of five steps after a prompt of four positions, and the last inputs of the convolution."""
    cache = KeyValueCache(config, len(x_BLD), 9, torch.bfloat16)
    prompt, steps = (Positions(torch.empty(0), torch.empty(0), False, {}, choice=each) for each in (TORCH, choice))
    with torch.inference_mode():
        layer(x_BLD[:, :4], prompt, cache)
        outputs = [layer(x_BLD[:, place : place + 1], steps, cache) for place in range(4, 9)]
    return torch.cat(outputs, dim=1).float(), cache.state(0)[0]


@needs_numba
@pytest.mark.parametrize("filter_size", [1, 2, 3, 5])
@pytest.mark.parametrize("hidden", [20, 64])
def test_a_compiled_step_is_the_step_of_torch(filter_size: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last inputs are the same bits, because both ways round them. Outputs differ by a rounding to bfloat16."""
    layer, config = layer_of(filter_size, hidden)
    x_BLD = torch.randn(3, 9, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected, wanted = stepped(layer, config, x_BLD, TORCH)
    seen, own = [], kernels.recur
    monkeypatch.setattr(kernels, "recur", lambda *given: seen.append(given[0]) or own(*given))
    found, last = stepped(layer, config, x_BLD, DECODING)
    assert seen == ["short_convolution"] * 5
    assert torch.equal(last, wanted)
    assert float((found - expected).abs().max()) <= 2.0**-7 * float(expected.abs().max())
