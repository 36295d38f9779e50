"""Speeds of devices, by which the counts of a planned run are divided: published ones of GPUs, measured ones of this CPU.

Shape suffixes: T tokens, D hidden, F expert width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress.options.plan_run import DEVICE_NAMES
from engine.passes.memory_budget import resident_memory_bytes


@dataclass(frozen=True)
class Device:
    """Speeds of a device. Effective rates are published or measured peak rates times an efficiency, which is stated."""

    name: str
    flops: dict[torch.dtype, float]
    """Peak floating-point operations per second of matrix products, by dtype."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory_bytes: int
    source: str
    product_efficiency: float = 0.4
    """Share of `flops` that products of one expert's tokens reach."""
    bandwidth_efficiency: float = 0.7
    """Share of `bandwidth` that operations between products reach."""
    read_bytes_per_second: float = 2e9
    """Bytes per second from a checkpoint's files to the memory of the device."""
    write_bytes_per_second: float = 0.6e9
    """Bytes per second at which the result is written, including its checksums."""
    draws_per_second: float = 2e10
    """Probabilities per second that sampling of tokens processes."""
    call_seconds: float = 6e-6
    """Minimum seconds of one operation."""
    start_seconds: float = 6.0
    """Seconds until the first layer runs: imports, tokenizer and text."""
    base_bytes: int = 900 << 20
    """Bytes of memory before any tensor: the device's context and its libraries' workspaces."""
    calibration: str = "assumed: not measured on this device"
    maps_weights: bool = False
    """Whether weights are used from the memory map and not copied."""

    def rate(self, dtype: torch.dtype) -> float:
        """Return the effective operations per second of products in this dtype."""
        return self.flops[dtype] * self.product_efficiency


def _card(name: str, half: float, single: float, double: float, bandwidth: float, gigabytes: int, source: str) -> Device:
    """Return a GPU from published figures.

    half, single, double: 10¹² operations per second (half precision without sparsity, accumulated in float32). bandwidth:
    10⁹ bytes per second.
    """
    rates = {torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: double}
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    return Device(name, flops, bandwidth * 1e9, gigabytes * 10**9, source)


DEVICES: dict[str, Device] = {
    card.name: card
    for card in (
        _card("h100", 989.4, 66.9, 66.9, 3350, 80, "NVIDIA H100 Tensor Core GPU datasheet, SXM5"),
        _card("h200", 989.4, 66.9, 66.9, 4800, 141, "NVIDIA H200 Tensor Core GPU datasheet, SXM"),
        _card("a100", 312.0, 19.5, 19.5, 2039, 80, "NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM4"),
        _card("a800", 312.0, 19.5, 19.5, 2039, 80, "NVIDIA A100 datasheet, 80 GB SXM4, which the A800 is but for its links"),
        _card("l40s", 362.0, 91.6, 1.4, 864, 48, "NVIDIA L40S GPU datasheet"),
        _card("rtx4090", 165.2, 82.6, 1.3, 1008, 24, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    )
}
assert ("cpu", *DEVICES) == DEVICE_NAMES
"""GPUs by name. float32 products are torch's default, without TF32. Speeds of reading, sampling and starting are
assumptions.
"""

CPU_BANDWIDTH_EFFICIENCY = 0.18
"""Share of the measured copy rate that operations between products reach: they are many and small, and convert half
precision. Calibrated on measured forward passes of three models (benchmarks/run_plan.py).
"""
CPU_PRODUCT_EFFICIENCY = 0.95
"""Share of the measured product rate that experts reach, which get unequal numbers of tokens. Calibrated likewise."""
TRIAL_FLOPS = 4e9
TRIAL_BYTES = 128 << 20
STREAM_BYTES = 512 << 20
"""Bytes whose reading is timed: more than caches hold."""
TRIALS = 12
STARTED_BYTES = 120 << 20
"""Bytes in memory before the first layer beyond a process with the same imports: tokenizer, text, and compiled kernels
(engine/kernels/linear.py).
"""


def measured(dtype: torch.dtype, rows: int, hidden: int, width: int, vocabulary: int) -> Device:
    """Return this processor, measured for two seconds by products [rows, hidden] · [hidden, width], a copy and sampling.

    rows: number of tokens of an expert in a batch. Products larger than TRIAL_FLOPS are cut along the width.
    """
    import psutil  # imported here: a plan for another device does not need it

    base = resident_memory_bytes() + STARTED_BYTES  # before the trial allocates memory
    width = max(16, min(width, int(TRIAL_FLOPS / (2 * rows * hidden))))
    kinds = list(dict.fromkeys((dtype, torch.float32, torch.float64)))
    whole, shares_TV = torch.ones(TRIAL_BYTES, dtype=torch.uint8), torch.rand(16, vocabulary)
    copy = torch.empty_like(whole)
    copying, drawing, *products = _best_seconds(
        lambda: copy.copy_(whole),
        lambda: shares_TV.multinomial(1),
        *(_product(kind, rows, hidden, width) for kind in kinds),
    )
    bandwidth = 2 * TRIAL_BYTES / copying
    flops = {kind: 2 * rows * hidden * width / seconds for kind, seconds in zip(kinds, products, strict=True)}
    return Device(
        "cpu",
        flops,
        bandwidth,
        psutil.virtual_memory().total,
        "measured on the spot",
        product_efficiency=CPU_PRODUCT_EFFICIENCY,
        bandwidth_efficiency=CPU_BANDWIDTH_EFFICIENCY,
        read_bytes_per_second=0.2 * bandwidth,
        write_bytes_per_second=0.6e9,
        draws_per_second=shares_TV.numel() / drawing,
        call_seconds=5e-6,
        start_seconds=4.0,
        base_bytes=base,
        calibration="rates measured on the spot; efficiencies on three models (benchmarks/run_plan.py)",
        maps_weights=True,
    )


def reading_speed() -> float:
    """Return the bytes per second at which this processor reads memory, the best of several trials."""
    buffer = torch.ones(STREAM_BYTES // 8, dtype=torch.int64)
    (seconds,) = _best_seconds(buffer.sum)
    return buffer.nbytes / seconds


def _product(dtype: torch.dtype, rows: int, hidden: int, width: int) -> Callable[[], object]:
    x_TD, weight_FD = torch.ones(rows, hidden, dtype=dtype), torch.ones(width, hidden, dtype=dtype)
    return lambda: torch.nn.functional.linear(x_TD, weight_FD)


def _best_seconds(*works: Callable[[], object]) -> list[float]:
    """Return the shortest time of each work.

    Works take turns, so that a disturbance of a shared machine never hits every trial of one.
    """
    best = [math.inf] * len(works)
    for trial in range(TRIALS + 1):
        for place, work in enumerate(works):
            started = time.perf_counter()
            work()
            if trial:  # the first trial warms up
                best[place] = min(best[place], time.perf_counter() - started)
    return best
