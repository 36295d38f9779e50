"""Counts of experts that tokens use together and one after the other, by hand and by counting token by token."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from calibrate import chosen as module
from calibrate.chosen import chosen_of, co_use, token_steps, transitions
from calibrate.statistics import Statistics
from engine.errors import DataError

FIRST = torch.tensor([[0, 1], [1, 2], [1, -1]], dtype=torch.int16)
SECOND = torch.tensor([[2, 0], [0, 1], [3, 0]], dtype=torch.int16)


def test_counts_by_hand() -> None:
    assert co_use(FIRST, 3).tolist() == [[1, 1, 0], [1, 3, 1], [0, 1, 1]]
    assert transitions(FIRST, SECOND, 3, 4).tolist() == [[1, 0, 1, 0], [3, 1, 1, 1], [1, 1, 0, 0]]


def test_counts_over_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.rand(50, count, generator=generator).topk(2).indices.short() for count in (5, 6))
    pairs = Counter(pair for rows in zip(before.tolist(), after.tolist(), strict=True) for pair in product(*rows))
    assert transitions(before, after, 5, 6).tolist() == [[pairs[i, j] for j in range(6)] for i in range(5)]


def test_steps_of_tokens() -> None:
    steps = [*token_steps({1: FIRST, 3: SECOND})]
    assert steps[:4] == [(1, [0, 1]), (3, [2, 0]), (1, [1, 2]), (3, [0, 1])]
    assert steps[4:] == [(1, [1]), (3, [3, 0])]


def test_statistics_of_an_earlier_version_have_no_lists() -> None:
    class Layer:
        chosen = None

    with pytest.raises(DataError, match=r"file: statistics of an earlier version.*calibrate again"):
        chosen_of(Statistics({0: Layer()}, {}), "file")
