"""The compiled kernels of decoding against the torch path and the textbook, every family, in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, save_reference
from torch import Tensor

import engine.linear
from engine.attention import rms_norm, rotate
from engine.checkpoint import Checkpoint
from engine.kv_cache import KeyValueCache
from engine.linear import as_bfloat16, decoding
from engine.model import Decoder

kernels: Any = pytest.importorskip("engine.gemv", reason="needs the extra `fast`")
TOKENS = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(1))


def decoded(decoder: Decoder, config: Any, dtype: torch.dtype) -> Tensor:
    """Logits of a prefill of 5 and of 7 single steps."""
    cache = KeyValueCache(config, 1, TOKENS.shape[1], dtype)
    with torch.inference_mode():
        logits = [decoder.last_logits(TOKENS[:, :5], None, cache)]
        with decoding():
            logits += [decoder.last_logits(TOKENS[:, i : i + 1], None, cache) for i in range(5, TOKENS.shape[1])]
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in FAMILIES), ("mixtral", {"sliding_window": 4}), ("olmoe", {"clip_qkv": 0.5})],
)
def test_every_family_decodes_as_well_as_through_torch(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are roundings of the float64 logits; the compiled path rounds less often, so it may not be the worse one."""
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)

    def source(dtype: torch.dtype) -> Any:
        plain = checkpoint.source(torch.bfloat16)
        return lambda name: plain(name).to(dtype)

    exact = decoded(Decoder(checkpoint.config, source(torch.float64)), checkpoint.config, torch.float64)
    compiled = decoded(Decoder(checkpoint.config, source(torch.bfloat16)), checkpoint.config, torch.bfloat16)
    monkeypatch.setattr(engine.linear, "_load_kernels", lambda: None)
    torch_path = decoded(Decoder(checkpoint.config, source(torch.bfloat16)), checkpoint.config, torch.bfloat16)
    assert compiled.dtype == torch.bfloat16 and not torch.equal(compiled, torch_path)
    assert (compiled - exact).norm() < 1.25 * (torch_path - exact).norm()


def test_norm_equals_torch_to_the_bit() -> None:
    torch.manual_seed(0)
    for size in (1, 7, 160):
        x, weight = torch.randn(3, size).bfloat16(), torch.randn(size).bfloat16()
        several = rms_norm(x, weight, 1e-5)
        with decoding():
            alone = torch.cat([rms_norm(row[None], weight, 1e-5) for row in x])
        assert torch.equal(several, alone)


@pytest.mark.parametrize(("position", "window"), [(0, None), (6, None), (6, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_equals_the_textbook(position: int, window: int | None, threads: int) -> None:
    torch.manual_seed(0)
    heads, groups, size, capacity = 6, 3, 8, 9
    kernels.use_threads(threads)
    query, key, value = (torch.randn(1, n, 1, size).bfloat16() for n in (heads, groups, groups))
    angles = torch.randn(1, 1, 1, size // 2).repeat(1, 1, 1, 2)
    cosine, sine = angles.cos().bfloat16(), angles.sin().bfloat16()
    keys, values = (torch.randn(groups, capacity, size).bfloat16() for _ in range(2))
    before = keys.clone(), values.clone()
    first = 0 if window is None else max(0, position + 1 - window)
    addresses = tuple(tensor.data_ptr() for tensor in (query, key, value))
    arrays = tuple(tensor.view(torch.uint16).numpy() for tensor in (keys, values))
    angle_addresses = cosine.data_ptr(), sine.data_ptr()
    mixed = as_bfloat16(kernels.attend(addresses, angle_addresses, *arrays, position, first, heads * size))

    wide = [tensor.double() for tensor in (query, key, cosine, sine)]
    turned_query, turned_key = (rotate(x, wide[2], wide[3])[0, :, 0] for x in wide[:2])
    assert torch.allclose(keys[:, position].double(), turned_key, rtol=2**-8, atol=1e-6)
    assert torch.equal(values[:, position], value[0, :, 0])
    others = [i for i in range(capacity) if i != position]
    assert torch.equal(keys[:, others], before[0][:, others]) and torch.equal(values[:, others], before[1][:, others])
    for head in range(heads):
        group = head // (heads // groups)
        seen = slice(first, position + 1)
        weights = (keys[group, seen].double() @ turned_query[head] / size**0.5).softmax(0)
        expected = weights @ values[group, seen].double()
        assert torch.allclose(mixed.view(heads, size)[head].double(), expected, rtol=2**-7, atol=1e-3)
