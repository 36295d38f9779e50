"""The correction after the refit: what is left of each layer's error, fitted on the smaller model's own hidden states.

The refit of narrowed experts (closed_form.py) sees the hidden states of the full model, one FFN at a time. In the smaller
model the layers before have already changed them, and where whole experts left or were merged, tokens use other experts.
So both models go through the text together, layer by layer. With z_t the output of a layer of the full model and z′_t that
of the smaller one, r_t = z_t − z′_t is fitted by one FFN after the other:

    ΔD = argmin Σ_t ‖r_t − w_t·ΔD·h_{t,K}‖² + ρ̄·‖ΔD‖²,    D′ ← D′ + ΔD,    r_t ← r_t − w_t·ΔD·h_{t,K}

over the tokens t that use the FFN, with their hidden units h and weights w in the smaller model (Gauss–Seidel, one sweep).
ρ is chosen for each FFN on sequences that were not fitted; where no ρ makes their error smaller, D′ stays as it is. The idea
of targets from the full model and inputs from the smaller one is that of GPTAQ for rounding (Li et al. 2025, arXiv
2504.02692).

Shape suffixes: S sequences, L positions, D hidden size, K units that stay, R tokens of one FFN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.ffn_inputs import Batch, FfnInputs, Text
from calibrate.unit_statistics import PARTS, WIDEST_GRAM
from compress.methods.inputs import MethodRun
from compress.methods.least_squares import DEFAULT_RIDGE, Equations, NormalEquations, SampledEquations, best_ridge, changes
from compress.methods.unit_criterion import include_of
from compress.plans.apply import planned_tensors
from compress.plans.plan import Plan
from compress.refit.narrowed import CorrectedFfn, corrected_ffns
from compress.refit.stored import mapped_tensors
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert
from engine.decoder.model import DecoderLayer
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.files.state_file import write_state
from engine.passes import heap, processes
from engine.passes.activations import Activations, Shelf, closed_on_error
from engine.passes.streaming import embed, layer_positions, one_layer

MODELS = ("full", "small")
TOGETHER = 6
"""Hidden states of the text that are held at a time: both models' before and after a layer, inputs and residuals."""


@dataclass
class Corrected:
    """The corrected projections of a plan's result."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name, memory-mapped, in the dtype of the weights."""
    drift_before: list[float | None] = field(default_factory=list)
    drift: list[float | None] = field(default_factory=list)
    """Share of the mean square of a layer's output by which the smaller model's differs on held-out sequences, before and
    after the layer's correction, for each layer with corrected FFNs; None without such sequences."""


def held_bytes(config: DecoderConfig, include: tuple[str, ...], itemsize: int) -> int:
    """Return the most bytes that a correction holds besides a layer of the full model and a batch: a layer of the smaller
    model, and the matrices of one FFN.
    """
    matrices = 3 * 8 * min(WIDEST_GRAM, config.widest_ffn(include)) ** 2
    return max(map(sum, config.ffn_widths(include).values())) * 3 * config.hidden_size * itemsize + matrices


def check_correctable(config: DecoderConfig) -> None:
    """Raise OptionError for a model whose layers norm the outputs of their FFNs, which no down projection can make up."""
    if config.output_norms:
        raise OptionError(
            f"a {config.architecture.model_type} norms the outputs of its experts, so that what a layer lacks is no linear "
            "function of their down projections; leave out --correct"
        )


def check_width(config: DecoderConfig) -> None:
    """Raise OptionError for whole experts that are too wide to be corrected."""
    if (widest := config.widest_ffn()) > WIDEST_GRAM:
        raise OptionError(
            f"experts have {widest} hidden units, and a correction takes at most {WIDEST_GRAM}; leave out --correct"
        )


