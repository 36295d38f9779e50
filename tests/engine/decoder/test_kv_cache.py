"""Keys and values kept in other dtypes: attention equals a naive one on rounded values, and reported bytes are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import save_reference
from torch import Tensor

import engine.decoder.attention
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.decoder.attention import attend, attention_mask
from engine.decoder.block_pool import BlockTable
from engine.decoder.kv_cache import KeyValueCache, Scaled, position_bytes, to_int8
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.errors import OptionError
from engine.generation.generate import Engine


def test_rounding_by_hand() -> None:
    integers, scales = to_int8(torch.tensor([[[1.0, -2.54, 0.01, 0.0]], [[0.0, 0.0, 0.0, 0.0]]]))
    assert torch.allclose(scales, torch.tensor([[0.02], [0.0]]))
    assert integers.tolist() == [[[50, -127, 0, 0]], [[0, 0, 0, 0]]]  # 1.0 / 0.02, and 0.01 / 0.02 rounded to even


def naive(kept: Tensor | Scaled) -> Tensor:
    return kept.integers.double() * kept.scales.double()[..., None] if isinstance(kept, Scaled) else kept.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.int8, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("new", "total", "window", "padding"), [(7, 7, None, 0), (4, 9, 3, 2), (1, 9, None, 0), (1, 9, 4, 1)]
)
def test_attention_equals_the_textbook_on_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    kept: torch.dtype,
    new: int,
    total: int,
    window: int | None,
    padding: int,
) -> None:
    monkeypatch.setattr(engine.decoder.attention, "KEY_BLOCK", 4)
    generator = torch.Generator().manual_seed(0)
    query, *parts = (torch.randn(2, heads, n, 8, generator=generator) for heads, n in ((6, new), (3, total), (3, total)))
    key, value = (to_int8(part) if kept == torch.int8 else part.to(kept) for part in parts)
    real = None
    if padding:
        real = torch.ones(2, total, dtype=torch.bool)
        real[1, :padding] = False
    mask = attention_mask(real, new, total, window)
    allowed = torch.ones(total, total, dtype=torch.bool).tril()[total - new :] if mask is None else mask
    wide_key, wide_value = (naive(part).repeat_interleave(2, 1) for part in (key, value))
    query = query.to(dtype)
    scores = (query.double() @ wide_key.mT * 8**-0.5).masked_fill(~allowed, -torch.inf)
    got = attend(query, key, value, mask)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert got.dtype == dtype and torch.allclose(got.double(), scores.softmax(-1) @ wide_value, atol=tolerance)


def test_both_caches_keep_the_same_and_count_their_bytes() -> None:
    config = Checkpoint(DEMO_DIRECTORY).config
    heads, size, layers = config.key_value_heads, config.head_dimension, len(config.layers)
    each = position_bytes(config, torch.int8)
    assert each == 2 * layers * heads * (size + 4) and position_bytes(config, torch.float16) == 2 * layers * heads * size * 2
    own = KeyValueCache(config, 1, 8, torch.int8)
    paged = PagedCache(config, 6 * 4 * each, torch.int8, block_size=4)
    assert own.bytes == 8 * each and paged.bytes == 6 * 4 * each
    assert paged.stored.bytes == paged.bytes
    table = BlockTable(blocks=[4, 1])
    generator = torch.Generator().manual_seed(1)
    for past, new in ((0, 5), (5, 1)):
        keys, values = torch.randn(2, 1, heads, new, size, generator=generator)
        table.length = past
        batch = PagedBatch(paged, [table], [new], [0])
        batch.append(1, keys, values)
        for mine, other in zip(own.append(1, keys, values), batch.of_sequence(1, 0), strict=True):
            assert isinstance(mine, Scaled) and isinstance(other, Scaled)
            assert torch.equal(mine.integers, other.integers) and torch.equal(mine.scales, other.scales)
        own.advance(new)
    last = own.stored.keys[1][0, :, 5].float() * own.stored.scales_of(1)[0, 0, :, 5, None]
    assert (last - keys[0, :, 0]).abs().max() <= keys.abs().max() / 254 + 1e-6
    rows, wider = own.of_rows(torch.tensor([0, 0])), own.of_rows(torch.tensor([0]))
    wider.extend(20)
    assert torch.equal(
        wider.stored.scales_of(1)[..., :6], own.stored.scales_of(1)[..., :6]
    )  # the other layers were not written to
    assert rows.stored.scales_of(1).shape[1] == 2 and wider.bytes == 20 * each


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("mixtral", name) for name in ("int8", "float16", "bfloat16")),
        *(("deepseek_v2", name) for name in ("int8", "float16")),
        ("gpt_oss", "int8"),
    ],
)
def test_generation_is_close_to_that_with_all_bits(family: str, name: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path)
    tokens = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(2))
    logits = {}
    for kept in ("auto", name):
        opened = Engine.open(tmp_path, kv_cache_dtype=kept)
        cache = opened.new_cache(1, 24)
        parts = [opened.prefill(tokens, None, cache), *(opened.step(tokens[0, i : i + 1], None, cache) for i in range(3))]
        logits[kept] = torch.cat(parts)
    difference = (logits[name] - logits["auto"]).abs().max() / logits["auto"].abs().max()
    assert 0 < difference < 0.02


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(OptionError, match="KV cache dtype 'int4' is not known"):
        Engine.open("demo", kv_cache_dtype="int4")


def test_the_report_tells_where_memory_is() -> None:
    opened = Engine.open("demo", kv_cache_dtype="int8")
    opened.generate("def add(", max_new_tokens=4)
    report = opened.report()
    prompt = report.prompt_tokens + 3
    assert report.kv_cache_bytes == prompt * position_bytes(opened.checkpoint.config, torch.int8)
    assert 0.2 * report.weights_bytes < report.weights_resident_bytes <= 1.02 * report.weights_bytes + (1 << 20)
    assert report.resident_memory_bytes == (
        report.weights_resident_bytes + report.kv_cache_bytes + report.other_memory_bytes
    )
    assert 0 < report.load_seconds < report.load_seconds + report.time_to_first_token_seconds
    wide = Engine.open("demo", dtype="float32")
    # The resident weights are copies, and the mapped file of the other engine.
    assert wide.weights_resident_bytes >= wide.weights_bytes == 2 * report.weights_bytes
