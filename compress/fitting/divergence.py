"""The KL divergence of a model's predictions from those of another, on text, layer by layer.

Shape suffixes: S sequences, L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from compress.training.divergences import forward_kl
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import DecoderLayer, Outer
from engine.passes.activations import Activations
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import Visit, chunk_tokens, stream_layers


def _no_change(index: int, layer: DecoderLayer) -> None:
    return None


@dataclass
class Reference:
    """A model's predictions for a text, from which those of other models are compared."""

    checkpoint: Checkpoint
    tokens_SL: Tensor
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    budget: MemoryBudget = UNLIMITED
    progress: Callable[[Iterable[int]], Iterable[int]] = iter
    _states: Activations | None = None

    def __enter__(self) -> Self:
        self._states = self._passed(self.checkpoint, _no_change)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._states is not None
        self._states.close()

    def _passed(self, checkpoint: Checkpoint, visit: Visit) -> Activations:
        return stream_layers(
            *(checkpoint, self.tokens_SL, visit),
            dtype=self.dtype,
            device=self.device,
            budget=self.budget,
            progress=self.progress,
        )

    @torch.no_grad()
    def divergence(self, checkpoint: Checkpoint, visit: Visit = _no_change) -> float:
        """Return the mean of KL(p ‖ q) over all predictions of the text, in nats: p of this model, q of `checkpoint`.

        visit: may change a layer before it runs.
        """
        assert self._states is not None
        outers = [Outer(own.config, own.source(self.dtype, self.device)) for own in (self.checkpoint, checkpoint)]
        chunk, total = chunk_tokens(checkpoint.config.vocabulary_size), 0.0
        with self._passed(checkpoint, visit) as states:
            for row in range(len(self.tokens_SL)):
                both = [
                    outer.hidden_states(own[row : row + 1].to(self.device))[0, :-1]
                    for outer, own in zip(outers, (self._states, states), strict=True)
                ]
                for part in torch.arange(both[0].shape[0]).split(chunk):
                    p_TV, q_TV = (
                        outer.logits(hidden_LD[part]).float().log_softmax(-1)
                        for outer, hidden_LD in zip(outers, both, strict=True)
                    )
                    total += float(forward_kl(p_TV, q_TV).sum(dtype=torch.float64))
        checkpoint.release()
        sequences, length = self.tokens_SL.shape
        return total / (sequences * (length - 1))
