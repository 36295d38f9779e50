"""The compiled step from tokens to logits: embeddings, angles of positions, places in caches that move, and the head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from kernels_for_tests import kernels, needs_integers
from packages_for_tests import needs_numba
from rotary_for_tests import DYNAMIC, LONGROPE
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.block_pool import BlockTable
from engine.decoder.kv_cache import KeyValueCache, position_bytes
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.decoder.step import places, records
from engine.kernels.kernel_choice import DECODING
from engine.kernels.stored.quantized_weight import QuantizedWeight, quantise

pytestmark = needs_numba
TEXT = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(2))


def decoder_of(directory: Path, family: str = "granite", **changes: Any) -> Decoder:
    """Return a decoder with random weights in bfloat16; by default without experts, of which two could tie."""
    save_reference(family, directory, **changes)
    checkpoint = Checkpoint(directory)
    return Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))


def by_layers(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tokens_BL: Tensor, capacity: int) -> Tensor:
    """Return the logits of each token, read one by one through the layers."""
    with monkeypatch.context() as patched:
        patched.setattr(decoder, "_step", lambda *given: None)
        return read(decoder, tokens_BL, KeyValueCache(decoder.config, len(tokens_BL), capacity, torch.bfloat16))


def read(decoder: Decoder, tokens_BL: Tensor, cache: KeyValueCache) -> Tensor:
    """Return the logits [B, L, V] of each token, read one by one."""
    with torch.inference_mode():
        found = [decoder.last_logits(token_B1, None, cache, DECODING) for token_B1 in tokens_BL.split(1, dim=1)]
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("family", ["granite", "granitemoe", "gemma4_text", "mixtral"])
def test_one_call_gives_the_bits_of_its_parts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of embeddings and logits, tied embeddings, capped logits and kinds of layers with angles of their own."""
    decoder = decoder_of(tmp_path, family)
    cache = KeyValueCache(decoder.config, 1, 24, torch.bfloat16)
    found = read(decoder, TEXT, cache)
    assert decoder._step._records is not None and decoder._step._records.vocabulary == found.shape[-1]
    assert torch.equal(found, by_layers(decoder, monkeypatch, TEXT, 24))
    seen: list[Tensor] = []
    decoder.watch = seen.append
    again = read(decoder, TEXT[:, :1], KeyValueCache(decoder.config, 1, 1, torch.bfloat16))
    assert torch.equal(decoder.logits(seen[0][:, 0], DECODING), again[:, 0])


