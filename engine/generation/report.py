"""Figures of a generation run: throughput, memory as the operating system reports it, and skipped experts.

Shape suffixes: T tokens, S slots, L MoE layers.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.decoder.experts import MoeBlock
from engine.decoder.routing import NO_EXPERT, Selection
from engine.onnx.runtime import OnnxDecoder
from engine.passes.memory_budget import resident_memory_bytes


@dataclass(frozen=True)
class Report:
    """Figures of one generation run. Rates are None if they would divide by zero."""

    prompt_tokens: int
    generated_tokens: int
    time_to_first_token_seconds: float
    """Time from the call to the first token of the batch, including tokenization."""
    prefill_tokens_per_second: float | None
    tokens_per_second: float | None
    """Tokens after the first of each sequence, divided by the time after the first."""
    peak_memory_bytes: int
    weights_bytes: int
    """Bytes of the weights, including the draft model's."""
    resident_memory_bytes: int
    """Resident memory when the report was made: the sum of the next three fields."""
    weights_resident_bytes: int
    """Bytes of the weights in memory; memory-mapped weights are loaded when they are used."""
    kv_cache_bytes: int
    other_memory_bytes: int
    """Bytes of the interpreter, libraries and buffers."""
    load_seconds: float
    experts_skipped_share: float
    """Share of the expert evaluations in the model's own routing that were skipped."""
    experts_skipped_share_per_layer: list[float]
    """Share of skipped expert evaluations for each MoE layer."""
    experts_read: int
    """Number of expert evaluations: one for each expert of each token and layer, without the draft model's."""
    weights_read_bytes_per_token: float | None
    """Average bytes of weights read per token when decoding one sequence: experts not chosen or skipped are not read.

    None for an exported model.
    """
    draft_acceptance_rate: float | None = None
    """Share of the draft model's tokens that the target accepted; None if there were none."""
    expert_cache: dict[str, Any] | None = None
    """Figures of the experts that were read under a memory limit (engine/expert_cache/figures.py); None without a limit."""
    tokens_per_target_forward: float | None = None
    """Tokens after the first, divided by the target's forward passes after the prefill; None without a draft."""


def rate(count: int, seconds: float) -> float | None:
    """Return the count per second; None if either is zero."""
    return count / seconds if count > 0 and seconds > 0 else None


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process, including memory-mapped weights."""
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    # Fallback: on some systems this figure survives exec, so a child starts with its parent's peak.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_weights_bytes(weights: Iterable[Tensor], paths: Iterable[Path]) -> int:
    """Return the bytes of the weights in memory: resident pages of these mapped files, and weights elsewhere.

    If the operating system does not report mappings, all weights count.
    """
    ranges, resident = _maps(paths)
    elsewhere = (weight for weight in weights if not any(begin <= weight.data_ptr() < end for begin, end in ranges))
    return resident + sum(weight.nbytes for weight in elsewhere)


def _maps(paths: Iterable[Path]) -> tuple[list[tuple[int, int]], int]:
    """Return the address ranges at which these files are mapped, and their resident bytes."""
    wanted, resident, ranges, counts = {os.path.realpath(path) for path in paths}, 0, [], False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return [], 0
    for line in lines:
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            counts = len(rest) == 5 and rest[4] in wanted
            if counts:
                begin, end = first.split("-")
                ranges.append((int(begin, 16), int(end, 16)))
        elif counts and first == "Rss:":
            resident += int(rest[0]) * 1024
    return ranges, resident


def memory_split(weights_resident_bytes: int, kv_cache_bytes: int) -> dict[str, int]:
    """Return the four memory fields of a Report, for this process."""
    resident = resident_memory_bytes()
    return {
        "resident_memory_bytes": resident,
        "weights_resident_bytes": weights_resident_bytes,
        "kv_cache_bytes": kv_cache_bytes,
        "other_memory_bytes": max(0, resident - weights_resident_bytes - kv_cache_bytes),
    }


def _status_bytes(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes; None if the system has no such file or field."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) * 1024 if values else None


class SkipCounter:
    """Counts the empty slots per MoE layer, as an observer of the blocks.

    The sums stay tensors on the device until they are requested, so that counting never makes decoding wait.
    """

    def __init__(self, blocks: Sequence[MoeBlock], device: torch.device | str = "cpu") -> None:
        self._blocks = blocks
        self._slots_L = torch.zeros(len(blocks), dtype=torch.int64, device=device)
        self._skipped_L = torch.zeros_like(self._slots_L)
        self.counted_T: Tensor | None = None
        """Bool [T], False for tokens of the next forward that are padding or past their end; None counts all."""

    def attach(self) -> None:
        """Start to observe the blocks."""
        for layer, block in enumerate(self._blocks):
            block.observer = self._observer(layer)

    def detach(self) -> None:
        """Stop to observe the blocks; the counts stay."""
        for block in self._blocks:
            block.observer = None

    def reset(self) -> None:
        """Reset the counts to zero."""
        self._slots_L.zero_()
        self._skipped_L.zero_()

    def _observer(self, layer: int) -> Callable[[Tensor, Tensor, Selection], None]:
        def observe(x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
            empty_TS = selection.experts == NO_EXPERT
            if self.counted_T is None:
                self._slots_L[layer] += empty_TS.numel()
            else:
                empty_TS = empty_TS & self.counted_T[:, None]
                self._slots_L[layer] += self.counted_T.sum() * empty_TS.shape[1]
            self._skipped_L[layer] += empty_TS.sum()

        return observe

    @property
    def share(self) -> float:
        """Share of all slots that were left empty; 0 before any forward."""
        return int(self._skipped_L.sum()) / max(1, int(self._slots_L.sum()))

    @property
    def share_per_layer(self) -> list[float]:
        """Share of empty slots for each MoE layer."""
        return (self._skipped_L / self._slots_L.clamp_min(1)).tolist()

    @property
    def skipped_per_layer(self) -> list[int]:
        """Number of empty slots for each MoE layer."""
        return self._skipped_L.tolist()

    @property
    def filled_per_layer(self) -> list[int]:
        """Number of slots with an expert, for each MoE layer."""
        return (self._slots_L - self._skipped_L).tolist()

    @property
    def filled(self) -> int:
        """Number of slots with an expert, in all layers."""
        return sum(self.filled_per_layer)


class ExportedSkipCounter(SkipCounter):
    """Counts the empty slots of an exported decoder, which outputs them for each token and layer."""

    def __init__(self, decoder: OnnxDecoder) -> None:
        super().__init__([])
        self._decoder = decoder
        own = [layer.moe.experts_per_token for layer in decoder.config.layers if layer.moe is not None]
        self._per_token_L = torch.tensor(own, dtype=torch.int64)
        self._slots_L, self._skipped_L = torch.zeros_like(self._per_token_L), torch.zeros_like(self._per_token_L)

    def attach(self) -> None:
        """Start to observe the decoder."""
        self._decoder.observer = self._count

    def detach(self) -> None:
        """Stop to observe the decoder; the counts stay."""
        self._decoder.observer = None

    def _count(self, skipped_TL: Tensor) -> None:
        counted_TL = skipped_TL if self.counted_T is None else skipped_TL[self.counted_T]
        self._slots_L += len(counted_TL) * self._per_token_L
        self._skipped_L += counted_TL.sum(dim=0)
