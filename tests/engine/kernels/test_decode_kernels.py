"""How a kernel is tested: each compiled decoding kernel against torch and a textbook formula, in bfloat16.

Whole models of every family are compared too, with the kernels and without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAMILIES, FURTHER_FAMILIES, save_reference
from kernels_for_tests import kernels
from nearness import is_as_near
from packages_for_tests import needs_numba
from torch import Tensor

import engine.kernels.kernel_choice
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.attention import rotate
from engine.decoder.block_pool import BlockTable
from engine.decoder.kv_cache import KeyValueCache, position_bytes, to_int8
from engine.decoder.model import Decoder
from engine.decoder.norms import rms_norm
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.kernels.kernel_choice import DECODING, PROMPT
from engine.kernels.linear import as_bfloat16

EVERY_FAMILY = (*FAMILIES, *FURTHER_FAMILIES)
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in EVERY_FAMILY),
    ("llama4_text", {"floor_scale": 2}),
    ("mixtral", {"sliding_window": 4}),
    ("olmoe", {"clip_qkv": 0.5}),
]
TOKENS = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(1))


def decoded(decoder: Decoder, config: Any, dtype: torch.dtype) -> Tensor:
    """Return the logits of a prefill of 5 positions and of 7 single steps."""
    cache = KeyValueCache(config, 1, TOKENS.shape[1], dtype)
    with torch.inference_mode():
        logits = [decoder.last_logits(TOKENS[:, :5], None, cache)]
        for i in range(5, TOKENS.shape[1]):
            logits.append(decoder.last_logits(TOKENS[:, i : i + 1], None, cache, DECODING))
    return torch.cat(logits)


def read(decoder: Decoder, config: Any, dtype: torch.dtype) -> Tensor:
    """Return the logits of a prompt in which rounding does not change an early choice of experts."""
    prompt = torch.randint(3, 96, (1, 70), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        return decoder(prompt, None, KeyValueCache(config, 1, prompt.shape[1], dtype), PROMPT)[0]


@needs_numba
@pytest.mark.parametrize("logits", [decoded, read])
@pytest.mark.parametrize(
    ("family", "changes"),
    CASES,
)
def test_every_family_decodes_as_well_as_through_torch(
    family: str, changes: dict[str, Any], logits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are roundings of the float64 logits. The compiled path rounds less often, so it must not be worse."""
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)

    def source(dtype: torch.dtype) -> Any:
        plain = checkpoint.source(torch.bfloat16)
        return lambda name: plain(name).to(dtype)

    exact = logits(Decoder(checkpoint.config, source(torch.float64)), checkpoint.config, torch.float64)
    compiled = logits(Decoder(checkpoint.config, source(torch.bfloat16)), checkpoint.config, torch.bfloat16)
    monkeypatch.setattr(engine.kernels.kernel_choice, "_load_kernels", lambda: None)
    torch_path = logits(Decoder(checkpoint.config, source(torch.bfloat16)), checkpoint.config, torch.bfloat16)
    assert compiled.dtype == torch.bfloat16
    assert not torch.equal(compiled, torch_path), "the kernels round elsewhere"
    errors, torch_errors = ((made - exact).norm(dim=-1) for made in (compiled, torch_path))
    assert is_as_near(errors, torch_errors)


def test_norm_equals_torch_to_the_bit() -> None:
    torch.manual_seed(0)
    for size in (1, 7, 160):
        x, weight = torch.randn(3, size).bfloat16(), torch.randn(size).bfloat16()
        several = rms_norm(x, weight, 1e-5)
        alone = torch.cat([rms_norm(row[None], weight, 1e-5, DECODING) for row in x])
        together = rms_norm(x, weight, 1e-5, DECODING)
        assert torch.equal(several, alone) and torch.equal(several, together)


