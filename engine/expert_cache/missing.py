"""Experts that are not in memory and that a token can do without (`--miss-threshold`).

An absent expert e, with the share w_e of the token's weights, may give its place to r, the best expert in memory that the
token has not chosen. r gets the weight that the router gives it in relation to e, w_e · p_r / p_e, where p are the router's
probabilities. The share w_e · (1 − p_r / p_e) is then lost. This is done where that is less than the threshold. Without any
r, the slot stays empty and all of w_e is lost. A threshold thus allows for light experts, and for those whose place another
fills nearly as well. The weights of the token are scaled to their sum before, and no token loses all of its experts.

`replace_absent` changes a layer's choice; the expert cache (cache.py) and `LimitedRouting` both call it. A `LimitedRouting`
measures the cost of a threshold without the disk: it lets a layer choose as it would with room for a part of its experts.

Shape suffixes: T tokens, S slots, N experts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.decoder.routing import NO_EXPERT, Routing, Selection, probabilities
from engine.expert_cache.policies import DEFAULT, POLICIES, SimulatedCache


class Changed(NamedTuple):
    """Slots of tokens whose expert was not in memory."""

    replaced: int
    """Slots that another expert took."""
    left_out: int
    """Slots that stay empty."""


def replace_absent(
    chosen_TS: Any, weights_TS: Any, probabilities_TN: Any, resident: Sequence[int], absent: Container[int], threshold: float
) -> Changed:
    """Replace absent experts by resident ones, or by none, where less than the threshold is lost.

    chosen_TS: int64. weights_TS: float32. Both are changed in place. probabilities_TN: the router's, float32. Experts that
    are neither resident nor absent are on their way, and stay.
    """
    replaced = left_out = 0
    for token, chosen in enumerate(chosen_TS.tolist()):
        places = [place for place, expert in enumerate(chosen) if expert != NO_EXPERT and expert in absent]
        if not places:
            continue
        weights, shares_N = list(map(abs, weights_TS[token].tolist())), probabilities_TN[token].tolist()
        total, used = sum(weights), len(chosen) - chosen.count(NO_EXPERT)
        free = sorted((expert for expert in resident if expert not in chosen), key=shares_N.__getitem__)
        before = replaced + left_out
        for place in sorted(places, key=weights.__getitem__):
            own = shares_N[chosen[place]]
            kept = 0.0 if not free else min(1.0, shares_N[free[-1]] / own) if own > 0 else 1.0
            if weights[place] * (1 - kept) >= threshold * total or (not free and used == 1):
                continue
            weights_TS[token, place] *= kept
            if free:
                chosen_TS[token, place], replaced = free.pop(), replaced + 1
            else:
                chosen_TS[token, place], left_out, used = NO_EXPERT, left_out + 1, used - 1
        left = abs(weights_TS[token]).sum()
        if replaced + left_out > before and left > 0:
            weights_TS[token] *= total / left
    return Changed(replaced, left_out)


def numbers_of(chosen: Any) -> list[int]:
    """Return the numbers of the chosen experts, in order. For a few tokens this takes a tenth of the time of `unique`."""
    return sorted(set(chosen.ravel().tolist()) - {NO_EXPERT})


@dataclass
class LayerCache:
    """The part of an expert cache that one layer has: room for some of its experts, simulated."""

    slots: int
    threshold: float = 0.0
    """The miss threshold."""
    policy: str = DEFAULT
    uses: int = 0
    """Experts that tokens used."""
    reads: int = 0
    """Experts among them that were read."""
    changed: int = 0
    """Slots of tokens whose expert was replaced by another one or left out."""
    _cache: SimulatedCache = field(init=False)

    def __post_init__(self) -> None:
        self._cache = SimulatedCache(self.slots, POLICIES[self.policy]())

    def decode(self, chosen_S: Any, weights_S: Any, probabilities_N: Any) -> None:
        """Let one token use its experts. The arguments are those of `replace_absent`, of one token."""
        if self.threshold > 0:
            resident = sorted(expert for _, expert in self._cache.resident)
            absent = set(chosen_S.tolist()).difference(resident)
            given = (chosen_S[None], weights_S[None], probabilities_N[None])
            self.changed += sum(replace_absent(*given, resident, absent, self.threshold))
        used = numbers_of(chosen_S)
        self.uses, self.reads = self.uses + len(used), self.reads + self._cache.step(0, used)


@dataclass
class LimitedRouting:
    """A layer's own Routing, as it acts where a part of the experts fits into memory.

    `readings` has a group of caches for each time that the text is read. All caches of a group see the same choices, and
    only the threshold of the first one changes the routing. Tokens come in the order of decoding, reading after reading.
    """

    base: Routing
    readings: Sequence[Sequence[LayerCache]]
    tokens: int
    """Tokens of the text."""
    seen: int = 0
    """Tokens of all readings so far."""

    def __call__(self, logits_TN: Tensor) -> Selection:
        selection = self.base(logits_TN)
        chosen_TS, weights_TS = selection.experts.cpu().numpy().copy(), selection.weights.float().cpu().numpy().copy()
        shares_TN = probabilities(self.base, logits_TN).float().cpu().numpy()
        for chosen_S, weights_S, shares_N in zip(chosen_TS, weights_TS, shares_TN, strict=True):
            first, *others = self.readings[self.seen // self.tokens]
            for cache in others:
                cache.decode(chosen_S.copy(), weights_S.copy(), shares_N)
            first.decode(chosen_S, weights_S, shares_N)
            self.seen += 1
        weights = torch.from_numpy(weights_TS).to(selection.weights.device, selection.weights.dtype)
        return Selection(torch.from_numpy(chosen_TS).to(selection.experts.device), weights)
