"""The trial of a GPU's graphs, with layers that are computed otherwise in their place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.gpu import trial
from engine.decoder.gpu.trial import MOST_OTHER_EXPERTS, pays
from engine.decoder.model import Decoder
from engine.decoder.routing import Selection, TopK


class _Shifted:
    """A rule that takes the experts after the best ones for every n-th token that it sees."""

    def __init__(self, base: TopK, every: int, first: int) -> None:
        self.base, self.every, self.seen = base, every, first

    def __call__(self, logits_TN: Tensor) -> Selection:
        k = self.base.experts_per_token
        experts_TS, weights_TS = TopK(2 * k, True)(logits_TN)
        places_T = torch.arange(len(logits_TN)) + self.seen
        self.seen += len(logits_TN)
        rest_T1 = (places_T % self.every == 0)[:, None]
        own = self.base(logits_TN)
        return Selection(
            torch.where(rest_T1, experts_TS[:, k:], own.experts), torch.where(rest_T1, weights_TS[:, k:], own.weights)
        )


class _OtherLayers:
    """Stands for graphs: the layers of the decoder itself, changed while they run."""

    def __init__(self, decoder: Decoder, every: int = 1 << 30, factor: float = 1.0) -> None:
        self.decoder, self.factor, self.failed = decoder, factor, set[Any]()
        blocks = enumerate(decoder.moe_blocks)
        self.rules = [_Shifted(block.routing, every, 2 * index) for index, block in blocks]  # type: ignore[arg-type]

    def __call__(self, tokens_BL: Tensor, real_BP: Any, cache: Any, choice: Any) -> Tensor | None:
        if tokens_BL.shape[1] > 1:
            return None
        own, self.decoder.gpu_step = self.decoder.gpu_step, None
        routings = [block.routing for block in self.decoder.moe_blocks]
        try:
            for block, rule in zip(self.decoder.moe_blocks, self.rules, strict=True):
                block.routing = rule
            return self.factor * self.decoder.hidden_states(tokens_BL, real_BP, cache, choice)
        finally:
            self.decoder.gpu_step = own
            for block, routing in zip(self.decoder.moe_blocks, routings, strict=True):
                block.routing = routing

    def logits(self, hidden: Tensor, choice: Any) -> None:
        return None

    def forget(self) -> None:
        raise AssertionError("no weights move")


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    source = checkpoint.source(torch.float32)
    return Decoder(checkpoint.config, lambda name: source(name).clone()).eval()


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.WARNING)
    return lambda: caplog.text


def test_what_computes_the_same_pays(decoder: Decoder, warned: Callable[[], str]) -> None:
    assert pays(decoder, _OtherLayers(decoder), is_timed=False) and not warned()


def test_a_choice_between_nearly_equal_experts_is_no_error(
    decoder: Decoder, warned: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the rows have other experts in some layer. Their logits are far away, but not after the same choices."""
    assert pays(decoder, _OtherLayers(decoder, every=4), is_timed=False) and not warned()
    monkeypatch.setattr(trial._Choices, "impose", lambda *given: None)
    assert not pays(decoder, _OtherLayers(decoder, every=4), is_timed=False)
    assert "its kernels have an error of" in warned()


def test_observers_are_back_after_the_compared_steps(decoder: Decoder) -> None:
    seen: list[int] = []
    for block in decoder.moe_blocks:
        block.observer = lambda x_TD, logits_TN, selection: seen.append(len(x_TD))
    assert pays(decoder, _OtherLayers(decoder), is_timed=False) and decoder.gpu_step is None
    prompts_and_timed_steps = 2 * 2 * len(decoder.moe_blocks) * len(trial.TRIAL_SEQUENCES)
    assert len(seen) == prompts_and_timed_steps and all(block.observer is not None for block in decoder.moe_blocks)


def test_other_experts_in_too_many_slots(decoder: Decoder, warned: Callable[[], str]) -> None:
    assert MOST_OTHER_EXPERTS < 1 / 3
    assert not pays(decoder, _OtherLayers(decoder, every=3), is_timed=False)
    assert "take other experts in" in warned()


def test_an_error_of_the_kernels(decoder: Decoder, warned: Callable[[], str]) -> None:
    assert not pays(decoder, _OtherLayers(decoder, factor=1.01), is_timed=False)
    assert "its kernels have an error of 1.0e-02" in warned()
