"""Criteria: which experts a smaller model loses or merges. Each method is one file, with its paper's formula on top.

A method gives a Plan; carrying one out is `compress/plans`, and nothing here writes a model. This file is the table of all
methods and imports none of them, so that the command line can list their names without torch. Start with `saliency.py`, the
plainest criteria; `criterion.py` says what a method has to give.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One row of METHODS: all that can be known of a method without running it."""

    kind: str
    """"prune" removes experts, "merge" makes fewer out of all of them."""
    code: str
    """"compress.methods.module:NAME" of its Criterion (criterion.py), which is imported where a run needs it."""
    scopes: tuple[str, ...] = ("global", "layer", "uniform")
    """Scopes of `Budget` that it can keep to, the default first."""
    needs_gradients: bool = False
    """It needs the whole model at once. The others read it layer by layer, so that sharding gains them nothing."""
    keeps_groups: bool = True
    """With scope "uniform" it can keep as many experts of each group of a layer."""


METHODS: dict[str, Method] = {
    "diep": Method("prune", "compress.methods.diep:DIEP", needs_gradients=True),
    "naee": Method("prune", "compress.methods.naee:NAEE", scopes=("layer", "uniform"), keeps_groups=False),
    "frequency": Method("prune", "compress.methods.saliency:FREQUENCY"),
    "probability": Method("prune", "compress.methods.saliency:PROBABILITY"),
    "reap": Method("prune", "compress.methods.saliency:REAP"),
    "man": Method("prune", "compress.methods.saliency:MAN"),
    "mc-moe": Method("prune", "compress.methods.saliency:MC_MOE"),
    "fisher": Method("prune", "compress.methods.gate_fisher:FISHER", needs_gradients=True),
    "taylor": Method("prune", "compress.methods.gate_taylor:TAYLOR", needs_gradients=True),
    "random": Method("prune", "compress.methods.random_scores:RANDOM"),
    "m-smoe": Method("merge", "compress.methods.m_smoe:M_SMOE", scopes=("layer",)),
    "s-smoe": Method("merge", "compress.methods.s_smoe:S_SMOE", scopes=("layer",)),
    "hc-smoe": Method("merge", "compress.methods.hc_smoe:HC_SMOE", scopes=("layer",)),
    "ream": Method("merge", "compress.methods.ream:REAM", scopes=("layer",)),
}
DEFAULT_METHOD = "fisher"
"""The best one-shot row of docs/methods.md on both models; DiEP's search from it is within noise, at many times the cost."""
DEFAULT_MERGE_METHOD = "ream"


def methods_of(kind: str) -> tuple[str, ...]:
    """Names of all methods of a kind, in the order of the table."""
    return tuple(name for name, method in METHODS.items() if method.kind == kind)
