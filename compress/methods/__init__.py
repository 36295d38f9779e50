"""Pruning and merging methods: each file implements one, with its paper's formula in its first lines.

A method returns a Plan, which `compress/plans` executes; nothing here writes a model. This file holds the table of all
methods and imports none of them, so that the command line lists their names without torch. Start with `saliency.py`, the
simplest methods; `criterion.py` defines the functions that a method provides.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One row of METHODS: every fact about a method that is known without running it."""

    kind: str
    """"prune" for methods that remove experts, "merge" for methods that combine them."""
    code: str
    """"compress.methods.module:NAME" of the method's Criterion (criterion.py), which is imported when a run needs it."""
    scopes: tuple[str, ...] = ("global", "layer", "uniform")
    """Scopes of `Budget` that the method supports; the first one is the default."""
    needs_gradients: bool = False
    """Whether the method needs gradients, and with them the whole model in memory unless layers are read one by one
    (`loaded_decoder`). Other methods always read layer by layer and gain nothing from sharding.
    """
    needs_states: bool = False
    """Whether the method compares the hidden states before the output head, which some models that transformers runs do not
    show.
    """
    granularity: str = "expert"
    """The method scores whole experts, or each hidden "unit" of an expert."""
    keeps_groups: bool = True
    """Whether scope "uniform" can keep equally many experts of each group of a layer."""


METHODS: dict[str, Method] = {
    "diep": Method("prune", "compress.methods.diep:DIEP", needs_gradients=True, needs_states=True),
    "naee": Method("prune", "compress.methods.naee:NAEE", scopes=("layer", "uniform"), keeps_groups=False),
    "frequency": Method("prune", "compress.methods.saliency:FREQUENCY"),
    "probability": Method("prune", "compress.methods.saliency:PROBABILITY"),
    "reap": Method("prune", "compress.methods.saliency:REAP"),
    "man": Method("prune", "compress.methods.saliency:MAN"),
    "mc-moe": Method("prune", "compress.methods.saliency:MC_MOE"),
    "fisher": Method("prune", "compress.methods.gate_fisher:FISHER", needs_gradients=True),
    "taylor": Method("prune", "compress.methods.gate_taylor:TAYLOR", needs_gradients=True),
    "random": Method("prune", "compress.methods.random_scores:RANDOM"),
    "unit-magnitude": Method("prune", "compress.methods.unit_magnitude:UNIT_MAGNITUDE", granularity="unit"),
    "unit-fisher": Method("prune", "compress.methods.unit_fisher:UNIT_FISHER", needs_gradients=True, granularity="unit"),
    "unit-obs": Method("prune", "compress.methods.unit_obs:UNIT_OBS", needs_gradients=True, granularity="unit"),
    "m-smoe": Method("merge", "compress.methods.m_smoe:M_SMOE", scopes=("layer",)),
    "s-smoe": Method("merge", "compress.methods.s_smoe:S_SMOE", scopes=("layer",)),
    "hc-smoe": Method("merge", "compress.methods.hc_smoe:HC_SMOE", scopes=("layer",)),
    "ream": Method("merge", "compress.methods.ream:REAM", scopes=("layer",)),
}
DEFAULT_METHODS = {"expert": "fisher", "unit": "unit-fisher", "both": "unit-fisher"}
"""The method for each choice of `--granularity`: the best one-shot methods on both models of docs/methods.md and
docs/hidden-units.md. For whole experts, DiEP's search from gate Fisher costs many times as much and is within noise of it.
"""
DEFAULT_GRANULARITY = "unit"
"""`--granularity` of `compress prune` by default: units cost a fraction of what whole experts cost in quality."""
DEFAULT_MERGE_METHOD = "ream"


def methods_of(kind: str) -> tuple[str, ...]:
    """Return the names of all methods of a kind, in the order of the table."""
    return tuple(name for name, method in METHODS.items() if method.kind == kind)