@pytest.mark.parametrize("changes", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_angles_that_depend_on_the_length_of_the_text(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(tmp_path, **changes)
    assert decoder.rotary.varies
    found = read(decoder, TEXT, KeyValueCache(decoder.config, 1, 24, torch.bfloat16))
    assert torch.equal(found, by_layers(decoder, monkeypatch, TEXT, 24))


@needs_integers
@pytest.mark.parametrize("bits", [4, 8])
def test_stored_embeddings_are_widened_row_by_row(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("granite", tmp_path, hidden_size=64)
    checkpoint = Checkpoint(tmp_path)
    source = checkpoint.source(torch.bfloat16)

    def weights(name: str) -> Any:
        return quantise(source(name), bits, 32, torch.bfloat16) if "embed" in name else source(name)

    decoder = Decoder(checkpoint.config, weights)
    found = read(decoder, TEXT, KeyValueCache(decoder.config, 1, 24, torch.bfloat16))
    own = decoder._step._records
    assert isinstance(decoder.embedding, QuantizedWeight) and own is not None and own.embeds
    assert torch.equal(found, by_layers(decoder, monkeypatch, TEXT, 24))


def test_tables_of_angles_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "ROWS_ADDED", 5)
    decoder = decoder_of(tmp_path)
    found = read(decoder, TEXT, KeyValueCache(decoder.config, 1, 24, torch.bfloat16))
    own = decoder._step._records
    assert own is not None and own.places._reached == 25
    assert torch.equal(found, by_layers(decoder, monkeypatch, TEXT, 24))


def test_caches_in_turn_and_a_cache_that_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records name the memory of keys and values, which differs from cache to cache, and when a cache grows."""
    decoder = decoder_of(tmp_path)
    texts = TEXT, TEXT.flip(1), torch.cat([TEXT, TEXT.flip(1)])
    expected = [by_layers(decoder, monkeypatch, text_BL, 24) for text_BL in texts]
    caches = [KeyValueCache(decoder.config, len(text_BL), 6, torch.bfloat16) for text_BL in texts]
    for place in range(TEXT.shape[1]):
        for text_BL, cache, logits_BLV in zip(texts, caches, expected, strict=True):
            if cache.length == cache.capacity:
                cache.extend(2 * cache.capacity)
            assert torch.equal(read(decoder, text_BL[:, place : place + 1], cache)[:, 0], logits_BLV[:, place])
    rows = caches[2].of_rows(torch.tensor([1, 0]))
    for cache in (rows, caches[2]):
        cache.length = 7
    own = [
        read(decoder, token_B1, cache) for token_B1, cache in ((texts[2][[1, 0], :1], rows), (texts[2][:, :1], caches[2]))
    ]
    assert torch.equal(own[0], own[1][[1, 0]])


def test_a_full_cache_and_tokens_without_an_embedding_are_refused(tmp_path: Path) -> None:
    decoder = decoder_of(tmp_path)
    cache = KeyValueCache(decoder.config, 1, 2, torch.bfloat16)
    for wrong in (-1, decoder.embedding_VD.shape[0]):
        with pytest.raises(IndexError):
            read(decoder, torch.tensor([[wrong]]), cache)
        assert cache.length == 0
    read(decoder, TEXT[:, :2], cache)
    with pytest.raises(AssertionError, match="is full"):
        read(decoder, TEXT[:, 2:3], cache)


def steps_of(decoder: Decoder, paged: PagedCache) -> Iterator[Tensor]:
    """Yield the logits of each token of two texts in a paged cache."""
    texts, tables = [TEXT[0].tolist(), TEXT[0].flip(0).tolist()], [BlockTable(), BlockTable()]
    for place in range(TEXT.shape[1]):
        for table in tables:
            paged.pool.extend(table, place + 1)
        tokens_B1 = torch.tensor([[text[place]] for text in texts])
        with torch.inference_mode():
            yield decoder.last_logits(tokens_B1, None, PagedBatch(paged, tables, None, [0, 0]), DECODING)
        for text, table in zip(texts, tables, strict=True):
            paged.pool.fill(table, text, place + 1)


@pytest.mark.parametrize("changes", [{}, DYNAMIC], ids=["plain", "dynamic"])
def test_paged_caches_and_others_in_turn(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(tmp_path, **changes)
    both_BL = torch.cat([TEXT, TEXT.flip(1)])
    expected = by_layers(decoder, monkeypatch, both_BL, 24)
    size = position_bytes(decoder.config, torch.bfloat16) * 64
    others = [steps_of(decoder, PagedCache(decoder.config, size, torch.bfloat16, block_size=4)) for _ in range(2)]
    cache = KeyValueCache(decoder.config, 2, 24, torch.bfloat16)
    for place in range(TEXT.shape[1]):
        made = [read(decoder, both_BL[:, place : place + 1], cache)[:, 0], *map(next, others)]
        assert all(torch.equal(each, expected[:, place]) for each in made)


@pytest.mark.parametrize("part", ["head", "embedding", "norm"])
def test_a_part_that_moves_alone_is_read_where_it_is(part: str, tmp_path: Path) -> None:
    decoder = decoder_of(tmp_path, "mixtral")
    read(decoder, TEXT, KeyValueCache(decoder.config, 1, 24, torch.bfloat16))
    weight = getattr(decoder, part)
    weight.data = 2 * weight.data
    other = Decoder(decoder.config, Checkpoint(tmp_path).source(torch.bfloat16))
    getattr(other, part).data.mul_(2)
    made = [read(each, TEXT, KeyValueCache(each.config, 1, 24, torch.bfloat16)) for each in (decoder, other)]
    assert torch.equal(*made)


def test_an_interrupted_step_that_was_observed_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises an interrupt when the compiled call has returned, before what it wrote is taken back."""
    decoder = decoder_of(tmp_path, "mixtral")
    expected = read(decoder, TEXT, KeyValueCache(decoder.config, 1, 24, torch.bfloat16))
    for block in decoder.moe_blocks:
        block.observer = lambda *seen: None
    own_type = type(kernels.KERNELS["decode_tokens"])
    call = own_type.__call__

    def interrupted(kernel: Any, *given: float) -> None:
        call(kernel, *given)
        raise KeyboardInterrupt

    cache = KeyValueCache(decoder.config, 1, 24, torch.bfloat16)
    with monkeypatch.context() as patched:
        patched.setattr(own_type, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(decoder, TEXT[:, :1], cache)
    own = decoder._step._records
    assert own is not None and own.step["seen_chosen"][0] != 0
    for block in decoder.moe_blocks:
        block.observer = None
    assert torch.equal(read(decoder, TEXT, KeyValueCache(decoder.config, 1, 24, torch.bfloat16)), expected)
    assert own.step["seen_chosen"][0] == 0


def test_embeddings_that_torch_reads_with_and_without_inference_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(tmp_path)
    monkeypatch.setattr(records, "_embedding_form", lambda *given: None)
    found = read(decoder, TEXT, KeyValueCache(decoder.config, 1, 24, torch.bfloat16))
    assert decoder._step._records is not None and not decoder._step._records.embeds
    assert torch.equal(found, by_layers(decoder, monkeypatch, TEXT, 24))
    with torch.no_grad():
        cache = KeyValueCache(decoder.config, 1, 24, torch.bfloat16)
        assert torch.equal(decoder.last_logits(TEXT[:, :1], None, cache, DECODING), found[:, 0])
