"""A multiple-choice knapsack: one option for each item, so that the total cost is least and no total is above its limit.

An item is an expert, or the weights outside of the experts. Its options are ways of storing it: how many of its hidden units
stay, and the bits of its projections. An option has a cost (what the model loses, in nats per token) and a size in each
limited quantity (bytes on disk, bytes read for a token).

The Lagrangian min Σ_i cost_i + Σ_k μ_k·size_ik decides item by item for given μ (Sinha and Zoltners, The Multiple-Choice
Knapsack Problem, Operations Research 27, 1979). For one limit, μ is found by bisection; for two, by nested bisection. A
repair then makes the changes that save most cost per byte, until none fits into the limits. Without it, the result is
smaller than the target by up to the largest step of an item.

Shape suffixes: I items, O options, Q limited quantities. Options that an item does not have cost infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import OptionError

NARROWEST = 1.0 + 1e-6
"""Ratio of the ends of a multiplier's interval at which its bisection ends."""
LARGEST, SMALLEST = 1e6, 1e-24
"""Ends of the interval of a multiplier, in nats per token and unit of size."""


@dataclass(frozen=True)
class Limit:
    """One limited quantity."""

    size_IO: Tensor
    """Size of each option, float64."""
    most: float
    """Largest total of the chosen options."""
    unit: str
    """Words for the total, in errors."""


def least_total(limit: Limit, cost_IO: Tensor) -> float:
    """Return the smallest total that any choice has."""
    return float(limit.size_IO.masked_fill(cost_IO.isinf(), torch.inf).amin(dim=1).sum())


def check_possible(least: float, most: float, unit: str) -> None:
    """Raise OptionError for a limit, `most`, that is below the smallest total that any choice has."""
    if least > most:
        raise OptionError(
            f"the target is {most:,.0f} {unit}, and the least that is possible is {least:,.0f}; "
            "give that much, or more to choose from where --bits, --no-remove, --min-experts or --group-size limit it"
        )


def choose(cost_IO: Tensor, limits: Sequence[Limit]) -> Tensor:
    """Return the option of each item, int64 [I]. Raises OptionError where limits are not kept (`check_possible`)."""
    for limit in limits:
        check_possible(least_total(limit, cost_IO), limit.most, limit.unit)
    choice_I = _relaxed(cost_IO, limits)
    for limit in limits:
        if (found := total(limit.size_IO, choice_I)) > limit.most:
            raise OptionError(
                f"the target is {limit.most:,.0f} {limit.unit}, and {found:,.0f} is the least that was found within the "
                "other target; raise one of the two"
            )
    return repaired(cost_IO, limits, choice_I)


def total(size_IO: Tensor, choice_I: Tensor) -> float:
    """Return the total of the chosen options."""
    return float(size_IO.gather(1, choice_I[:, None]).sum())


def _relaxed(cost_IO: Tensor, limits: Sequence[Limit]) -> Tensor:
    """Return the choice of the smallest multipliers that keep all limits; the last limit's multiplier is the outer one.

    Of equal sums the first one is taken.
    """
    if not limits:
        return cost_IO.argmin(dim=1)
    *inner, limit = limits

    def priced(multiplier: float) -> Tensor:
        return _relaxed(cost_IO + multiplier * limit.size_IO, inner)

    if total(limit.size_IO, free_I := priced(0.0)) <= limit.most:
        return free_I
    low, high = SMALLEST, LARGEST
    while high > low * NARROWEST:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if total(limit.size_IO, priced(middle)) <= limit.most else (middle, high)
    return priced(high)


def repaired(cost_IO: Tensor, limits: Sequence[Limit], choice_I: Tensor) -> Tensor:
    """Return a choice in which no single change to a cheaper option fits into the limits, from one that keeps them.

    The change with the largest saving for its size comes first. Its size is the largest share of what a limit leaves over.
    """
    choice_I = choice_I.clone()
    while True:
        saving_IO = cost_IO.gather(1, choice_I[:, None]) - cost_IO
        fits_IO, share_IO = saving_IO > 0.0, torch.full_like(cost_IO, SMALLEST)
        for limit in limits:
            left = limit.most - total(limit.size_IO, choice_I)
            more_IO = limit.size_IO - limit.size_IO.gather(1, choice_I[:, None])
            fits_IO &= more_IO <= left
            share_IO = share_IO.maximum(more_IO / max(left, SMALLEST))
        if not bool(fits_IO.any()):
            return choice_I
        place = int((saving_IO / share_IO).masked_fill(~fits_IO, -torch.inf).argmax())
        choice_I[place // cost_IO.shape[1]] = place % cost_IO.shape[1]
