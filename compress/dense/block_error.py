"""Error of a layer's single FFN against the MoE block that it replaces, on the model's own hidden states.

Shape suffixes: S sequences, L positions, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.dense.dense_student import ffn_sum
from compress.plans.plan import SHARED_EXPERT, Plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import DecoderLayer
from engine.kernels.linear import linear
from engine.passes.streaming import Visit, stream_layers


@dataclass(frozen=True)
class BlockError:
    """Mean over tokens of ‖error‖₂ / ‖y‖₂, where y is the MoE block's output."""

    whole: float
    """Error of the FFN in place of the block."""
    shared_gate: float
    """Error from the mean gate of the shared expert alone, in place of the token's gate; 0 without a gate."""


def shared_gates(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[int, float]:
    """Return the mean over tokens of the shared expert's gate σ(g·x), by decoder layer.

    The value is 1 for a shared expert without a gate. Layers without a shared expert are left out.
    """
    layers = {index: checkpoint.config.layers[index].moe for index in checkpoint.config.moe_layers}
    shared = [index for index, moe in layers.items() if moe is not None and moe.shared_width]
    if not checkpoint.config.architecture.has_shared_gate:
        return dict.fromkeys(shared, 1.0)
    means: dict[int, _Mean] = {}

    def see(index: int, block: MoeBlock, x_TD: Tensor, y_TD: Tensor) -> None:
        means.setdefault(index, _Mean()).add(_gate(block, x_TD))

    _stream(checkpoint, tokens_SL, see, dtype, device, progress)
    return {index: mean.value for index, mean in means.items()}


def block_errors(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[int, BlockError]:
    """Return the error of a dense plan by decoder layer; the input of each layer is that of the full model."""
    whole: dict[int, _Mean] = {}
    gate: dict[int, _Mean] = {}
    ffns: dict[int, Any] = {}

    def see(index: int, block: MoeBlock, x_TD: Tensor, y_TD: Tensor) -> None:
        if index not in ffns:
            ffns.clear()  # one layer in memory at a time
            ffns[index] = ffn_sum(plan, checkpoint, index, dtype, device)
        lengths_T = y_TD.float().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        whole.setdefault(index, _Mean()).add((ffns[index](x_TD) - y_TD).float().norm(dim=1) / lengths_T)
        if block.shared is not None and block.shared_gate_1D is not None:
            off_T = (_gate(block, x_TD) - _folded_gate(plan, index)).abs()
            gate.setdefault(index, _Mean()).add(off_T * block.shared(x_TD).float().norm(dim=1) / lengths_T)

    _stream(checkpoint, tokens_SL, see, dtype, device, progress)
    return {index: BlockError(mean.value, gate[index].value if index in gate else 0.0) for index, mean in whole.items()}


class _Mean:
    """A mean over values that are added in batches."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, values_T: Tensor) -> None:
        self.total += float(values_T.double().sum())
        self.count += values_T.numel()

    @property
    def value(self) -> float:
        return self.total / self.count


def _gate(block: MoeBlock, x_TD: Tensor) -> Tensor:
    assert block.shared_gate_1D is not None
    return torch.sigmoid(linear(x_TD, block.shared_gate_1D)).float()[:, 0]


def _folded_gate(plan: Plan, layer: int) -> float:
    (planned,) = plan.layers[layer]
    return sum(part.scale for part in planned.parts if part.sources[0].expert == SHARED_EXPERT)


def _stream(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    see: Callable[[int, MoeBlock, Tensor, Tensor], None],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[Iterable[int]], Iterable[int]],
) -> None:
    """Call `see` with input and output of every MoE block, batch by batch."""

    def visit(index: int, layer: DecoderLayer) -> None:
        if isinstance(block := layer.feed_forward, MoeBlock):
            block.register_forward_hook(lambda module, inputs, y_TD: see(index, module, inputs[0], y_TD))

    watched: Visit = visit
    stream_layers(checkpoint, tokens_SL, watched, dtype=dtype, device=device, progress=progress).close()
