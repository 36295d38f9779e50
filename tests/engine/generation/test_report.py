"""Memory from the operating system, and the count of skipped experts."""

from __future__ import annotations

import mmap

import pytest
import torch

from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.routing import NO_EXPERT, Selection
from engine.generation import report
from engine.generation.report import SkipCounter, peak_memory_bytes, rate
from engine.passes.memory_budget import resident_memory_bytes

SIZE = 64 << 20


def test_the_peak_grows_and_stays_while_resident_falls() -> None:
    before = peak_memory_bytes()
    filler = 0
    with mmap.mmap(-1, before - resident_memory_bytes() + SIZE) as block:
        for offset in range(0, len(block), mmap.PAGESIZE):
            block[offset] = 1
        filler = resident_memory_bytes()
    assert peak_memory_bytes() >= before + SIZE // 2
    assert resident_memory_bytes() <= filler - SIZE // 2


def test_a_system_without_proc_still_has_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_status_bytes", lambda field: None)
    assert peak_memory_bytes() >= resident_memory_bytes() // 2


def test_rate() -> None:
    assert rate(10, 4.0) == 2.5
    assert rate(0, 4.0) is None
    assert rate(10, 0.0) is None


class Fixed:
    """A routing that always returns the same selection."""

    def __init__(self, experts: list[list[int]]) -> None:
        self.experts = torch.tensor(experts)

    def __call__(self, logits_TN: torch.Tensor) -> Selection:
        return Selection(self.experts, torch.ones(self.experts.shape))


def block(experts: list[list[int]]) -> MoeBlock:
    weights = [Expert(torch.ones(3, 2), torch.ones(3, 2), torch.ones(2, 3)) for _ in range(4)]
    return MoeBlock(torch.ones(4, 2), weights, Fixed(experts))


def test_skip_counter_counts_empty_slots_per_layer() -> None:
    blocks = [block([[0, 1], [2, NO_EXPERT]]), block([[3, NO_EXPERT], [1, NO_EXPERT]])]
    counter = SkipCounter(blocks)
    assert counter.share == 0.0
    assert counter.share_per_layer == [0.0, 0.0]
    counter.attach()
    for each in blocks:
        each(torch.ones(2, 2))
    assert counter.share_per_layer == [0.25, 0.5]
    assert counter.share == 0.375
    assert counter.filled == 5
    counter.detach()
    blocks[0](torch.ones(2, 2))
    assert counter.filled == 5
    counter.reset()
    assert counter.filled == 0


def test_skip_counter_leaves_padding_out() -> None:
    blocks = [block([[0, 1], [2, NO_EXPERT]])]
    counter = SkipCounter(blocks)
    counter.attach()
    counter.counted_T = torch.tensor([False, True])
    blocks[0](torch.ones(2, 2))
    assert counter.share == 0.5
    assert counter.filled == 1
