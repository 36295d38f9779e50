"""The paged cache: its accounting under random operations, and logits through it against a plain forward."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, save_reference

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.block_pool import BlockPool, BlockTable, OutOfBlocksError
from engine.decoder.kv_cache import KeyValueCache, position_bytes
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import PagedBatch, PagedCache

LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 12,
        "factor": 4.0,
    }
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
YARN = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
}


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def held(pool: BlockPool, text: list[int], kind: bytes = b"") -> BlockTable:
    """Return the table of a sequence that has read this text."""
    table = pool.find(text, kind)
    pool.take(table)
    pool.extend(table, len(text))
    pool.fill(table, text, len(text))
    return table


# Accounting


def test_a_text_is_found_in_whole_blocks_short_of_its_last_token() -> None:
    pool = BlockPool(8, 4)
    first = held(pool, list(range(10)))
    assert first.blocks == [0, 1, 2] and pool.unused == 5
    assert pool.find(list(range(10))).blocks == [0, 1]
    assert pool.find(list(range(8))).blocks == [0], "the last token has to be read again for its logits"
    assert pool.find(list(range(9))).blocks == [0, 1]
    assert pool.find([0, 1, 2, 3, 9, 9, 9, 9, 9]).blocks == [0]
    assert pool.find([9, *range(1, 10)]).blocks == []
    assert pool.find([4, 5, 6, 7, 8]).blocks == [], "a block is known with all that is before it"
    assert pool.find(list(range(10)), kind=b"1").blocks == []


def test_shared_blocks_stay_until_the_last_user_goes() -> None:
    pool = BlockPool(4, 4)
    first = held(pool, list(range(9)))
    found = pool.find(list(range(9)))
    assert pool.missing(found, 9) == 1 == pool.unused
    second = held(pool, list(range(9)))
    assert second.blocks[:2] == first.blocks[:2] and pool.unused == 0
    pool.release(first)
    assert pool.unused == 1
    with pytest.raises(OutOfBlocksError):
        pool.extend(second, 17)
    pool.release(second)
    assert pool.unused == 4
    assert pool.missing(pool.find(list(range(9))), 9) == 3, "what nobody uses is taken from the unused ones too"


def test_the_block_unused_for_longest_goes_first_and_the_end_before_the_beginning() -> None:
    pool = BlockPool(4, 2)
    old, new = held(pool, [1, 2, 3, 4]), held(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    held(pool, [9, 9])
    assert len(pool.find([1, 2, 3, 4, 0]).blocks) == 1
    assert len(pool.find([5, 6, 7, 8, 0]).blocks) == 2


def test_what_is_in_doubt_is_not_found() -> None:
    pool = BlockPool(4, 2)
    table = held(pool, [1, 2, 3, 4])
    pool.forget(table)
    assert pool.find([1, 2, 3, 4, 5]).blocks == []
    pool.release(table)
    assert pool.unused == 4


@pytest.mark.parametrize("seed", range(5))
def test_under_random_operations_every_block_has_one_content_and_all_come_back(seed: int) -> None:
    """A second account records the content of each block, position by position."""
    choose = random.Random(seed)
    pool = BlockPool(12, 2)
    written: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, place): the whole text up to this position
    sequences: list[tuple[BlockTable, list[int]]] = []

    def write(table: BlockTable, text: list[int]) -> None:
        for place in range(table.length, len(text)):
            written[table.blocks[place // 2], place % 2] = tuple(text[: place + 1])
        pool.fill(table, text, len(text))

    for _ in range(600):
        action = choose.random()
        if action < 0.4:
            text = [choose.randrange(2) for _ in range(choose.randrange(1, 9))]
            table = pool.find(text)
            if pool.missing(table, len(text)) <= pool.unused:
                pool.take(table)
                pool.extend(table, len(text))
                sequences.append((table, text))
                write(table, text)
        elif sequences and action < 0.75:
            table, text = choose.choice(sequences)
            text.append(choose.randrange(2))
            try:
                pool.extend(table, len(text))
            except OutOfBlocksError:
                assert pool.unused == 0
                text.pop()
            else:
                write(table, text)
        elif sequences:
            table, _ = sequences.pop(choose.randrange(len(sequences)))
            if choose.random() < 0.2:
                pool.forget(table)
            pool.release(table)
        users = [sum(block in table.blocks for table, _ in sequences) for block in range(12)]
        assert users == pool._users and pool.unused == users.count(0)
        for table, text in sequences:
            for place in range(len(text)):
                assert written[table.blocks[place // 2], place % 2] == tuple(text[: place + 1])
    for table, _ in sequences:
        pool.release(table)
    assert pool.unused == 12 and not any(pool._users)


# Logits


def paged(decoder: Decoder, config: Any, texts: list[list[int]], chunk: int, alone: int) -> list[torch.Tensor]:
    """Return logits after each of the last `alone` tokens of every text. The rest is read in chunks, these one by one."""
    cache = PagedCache(config, position_bytes(config, torch.float32) * 256, torch.float32, block_size=4)
    tables = [BlockTable() for _ in texts]
    prompts = [len(text) - alone for text in texts]
    for start in range(0, max(prompts), chunk):  # in turns, so that no sequence has contiguous blocks
        for table, text, prompt in zip(tables, texts, prompts, strict=True):
            if start < prompt:
                end = min(start + chunk, prompt)
                cache.pool.extend(table, end)
                batch = PagedBatch(cache, [table], [end - start], [prompt])
                decoder.hidden_states(torch.tensor([text[start:end]]), None, batch)
                cache.pool.fill(table, text, end)
    results = []
    for step in range(alone):
        for table in tables:
            cache.pool.extend(table, table.length + 1)
        batch = PagedBatch(cache, tables, None, prompts)
        last = torch.tensor([[text[prompt + step]] for text, prompt in zip(texts, prompts, strict=True)])
        results.append(decoder.last_logits(last, None, batch))
        for table, text in zip(tables, texts, strict=True):
            cache.pool.fill(table, text, table.length + 1)
    return list(torch.stack(results, dim=1))


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("mixtral", {"sliding_window": 5}),
        ("mistral", {"sliding_window": 9}),
        ("llama", DYNAMIC),
        ("llama", YARN),
    ],
)
def test_logits_equal_those_of_a_plain_forward(family: str, changes: dict[str, Any], chunk: int, tmp_path: Path) -> None:
    save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    texts = [tokens(count, seed) for seed, count in enumerate((9, 40, 22))]
    with torch.inference_mode():
        for text, logits in zip(texts, paged(decoder, checkpoint.config, texts, chunk, 4), strict=True):
            plain = decoder(torch.tensor([text]))[0, -4:]
            assert torch.allclose(logits, plain, atol=1e-5, rtol=1e-5), (logits - plain).abs().max()


def test_frequencies_that_follow_the_length_are_each_texts_own(tmp_path: Path) -> None:
    """A prompt of more than 12 positions is read with the long form throughout, a shorter one with the short form."""
    save_reference("llama", tmp_path, **LONG_ROPE)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    texts = [tokens(count, seed) for seed, count in enumerate((10, 30))]
    with torch.inference_mode():
        together = paged(decoder, checkpoint.config, texts, 5, 4)
        assert torch.allclose(together[1], decoder(torch.tensor([texts[1]]))[0, -4:], atol=1e-5)
        assert torch.allclose(together[0], decoder(torch.tensor([texts[0]]))[0, -4:], atol=1e-5)
        # A sequence that begins short and becomes long equals step-by-step decoding with a cache of its own.
        text = tokens(18, 7)
        own = KeyValueCache(checkpoint.config, 1, 18, torch.float32)
        expected = [decoder.last_logits(torch.tensor([text[:10]]), None, own)]
        expected += [decoder.last_logits(torch.tensor([[token]]), None, own) for token in text[10:]]
        crossing, _ = paged(decoder, checkpoint.config, [text, tokens(40, 8)], 10, 8)
        assert torch.allclose(crossing, torch.cat(expected[1:]), atol=1e-5)
    assert decoder.rotary.scale_of(12) != decoder.rotary.scale_of(13)


def test_the_size_is_kept() -> None:
    config = Checkpoint(Path(__file__).parents[3] / "engine" / "demo_model").config
    each = position_bytes(config, torch.bfloat16)
    assert each == 2 * len(config.layers) * config.key_value_heads * config.head_dimension * 2
    cache = PagedCache(config, 10 * each * 16 + 5, torch.bfloat16, block_size=16)
    assert cache.pool.count == 10 and cache.bytes == 10 * each * 16
    assert cache.stored.bytes == cache.bytes
