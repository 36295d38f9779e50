"""One token of a distribution, drawn by a race: token i arrives after e_i / p_i, where e_i is an exponential number.

The first to arrive is token i with probability p_i. e_i depends on a seed, the token's place in the text and i alone, so
that two distributions with the same numbers choose the same token as often as they allow without knowing each other (Daliri
et al. 2025, arXiv 2408.07978). Only tokens of at least `LIKELY` of the largest probability have numbers of their own. The
others race together, as one with the sum of their probabilities, and if that one is first, a further number draws a token
of theirs. A large vocabulary thus takes few numbers, where torch's `multinomial` draws one for each token.

Shape suffixes: V tokens with a probability, which is the vocabulary or a part of it, C likely tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LIKELY = 1e-3
"""Share of the largest probability from which on a token races alone."""
FEW = 16
"""Number of likely tokens up to which a loop in Python is as fast as arrays."""
_MASK = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele, Lea and Flood 2014)."""
_OTHERS, _WITHIN = -1, -2
"""Where tokens have their ids: the number of all unlikely tokens, and the one that draws one of them."""


def race(weights_V: Any, seed: int, place: int, ids_V: Any = None) -> int:
    """Return a token drawn in proportion to the weights, with the numbers of this seed and place.

    weights_V: float32, none negative; their largest is of the order of one. ids_V: the token of each weight, int64; None
    where there is one for each token of the vocabulary.
    """
    key = _mixed(_mixed(seed) + place)
    bound = weights_V[weights_V.argmax()] * LIKELY
    likely_C = (weights_V >= bound).nonzero()[0]
    weights_C = weights_V[likely_C]
    ids_C = likely_C if ids_V is None else ids_V[likely_C]
    if len(ids_C) <= FEW:
        arrival, first = _first_of_few(key, ids_C, weights_C)
    else:
        arrivals_C = -np.log(uniform(key, ids_C)) / weights_C
        first = int(arrivals_C.argmin())
        arrival = float(arrivals_C[first])
    others = float(np.add.reduce(weights_V, dtype=np.float64) - np.add.reduce(weights_C, dtype=np.float64))
    if others > 0.0 and -math.log(uniform_of(key, _OTHERS)) < others * arrival:
        sums_V = np.where(weights_V < bound, weights_V, 0.0).cumsum(dtype=np.float64)
        if sums_V[-1] > 0.0:  # not if only rounding made the sum of the likely ones smaller than that of all
            found = int(np.searchsorted(sums_V, uniform_of(key, _WITHIN) * sums_V[-1], side="right"))
            return found if ids_V is None else int(ids_V[found])
    return int(ids_C[first])


def _first_of_few(key: int, ids_C: Any, weights_C: Any) -> tuple[float, int]:
    """Return when the first of a few tokens arrives, and its index. Arrays of a few numbers cost more than a loop."""
    return min(
        (-math.log(uniform_of(key, token)) / weight, index)
        for index, (token, weight) in enumerate(zip(ids_C.tolist(), weights_C.tolist(), strict=True))
    )


def uniform(key: int, places_C: Any) -> Any:
    """Return the number of each place for a key, float64 between zero and one, both excluded."""
    mixed_C = places_C.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    mixed_C = (mixed_C ^ (mixed_C >> np.uint64(30))) * np.uint64(_FIRST)
    mixed_C = (mixed_C ^ (mixed_C >> np.uint64(27))) * np.uint64(_SECOND)
    return ((mixed_C ^ (mixed_C >> np.uint64(31))) >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53


def uniform_of(key: int, place: int) -> float:
    """Return the number of one place, which may be negative; a tenth of the time of an array of one."""
    mixed = (place * _GOLDEN + key) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * _FIRST & _MASK
    mixed = (mixed ^ (mixed >> 27)) * _SECOND & _MASK
    return ((mixed ^ (mixed >> 31)) >> 12) * 2.0**-52 + 2.0**-53


def _mixed(number: int) -> int:
    """Return the number's output of SplitMix64, whose every bit depends on all bits of the number."""
    mixed = (number + _GOLDEN) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * _FIRST & _MASK
    mixed = (mixed ^ (mixed >> 27)) * _SECOND & _MASK
    return mixed ^ (mixed >> 31)
