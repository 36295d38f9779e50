"""M-SMoE: each expert joins the dominant expert with the most similar router logits (Li et al. 2024, arXiv 2310.01334).

W = Σ_i f_i·W_i / Σ_i f_i over a group, where f is the activation frequency. The paper's text was not available; the
implementation follows the authors' code (UNITES-Lab/MC-SMoE).
"""

from __future__ import annotations

from calibrate.statistics import LayerStatistics
from compress.methods.criterion import grouping
from compress.methods.groups import Group, cosine, highest, joined, shares


def m_smoe(layer: LayerStatistics, experts: int) -> list[Group]:
    """Return M-SMoE's groups with their weights (Li et al. 2024, arXiv 2310.01334).

    The most used experts are dominant. Every other expert joins the dominant one whose router logits over all tokens have
    the highest cosine with its own. Weights: W = Σ_i f_i·W_i / Σ_i f_i, with activation frequency f, after alignment to the
    dominant expert. A group without routed tokens is averaged with equal weights (the formula is 0/0 there). The paper
    ranks frequencies globally and so gives layers different numbers of experts; here each layer gets the requested number.
    """
    return [Group(centre, shares(group, layer.tokens_routed)) for centre, group in dominated(layer, experts).items()]


def dominated(layer: LayerStatistics, experts: int) -> dict[int, list[int]]:
    """Return the members of each dominant expert, best first.

    Dominant experts are the most used ones; the others join the one with the closest router logits.
    """
    return joined(cosine(layer.router_gram), highest(layer.tokens_routed, experts))


M_SMOE = grouping(m_smoe)
