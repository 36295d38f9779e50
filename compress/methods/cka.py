"""Merging of removed experts into the kept ones by CKA (Bai et al., DiEP §A.5).

Shape suffixes: N routed experts of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calibrate.statistics import LayerStatistics
from compress.methods.groups import Group, joined


def cka_groups(layer: LayerStatistics, kept: Sequence[int]) -> list[Group]:
    """Return groups in which each pruned expert joins its most similar kept expert c (DiEP §A.5).

    Similarity ρ is the RBF CKA of outputs, the kernel of the paper's figures. Weights in a group are softmax(ρ(c, ·)) with
    ρ(c, c) = 1. The paper's "normalized CKA" is read as CKA itself, which is normalized HSIC. The rows of pruned experts
    leave the router.
    """
    similarity_NN = layer.rbf_cka.double()
    members = joined(similarity_NN, sorted(kept))
    return [
        Group(centre, dict(zip(group, similarity_NN[centre, group].softmax(0).tolist(), strict=True)))
        for centre, group in members.items()
    ]


REMOVED_EXPERTS: dict[str, Callable[[LayerStatistics, Sequence[int]], list[Group]] | None] = {
    "none": None,
    "cka": cka_groups,
}
"""Ways in which removed experts join the kept ones: one layer's statistics and its kept experts to groups.

None drops the removed experts.
"""