@torch.no_grad()
def corrected(run: MethodRun, plan: Plan, fitted: Mapping[str, Tensor]) -> Corrected:
    """Return the correction of a plan's result. fitted: the refitted projections, by name.

    An interrupted correction resumes at its layer. FFNs that keep more than WIDEST_GRAM units stay as they are.
    """
    checkpoint, dtype, device = run.prepared.checkpoint, run.prepared.dtype, run.options.device
    tokens_SL, budget = run.prepared.tokens_SL, run.memory_budget
    config, source = planned_tensors(plan, checkpoint, dtype, device, replaced=fitted)
    fitted_ffns, include = corrected_ffns(plan, checkpoint.config), include_of(run)
    rows = processes.own_rows(*tokens_SL.shape, budget=budget)
    text, directory = Text(rows, tokens_SL.shape[1]), run.work.path / "correction"
    directory.mkdir(parents=True, exist_ok=True)
    own = processes.own_directory(directory, rows)
    shelf = Shelf(own, (text.sequences, text.length, config.hidden_size), dtype, TOGETHER, budget)
    first, states = _begun(run, shelf, tokens_SL[rows])
    positions = layer_positions(checkpoint, tokens_SL, dtype, device)
    batches = list(budget.batches(text.sequences, text.length))
    result = Corrected()
    for index in run.bar("correcting (layers)")(range(first, len(config.layers))):
        after = {name: shelf.begin(f"{name}-{index + 1}") for name in MODELS}
        with closed_on_error(*states.values(), *after.values()):
            with one_layer(checkpoint, index, dtype, device, budget) as layer:
                for part in batches:
                    after["full"][part] = layer(states["full"][part].to(device), positions)
                del layer
            small = DecoderLayer(config, index, source)
            budget.relieve_between_experts(small, Expert, checkpoint.release)
            inputs = None
            if index in fitted_ffns and small.feed_forward is not None:
                inputs = FfnInputs(
                    small.feed_forward,
                    text,
                    dtype,
                    include=include,
                    together=TOGETHER,
                    budget=budget,
                    release=checkpoint.release,
                )
            for part in batches:
                after["small"][part] = small(states["small"][part].to(device), positions)
            if inputs is not None:
                inputs.stop()
                layer_correction = _LayerCorrection(run, small, inputs, fitted_ffns[index], after)
                changed = layer_correction.solve()
                _save(directory, index, changed, layer_correction.drift_before, layer_correction.drift())
                layer_correction.close()
                inputs.close()
            del small, inputs
            for name in MODELS:
                shelf.finish(f"{name}-{index + 1}")
            processes.wait()  # all processes resume from one layer: none drops an input that another may need
            for name in MODELS:
                shelf.drop(f"{name}-{index}", states[name])
            states = after
            checkpoint.release()
            heap.give_back()
    for activations in states.values():
        activations.close()
    for index in sorted(fitted_ffns):
        _read(checkpoint, directory, index, result)
    return result


def _begun(run: MethodRun, shelf: Shelf, own_SL: Tensor) -> tuple[int, dict[str, Activations]]:
    """Return the layer at which the correction begins or resumes, and the hidden states of both models before it."""
    layers = len(run.prepared.checkpoint.config.layers)
    own = next((i for i in reversed(range(layers + 1)) if all(shelf.has(f"{name}-{i}") for name in MODELS)), -1)
    first = int(processes.smallest(own))
    if first >= 0:
        found = {name: shelf.find(f"{name}-{first}") for name in MODELS}
        return first, {name: states for name, states in found.items() if states is not None}
    states = {name: shelf.begin(f"{name}-0") for name in MODELS}
    for name in MODELS:
        embed(run.prepared.checkpoint, own_SL, states[name], run.options.device, run.memory_budget)
        shelf.finish(f"{name}-0")
    return 0, states


