"""The inputs of a layer's feed-forward block on text, kept while the layer runs, and the hidden units of each FFN on them.

A layer's FFNs are its routed experts and, where it is included, the FFN that every token uses (DecoderConfig.ffn_widths).

Shape suffixes: L positions, T tokens of one batch, N experts, K top-k, R tokens of one FFN, F width, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.routing import Selection
from engine.passes.activations import Activations
from engine.passes.memory_budget import MemoryBudget

HELD_OUT_ONE_IN = 8
"""One calibration sequence in so many is held out of the fit, for the choice of the ridge: the second, the tenth, …"""


class Text(NamedTuple):
    """The sequences of this process."""

    rows: slice
    """Their numbers among the sequences of all processes."""
    length: int

    @property
    def sequences(self) -> int:
        """Number of sequences of this process."""
        return int(self.rows.stop - self.rows.start)

    def is_held(self, rows: slice) -> Tensor:
        """Return whether each token of these sequences of this process is held out, [T] bool."""
        first = self.rows.start
        is_held_S = torch.arange(first + rows.start, first + rows.stop) % HELD_OUT_ONE_IN == 1
        return is_held_S.repeat_interleave(self.length)


class Batch(NamedTuple):
    """Some sequences that went through the block together."""

    number: int
    rows: slice
    """Their numbers among the sequences of this process."""
    x_TD: Tensor
    """The block's inputs."""
    is_held_T: Tensor


class Use(NamedTuple):
    """Hidden units of an FFN in a batch, on the CPU."""

    h_RF: Tensor
    """Hidden units, float32."""
    weight_R: Tensor
    """Weights of the outputs in the block's output, float32."""
    token_R: Tensor
    """Numbers of the tokens within the batch."""


def groups_within(limit: int, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of FFNs, in order, in groups whose sizes add up to at most `limit`; a larger one is alone."""
    group: list[int] = []
    held = 0
    for number, size in enumerate(sizes):
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(number)
        held += size
    yield group


class FfnInputs:
    """Keeps the inputs and the selections of a feed-forward block while it runs, in a file beyond the memory limit."""

    def __init__(
        self,
        block: MoeBlock | Expert,
        text: Text,
        dtype: torch.dtype,
        *,
        include: Collection[str] = (),
        together: int = 2,
        budget: MemoryBudget,
        release: Callable[[], None],
    ) -> None:
        """include: "shared" for the shared expert of an MoE block. together: Activations of this shape at a time."""
        self.text, self._block, self._budget, self._release = text, block, budget, release
        self._experts = len(block.experts) if isinstance(block, MoeBlock) else 0
        self.networks: list[Any] = [block]
        if isinstance(block, MoeBlock):
            common = [block.shared] if "shared" in include and block.shared is not None else []
            self.networks = [*block.experts, *common]
            block.observer = self._select
        hidden = block.hidden_size
        shape = text.sequences, text.length, hidden
        self._kept = Activations(shape, dtype, together=together, budget=budget)
        self._kept_shared: Activations | None = None
        """Inputs of the shared expert, where it has a norm of its own; None where they are those of the routed experts."""
        if isinstance(block, MoeBlock) and block.own_norms is not None and self._experts < len(self.networks):
            self._kept_shared = Activations(shape, dtype, together=together, budget=budget)
        self._chosen: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._rows: list[slice] = []
        self._hook = None if isinstance(block, MoeBlock) else block.register_forward_pre_hook(self._see)
        if self._kept_shared is not None:
            self._hook = self.networks[-1].register_forward_pre_hook(self._see_shared)

    def _see(self, block: Any, arguments: tuple[Any, ...]) -> None:
        self._keep(arguments[0])

    def _see_shared(self, shared: Any, arguments: tuple[Any, ...]) -> None:
        """Keep the input of the shared expert. The block has chosen experts before, so that the batch is known."""
        assert self._kept_shared is not None
        x_TD: Tensor = arguments[0]
        self._kept_shared[self._rows[-1]] = x_TD.view(-1, self.text.length, x_TD.shape[-1]).cpu()

    def _keep(self, x_TD: Tensor) -> None:
        start = self._rows[-1].stop if self._rows else 0
        self._rows.append(slice(start, start + len(x_TD) // self.text.length))
        self._kept[self._rows[-1]] = x_TD.view(-1, self.text.length, x_TD.shape[-1]).cpu()

    def _select(self, x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        assert isinstance(self._block, MoeBlock)
        self._keep(x_TD)
        self._chosen.append(selection.experts.cpu())
        self._weights.append(selection.weights.float().cpu())
        scales_TN = self._block.input_scales(logits_TN)
        if scales_TN is not None:
            self._scales.append(scales_TN.gather(1, selection.experts.clamp_min(0)).cpu())

    def stop(self) -> None:
        """Keep nothing of further runs of the block."""
        if self._hook is not None:
            self._hook.remove()
        if isinstance(self._block, MoeBlock):
            self._block.observer = None

    def close(self) -> None:
        """Free the memory, or close the file."""
        self._kept.close()
        if self._kept_shared is not None:
            self._kept_shared.close()

    def count(self, number: int) -> int:
        """Return the number of tokens that use an FFN, in this process."""
        if number == self._experts:
            return self.text.sequences * self.text.length
        return sum(int((chosen_TK == number).sum()) for chosen_TK in self._chosen)

    def batches(self) -> Iterator[Batch]:
        """Yield every batch, in the order of the text."""
        device = next(self._block.parameters()).device
        for number, rows in enumerate(self._rows):
            yield Batch(number, rows, self._kept[rows].flatten(0, 1).to(device), self.text.is_held(rows))

    def use(self, batch: Batch, number: int) -> Use:
        """Return what an FFN computes in a batch."""
        x_RD, weight_R, token_R = self.used(batch, number)
        h_RF = self.networks[number].units(x_RD).float().cpu()
        self._budget.relieve(self._release)
        return Use(h_RF, weight_R, token_R)

    def used(self, batch: Batch, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs [R, D] of an FFN in a batch, the weights [R] of its outputs, and the tokens' numbers [R]."""
        if number == self._experts:
            every_T = torch.arange(len(batch.x_TD))
            if self._kept_shared is not None:
                return self._kept_shared[batch.rows].flatten(0, 1).to(batch.x_TD), torch.ones(len(every_T)), every_T
            weight_T1 = self._block.shared_weights(batch.x_TD) if isinstance(self._block, MoeBlock) else None
            return batch.x_TD, torch.ones(len(every_T)) if weight_T1 is None else weight_T1.squeeze(1).float().cpu(), every_T
        token_R, slot_R = (self._chosen[batch.number] == number).nonzero(as_tuple=True)
        x_RD = batch.x_TD[token_R.to(batch.x_TD.device)]
        if self._scales:
            x_RD = x_RD * self._scales[batch.number][token_R, slot_R, None].to(x_RD)
        return x_RD, self._weights[batch.number][token_R, slot_R], token_R
