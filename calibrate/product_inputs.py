"""The squares of the inputs of every product of a model, summed over text in one streaming pass.

Σ x² of input i says how much an error in column i of a matrix counts: the squared error of its products is Σ_i Σ x_i² · δ_i²
for each row, as far as inputs are uncorrelated. A matrix of an expert has the tokens that are routed to it, scaled as the
model scales them. One layer is in memory at a time, and of its inputs only the sums.

Shape suffixes: S sequences, L positions, I inputs of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import DecoderLayer, Outer
from engine.decoder.parameters import layer_weights
from engine.errors import CheckpointError
from engine.families.tensor_names import head_tensor
from engine.kernels.stored.quantized_weight import Weight
from engine.passes.memory_budget import UNLIMITED
from engine.passes.streaming import stream_layers


@dataclass(frozen=True)
class InputSums:
    """Sums over the tokens that use each matrix, by its name on disk. Experts that no token chose are left out."""

    squares: dict[str, Tensor] = field(default_factory=dict)
    """Σ x², float32 [I]. Matrices with the same input share a tensor."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Number of tokens."""


def collect_inputs(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> InputSums:
    """Return the sums of every matrix, those of the output head among them; with tied embeddings these are under the
    embeddings' name. Raises CheckpointError for a model whose inputs are not finite."""
    config, found = checkpoint.config, InputSums()

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None]:
        collector = _Collector({id(weight): name for name, weight in layer_weights(config, index, layer)})
        watch_products(layer, collector.see)
        return lambda: collector.finish(found)

    with stream_layers(checkpoint, tokens_SL, visit, dtype=dtype, device=device, progress=progress) as states:
        outer, head = Outer(config, checkpoint.source(dtype, device)), _Collector({})
        for rows in UNLIMITED.batches(*tokens_SL.shape):
            head.add((head_tensor(config),), outer.hidden_states(states[rows].to(device)))
    head.finish(found)
    checkpoint.release()
    for name, square_I in found.squares.items():
        check_inputs(checkpoint, name, square_I)
    return found


def watch_products(layer: DecoderLayer, see: Callable[[Tensor, Sequence[Weight]], None]) -> None:
    """Call `see` with the input of every product of a layer and the weights that are multiplied by it."""

    def observed(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BLD, positions, *others = given
        return x_BLD, positions._replace(choice=replace(positions.choice, observer=see)), *others

    layer.register_forward_pre_hook(observed)


def check_inputs(checkpoint: Checkpoint, name: str, sums: Tensor) -> None:
    """Raise CheckpointError if sums over a matrix's inputs are not finite."""
    if not bool(sums.isfinite().all()):
        raise CheckpointError(f"{checkpoint.directory}: inputs of {name} are NaN or infinite; check the model's weights")


class _Collector:
    """Adds up the squares of one layer's inputs."""

    def __init__(self, names: dict[int, str]) -> None:
        """names: of the layer's weights, by their `id`."""
        self._names = names
        self._squares: dict[tuple[str, ...], Tensor] = {}
        self._tokens: Counter[tuple[str, ...]] = Counter()

    def see(self, x: Tensor, weights: Sequence[Weight]) -> None:
        """Add the input of a product with these weights."""
        names = tuple(self._names[id(weight)] for weight in weights if id(weight) in self._names)
        if names:
            self.add(names, x)

    def add(self, names: tuple[str, ...], x: Tensor) -> None:
        """Add rows of inputs […, I] of matrices."""
        x_TI = x.detach().flatten(0, -2).float()
        square_I = x_TI.square().sum(0, dtype=torch.float64)
        self._squares[names] = self._squares[names] + square_I if names in self._squares else square_I
        self._tokens[names] += len(x_TI)

    def finish(self, found: InputSums) -> None:
        """Hand over the sums."""
        for names, square_I in self._squares.items():
            found.squares.update(dict.fromkeys(names, square_I.float().cpu()))
            found.tokens.update(dict.fromkeys(names, self._tokens[names]))
