"""The cost of rounding each expert's matrices to each width, in one streaming pass over text.

An expert's matrices are rounded with error feedback (compress/rounding/gptq.py) to every width in turn, and its outputs on
the tokens that chose it are compared with those of the unrounded expert. With Δy the change of an output, w the weight by
which the block multiplies it, and G the mean square of ∂L/∂y in each dimension of the block's output (unit_fisher.py), the
loss grows by

    cost = ½ · Σ_t Σ_d G_d · w_t² · Δy_td² / T      in nats per token

for T tokens of the text: the second-order term of the KL divergence between the model's predictions before and after, with
the Fisher matrix of the block's output taken as diagonal and tokens as independent. The matrices that read the layer's input
(gate and up) are rounded together, and the down projection by itself; their costs are added.

Shape suffixes: T tokens, N experts, B widths, R tokens of one expert, D hidden, F width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from calibrate.ffn_inputs import FfnInputs, Text, groups_within
from compress.rounding.feedback_pass import NetworkMoments, mean_moment, most_moment_bytes, network_moments
from compress.rounding.gptq import Feedback, factoring_bytes
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import DecoderLayer
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.kernels.linear import linear
from engine.kernels.stored.quantized_weight import as_tensor
from engine.kernels.stored.scheme import Scheme
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import stream_layers

READERS, DOWN = PARTS = ("readers", "down")
"""The parts of an expert that have a width each: the matrices that read the layer's input, and the down projection."""


def rounding_costs(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    weights: Mapping[int, Tensor],
    schemes: Sequence[Scheme],
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[int, dict[str, Tensor]]:
    """Return the costs [N, B] of each part (PARTS), float64, by decoder layer index.

    weights: G of each MoE layer, [D]. directory: where the costs are kept, so that an interrupted pass resumes at its layer.
    """
    layers, text = checkpoint.config.moe_layers, Text(slice(0, len(tokens_SL)), tokens_SL.shape[1])
    if not schemes:
        counts = checkpoint.config.experts_by_layer
        return {layer: {part: torch.zeros(counts[layer], 0, dtype=torch.float64) for part in PARTS} for layer in layers}
    directory.mkdir(parents=True, exist_ok=True)

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None] | None:
        block = layer.feed_forward
        if not isinstance(block, MoeBlock):
            return None
        inputs = FfnInputs(block, text, dtype, budget=budget, release=checkpoint.release)
        return partial(_write, _path(directory, index), inputs, weights[index], schemes, checkpoint.model_dtype, budget)

    if not _path(directory, layers[-1]).is_file():
        stream_layers(
            *(checkpoint, tokens_SL, visit),
            dtype=dtype,
            device=device,
            budget=budget,
            directory=directory / "pass",
            progress=progress,
        ).close()
    return {layer: _read(_path(directory, layer)) for layer in layers}


def _path(directory: Path, layer: int) -> Path:
    return directory / f"rounding-{layer}.safetensors"


def _read(path: Path) -> dict[str, Tensor]:
    with SafetensorsFile(path) as file:
        check_digest(file)
        return {part: file.tensor(part).clone() for part in PARTS}


def _write(
    path: Path,
    inputs: FfnInputs,
    weight_D: Tensor,
    schemes: Sequence[Scheme],
    scale_dtype: torch.dtype,
    budget: MemoryBudget,
) -> None:
    """Measure the experts of one layer, and write their costs."""
    inputs.stop()
    found = {part: torch.zeros(len(inputs.networks), len(schemes), dtype=torch.float64) for part in PARTS}
    for number, costs in _costs(inputs, weight_D, schemes, scale_dtype, budget):
        for part, cost_B in costs.items():
            found[part][number] = cost_B
    write_state(path, found, {}, "costs of rounding")
    inputs.close()