@needs_numba
@pytest.mark.parametrize("window", [None, 3, -4])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("past", "owners"),
    [([0], [0]), ([6], [0]), ([3, 0, 11, 4], [0, 1, 2, 3]), ([3, 4, 0, 5, 1, 7], [0, 0, 1, 0, 1, 2])],
)
@pytest.mark.parametrize("rotated", [8, 4, 0])
def test_attention_equals_the_textbook(
    rotated: int, past: list[int], owners: list[int], window: int | None, threads: int
) -> None:
    """The blocks of 4 positions of each sequence lie anywhere in a cache of 12 blocks. A sequence may have several rows."""
    torch.manual_seed(0)
    heads, groups, size, count = 6, 3, 8, len(past)
    kernels.use_threads(threads)
    projected = torch.randn(count, (heads + 2 * groups) * size).bfloat16()  # side by side, as `linears` returns them
    query, key, value = (p.view(count, -1, size) for p in projected.split([heads * size, groups * size, groups * size], 1))
    angles = torch.randn(count, rotated // 2).repeat(1, 2)
    cosine, sine = angles.cos().bfloat16(), angles.sin().bfloat16()
    sinks = torch.randn(heads)
    keys, values = (torch.randn(groups, 48, size).bfloat16() for _ in range(2))
    before = keys.clone(), values.clone()
    blocks = torch.randperm(12).view(4, 3)[owners]
    mixed = kernels.attend(
        [tensor.data_ptr() for tensor in (query, key, value, cosine, sine)],
        [tensor.stride(0) for tensor in (query, key, value)],
        [keys.data_ptr(), values.data_ptr()],
        (count, heads, groups, size, rotated),
        keys.stride(0),
        (blocks.numpy(), np.array(past), 4, len(set(owners)) < count),
        window,
        size**-0.5,
        sinks.numpy(),
    )
    mixed, written = as_bfloat16(mixed), []
    for row, position in enumerate(past):
        wide = [tensor[row].double() for tensor in (query, key, cosine, sine)]
        turned_query, turned_key = (rotate(x, wide[2], wide[3]) if rotated else x for x in wide[:2])
        slots = [int(blocks[row, place // 4]) * 4 + place % 4 for place in range(position + 1)]
        written.append(slots[-1])
        assert torch.allclose(keys[:, slots[-1]].double(), turned_key, rtol=2**-8, atol=1e-6)
        assert torch.equal(values[:, slots[-1]], value[row])
        seen = slots if window is None else slots[-window:] if window > 0 else slots[position // -window * -window :]
        for head in range(heads):
            group = head // (heads // groups)
            scores = keys[group, seen].double() @ turned_query[head] / size**0.5
            weights = torch.cat([scores, sinks[head, None].double()]).softmax(0)
            expected = weights[:-1] @ values[group, seen].double()
            assert torch.allclose(mixed[row, head].double(), expected, rtol=2**-7, atol=1e-3)
    others = [slot for slot in range(48) if slot not in written]
    assert torch.equal(keys[:, others], before[0][:, others]) and torch.equal(values[:, others], before[1][:, others])


def attended(
    past: list[int],
    shape: tuple[int, int, int],
    window: int | None,
    block_size: int = 32,
    threads: int = 1,
    *,
    in_bytes: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Return the kernel's result for sequences whose positions were drawn, and that of the textbook in float64.

    in_bytes: whether the cache has 8 bits; the textbook then computes with the rounded keys and values.
    """
    heads, groups, size = shape
    kernels.use_threads(threads)
    mixed, expected = [], []
    most = max(past) // block_size + 1
    query, key, value = (torch.empty(len(past), count, size).bfloat16() for count in (heads, groups, groups))
    slots_of_all = len(past) * most * block_size
    caches = [torch.empty(groups, slots_of_all, size, dtype=torch.int8 if in_bytes else torch.bfloat16) for _ in range(2)]
    scales = [torch.empty(groups, slots_of_all) for _ in range(2 if in_bytes else 0)]
    blocks = torch.arange(len(past) * most).view(len(past), most).flip(1).contiguous()
    for row, position in enumerate(past):
        generator = torch.Generator().manual_seed(position)
        own = torch.randn(heads + 2 * groups * (position + 1), size, generator=generator).bfloat16()
        query[row] = own[:heads]
        own_keys, own_values = own[heads:].view(2, groups, position + 1, size)
        key[row], value[row] = own_keys[:, -1], own_values[:, -1]
        slots = [int(blocks[row, place // block_size]) * block_size + place % block_size for place in range(position)]
        kept = [own_keys, own_values]
        for part, own_part in enumerate((own_keys, own_values)):
            if in_bytes:
                rounded = to_int8(own_part)
                kept[part] = rounded.integers.double() * rounded.scales[..., None]
                scales[part][:, slots] = rounded.scales[:, :-1]
                own_part = rounded.integers
            caches[part][:, slots] = own_part[:, :-1]
        own_keys, own_values = kept
        first = 0 if window is None else max(0, position + 1 - window) if window > 0 else position // -window * -window
        each = heads // groups
        scores = query[row].double().view(groups, each, size) @ own_keys[:, first:].double().mT * size**-0.5
        expected.append((scores.softmax(-1) @ own_values[:, first:].double()).view(heads, size))
    ones, zeros = torch.ones(len(past), size).bfloat16(), torch.zeros(len(past), size).bfloat16()
    mixed = kernels.attend(
        [tensor.data_ptr() for tensor in (query, key, value, ones, zeros)],
        [tensor.stride(0) for tensor in (query, key, value)],
        [part.data_ptr() for part in (*caches, *scales)],
        (len(past), heads, groups, size, size),
        caches[0].stride(0),
        (blocks.numpy(), np.array(past), block_size, False),
        window,
        size**-0.5,
    )
    return as_bfloat16(mixed), expected


@needs_numba
@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("window", [None, 700, -600])
@pytest.mark.parametrize("shape", [(8, 2, 64), (5, 1, 96), (8, 1, 128), (2, 2, 40), (6, 1, 80), (3, 3, 34), (21, 1, 32)])
def test_attention_over_several_pieces_equals_the_textbook(
    shape: tuple[int, int, int], window: int | None, in_bytes: bool
) -> None:
    """Pieces have 512 positions. Every number of queries of a group and every rest of a head's size is there."""
    past = [0, 1, 510, 511, 512, 1023, 1300]
    mixed, expected = attended(past, shape, window, in_bytes=in_bytes)
    for got, wanted in zip(mixed.double(), expected, strict=True):
        assert (got - wanted).abs().max() <= 2**-8 * wanted.abs().max() + 2e-3


@needs_numba
def test_vectors_whose_sums_may_need_more_than_32_bits_are_multiplied_as_float32() -> None:
    mixed, expected = attended([0, 30], (4, 1, 1056), None, in_bytes=True)
    for got, wanted in zip(mixed.double(), expected, strict=True):
        assert (got - wanted).abs().max() <= 2**-8 * wanted.abs().max() + 2e-3


@needs_numba
@pytest.mark.parametrize("in_bytes", [False, True])
def test_attention_has_the_same_bits_on_any_number_of_threads_and_in_any_company(in_bytes: bool) -> None:
    past = [1300, 3, 700, 511]
    together, _ = attended(past, (8, 2, 64), None, in_bytes=in_bytes)
    on_two, _ = attended(past, (8, 2, 64), None, threads=2, in_bytes=in_bytes)
    assert torch.equal(together, on_two)
    for row, position in enumerate(past):
        alone, _ = attended([position], (8, 2, 64), None, threads=2, in_bytes=in_bytes)
        assert torch.equal(alone[0], together[row])


@needs_numba
@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("window", [None, 514, 300, -301])
@pytest.mark.parametrize("heads", [7, 17])
def test_attention_has_the_same_bits_in_blocks_and_in_contiguous_memory(
    heads: int, window: int | None, in_bytes: bool
) -> None:
    past = [1300, 515, 700, 30]
    contiguous, _ = attended(past, (heads, 1, 64), window, block_size=2048, in_bytes=in_bytes)
    for block_size in (1, 3, 4, 6, 32) if in_bytes else (4, 6, 32):  # pairs of bfloat16 need even sizes
        assert torch.equal(attended(past, (heads, 1, 64), window, block_size, in_bytes=in_bytes)[0], contiguous)


@needs_numba
def test_new_keys_and_values_are_rounded_to_8_bits_as_by_torch() -> None:
    """Also a vector of zeros, whose scale is 0, and numbers exactly between two integers."""
    between = torch.arange(-16.0, 16.0) + 0.5
    between[0] = 127.0
    given = torch.stack([torch.zeros(32), torch.randn(32, generator=torch.Generator().manual_seed(0)), between]).bfloat16()
    keys, values = (torch.full((1, 96, 32), 99, dtype=torch.int8) for _ in range(2))
    scales, turned = torch.full((2, 1, 96), 99.0), given.flip(0).contiguous()
    ones, zeros = torch.ones(3, 32).bfloat16(), torch.zeros(3, 32).bfloat16()
    kernels.attend(
        [tensor.data_ptr() for tensor in (given, given, turned, ones, zeros)],
        [32, 32, 32],
        [part.data_ptr() for part in (keys, values, scales[0], scales[1])],
        (3, 1, 1, 32, 32),
        keys.stride(0),
        (np.arange(3)[:, None], np.array([5, 5, 5]), 32, False),
        None,
        1.0,
    )
    for cache, own_scales, expected in ((keys, scales[0], to_int8(given)), (values, scales[1], to_int8(turned))):
        assert torch.equal(cache[0, 5::32], expected.integers) and torch.equal(own_scales[0, 5::32], expected.scales)
        assert int((cache == 99).sum()) == 93 * 32, "nothing else is written"


@needs_numba
def test_a_value_that_is_no_number_stays_visible_in_8_bits() -> None:
    given, ones, zeros = torch.ones(1, 32).bfloat16(), torch.ones(1, 32).bfloat16(), torch.zeros(1, 32).bfloat16()
    given[0, 7] = torch.nan
    keys, values = (torch.zeros(1, 4, 32, dtype=torch.int8) for _ in range(2))
    scales = torch.ones(2, 1, 4)
    mixed = kernels.attend(
        [tensor.data_ptr() for tensor in (ones, ones, given, ones, zeros)],
        [32, 32, 32],
        [part.data_ptr() for part in (keys, values, scales[0], scales[1])],
        (1, 1, 1, 32, 32),
        keys.stride(0),
        (np.zeros((1, 1), np.int64), np.array([1]), 4, False),
        None,
        1.0,
    )
    assert torch.isnan(scales[1, 0, 1]) and not torch.isnan(scales[0]).any()
    assert torch.isnan(as_bfloat16(mixed)).all()


@needs_numba
def test_the_largest_score_of_a_piece_may_be_far_below_that_of_all() -> None:
    """The first piece's scores are 200 below the second's, so its weights vanish, and nothing overflows."""
    heads, size, past = 1, 32, 600
    query = torch.full((1, heads, size), 8.0).bfloat16()
    keys = torch.full((1, 640, size), -4.0).bfloat16()
    keys[:, 512:] = 4.0
    values = torch.ones(1, 640, size).bfloat16()
    values[:, :512] = -1.0
    new = keys[0, :1].clone().fill_(4.0), values[0, 600:601].clone()
    ones, zeros = torch.ones(1, size).bfloat16(), torch.zeros(1, size).bfloat16()
    mixed = kernels.attend(
        [tensor.data_ptr() for tensor in (query, *new, ones, zeros)],
        [heads * size, size, size],
        [keys.data_ptr(), values.data_ptr()],
        (1, heads, 1, size, size),
        keys.stride(0),
        (np.arange(20)[None], np.array([past]), 32, False),
        None,
        1.0,
    )
    assert torch.equal(as_bfloat16(mixed), torch.ones(1, heads, size).bfloat16())


@needs_numba
@pytest.mark.parametrize(
    ("family", "changes"),
    CASES,
)
def test_a_sequence_gets_the_same_bits_beside_others(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Results in blocks and in contiguous memory are the same, too."""
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    config = checkpoint.config
    decoder = Decoder(config, checkpoint.source(torch.bfloat16))
    cache = PagedCache(config, position_bytes(config, torch.bfloat16) * 96, torch.bfloat16, block_size=4)
    tables, lengths = [BlockTable() for _ in range(5)], [5, 11, 1, 3, 8]
    prompts = torch.randint(3, 96, (5, 24), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        alone = [KeyValueCache(config, 1, 24, torch.bfloat16) for _ in tables]
        for table, length, prompt, own in zip(tables, lengths, prompts, alone, strict=True):
            cache.pool.extend(table, length)
            together = decoder.last_logits(prompt[None, :length], None, PagedBatch(cache, [table], [length], [length]))
            assert torch.equal(together, decoder.last_logits(prompt[None, :length], None, own))
            cache.pool.fill(table, prompt.tolist(), length)
        for step in range(8):
            for table in tables:
                cache.pool.extend(table, table.length + 1)
            last = torch.stack([prompt[length + step] for prompt, length in zip(prompts, lengths, strict=True)])
            together = decoder.last_logits(last[:, None], None, PagedBatch(cache, tables, None, lengths), DECODING)
            for row, own in enumerate(alone):
                assert torch.equal(together[row], decoder.last_logits(last[row, None, None], None, own, DECODING)[0])
            for table, prompt in zip(tables, prompts.tolist(), strict=True):
                cache.pool.fill(table, prompt, table.length + 1)


def test_a_batch_that_moves_in_step_gets_the_same_bits_as_each_alone(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path, sliding_window=6)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))
    prompts = torch.randint(3, 96, (3, 10), generator=torch.Generator().manual_seed(3))

    def steps(tokens_BL: Tensor) -> Tensor:
        cache = KeyValueCache(checkpoint.config, len(tokens_BL), 10, torch.bfloat16)
        columns = (column[:, None] for column in tokens_BL.T)
        return torch.stack([decoder.last_logits(column, None, cache, DECODING) for column in columns], dim=1)

    with torch.inference_mode():
        assert torch.equal(steps(prompts), torch.cat([steps(prompt[None]) for prompt in prompts]))
