"""Report on a teacher's routers: probability on unselected experts, and the change by student-aware routing.

Figure 1 of Every Expert Matters shows the share of the gate's probability on experts that are not selected, and figure 5
the KL divergence between the gates of the old and the new teacher, both by layer. In figure 5 each teacher computes its own
hidden states, so the divergence grows with depth: a changed gate changes the inputs of all later layers.

Shape suffixes: T tokens, N experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.instructions import Example
from compress.distillation.responses import ResponseBatch, batch_of
from compress.report import canvas, plots
from compress.report.pictures import Picture, save
from engine.decoder.experts import MoeBlock, router_logits
from engine.decoder.model import Decoder, routed_by
from engine.decoder.routing import NO_EXPERT, Routing, Selection, probabilities


@dataclass(frozen=True)
class RouterReport:
    """Means over tokens, by decoder layer."""

    unselected: dict[int, float]
    """The old router's probability on experts that the model's own rule does not select."""
    moved: dict[int, float]
    """KL(old ‖ new) in nats, on equal inputs."""
    drift: RouterDrift | None = None
    """Drift between the complete forward passes; None where the routers were not trained."""


@dataclass(frozen=True)
class RouterDrift:
    """KL(old ‖ new) in nats by decoder layer, where each teacher routes its own hidden states (figure 5)."""

    mean: dict[int, float]
    """Mean over tokens."""
    largest: dict[int, float]
    """Maximum over tokens."""


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
    """Return the report for the decoder's current routers, under its own rules, on some examples, without the drift.

    `old`: the result of `old_routers` before the training.
    """
    totals: dict[int, list[float]] = {index: [0.0, 0.0] for index in decoder.config.moe_layers}

    def watch(index: int, x_TD: Tensor, logits_TN: Tensor) -> None:
        rule, old_TN = old[index].rule, router_logits(x_TD, *old[index].tensors).double()
        before_TN, chosen_TK = probabilities(rule, old_TN), rule(old_TN).experts
        chosen_probability_TK = before_TN.gather(1, chosen_TK.clamp_min(0)).masked_fill(chosen_TK == NO_EXPERT, 0.0)
        totals[index][0] += float((1.0 - chosen_probability_TK.sum(1)).sum())
        totals[index][1] += float(_divergence(rule, old_TN, logits_TN.double()).sum())

    rules = [old[index].rule for index in decoder.config.moe_layers]
    tokens = 0
    for side in _batches(examples, group_size):
        tokens += int(side.real_BL.sum())
        _watch_routers(decoder, side, rules, watch)
    unselected, moved = ({index: own[place] / tokens for index, own in totals.items()} for place in range(2))
    return RouterReport(unselected, moved)


@torch.no_grad()
def router_drift(
    decoder: Decoder,
    old: Mapping[int, OldRouter],
    examples: Sequence[Example],
    group_size: int,
    gates: Sequence[Routing],
) -> RouterDrift:
    """Return how far the gates of the trained teacher are from those of the teacher before, over all tokens.

    Both teachers run completely, with the experts that `gates` choose. The paper does not say which experts its figure 5
    uses; with those of the recipe, the figure is about the passes that taught the student.
    """
    totals, largest = (dict.fromkeys(decoder.config.moe_layers, 0.0) for _ in range(2))
    before: dict[int, Tensor] = {}

    def keep(index: int, x_TD: Tensor, logits_TN: Tensor) -> None:
        before[index] = logits_TN

    def compare(index: int, x_TD: Tensor, logits_TN: Tensor) -> None:
        divergence_T = _divergence(old[index].rule, before.pop(index).double(), logits_TN.double())
        totals[index] += float(divergence_T.sum())
        largest[index] = max(largest[index], float(divergence_T.max()))

    tokens = 0
    for side in _batches(examples, group_size):
        tokens += int(side.real_BL.sum())
        with _old_again(decoder, old):
            _watch_routers(decoder, side, gates, keep)
        _watch_routers(decoder, side, gates, compare)
    return RouterDrift({index: total / tokens for index, total in totals.items()}, largest)


def _batches(examples: Sequence[Example], group_size: int) -> Iterator[ResponseBatch]:
    for start in range(0, len(examples), group_size):
        yield batch_of([examples[place] for place in range(start, min(start + group_size, len(examples)))])


def _divergence(rule: Routing, old_TN: Tensor, new_TN: Tensor) -> Tensor:
    """Return KL(old ‖ new) of the gates' probabilities, [T], in nats."""
    before_TN, now_TN = probabilities(rule, old_TN), probabilities(rule, new_TN)
    return (before_TN * (before_TN.log() - now_TN.log())).sum(1)


