"""Calibration: one streaming pass over text that collects the statistics of every MoE layer.

Several processes (engine/passes/processes.py) share the text. Sums are added over the processes, counts as integers and
all other values in float64. Medians and similarities are computed over the tokens of all processes. The statistics are
therefore those that a single process would compute.

Shape suffixes: S sequences, L positions, T tokens, N experts, K top-k, D hidden, R tokens routed to one expert, M
experts of the MoE layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from calibrate.similarity import alignment, linear_grams, pairwise, rbf_grams
from calibrate.statistics import CHOSEN_TOKENS, LayerStatistics, Statistics, load_layer
from engine.adapted.adapted_pass import visit_layers
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import DecoderLayer
from engine.decoder.routing import NO_EXPERT, Selection, importance, probabilities
from engine.families.config import DecoderConfig
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.passes import processes
from engine.passes.memory_budget import UNLIMITED, MemoryBudget

SIMILARITY_TOKENS = 256
"""Number of sampled tokens on which every expert of every layer runs, for CKA and mean outputs.

CKA between layers keeps the Gram matrices of one layer until the next layer has run: 262 kB for each expert.
"""
PROTECTED_ONE_IN = 50
"""One token in so many is important: MC-MoE protects about 2 % of the tokens."""


def held_bytes(config: DecoderConfig, tokens: int = SIMILARITY_TOKENS) -> int:
    """The most bytes that `collect` holds besides a layer and a batch: Gram matrices of two consecutive MoE layers."""
    experts, samples = max(config.experts_per_layer, default=0), min(SIMILARITY_TOKENS, tokens)
    return experts * samples**2 * (2 * 8 + 2 * 4) + samples * config.hidden_size * 3 * 8


def collect(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    budget: MemoryBudget = UNLIMITED,
    directory: Path | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Statistics:
    """Return the statistics of a checkpoint on token sequences, with one layer in memory at a time.

    directory: where the statistics of each layer are saved, so that an interrupted calibration resumes at its layer.
    """
    layers: dict[int, LayerStatistics] = {}
    grams = Grams(directory)
    before = dict(zip(checkpoint.config.moe_layers[1:], checkpoint.config.moe_layers, strict=False))
    chosen = torch.randperm(tokens_SL.numel(), generator=torch.Generator().manual_seed(seed))
    rows = processes.own_rows(*tokens_SL.shape, budget=budget)
    sample_T = chosen[:SIMILARITY_TOKENS].sort().values - rows.start * tokens_SL.shape[1]

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None] | None:
        block = layer.feed_forward
        if not isinstance(block, MoeBlock):
            return None
        collector = LayerCollector(block, sample_T.to(device))

        def finish() -> None:
            layers[index], gram_NTT = collector.statistics(grams.of(before.get(index)))
            block.observer = block.expert_observer = None  # a cycle of references would keep the layer's weights
            grams.keep(index, gram_NTT)
            if directory is not None and processes.is_first():
                Statistics({index: layers[index]}, {}).save(directory / f"statistics-{index}.safetensors")

        return finish

    kept = None if directory is None else processes.own_directory(directory, rows)
    visit_layers(
        checkpoint, tokens_SL[rows], visit, dtype=dtype, device=device, budget=budget, directory=kept, progress=progress
    )
    for index in checkpoint.config.moe_layers:
        if index not in layers and directory is not None:  # saved before the interruption
            layers[index] = load_layer(directory / f"statistics-{index}.safetensors", index, checkpoint.config)
    header = {
        "model": checkpoint.fingerprint(),
        "tokens": tokens_SL.numel(),
        "sequence_length": tokens_SL.shape[1],
        "seed": seed,
    }
    return Statistics({index: layers[index] for index in checkpoint.config.moe_layers}, header)


class Grams:
    """Gram matrices of the last MoE layer, [N, T, T].

    In a directory, those of the layer before it are kept too, in case the last layer runs again after an interruption.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory, self._last = directory, (-1, torch.empty(0))

    def of(self, index: int | None) -> Tensor | None:
        """Return the Gram matrices of a layer; None where there is no layer before."""
        if index is None:
            return None
        if self._last[0] != index and self._directory is not None:  # saved before an interruption
            with SafetensorsFile(self._path(index)) as file:
                check_digest(file)
                self._last = index, file.tensor("gram").clone()
        return self._last[1]

    def keep(self, index: int, gram_NTT: Tensor) -> None:
        """Store the Gram matrices of the next layer."""
        last, self._last = self._last[0], (index, gram_NTT)
        if self._directory is not None and processes.is_first():
            write_state(self._path(index), {"gram": gram_NTT}, {}, "the state of calibration")
            for path in self._directory.glob("gram-*.safetensors"):
                if path not in (self._path(index), self._path(last)):
                    path.unlink()

    def _path(self, index: int) -> Path:
        assert self._directory is not None
        return self._directory / f"gram-{index}.safetensors"


