"""The FFNs of a plan's result that are refitted or corrected: those that lost hidden units or, if none did, all experts."""

from __future__ import annotations

from typing import NamedTuple

from compress.plans.plan import Plan
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN
from engine.families.tensor_names import common_tensor, expert_tensor


class NarrowedFfn(NamedTuple):
    """One FFN of the result that lost hidden units."""

    name: str
    """Name of its down projection in the result."""
    number: int
    """Its number in the result (DecoderConfig.ffn_widths)."""
    source: int
    """Its number in the source."""
    units: tuple[int, ...]
    """Units of the source that stay."""


def narrowed_ffns(plan: Plan, config: DecoderConfig) -> dict[int, list[NarrowedFfn]]:
    """Return the FFNs that lost units, by layer. config: of the source."""
    row, counts = config.architecture, config.experts_by_layer
    found: dict[int, list[NarrowedFfn]] = {}
    for layer, experts in plan.layers.items():
        for index, expert in enumerate(experts):
            units, source = expert.parts[0].units, expert.origin
            if units is not None and isinstance(source, int):
                name = expert_tensor(row, layer, index, DOWN)
                found.setdefault(layer, []).append(NarrowedFfn(name, index, source, units))
    for layer, units in plan.common.items():
        source, number = counts.get(layer, 0), len(plan.layers.get(layer, ()))
        name = common_tensor(config, layer, DOWN)
        found.setdefault(layer, []).append(NarrowedFfn(name, number, source, units))
    return found


class CorrectedFfn(NamedTuple):
    """One FFN of the result whose down projection is corrected."""

    name: str
    """Name of its down projection in the result."""
    number: int
    """Its number in the result (DecoderConfig.ffn_widths)."""


def corrected_ffns(plan: Plan, config: DecoderConfig) -> dict[int, list[CorrectedFfn]]:
    """Return the FFNs that lost units, or where none did all experts of the result, by layer. config: of the source."""
    if narrowed := narrowed_ffns(plan, config):
        return {layer: [CorrectedFfn(own.name, own.number) for own in networks] for layer, networks in narrowed.items()}
    row = config.architecture
    return {
        layer: [CorrectedFfn(expert_tensor(row, layer, index, DOWN), index) for index in range(len(experts))]
        for layer, experts in plan.layers.items()
    }