class _LayerCorrection:
    """Fits the residuals of one layer."""

    def __init__(
        self,
        run: MethodRun,
        layer: DecoderLayer,
        inputs: FfnInputs,
        networks: list[CorrectedFfn],
        after: Mapping[str, Activations],
    ) -> None:
        self.run, self.layer, self.inputs, self.networks, self.after = run, layer, inputs, networks, after
        shape = (inputs.text.sequences, inputs.text.length, after["full"].shape[-1])
        self.residuals = Activations(shape, torch.float32, together=TOGETHER, budget=run.memory_budget)
        for batch in inputs.batches():
            self.residuals[batch.rows] = after["full"][batch.rows].float() - after["small"][batch.rows].float()
        self.drift_before = self.drift()

    def close(self) -> None:
        """Free the memory, or close the file."""
        self.residuals.close()

    def drift(self) -> float | None:
        """Return the share of the full model's mean square by which the smaller model's output differs, held out."""
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in self.inputs.batches():
            full, small = (self.after[name][batch.rows].flatten(0, 1)[batch.is_held_T].double() for name in MODELS)
            sums += torch.stack([(full - small).square().sum(), full.square().sum()])
        difference, whole = processes.added_up(sums.tolist())
        return difference / whole if whole else None

    def solve(self) -> dict[str, Tensor]:
        """Correct one FFN after the other; return the down projections that changed, by name in the result.

        The smaller model's output is then set to the full model's output minus the residuals that are left.
        """
        changed = {}
        for network in self.networks:
            expert: Any = self.inputs.networks[network.number]
            if expert.width > WIDEST_GRAM or (delta_DK := self._fitted(network.number)) is None:
                continue
            before_DK = expert.down_DF.data
            stored_DK = (before_DK.float().cpu() + delta_DK).to(self.run.prepared.checkpoint.model_dtype)
            expert.down_DF.data = stored_DK.to(before_DK)
            changed[network.name] = stored_DK
            self._subtract(network.number, stored_DK.float() - before_DK.float().cpu())
        for batch in self.inputs.batches() if changed else ():
            corrected = self.after["full"][batch.rows].float() - self.residuals[batch.rows]
            self.after["small"][batch.rows] = corrected.to(self.after["small"].dtype)
        return changed

    def _fitted(self, number: int) -> Tensor | None:
        """Return ΔD [D, K]; None where none makes the error on held-out sequences smaller, or no token uses the FFN."""
        width, hidden = self.inputs.networks[number].width, self.residuals.shape[-1]
        are_few = sum(processes.all_told(self.inputs.count(number))) < width
        parts: list[_Rows | _Products] = [_Rows(width, hidden) if are_few else _Products(width, hidden) for _ in PARTS]
        for batch in self.inputs.batches():
            a_RK, token_R = self._weighted(batch, number)
            r_RD, is_held_R = self.residuals[batch.rows].flatten(0, 1)[token_R], batch.is_held_T[token_R]
            for part, is_part_R in zip(parts, (~is_held_R, is_held_R), strict=True):
                part.add(a_RK[is_part_R], r_RD[is_part_R])
        fit, held = (part.equations() for part in parts)
        ridge = _chosen_ridge(fit, held, self.run.options.refit.ridge)
        return None if ridge is None else fit.joined(held).solved(ridge).float()

    def _subtract(self, number: int, delta_DK: Tensor) -> None:
        for batch in self.inputs.batches():
            a_RK, token_R = self._weighted(batch, number)
            residuals = self.residuals[batch.rows].flatten(0, 1)
            residuals.index_add_(0, token_R, a_RK @ delta_DK.T, alpha=-1.0)
            self.residuals[batch.rows] = residuals.view(-1, *self.residuals.shape[1:])

    def _weighted(self, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        """Return w·h [R, K] of an FFN in a batch, and its tokens [R]."""
        use = self.inputs.use(batch, number)
        return self.layer.feed_forward_weight * use.weight_R[:, None] * use.h_RF, use.token_R


class _Products:
    """The problem of an FFN with many tokens, as sums of products."""

    def __init__(self, width: int, hidden: int) -> None:
        self.gram_KK = torch.zeros(width, width, dtype=torch.float64)
        self.right_KD = torch.zeros(width, hidden, dtype=torch.float64)

    def add(self, a_RK: Tensor, r_RD: Tensor) -> None:
        """Add some tokens."""
        self.gram_KK += a_RK.T @ a_RK
        self.right_KD += a_RK.T @ r_RD

    def equations(self) -> Equations:
        """Return the problem over the tokens of all processes."""
        processes.add_up([self.gram_KK, self.right_KD])
        return NormalEquations.of(self.gram_KK, self.right_KD)


class _Rows:
    """The problem of an FFN with fewer tokens than units, as the tokens themselves."""

    def __init__(self, width: int, hidden: int) -> None:
        self.a, self.r = [torch.zeros(0, width)], [torch.zeros(0, hidden)]

    def add(self, a_RK: Tensor, r_RD: Tensor) -> None:
        """Add some tokens."""
        self.a.append(a_RK)
        self.r.append(r_RD)

    def equations(self) -> Equations:
        """Return the problem over the tokens of all processes."""
        a_RK, r_RD = (processes.gathered(torch.cat(pieces)).double() for pieces in (self.a, self.r))
        return SampledEquations.of(a_RK, r_RD)


def _chosen_ridge(fit: Equations, held: Equations, given: float | None) -> float | None:
    """Return ρ; None where no correction is made."""
    if not fit.scale:
        return None
    if given is not None or not held.scale:
        return DEFAULT_RIDGE if given is None else given
    best, changed = best_ridge(lambda ridges: changes(fit, held, ridges))
    return best if changed < 0.0 else None


def _path(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer}.safetensors"


def _save(directory: Path, layer: int, changed: Mapping[str, Tensor], before: float | None, after: float | None) -> None:
    """Write a layer's corrected projections. A state without any tensor cannot be written, so one is always there."""
    if processes.is_first():
        shares = torch.tensor([-1.0 if share is None else share for share in (before, after)], dtype=torch.float64)
        write_state(_path(directory, layer), {**changed, "drift": shares}, {}, "the correction")


def _read(checkpoint: Checkpoint, directory: Path, layer: int, result: Corrected) -> None:
    found = mapped_tensors(checkpoint, _path(directory, layer))
    before, after = (None if share < 0.0 else share for share in found.pop("drift").tolist())
    result.drift_before.append(before)
    result.drift.append(after)
    result.tensors |= found
