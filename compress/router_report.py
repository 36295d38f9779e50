"""What a teacher's routers know beside the experts that they choose, and how far student-aware routing has moved them.

Every Expert Matters: its figure 1 is the share of the gate's probability on experts that are not chosen, figure 5 the KL
divergence between the old and the new router, both by layer.

Shape suffixes: T tokens, N experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.instructions import Example
from compress.responses import batch_of
from engine.architectures import router_tensors
from engine.experts import router_logits
from engine.model import Decoder, own_routing, routed_by
from engine.routing import Selection, softmax


@dataclass(frozen=True)
class RouterReport:
    """Means over tokens, by decoder layer."""

    unselected: dict[int, float]
    """Probability on experts that the model's own rule does not choose, by the old router."""
    moved: dict[int, float]
    """KL(old ‖ new) in nats, on the same inputs."""


def old_routers(decoder: Decoder) -> dict[int, list[Tensor]]:
    """Copies of what a layer's logits are made of: the router's matrix and, of a gate network, its first layer."""
    layers = zip(decoder.config.moe_layers, decoder.moe_blocks, strict=True)
    tensors = {index: (block.router_ND, block.gate_hidden_HD) for index, block in layers}
    return {index: [own.detach().clone() for own in both if own is not None] for index, both in tensors.items()}


@torch.no_grad()
def router_report(
    decoder: Decoder, old: Mapping[int, Sequence[Tensor]], examples: Sequence[Example], group_size: int
) -> RouterReport:
    """Of the decoder as it is now, by its own rule, on some examples; `old`: what `old_routers` gave before."""
    totals: dict[int, list[float]] = {index: [0.0, 0.0] for index in decoder.config.moe_layers}
    real_T, tokens = torch.empty(0), 0

    def watch(index: int, x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        moe = decoder.config.layers[index].moe
        assert moe is not None and len(old[index]) == len(router_tensors(decoder.config, index))
        before_TN = softmax(router_logits(x_TD[real_T], *old[index]).double()).log()
        chosen_TK = own_routing(moe)(before_TN).experts
        totals[index][0] += float((1.0 - before_TN.exp().gather(1, chosen_TK).sum(1)).sum())
        totals[index][1] += float((before_TN.exp() * (before_TN - softmax(logits_TN[real_T].double()).log())).sum())

    for index, block in zip(decoder.config.moe_layers, decoder.moe_blocks, strict=True):
        block.observer = lambda x, logits, selection, index=index: watch(index, x, logits, selection)
    rules = [own_routing(layer.moe) for layer in decoder.config.layers if layer.moe is not None]
    for start in range(0, len(examples), group_size):
        side = batch_of([examples[place] for place in range(start, min(start + group_size, len(examples)))])
        real_T = side.real_BL.flatten().to(decoder.embedding_VD.device)
        tokens += int(real_T.sum())
        with routed_by(decoder, rules):
            decoder.hidden_states(side.tokens_BL.to(decoder.embedding_VD.device))
    for block in decoder.moe_blocks:
        block.observer = None
    unselected, moved = ({index: own[place] / tokens for index, own in totals.items()} for place in range(2))
    return RouterReport(unselected, moved)
