"""The choice of a router of transformers where only some experts are left, for inputs that it has seen.

The router of a model of the family with so many experts runs with the rows of those that are left, as in a pruned model.
Nothing here names a family.

Shape suffixes: T tokens, S slots, N experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.adapted.adapted_block import AdaptedBlock, OwnRouting
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.config_keys import ExpertAxis
from engine.adapted.layer_sizes import plain_config
from engine.decoder.routing import NO_EXPERT, Selection


class SubsetRouters:
    """The routers of models of one family without weights, by their number of experts."""

    def __init__(self, checkpoint: AdaptedCheckpoint, dtype: torch.dtype) -> None:
        self.checkpoint, self._dtype = checkpoint, dtype
        self._routers: dict[int, dict[str, nn.Module]] = {}

    def router(self, name: str, count: int) -> nn.Module:
        """Return a router with another number of experts; models are built once for each number."""
        if count not in self._routers:
            raw = self.checkpoint.count_key.changed(plain_config(self.checkpoint.raw_config), count)
            model = self.checkpoint.build(raw, self._dtype)
            names = [layer.router for layer in self.checkpoint.found.experts]
            self._routers[count] = {each: model.get_submodule(each) for each in names}
        return self._routers[count][name]


class SubsetChoice:
    """The choice of one layer's router for sampled tokens, if some experts are removed."""

    def __init__(self, routers: SubsetRouters, block: AdaptedBlock) -> None:
        """block: while its weights are loaded."""
        self._routers, self._block, self._layer = routers, block, block.layer
        self._axes = routers.checkpoint.count_key.axes
        self._further = max(
            (axis.further for name, axis in self._axes.items() if name.startswith(f"{self._layer.router}.")), default=0
        )
        self._pieces: list[_Asked] = []

    def see(self, here_T: Tensor, tokens: int, logits_TN: Tensor) -> None:
        """Keep what the router was called with last, at some tokens of a batch. tokens: their number in the batch."""
        given, options = self._block.asked
        kept = [_at(value, here_T, tokens) for value in given]
        self._pieces.append(_Asked(kept, {key: _at(value, here_T, tokens) for key, value in options.items()}))

    def __call__(self, kept_N: Tensor | None = None) -> Selection:
        """Return the choice for all sampled tokens among the experts that are kept; None for all of them."""
        count = self._layer.count
        rows_N = torch.arange(count) if kept_N is None else kept_N.nonzero().flatten()
        if not self._pieces:  # a process without sequences
            return Selection(torch.empty(0, self._layer.per_token, dtype=torch.long), torch.empty(0, self._layer.per_token))
        self._pieces = [_all_of(self._pieces)]
        given = tuple(self._fitting(value, rows_N) for value in self._pieces[0].given)
        options = {key: self._fitting(value, rows_N) for key, value in self._pieces[0].options.items()}
        router = self._routers.router(self._layer.router, len(rows_N))
        made = functional_call(router, self._tensors(rows_N), given, options)
        own = OwnRouting(len(rows_N), self._layer.router)
        own.see(*made[:3])
        experts_TS, weights_TS = own.selection
        rows_N = rows_N.to(experts_TS.device)
        return Selection(rows_N[experts_TS.clamp_min(0)].masked_fill(experts_TS == NO_EXPERT, NO_EXPERT), weights_TS)

    def _tensors(self, rows_N: Tensor) -> dict[str, Tensor]:
        """Return the router's parameters and buffers with the rows of some experts."""
        router, found = self._block.router, dict[str, Tensor]()
        for name, tensor in (*router.named_parameters(), *router.named_buffers()):
            axis = self._axes.get(f"{self._layer.router}.{name}")
            found[name] = tensor if axis is None else self._rows(tensor, axis, rows_N)
        return found

    def _rows(self, tensor: Tensor, axis: ExpertAxis, rows_N: Tensor) -> Tensor:
        further = torch.arange(self._layer.count, self._layer.count + axis.further)
        return tensor.index_select(axis.axis, torch.cat([rows_N, further]).to(tensor.device))

    def _fitting(self, value: Any, rows_N: Tensor) -> Any:
        """Return an argument, without the removed experts if it has an entry for each, such as a bias of the choice."""
        if isinstance(value, _OfTokens):
            return value.tensor
        if isinstance(value, Tensor) and value.dim() and value.shape[-1] == self._layer.count + self._further:
            return self._rows(value, ExpertAxis(value.dim() - 1, self._further), rows_N)
        return value


class _OfTokens:
    """An argument with an entry for each token."""

    def __init__(self, tensor: Tensor, places: int) -> None:
        """places: number of dimensions that tokens have."""
        self.tensor, self.places = tensor, places


class _Asked(NamedTuple):
    """The arguments of a call of a router."""

    given: list[Any]
    options: dict[str, Any]


def _all_of(pieces: list[_Asked]) -> _Asked:
    """Return the arguments of several calls as those of one."""
    if len(pieces) == 1:
        return pieces[0]
    given = [_joined(list(each)) for each in zip(*(own.given for own in pieces), strict=True)]
    return _Asked(given, {key: _joined([own.options[key] for own in pieces]) for key in pieces[0].options})


def _at(value: Any, here_T: Tensor, tokens: int) -> Any:
    """Return an argument at some tokens, if it has an entry for each token of a batch: [T, …] or [B, L, …]."""
    if not isinstance(value, Tensor):
        return value
    numbers = 1 if value.is_floating_point() else 0  # dimensions that an entry has at least
    for places in (1, 2):
        if value.dim() >= places + numbers and value.shape[:places].numel() == tokens:
            own_T = value.detach().flatten(0, places - 1)[here_T]
            return _OfTokens(own_T if places == 1 else own_T[None], places)
    return value


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, _OfTokens):
        return first
    return _OfTokens(torch.cat([each.tensor for each in values], dim=first.places - 1), first.places)
