"""Which experts tokens use together and one after the other, from the lists of chosen experts in the statistics.

Shape suffixes: C tokens whose experts are listed, K top-k, N experts of the layer, M experts of the MoE layer before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from calibrate.statistics import Statistics
from engine.decoder.routing import NO_EXPERT
from engine.errors import DataError
from engine.expert_cache.policies import Step

_AT_ONCE = 4096
"""Tokens that are counted together."""


def co_use(chosen_CK: Tensor, experts: int) -> Tensor:
    """Return the number of tokens that use both experts of each pair, [N, N]; on the diagonal, those that use the expert."""
    return transitions(chosen_CK, chosen_CK, experts, experts)


def transitions(before_CK: Tensor, after_CK: Tensor, experts_before: int, experts: int) -> Tensor:
    """Return the number of tokens that use one expert of the MoE layer before and another of this layer, [M, N]."""
    counts_MN = torch.zeros(experts_before, experts, dtype=torch.long)
    for before, after in zip(before_CK.split(_AT_ONCE), after_CK.split(_AT_ONCE), strict=True):
        counts_MN += (_used(before, experts_before).T @ _used(after, experts)).long()  # sums below 2^24 are exact
    return counts_MN


def _used(chosen_CK: Tensor, experts: int) -> Tensor:
    """Return 1 for each expert that a token uses, else 0, [C, N]."""
    used_CN = torch.zeros(len(chosen_CK), experts + 1)
    places_CK = chosen_CK.long().where(chosen_CK != NO_EXPERT, experts)
    return used_CN.scatter_(1, places_CK, 1.0)[:, :experts]


def chosen_of(statistics: Statistics, where: str) -> dict[int, Tensor]:
    """Return the lists of chosen experts by decoder layer. Raises DataError, which begins with `where`, without them."""
    found = {index: layer.chosen for index, layer in statistics.layers.items() if layer.chosen is not None}
    if len(found) < len(statistics.layers):
        raise DataError(f"{where}: statistics of an earlier version, without the experts of each token; calibrate again")
    return found


def token_steps(chosen: dict[int, Tensor]) -> Iterator[Step]:
    """Yield the steps of decoding these tokens one after the other: (layer, experts), all layers of one token first."""
    lists = {index: chosen_CK.tolist() for index, chosen_CK in chosen.items()}
    for token in range(min(map(len, lists.values()), default=0)):
        for index, own in lists.items():
            yield index, [expert for expert in own[token] if expert != NO_EXPERT]
