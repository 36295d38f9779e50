"""Report on a teacher's routers: probability on unselected experts, and the change by student-aware routing.

Figure 1 of Every Expert Matters shows the share of the gate's probability on experts that are not selected, and figure 5
the KL divergence between the old and the new router, both by layer.

Shape suffixes: T tokens, N experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from calibrate.instructions import Example
from compress.distillation.responses import batch_of
from compress.report import plots
from compress.report.pictures import Picture, save
from engine.decoder.experts import router_logits
from engine.decoder.model import Decoder, routed_by
from engine.decoder.routing import NO_EXPERT, Routing, Selection, probabilities


@dataclass(frozen=True)
class RouterReport:
    """Means over tokens, by decoder layer."""

    unselected: dict[int, float]
    """The old router's probability on experts that the model's own rule does not select."""
    moved: dict[int, float]
    """KL(old ‖ new) in nats, on equal inputs."""


@dataclass(frozen=True)
class OldRouter:
    """A layer's router before its training."""

    tensors: tuple[Tensor, Tensor | None, Tensor | None]
    """Tensors from which the logits are computed: the matrix, the first layer of a gate network, a bias."""
    rule: Routing
    """The model's own Routing."""


def old_routers(decoder: Decoder) -> dict[int, OldRouter]:
    """Return copies of a decoder's routers by layer; its blocks must still have the model's own rules."""
    layers = zip(decoder.config.moe_layers, decoder.moe_blocks, strict=True)
    return {
        index: OldRouter((_copy(block.router_ND), _copied(block.gate_hidden_HD), _copied(block.logit_bias_N)), block.routing)
        for index, block in layers
    }


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _copy(tensor)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@torch.no_grad()
def router_report(
    decoder: Decoder, old: Mapping[int, OldRouter], examples: Sequence[Example], group_size: int
) -> RouterReport:
    """Return the report for the decoder's current routers, under its own rules, on some examples.

    `old`: the result of `old_routers` before the training.
    """
    totals: dict[int, list[float]] = {index: [0.0, 0.0] for index in decoder.config.moe_layers}
    real_T, tokens = torch.empty(0), 0

    def watch(index: int, x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        tensors, rule = old[index].tensors, old[index].rule
        old_TN = router_logits(x_TD[real_T], *tensors).double()
        before_TN, now_TN = probabilities(rule, old_TN), probabilities(rule, logits_TN[real_T].double())
        chosen_TK = rule(old_TN).experts
        chosen_probability_TK = before_TN.gather(1, chosen_TK.clamp_min(0)).masked_fill(chosen_TK == NO_EXPERT, 0.0)
        totals[index][0] += float((1.0 - chosen_probability_TK.sum(1)).sum())
        totals[index][1] += float((before_TN * (before_TN.log() - now_TN.log())).sum())

    for index, block in zip(decoder.config.moe_layers, decoder.moe_blocks, strict=True):
        block.observer = lambda x, logits, selection, index=index: watch(index, x, logits, selection)
    rules = [old[index].rule for index in decoder.config.moe_layers]
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


def draw_routers(directory: Path, label: str, report: RouterReport | None, moved: bool) -> list[Picture]:
    """Draw the probability on unselected experts and, for trained routers, their divergence from the old routers."""
    if report is None:
        return []
    panels = {"probability on experts not chosen": report.unselected}
    about = "Share of the gate's probability on experts that are not chosen, the mean over tokens, by layer."
    if moved:
        panels["KL(old ‖ new router), nats"] = report.moved
        about += " Beside it, how far the student's answers have moved each layer's router."
    figure = plots.by_layer(f"Routers of {plots.short(label)}", panels)
    return [save(directory, "routers", figure, "Routers of the teacher", about)]
