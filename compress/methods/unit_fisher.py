"""Fisher information of hidden units: Σ over tokens of (h_f·∂L/∂h_f)².

L is the negative log-likelihood of the model's own samples over a sequence, as in gate Fisher (gate_gradients.py); the
square is taken for each token. One forward and one backward pass. The same pass sums up the squares of ∂L/∂y, the gradient
of the block's routed output, for the methods that weigh output errors by it.

Shape suffixes: B sequences of one batch, L positions, N experts, R tokens of one expert, T tokens, F expert width, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.methods.gate_gradients import Sums, gated, loaded_decoder, pass_over_text, sampled_loss
from compress.methods.inputs import MethodRun
from compress.methods.unit_criterion import UnitScores, include_of, unit_criterion
from engine.passes.layerwise import AnyDecoder, backward
from engine.passes.memory_budget import UNLIMITED, MemoryBudget


class UnitGradients(NamedTuple):
    """Sums of squared gradients by decoder layer index, over all tokens."""

    units: dict[int, list[Tensor]]
    """Σ (h·∂L/∂h)², [F] float64 for each FFN (DecoderConfig.ffn_widths)."""
    output: dict[int, Tensor]
    """Σ (∂L/∂y)², [D] float64."""


class _SquaredUse(torch.autograd.Function):
    """The identity of h. Its backward pass adds Σ (h·∂L/∂h)² to the gradient of a second input, which sums them up."""

    @staticmethod
    def forward(ctx: Any, h_RF: Tensor, sum_F: Tensor) -> Tensor:
        ctx.save_for_backward(h_RF)
        return h_RF.view_as(h_RF)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (h_RF,) = ctx.saved_tensors
        (gradient_RF,) = gradients
        return gradient_RF, (h_RF.float() * gradient_RF.float()).double().square().sum(0)


class _SquaredGradient(torch.autograd.Function):
    """The identity of y. Its backward pass adds Σ (∂L/∂y)² to the gradient of a second input."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, sum_D: Tensor) -> Tensor:
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient_TD,) = gradients
        return gradient_TD, gradient_TD.double().square().sum(0)


class _Observer:
    """Sums up the squares of one layer."""

    def __init__(self, units: list[Tensor], output_D: Tensor) -> None:
        self._units, self._output_D = units, output_D

    def units(self, number: int, h_RF: Tensor) -> Tensor:
        """Return h, whose backward pass is observed if the FFN is included."""
        if number >= len(self._units):
            return h_RF
        observed: Tensor = _SquaredUse.apply(h_RF, self._units[number])  # type: ignore[no-untyped-call]
        return observed

    def output(self, y_TD: Tensor) -> Tensor:
        """Return y, whose backward pass is observed."""
        observed: Tensor = _SquaredGradient.apply(y_TD, self._output_D)  # type: ignore[no-untyped-call]
        return observed


def unit_gradients(
    decoder: AnyDecoder,
    tokens_SL: Tensor,
    seed: int = 0,
    *,
    include: Collection[str] = (),
    state_path: Path | None = None,
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[slice]], Iterable[slice]] = iter,
) -> UnitGradients:
    """Return the sums over the text.

    include: "shared" or "dense", for the FFNs that every token uses. state_path: where the sums are saved, so that an
    interrupted pass continues from there.
    """
    config, device = decoder.config, decoder.device
    widths = config.ffn_widths(include)
    names = {layer: [f"units.{layer}.{number}" for number in range(len(own))] for layer, own in widths.items()}
    shapes = {name: width for layer in widths for name, width in zip(names[layer], widths[layer], strict=True)}
    shapes |= {f"output.{layer}": config.hidden_size for layer in widths}
    sums = Sums({name: torch.zeros(size, dtype=torch.float64) for name, size in shapes.items()}, seed, device)

    def add(tokens_BL: Tensor, directory: Path | None) -> None:
        leaves = {name: zero.clone().to(device).requires_grad_() for name, zero in sums.tensors.items()}
        observers = {
            layer: _Observer([leaves[name] for name in own], leaves[f"output.{layer}"]) for layer, own in names.items()
        }
        backward(
            decoder,
            tokens_BL,
            gated(decoder, len(tokens_BL))[0],
            sampled_loss(decoder, tokens_BL, sums.generator),
            trained=leaves,
            observe=observers,
            generator=sums.generator,
            directory=directory,
            budget=budget,
        )
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                sums.tensors[name] += leaf.grad.cpu()

    pass_over_text(decoder, tokens_SL, sums, add, own_samples=True, state_path=state_path, budget=budget, progress=progress)
    units = {layer: [sums.tensors[name] for name in own] for layer, own in names.items()}
    return UnitGradients(units, {layer: sums.tensors[f"output.{layer}"] for layer in widths})


def gradients_of(run: MethodRun, sequences: int | None = None) -> UnitGradients:
    """Return the sums of a run, which are computed once for all runs on this model and text.

    sequences: how many of the calibration text's sequences are read, at most; None for all.
    """
    tokens_SL, include = run.prepared.tokens_SL[:sequences], include_of(run)
    name = "-".join(["unit-gradients", str(len(tokens_SL)), *include])

    def compute() -> dict[str, Any]:
        found = unit_gradients(
            loaded_decoder(run),
            tokens_SL,
            run.options.diep.seed,
            include=include,
            state_path=run.work.shared / f"{name}.safetensors",
            budget=run.memory_budget,
            progress=run.bar("gradients of hidden units (batches)"),
        )
        units = {str(layer): [own.tolist() for own in experts] for layer, experts in found.units.items()}
        return {"units": units, "output": {str(layer): own.tolist() for layer, own in found.output.items()}}

    values = run.work.once(name, compute, shared=True)

    def tensor(row: list[float]) -> Tensor:
        return torch.tensor(row, dtype=torch.float64)

    units = {int(layer): [tensor(own) for own in experts] for layer, experts in values["units"].items()}
    return UnitGradients(units, {int(layer): tensor(own) for layer, own in values["output"].items()})


def fisher_scores(run: MethodRun) -> UnitScores:
    """Return the score of each unit, [F] float64 for each FFN, by decoder layer index."""
    return gradients_of(run).units


UNIT_FISHER = unit_criterion(fisher_scores, gradients=True)