def _watch_routers(
    decoder: Decoder, side: ResponseBatch, gates: Sequence[Routing], watch: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Call `watch` with the layer, the router's inputs [T, D] and its logits [T, N] in a forward pass, without padding."""
    device = decoder.embedding_VD.device
    real_T = side.real_BL.flatten().to(device)

    def observe(index: int, x_TD: Tensor, logits_TN: Tensor) -> None:
        watch(index, x_TD[real_T], logits_TN[real_T])

    def observer(index: int, block: MoeBlock) -> Callable[..., None]:
        given: list[tuple[Any, ...]] = []
        hooks.append(block.register_forward_pre_hook(lambda _, arguments: given.append(arguments)))

        def see(x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
            _, *others = given.pop()
            observe(index, block.router_input(x_TD, *others[1:2]), logits_TN)

        return see

    hooks: list[Any] = []
    for index, block in zip(decoder.config.moe_layers, decoder.moe_blocks, strict=True):
        block.observer = observer(index, block)
    with routed_by(decoder, gates):
        decoder.hidden_states(side.tokens_BL.to(device))
    for block, hook in zip(decoder.moe_blocks, hooks, strict=True):
        block.observer = None
        hook.remove()


@contextmanager
def _old_again(decoder: Decoder, old: Mapping[int, OldRouter]) -> Iterator[None]:
    """Give the decoder its old routers during the body."""
    pairs = [
        (trained, before)
        for index, block in zip(decoder.config.moe_layers, decoder.moe_blocks, strict=True)
        for trained, before in zip(
            (block.router_ND, block.gate_hidden_HD, block.logit_bias_N), old[index].tensors, strict=True
        )
        if trained is not None and before is not None
    ]
    new = [trained.data for trained, _ in pairs]
    for trained, before in pairs:
        trained.data = before
    try:
        yield
    finally:
        for (trained, _), own in zip(pairs, new, strict=True):
            trained.data = own


def draw_routers(directory: Path, label: str, report: RouterReport | None) -> list[Picture]:
    """Draw the probability on unselected experts and, for trained routers, how far they have moved."""
    if report is None:
        return []
    panels = {"probability on experts not chosen": report.unselected}
    about = "Share of the gate's probability on experts that are not chosen, the mean over tokens, by layer."
    if report.drift is None:
        return [_drawn(directory, "routers", label, panels, "Routers of the teacher", about)]
    panels["KL(old ‖ new router), nats"] = report.moved
    about += " Beside it, how far the student's answers have moved each layer's router, on the same inputs."
    drifts = {"mean over tokens, nats": report.drift.mean, "maximum over tokens, nats": report.drift.largest}
    whole = (
        "KL(old ‖ new) of the gate's probabilities, by layer, where the teacher before and after training each route "
        "their own hidden states."
    )
    return [
        _drawn(directory, "routers", label, panels, "Routers of the teacher", about),
        _drawn(directory, "router_drift", label, drifts, "Drift of the teacher's routers", whole),
    ]


def _drawn(
    directory: Path, name: str, label: str, panels: Mapping[str, Mapping[int, float]], title: str, about: str
) -> Picture:
    return save(directory, name, plots.by_layer(f"{title}: {canvas.short(label)}", panels), title, about)
