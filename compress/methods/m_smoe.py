"""M-SMoE: every expert joins the dominant one that is routed to most alike (Li et al. 2024, arXiv 2310.01334).

W = Σ_i f_i·W_i / Σ_i f_i over a group, f the activation frequency. The paper's text was not at hand; the authors' code
decided (UNITES-Lab/MC-SMoE).
"""

from __future__ import annotations

from calibrate.statistics import LayerStatistics
from compress.methods.criterion import grouping
from compress.methods.groups import Group, cosine, highest, joined, shares


def m_smoe(layer: LayerStatistics, experts: int) -> list[Group]:
    """M-SMoE (Li et al. 2024, arXiv 2310.01334).

    The most used experts are dominant; every other joins the dominant one whose router logits over all tokens are closest in
    cosine. Weights: W = Σ_i f_i·W_i / Σ_i f_i, f the activation frequency, after alignment to the dominant expert. A group
    that no token was routed to is averaged evenly (the formula is 0/0 there). The paper gives layers different numbers of
    experts by a global ranking of frequency; here each layer gets what was asked for.
    """
    return [Group(centre, shares(group, layer.tokens_routed)) for centre, group in dominated(layer, experts).items()]


def dominated(layer: LayerStatistics, experts: int) -> dict[int, list[int]]:
    """M-SMoE's groups: the most used experts, best first, each with those whose router logits are closest to its own."""
    return joined(cosine(layer.router_gram), highest(layer.tokens_routed, experts))


M_SMOE = grouping(m_smoe)
