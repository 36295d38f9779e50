"""The trial of a decoder's graphs: whether they compute what its layers compute, and in less time.

Two ways of rounding let a token take another expert wherever two are nearly equal, and its logits then differ by more than
any error of a kernel. Where the graphs took others, the layers therefore take those too, and such choices are counted.

Shape suffixes: B sequences, P positions, T tokens, S slots.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.decoder.experts import MoeBlock
from engine.decoder.gpu.triton_experts import wait
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, Steps
from engine.decoder.routing import NO_EXPERT, Selection
from engine.kernels.kernel_choice import DECODING, PROMPT

_log = logging.getLogger(__name__)

TRIAL_LENGTH, TRIAL_STEPS, TRIAL_SEQUENCES = 24, 4, (1, 6)
"""Positions of the prompt, compared steps after it, and sequences in each of the trials, which take different kernels."""
TOLERANCE, LEAST_TOLERANCE = 12, 1e-4
"""Largest median of the relative errors in a trial: a multiple of the dtype's rounding, but at least so much."""
MOST_OTHER_EXPERTS = 0.25
"""Largest share of the slots in which graphs take an expert that the layers do not take."""


Observer = Callable[[Tensor, Tensor, Selection], None]


class Graphs(Steps, Protocol):
    """The passes of a decoder that are graphs, with the names of those that failed."""

    failed: set[object]


@torch.inference_mode()
def pays(decoder: Decoder, step: Graphs, is_timed: bool) -> bool:
    """Return whether the graphs give what the layers give, and steps are faster. Prompts are given up alone."""
    limit = max(LEAST_TOLERANCE, TOLERANCE * torch.finfo(decoder.dtype).eps)
    for sequences in TRIAL_SEQUENCES:
        choices = _Choices()
        by_graphs, by_layers = (_tried(decoder, own, sequences, choices) for own in (step, None))
        if any(what != "prompts" for what in step.failed):
            return False
        prompt, steps = _error(by_graphs.prompt, by_layers.prompt), _error(by_graphs.steps, by_layers.steps)
        if not steps <= limit:  # also refuses NaN
            _log.warning("decoding runs layer by layer: its kernels have an error of %.1e", steps)
            return False
        if (others := choices.others()) > MOST_OTHER_EXPERTS:
            _log.warning("decoding runs layer by layer: its kernels take other experts in %.0f%% of slots", 100 * others)
            return False
        if not prompt <= limit:
            _log.warning("prompts are read layer by layer: their kernels have an error of %.1e", prompt)
            step.failed.add("prompts")
        if is_timed and by_graphs.seconds >= by_layers.seconds:
            return False
    return True


class _Choices:
    """The experts that graphs took in the steps of a trial, in the order of the passes, for the layers to take."""

    def __init__(self) -> None:
        self._taken: deque[Selection] = deque()
        self._others: list[Tensor] = []

    def note(self, x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        """Remember a choice of a graph. This is the observer of a MoE block."""
        self._taken.append(selection)

    def impose(self, x_TD: Tensor, logits_TN: Tensor, own: Selection) -> None:
        """Replace what the layers chose for a token by the graph's choice if its experts are others."""
        taken = self._taken.popleft()
        is_other_TS = ~(taken.experts[:, :, None] == own.experts[:, None, :]).any(-1) & (taken.experts != NO_EXPERT)
        self._others.append(is_other_TS.float().mean())
        differs_T1 = (taken.experts.sort(dim=-1).values != own.experts.sort(dim=-1).values).any(-1, keepdim=True)
        for mine, theirs in zip(own, taken, strict=True):
            mine.copy_(torch.where(differs_T1, theirs.to(mine.dtype), mine))

    def others(self) -> float:
        """Return the share of slots in which the graphs took an expert that the layers would not have taken."""
        return float(torch.stack(self._others).mean()) if self._others else 0.0


class _Tried(NamedTuple):
    """Logits of a trial's prompt and of its steps, and the seconds of a further step."""

    prompt: Tensor
    steps: Tensor
    seconds: float


def _tried(decoder: Decoder, step: Graphs | None, sequences: int, choices: _Choices) -> _Tried:
    """Return what a decoder gives through its graphs, which fill `choices`, and then through its layers."""
    generator = torch.Generator().manual_seed(sequences)
    shape = sequences, TRIAL_LENGTH + TRIAL_STEPS + 1
    tokens_BP = torch.randint(decoder.config.vocabulary_size, shape, generator=generator).to(decoder.device)
    decoder.gpu_step = step
    try:
        cache = KeyValueCache(decoder.config, *shape, decoder.dtype, decoder.device)
        prompt = decoder(tokens_BP[:, :TRIAL_LENGTH], None, cache, PROMPT)
        *compared, timed_B1 = tokens_BP[:, TRIAL_LENGTH:].split(1, dim=1)
        with _observed(decoder.moe_blocks, choices.impose if step is None else choices.note):
            steps = [decoder(token_B1, None, cache, DECODING) for token_B1 in compared]
        wait(steps[-1])
        started = time.perf_counter()
        wait(decoder(timed_B1, None, cache, DECODING))
        seconds = time.perf_counter() - started
    finally:
        decoder.gpu_step = None
    return _Tried(prompt, torch.cat(steps), seconds)


@contextmanager
def _observed(blocks: Sequence[MoeBlock], observe: Observer) -> Iterator[None]:
    """Let `observe` see what the blocks choose inside, in place of their own observers."""
    own = [block.observer for block in blocks]
    try:
        for block in blocks:
            block.observer = observe
        yield
    finally:
        for block, observer in zip(blocks, own, strict=True):
            block.observer = observer


def _error(made: Tensor, expected: Tensor) -> float:
    """Return the median relative error of the rows."""
    made, expected = made.float().flatten(0, -2), expected.float().flatten(0, -2)
    return float(((made - expected).norm(dim=1) / expected.norm(dim=1)).median())
