"""The order of experts and tensors in files, by hand and for any sizes."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.plans.expert_order import Block, Stored, arranged, blocks_of, chained, neighbors_share, sharded

COUNTS = torch.tensor([[9, 1, 5, 0], [1, 9, 0, 3], [5, 0, 9, 2], [0, 3, 2, 9]])
SIZES = st.lists(st.tuples(st.sampled_from((1, 2, 4, 8)), st.integers(0, 9), st.sampled_from((1, 4096))), max_size=12)


def test_chain_by_hand() -> None:
    # 0-2 (5), 1-3 (3), 2-3 (2); 0-1 would close the ring
    assert chained(COUNTS) == [0, 2, 3, 1]
    assert neighbors_share([0, 2, 3, 1], COUNTS) == 10 / 11
    assert neighbors_share([0, 1, 2, 3], COUNTS) == 3 / 11
    # 0-1 and 0-3 make 0 full, so that 0-2 is left out although it is more frequent than 1-2
    counts = torch.tensor([[0, 9, 7, 8], [9, 0, 1, 0], [7, 1, 0, 0], [8, 0, 0, 0]])
    assert chained(counts) == [2, 1, 0, 3]


def test_chain_without_counts_or_experts() -> None:
    assert chained(torch.zeros(4, 4, dtype=torch.long)) == [0, 1, 2, 3]
    assert chained(torch.ones(1, 1, dtype=torch.long)) == [0]
    assert neighbors_share([0, 1, 2, 3], torch.zeros(4, 4, dtype=torch.long)) is None


@given(st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_chain_has_each_expert_once_and_the_heaviest_pair(count: int, seed: int) -> None:
    counts = torch.randint(0, 9, (count, count), generator=torch.Generator().manual_seed(seed))
    counts = counts + counts.T
    order = chained(counts)
    assert sorted(order) == list(range(count))
    neighbors = [int(counts[first, second]) for first, second in pairwise(order)]
    assert count == 1 or max(neighbors) == int(counts.masked_fill(torch.eye(count).bool(), -1).max())


def test_blocks_by_hand() -> None:
    names = ["embed", "a0.down", "a0.up", "a0.shape", "norm", "a1.up", "a1.down", "b0.up", "b0.down"]
    tensors = [Stored(name, 8, 2) for name in names]
    experts = {"a0.up": (0, 0), "a0.down": (0, 0), "a1.up": (0, 1), "a1.down": (0, 1), "b0.up": (2, 0), "b0.down": (2, 0)}
    found = blocks_of(tensors, experts, {0: [1, 0], 2: [0]})
    assert [[tensor.name for tensor in block.tensors] for block in found] == [
        ["embed"],
        ["a1.up", "a1.down"],
        ["a0.up", "a0.down"],
        ["a0.shape"],
        ["norm"],
        ["b0.up", "b0.down"],
    ]
    assert [block.expert for block in found] == [None, (0, 1), (0, 0), None, None, (2, 0)]


def test_arranged_by_hand() -> None:
    odd, half = Block((Stored("odd", 3, 1),)), Block((Stored("half", 2048, 2),))
    expert = Block((Stored("up", 2048, 2), Stored("scale", 4096, 4), Stored("down", 2048, 2)), (0, 0))
    wide, page = Block((Stored("wide", 12, 4),)), Block((Stored("page", 8192, 1),))
    assert arranged([odd, half, expert, wide, page]) == [expert, page, half, wide, odd]
    # the second tensor of a block would not be aligned behind the first, and 6 bytes are no multiple of 4
    torn, narrow = Block((Stored("a", 6, 2), Stored("b", 4, 4))), Block((Stored("c", 6, 2), Stored("d", 4, 2)), (0, 1))
    assert (torn.width, narrow.width, wide.width, odd.width) == (None, 2, 4, 1)
    apart = [Block((tensor,)) for tensor in torn.tensors]
    assert arranged([odd, torn, narrow, half]) == [half, apart[1], apart[0], narrow, odd]


def blocks(sizes: list[tuple[int, int, int]]) -> list[Block]:
    tensors = [Stored(str(number), width * count * page, width) for number, (width, count, page) in enumerate(sizes)]
    return [Block(tuple(tensors[place : place + 3])) for place in range(0, len(tensors), 3)]


@given(SIZES, st.integers(1, 20000))
@settings(max_examples=150, deadline=None)
def test_all_tensors_are_there_once_and_aligned(sizes: list[tuple[int, int, int]], shard_bytes: int) -> None:
    shards = [*sharded(blocks(sizes), shard_bytes)]
    assert [block for shard in shards for block in shard] == blocks(sizes)
    assert all(len(shard) == 1 or sum(block.nbytes for block in shard) <= shard_bytes for shard in shards)
    for shard in shards:
        place, seen, begins = 0, list[Stored](), dict[str, int]()
        for block in arranged(shard):
            for tensor in block.tensors:
                assert place % tensor.itemsize == 0
                begins[tensor.name] = place
                place += tensor.nbytes
                seen.append(tensor)
        for block in shard:
            if block.nbytes % 4096 == 0 and block.width is not None:
                assert begins[block.tensors[0].name] % 4096 == 0
        assert sorted(seen) == sorted(tensor for block in shard for tensor in block.tensors)
