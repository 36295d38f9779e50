"""Student-aware routing (Every Expert Matters, SAR): the teacher's router takes a step before each step of the student.

    L_SAR = KL(p ‖ q) + β · L_b          L_b = Σ_layers CV(m)² + CV(P)²

p is the prediction of the teacher with all experts; its gradient flows into router weights only. q is the student's
prediction, a constant. m counts the tokens that the teacher's own rule routes to each expert, and P sums the gate
probabilities; neither includes padding. A router with noise (routing.Noisy) applies the noise here, where it is trained,
and m and P include it.

Shape suffixes: T tokens, N experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.distillation.response_distillation import Responses, predictions
from compress.training.divergences import forward_kl, weighted_divergence
from compress.training.training import Batch, Trainer
from engine.decoder.model import Decoder, gate_of
from engine.decoder.parameters import parameters_on_disk
from engine.decoder.routing import NO_EXPERT, AllExperts, Noisy, Routing, Selection, factor_of, probabilities
from engine.families.tensor_shapes import noise_tensors, router_tensors


def router_parameters(teacher: Decoder) -> dict[str, nn.Parameter]:
    """Return the parameters that SAR trains, by name on disk: all from which router logits and their noise are computed."""
    own, config = parameters_on_disk(teacher), teacher.config
    layers = [{**router_tensors(config, layer), **noise_tensors(config, layer)} for layer in config.moe_layers]
    return {name: own[name] for names in layers for name in names}


class RouterTrainer(Trainer):
    """A training whose time is counted as the router's."""

    loss: RouterLoss

    def gradients(self, step: int) -> dict[str, float]:
        """Compute gradients as the base class does."""
        with self.loss.responses.clock.of("router"):
            return super().gradients(step)

    def update(self, step: int) -> None:
        """Update parameters as the base class does."""
        with self.loss.responses.clock.of("router"):
            super().update(step)


class RouterLoss:
    """KL(p ‖ q) + β · L_b of the teacher's router on the student's responses (Every Expert Matters, SAR); q is constant."""

    def __init__(
        self,
        teacher: Decoder,
        student: Decoder,
        responses: Responses,
        balance: float,
        temperature: float = 1.0,
    ) -> None:
        """Create the loss. balance: β.

        A call leaves its gates in the teacher, because the backward pass may recompute layers.
        """
        self.teacher, self.student, self.responses = teacher, student, responses
        self.balance, self.temperature = balance, temperature
        self._rules = [block.routing for block in teacher.moe_blocks]
        self._seen: dict[int, Tensor] = {}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Return the group's part of the mean over the step's sequences; L_b is averaged over groups."""
        side, sequences = self.responses(batch), len(batch.rows_B)
        weights_T = side.weights_BL[side.asked_BL].to(self.teacher.embedding_VD.device) / sequences
        with torch.no_grad():
            own = predictions(self.student, side)
        self._seen.clear()
        self._take_gates(batch.generator)
        taught = predictions(self.teacher, side)
        divergence = weighted_divergence(
            forward_kl, taught, own, weights_T, temperature=self.temperature, teacher_learns=True
        )
        balance = load_balance(self._rules, self._seen, side.real_BL.flatten())
        return {"divergence": divergence, "balance": self.balance * balance * len(batch.group_G) / sequences}

    def _take_gates(self, generator: torch.Generator) -> None:
        """Set gates that use all experts in every layer, with noise where the model has it."""
        layers = [layer.moe for layer in self.teacher.config.layers if layer.moe is not None]
        for place, (block, moe) in enumerate(zip(self.teacher.moe_blocks, layers, strict=True)):
            block.routing = Watched(AllExperts(factor_of(block.own_routing), gate_of(moe)), self._seen, place)
            if block.noise_ND is not None and moe.noise_epsilon is not None:
                seed = int(torch.randint(2**62, (), generator=generator))
                block.routing = Noisy(block.routing, block.noise_ND, moe.noise_epsilon, seed)


@dataclass(frozen=True)
class Watched:
    """A Routing that keeps its logits of the first call; later calls may be recomputation in the backward pass."""

    base: Routing
    seen: dict[int, Tensor]
    place: int

    def __call__(self, logits_TN: Tensor) -> Selection:
        self.seen.setdefault(self.place, logits_TN)
        return self.base(logits_TN)


def load_balance(rules: Sequence[Routing], logits: Mapping[int, Tensor], real_T: Tensor) -> Tensor:
    """Return L_b = CV(m)² + CV(P)², summed over layers. Only P has a gradient.

    rules: the routing of each layer; logits: [T, N] by index of the MoE layer; real_T: False at padding.
    """
    terms = []
    for place, logits_TN in logits.items():
        real_TN = logits_TN[real_T.to(logits_TN.device)]
        chosen = rules[place](real_TN.detach()).experts
        counts_N = torch.bincount(chosen[chosen != NO_EXPERT], minlength=real_TN.shape[1])
        gates_TN = probabilities(rules[place], real_TN)
        terms += [squared_variation(counts_N.float()), squared_variation(gates_TN.sum(0))]
    return torch.stack(terms).sum()


def squared_variation(values_N: Tensor) -> Tensor:
    """CV² = σ²/μ², where σ² is the mean squared distance from the mean."""
    return values_N.var(correction=0) / values_N.mean().square()