class LayerCollector:
    """Observes one MoE block and sums, in float64, the statistics that all methods need."""

    def __init__(self, block: MoeBlock, sample_T: Tensor) -> None:
        """Create the collector.

        sample_T: sorted indices into the flat sequence of all tokens; the inputs of these tokens are kept, and every
        expert runs on them. Indices count from the first token of this process. Samples of other processes are outside
        of its range.
        """
        experts, hidden = len(block.experts), block.hidden_size
        self.block, self.sample_T, self.seen = block, sample_T, 0

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=block.device)

        self.tokens_routed, self.probability, self.routed_probability = zeros(experts), zeros(experts), zeros(experts)
        self.weight, self.weighted_norm = zeros(experts), zeros(experts)
        self.norm, self.squared_norm, self.output = zeros(experts), zeros(experts), zeros(experts, hidden)
        self.router_gram = zeros(experts, experts)
        self.ratios: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.samples: list[tuple[Tensor, Tensor]] = []
        block.observer = self.see_routing
        block.expert_observer = self.see_expert

    def see_routing(self, x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        """Add the router statistics of one batch."""
        probabilities_TN = probabilities(self.block.routing, logits_TN).double()
        experts_TK, weights_TK = selection
        empty_TK = experts_TK == NO_EXPERT
        routed_TK = probabilities_TN.gather(1, experts_TK.clamp_min(0)).masked_fill(empty_TK, 0.0)
        self.probability += probabilities_TN.sum(0)
        self.router_gram += logits_TN.double().T @ logits_TN.double()
        self.routed_probability.index_add_(0, experts_TK.clamp_min(0).flatten(), routed_TK.flatten())
        ordered_TK = weights_TK.float().masked_fill(empty_TK, 0.0).sort(dim=1, descending=True).values
        # A sigmoid router may give all experts of a token a weight of zero.
        self.ratios.append((ordered_TK[:, 1:] / ordered_TK[:, :1].clamp_min(torch.finfo(torch.float32).tiny)).cpu())
        self.norms.append(importance(x_TD).float().cpu())
        if self.seen < CHOSEN_TOKENS:
            self.chosen.append(experts_TK[: CHOSEN_TOKENS - self.seen].short().cpu())
        here = self.sample_T[(self.sample_T >= self.seen) & (self.sample_T < self.seen + x_TD.shape[0])]
        self.samples.append((x_TD[here - self.seen], probabilities_TN[here - self.seen]))
        self.seen += x_TD.shape[0]

    def see_expert(self, expert: int, output_RD: Tensor, weight_R: Tensor) -> None:
        """Add the output statistics of one expert on the tokens routed to it."""
        norms_R = output_RD.float().norm(dim=1).double()
        self.tokens_routed[expert] += len(norms_R)
        self.weight[expert] += weight_R.double().sum()
        self.weighted_norm[expert] += (weight_R.double() * norms_R).sum()
        self.norm[expert] += norms_R.sum()
        self.squared_norm[expert] += norms_R.square().sum()
        self.output[expert] += output_RD.sum(0, dtype=torch.float64)

    def statistics(self, before_MTT: Tensor | None = None) -> tuple[LayerStatistics, Tensor]:
        """Run every expert on the sample; return (the LayerStatistics, Gram matrices [N, T, T] for the next layer).

        before_MTT: Gram matrices of the MoE layer before, if there is one.
        """
        self._add_up_processes()
        sample_TD, probabilities_TN = self.samples[0]
        unselected = 1.0 - self.routed_probability.sum() / max(self.seen, 1)
        shape = len(self.block.experts), len(sample_TD), len(sample_TD)
        linear_NTT = sample_TD.new_empty(shape, dtype=torch.float64)
        rbf_NTT, means, weighted = torch.empty_like(linear_NTT), [], []
        # one at a time: the outputs of all experts may be larger than their weights
        for expert, output_TD in enumerate(self.block.outputs(sample_TD)):
            wide_TD = output_TD.float()
            means.append(wide_TD.mean(0))
            weighted.append((wide_TD * probabilities_TN[:, expert, None].float()).mean(0))
            linear_NTT[expert], rbf_NTT[expert] = linear_grams(wide_TD[None])[0], rbf_grams(wide_TD[None])[0]
        linear_NN = pairwise(linear_NTT)
        del linear_NTT
        gram_NTT, norms_T = rbf_NTT.float(), self.norms[0]
        statistics = LayerStatistics(
            tokens=torch.tensor(self.seen),
            tokens_routed=self.tokens_routed.long().cpu(),
            probability_sum=self.probability.cpu(),
            routed_probability_sum=self.routed_probability.cpu(),
            weight_sum=self.weight.cpu(),
            weighted_norm_sum=self.weighted_norm.cpu(),
            norm_sum=self.norm.cpu(),
            squared_norm_sum=self.squared_norm.cpu(),
            output_sum=self.output.float().cpu(),
            output_mean=torch.stack(means).cpu(),
            weighted_output_mean=torch.stack(weighted).cpu(),
            router_gram=self.router_gram.cpu(),
            weight_ratio_median=self.ratios[0].median(dim=0).values,
            linear_cka=linear_NN.cpu(),
            rbf_cka=pairwise(rbf_NTT).cpu(),
            rbf_cka_before=alignment(gram_NTT, gram_NTT[:0] if before_MTT is None else before_MTT).cpu(),
            unselected_probability_share=unselected.cpu(),
            input_norm_quantile=norms_T.kthvalue(len(norms_T) - len(norms_T) // PROTECTED_ONE_IN).values.reshape(1),
            chosen=self.chosen[0],
        )
        return statistics, gram_NTT

    def _add_up_processes(self) -> None:
        """Combine the statistics of all processes."""
        self.seen = int(sum(processes.all_told(self.seen)))
        processes.add_up([self.tokens_routed, self.probability, self.routed_probability, self.router_gram])
        processes.add_up([self.weight, self.weighted_norm, self.norm, self.squared_norm, self.output])
        samples = map(torch.cat, zip(*self.samples, strict=True)) if self.samples else (None, None)
        sample_TD, probabilities_TN = (processes.gathered(part).to(self.output.device) for part in samples)
        self.samples = [(sample_TD, probabilities_TN)]
        self.ratios = [processes.gathered(torch.cat(self.ratios) if self.ratios else None)]
        self.norms = [processes.gathered(torch.cat(self.norms) if self.norms else None)]
        self.chosen = [processes.gathered(torch.cat(self.chosen) if self.chosen else None)[:CHOSEN_TOKENS].contiguous()]
