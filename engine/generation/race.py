"""One token of a distribution, drawn by a race: token i arrives after e_i / p_i, where e_i is an exponential number.

The first to arrive is token i with probability p_i. e_i depends on a seed, the token's place in the text and i alone, so
that two distributions with the same numbers choose the same token as often as they allow without knowing each other (Daliri
et al. 2025, arXiv 2408.07978). Only tokens of at least `LIKELY` of the largest probability have numbers of their own. The
others race together, as one with the sum of their probabilities, and if that one is first, a further number draws a token
of theirs. A large vocabulary thus takes few numbers, where torch's `multinomial` draws one for each token.

Shape suffixes: V vocabulary, C likely tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LIKELY = 1e-3
"""Share of the largest probability from which on a token races alone."""
_MASK = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele, Lea and Flood 2014)."""
_OTHERS, _WITHIN = -1, -2
"""Where tokens have their ids: the number of all unlikely tokens, and the one that draws one of them."""


def race(p_V: Any, seed: int, place: int) -> int:
    """Return a token drawn from p_V, float32 probabilities that sum to one, with the numbers of this seed and place."""
    key = _mixed(_mixed(seed) + place)
    bound = p_V.max() * LIKELY
    likely_C = np.flatnonzero(p_V >= bound)
    p_C = p_V[likely_C].astype(np.float64)
    arrivals_C = -np.log(uniform(key, likely_C)) / p_C
    first = int(arrivals_C.argmin())
    others = 1.0 - float(p_C.sum())
    if others > 0.0 and -math.log(_uniform_of(key, _OTHERS)) < others * float(arrivals_C[first]):
        sums_V = np.where(p_V < bound, p_V, 0.0).cumsum(dtype=np.float64)
        if sums_V[-1] > 0.0:  # not if only rounding kept the sum of the likely ones below one
            return int(np.searchsorted(sums_V, _uniform_of(key, _WITHIN) * sums_V[-1], side="right"))
    return int(likely_C[first])


def uniform(key: int, places_C: Any) -> Any:
    """Return the number of each place for a key, float64 between zero and one, both excluded."""
    mixed_C = places_C.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    mixed_C = (mixed_C ^ (mixed_C >> np.uint64(30))) * np.uint64(_FIRST)
    mixed_C = (mixed_C ^ (mixed_C >> np.uint64(27))) * np.uint64(_SECOND)
    return ((mixed_C ^ (mixed_C >> np.uint64(31))) >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53


def _uniform_of(key: int, place: int) -> float:
    return float(uniform(key, np.array([place], np.int64))[0])


def _mixed(number: int) -> int:
    """Return the number's output of SplitMix64, whose every bit depends on all bits of the number."""
    mixed = (number + _GOLDEN) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * _FIRST & _MASK
    mixed = (mixed ^ (mixed >> 27)) * _SECOND & _MASK
    return mixed ^ (mixed >> 31)
