"""What a run cost: tokens per second by the clock, memory by the operating system, experts that were skipped.

Shape suffixes: T tokens, S slots, L MoE layers.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.decoder.experts import MoeBlock
from engine.decoder.routing import NO_EXPERT, Selection
from engine.onnx.runtime import OnnxDecoder
from engine.passes.memory_budget import resident_memory_bytes


@dataclass(frozen=True)
class Report:
    """One run of generation. Rates are None where there was nothing to divide."""

    prompt_tokens: int
    generated_tokens: int
    time_to_first_token_seconds: float
    """From the call to the first token of the batch, tokenizing included."""
    prefill_tokens_per_second: float | None
    tokens_per_second: float | None
    """Tokens after the first of each sequence, over the time after the first."""
    peak_memory_bytes: int
    weights_bytes: int
    """A draft's included, as in the cache."""
    resident_memory_bytes: int
    """When the report was made: the next three together."""
    weights_resident_bytes: int
    """Of the weights, what is in memory: mapped ones come in as they are used."""
    kv_cache_bytes: int
    other_memory_bytes: int
    """The interpreter, libraries and buffers."""
    load_seconds: float
    experts_skipped_share: float
    """Of the expert evaluations that the model's own rule asks for."""
    experts_skipped_share_per_layer: list[float]
    """One per MoE layer."""
    experts_read: int
    """Expert evaluations that were carried out: one for each expert of each token and layer; a draft's do not count."""
    weights_read_bytes_per_token: float | None
    """Of weights, by a token that is decoded alone: experts that it does not choose, or skips, are not read. None for an
    exported model."""
    draft_acceptance_rate: float | None = None
    """Drafted tokens that were kept, of those that were drafted; None where none were."""
    tokens_per_target_forward: float | None = None
    """Tokens after the first, over forwards after the one of the prompt; None without a draft."""


def rate(count: int, seconds: float) -> float | None:
    """Count per second, None for nothing in no time."""
    return count / seconds if count > 0 and seconds > 0 else None


def peak_memory_bytes() -> int:
    """The most that this process ever had resident, mapped weights included."""
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    # Second best: on some systems this figure survives exec, so a child starts with its parent's peak.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_weights_bytes(weights: Iterable[Tensor], paths: Iterable[Path]) -> int:
    """Bytes of the weights in memory: of these files what is resident through maps, and weights that lie elsewhere whole.

    Where the system tells nothing of maps, all weights.
    """
    ranges, resident = _maps(paths)
    elsewhere = (weight for weight in weights if not any(begin <= weight.data_ptr() < end for begin, end in ranges))
    return resident + sum(weight.nbytes for weight in elsewhere)


def _maps(paths: Iterable[Path]) -> tuple[list[tuple[int, int]], int]:
    """Where files are mapped, as ranges of addresses, and bytes of them that are resident."""
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
    """The four fields of a Report that say what is resident, for this process."""
    resident = resident_memory_bytes()
    return {
        "resident_memory_bytes": resident,
        "weights_resident_bytes": weights_resident_bytes,
        "kv_cache_bytes": kv_cache_bytes,
        "other_memory_bytes": max(0, resident - weights_resident_bytes - kv_cache_bytes),
    }


def _status_bytes(field: str) -> int | None:
    """A field of /proc/self/status; None where the system has no such file or field."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) * 1024 if values else None


class SkipCounter:
    """Counts per MoE layer how many slots were left empty, as an observer of the blocks.

    The sums stay tensors on the device until they are asked for, so counting never makes decoding wait.
    """

    def __init__(self, blocks: Sequence[MoeBlock], device: torch.device | str = "cpu") -> None:
        self._blocks = blocks
        self._slots_L = torch.zeros(len(blocks), dtype=torch.int64, device=device)
        self._skipped_L = torch.zeros_like(self._slots_L)
        self.counted_T: Tensor | None = None
        """Bool [T], False for tokens of the next forward that are padding or past their end; None counts all."""

    def attach(self) -> None:
        """Watch the blocks from now on."""
        for layer, block in enumerate(self._blocks):
            block.observer = self._observer(layer)

    def detach(self) -> None:
        """Watch no longer; what was counted stays."""
        for block in self._blocks:
            block.observer = None

    def reset(self) -> None:
        """Count from zero again."""
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
        """Share of all slots that were left empty, 0 before any forward."""
        return int(self._skipped_L.sum()) / max(1, int(self._slots_L.sum()))

    @property
    def share_per_layer(self) -> list[float]:
        """The same for each MoE layer."""
        return (self._skipped_L / self._slots_L.clamp_min(1)).tolist()

    @property
    def skipped_per_layer(self) -> list[int]:
        """Slots that were left empty, for each MoE layer."""
        return self._skipped_L.tolist()

    @property
    def filled_per_layer(self) -> list[int]:
        """Slots that were not."""
        return (self._slots_L - self._skipped_L).tolist()

    @property
    def filled(self) -> int:
        """The same in all layers together."""
        return sum(self.filled_per_layer)


class ExportedSkipCounter(SkipCounter):
    """The same of an exported decoder, which gives the empty slots of each token and layer."""

    def __init__(self, decoder: OnnxDecoder) -> None:
        super().__init__([])
        self._decoder = decoder
        own = [layer.moe.experts_per_token for layer in decoder.config.layers if layer.moe is not None]
        self._per_token_L = torch.tensor(own, dtype=torch.int64)
        self._slots_L, self._skipped_L = torch.zeros_like(self._per_token_L), torch.zeros_like(self._per_token_L)

    def attach(self) -> None:
        """Watch the decoder from now on."""
        self._decoder.observer = self._count

    def detach(self) -> None:
        """Watch no longer; what was counted stays."""
        self._decoder.observer = None

    def _count(self, skipped_TL: Tensor) -> None:
        counted_TL = skipped_TL if self.counted_T is None else skipped_TL[self.counted_T]
        self._slots_L += len(counted_TL) * self._per_token_L
        self._skipped_L += counted_TL.sum(dim=0)