def _costs(
    inputs: FfnInputs, weight_D: Tensor, schemes: Sequence[Scheme], scale_dtype: torch.dtype, budget: MemoryBudget
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the number of each expert with the costs [B] of its parts."""
    mean_DD, tokens = mean_moment(inputs)
    sizes = [trial_bytes(network.hidden_size, network.width, len(schemes)) for network in inputs.networks]
    for group in groups_within(most_moment_bytes(budget), sizes):
        moments = network_moments(inputs, group)
        trials = {number: _Trials(own, mean_DD, schemes, scale_dtype) for number, own in moments.items()}
        for batch in inputs.batches():
            for number, trial in trials.items():
                trial.add(*inputs.used(batch, number)[:2], weight_D)
        for number, trial in trials.items():
            yield number, {part: 0.5 * sum_B / tokens for part, sum_B in trial.sums.items()}


def trial_bytes(hidden: int, width: int, widths: int) -> int:
    """Return the bytes that the trials of one expert hold: its moments while they are factored, and its matrices at each of
    some widths.

    hidden, width: its inputs and its hidden units.
    """
    return factoring_bytes(max(width, hidden)) + 8 * (width**2 + hidden**2) + 4 * widths * 3 * width * hidden


class _Trials:
    """One expert, rounded to each width, and the squared errors of its outputs."""

    def __init__(
        self, moments: NetworkMoments, mean_DD: Tensor, schemes: Sequence[Scheme], scale_dtype: torch.dtype
    ) -> None:
        self._network, down = moments.network, as_tensor(moments.network.down_DF)
        plain = (each for each in self._network.projections if isinstance(each, Tensor))
        self._readers = [each for each in plain if each.dim() == 2 and each is not self._network.down_DF]
        inputs_DD, units_FF = moments.moments(mean_DD)
        of_inputs, of_units = Feedback(inputs_DD), Feedback(units_FF)

        def rounded(feedback: Feedback, weights: Sequence[Tensor]) -> list[list[Tensor]]:
            """Return the weights at each width."""
            plain = [weight.detach().float().cpu() for weight in weights]
            matrices = [(own, scheme) for scheme in schemes for own in plain]
            found = [each.dequantised(torch.float32).to(down) for each in feedback.round_all(matrices, scale_dtype)]
            return [found[start : start + len(plain)] for start in range(0, len(found), len(plain))]

        self._rounded = rounded(of_inputs, self._readers)
        self._downs = [own for (own,) in rounded(of_units, [down])]
        self.sums = {part: torch.zeros(len(schemes), dtype=torch.float64) for part in PARTS}
        """Σ_t Σ_d G_d·w_t²·Δy_td² of each part at each width, [B]."""

    @torch.no_grad()
    def add(self, x_RD: Tensor, weight_R: Tensor, weight_D: Tensor) -> None:
        """Add the tokens of a batch that chose the expert. weight_R: the weights of their outputs. weight_D: G."""
        if not len(x_RD):
            return
        scale_RD = weight_R.to(x_RD.device).float()[:, None].square() * weight_D.to(x_RD.device).float()
        h_RF, down_DF = self._network.units(x_RD), as_tensor(self._network.down_DF)

        def squared(changed_RF: Tensor, with_DF: Tensor) -> float:
            return float((scale_RD * linear(changed_RF, with_DF).float().square()).sum(dtype=torch.float64))

        for place, (readers, rounded_DF) in enumerate(zip(self._rounded, self._downs, strict=True)):
            with _holding(self._readers, readers):
                self.sums[READERS][place] += squared(self._network.units(x_RD) - h_RF, down_DF)
            self.sums[DOWN][place] += squared(h_RF, rounded_DF - down_DF)


@contextmanager
def _holding(weights: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters have other values during the body."""
    own = [weight.data for weight in weights]
    try:
        for weight, value in zip(weights, values, strict=True):
            weight.data = value
        yield
    finally:
        for weight, value in zip(weights, own, strict=True):
            weight.data = value
