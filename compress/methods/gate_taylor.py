"""Gate Taylor: |Σ over sequences of ∂L/∂g_i|, where L is the negative log-likelihood of the text itself.

g_i = 1 is a factor on expert i's contribution, which is differentiated and never trained (gate_gradients.py).

Shape suffixes: S sequences, L positions, N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from compress.cost.phases import PassCosts, Phase
from compress.methods.criterion import Criterion, by_scores
from compress.methods.gate_gradients import gate_gradients, gradient_memory, gradient_phase, gradient_scores
from compress.options.plan_run import RunOptions
from engine.passes.layerwise import AnyDecoder


def taylor_scores(decoder: AnyDecoder, tokens_SL: Tensor, seed: int = 0, **pass_options: Any) -> dict[int, Tensor]:
    """Return the scores, [N] by decoder layer index. pass_options: passed to `gate_gradients`."""
    sums, _ = gate_gradients(decoder, tokens_SL, own_samples=False, seed=seed, **pass_options)
    return {layer: total.abs() for layer, total in sums.items()}


def _phases(costs: PassCosts, options: RunOptions) -> Iterator[Phase]:
    yield gradient_phase(costs, own_samples=False)


TAYLOR = Criterion(by_scores(lambda run: gradient_scores(run, "taylor", taylor_scores)), _phases, gradient_memory)
