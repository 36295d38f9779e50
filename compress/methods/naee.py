"""NAEE: the best subset of each layer's experts, by enumeration (Lu et al., "Not All Experts are Equal", ACL 2024, §3.2).

Each MoE layer keeps the n experts that change its output least: argmin ‖y_full − y_subset‖_F over the layer's inputs in the
full model. A subset's output uses the layer's own routing with the other experts masked: their logits are −∞, tokens are
re-routed, and weights are renormalized where the model does so. Shared experts cancel out.

The paper enumerates all C(N, n) subsets. This implementation does so up to a limit. Beyond it, experts are removed one at a
time, each time the one with the lowest resulting loss (greedy backward elimination). Inputs are a random sample of the
calibration tokens.

Each expert runs once on the sample. With Δ the change of a token's weights, ‖y_full − y_subset‖² = Σ_t Δ_tᵀ G_t Δ_t, where
G_t holds the inner products of the token's expert outputs. A subset therefore costs its routing and products of size N × N,
whatever the hidden size, and T · N² numbers are held instead of T · N · D.

Where transformers runs the layers, the family's own router chooses among the experts of a subset
(engine/adapted/subset_router.py).

Several processes share the text. Each holds the sampled tokens of its own sequences, and losses are summed over all.

Shape suffixes: T sampled tokens, P tokens of one piece, N experts of the layer, D hidden, B subsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from compress.cost.counts import OperationCounts, Passes
from compress.cost.phases import PassCosts, Phase, kept_of
from compress.methods.criterion import Criterion, kept_plan
from compress.methods.inputs import MethodRun
from compress.options.plan_run import RunOptions
from compress.options.prune import SUBSET_LIMIT, PruneOptions
from compress.plans.plan import Plan
from compress.report.figures import SearchFigures
from engine.adapted.adapted_block import AdaptedBlock
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.adapted_pass import visit_layers
from engine.adapted.subset_router import SubsetChoice, SubsetRouters
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import DecoderLayer
from engine.decoder.routing import NO_EXPERT, Masked, Selection
from engine.errors import DataError
from engine.families.config import DecoderConfig
from engine.passes import processes
from engine.passes.activations import Activations, closed_on_error
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.memory_need import MemoryDemand

SAMPLE_TOKENS = 4096
"""Number of calibration tokens, drawn at random, on whose layer inputs subsets are compared."""
OUTPUT_BYTES = 64 << 20
"""Bytes of the outputs of all experts; as many tokens run at a time as fit, and two copies are held."""
SUBSETS_AT_ONCE = 32
TOKENS_AT_ONCE = 512
"""Number of tokens whose inner products are read together when subsets are compared."""
SUBSET_PASSES = 30
"""Elements read and written to route one token among one subset, per expert."""


def held_bytes(config: DecoderConfig) -> int:
    """The most bytes that `naee` holds besides a layer and a batch: outputs, and weights of subsets compared together."""
    experts = max(config.experts_per_layer, default=0)
    weights = SAMPLE_TOKENS * experts * SUBSETS_AT_ONCE * 4
    products = TOKENS_AT_ONCE * experts * (experts + 2 * SUBSETS_AT_ONCE) * 4
    inputs = 2 * SAMPLE_TOKENS * config.hidden_size * 4  # those of the experts, and of a router that transformers runs
    return max(3 * OUTPUT_BYTES, 2 * weights + products) + inputs


@dataclass(frozen=True)
class SubsetSearch:
    """How the subsets of every layer are compared."""

    limit: int = SUBSET_LIMIT
    """Maximum number of subsets of a layer that are all compared; a layer with more is searched greedily."""
    seed: int = 0
    """Seed of the sample of tokens."""
    once: Callable[[str, Callable[[], list[int]]], list[int]] = lambda name, compute: compute()
    """May store a layer's result under a name, so that a resumed run does not search that layer again."""


def naee(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    kept: Mapping[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    search: SubsetSearch = SubsetSearch(),
    budget: MemoryBudget = UNLIMITED,
    directory: Path | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[int, list[int]]:
    """Return the kept experts of each MoE layer, ascending, by decoder layer index; `kept` gives their numbers.

    One layer is in memory at a time, and its inputs are those of the full model. With a `directory` an interrupted pass over
    the text resumes at its layer.
    """
    drawn = torch.randperm(tokens_SL.numel(), generator=torch.Generator().manual_seed(search.seed))
    rows = processes.own_rows(*tokens_SL.shape, budget=budget)
    sample_T = (drawn[:SAMPLE_TOKENS].sort().values - rows.start * tokens_SL.shape[1]).to(device)
    result: dict[int, list[int]] = {}
    routers = SubsetRouters(checkpoint, dtype) if isinstance(checkpoint, AdaptedCheckpoint) else None

    def choice_of(block: MoeBlock) -> Choice:
        if routers is not None and isinstance(block, AdaptedBlock):
            return SubsetChoice(routers, block)
        return MaskedChoice(block)

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None] | None:
        block = layer.feed_forward
        if not isinstance(block, MoeBlock):
            return None
        inputs = LayerInputs(block, sample_T, choice_of(block))

        def finish() -> None:
            result[index] = search.once(
                f"naee_{index}",
                lambda: best_subset(
                    block, inputs.sampled(), inputs.choice, keep=kept[index], limit=search.limit, budget=budget
                ),
            )

        return finish

    left = None if directory is None else processes.own_directory(directory, rows)
    visit_layers(
        checkpoint, tokens_SL[rows], visit, dtype=dtype, device=device, budget=budget, directory=left, progress=progress
    )
    for index in sorted(kept.keys() - result.keys()):  # stored before the interruption
        result[index] = search.once(f"naee_{index}", list)
    return dict(sorted(result.items()))


def search_used(counts: Mapping[int, int], kept: Mapping[int, int], limit: int) -> SearchFigures:
    """Return how layers of `counts` experts are searched: "greedy" if any of them is, and the most subsets of a layer."""
    subsets = max(comb(count, kept[layer]) for layer, count in counts.items())
    return {"search": "exhaustive" if subsets <= limit else "greedy", "subsets": subsets}


def compared_subsets(experts: int, kept: int, limit: int) -> int:
    """Return the number of subsets that the search of one layer compares.

    It is C(N, kept) up to the limit, and N + (N − 1) + … + (kept + 1) beyond it.
    """
    if kept >= experts:
        return 0
    every = comb(experts, kept)
    return every if every <= limit else sum(range(kept + 1, experts + 1))


class Choice(Protocol):
    """A router's choice for the sampled tokens of one layer."""

    def see(self, here_T: Tensor, tokens: int, logits_TN: Tensor) -> None:
        """Keep what is needed of a batch. here_T: indices of its sampled tokens; tokens: the number of all of them."""

    def __call__(self, kept_N: Tensor | None = None) -> Selection:
        """Return the choice among the experts that are kept, bool [N]; None for all."""
        ...


class MaskedChoice:
    """The choice of a block's Routing by router logits; those of removed experts are −∞."""

    def __init__(self, block: MoeBlock, *logits_TN: Tensor) -> None:
        """logits_TN: of the sampled tokens, as far as they are known."""
        self.block, self._pieces = block, list(logits_TN)

    def see(self, here_T: Tensor, tokens: int, logits_TN: Tensor) -> None:
        """Keep the sampled tokens of one batch."""
        self._pieces.append(logits_TN[here_T])

    def __call__(self, kept_N: Tensor | None = None) -> Selection:
        """Return the choice for all sampled tokens."""
        if not self._pieces:  # a process without sequences
            self._pieces = [self.block.router_ND.new_empty(0, len(self.block.experts))]
        self._pieces = [torch.cat(self._pieces)]
        (logits_TN,), routing = self._pieces, self.block.routing
        return (routing if kept_N is None else Masked(routing, kept_N.to(logits_TN.device)))(logits_TN)


class LayerInputs:
    """Observes one MoE block and keeps its inputs and its router's choice at the sampled tokens."""

    def __init__(self, block: MoeBlock, sample_T: Tensor, choice: Choice) -> None:
        """Create the observer.

        sample_T: sorted indices into the flat sequence of all tokens, counted from the first token of this process.
        """
        self.block, self.sample_T, self.choice, self.seen = block, sample_T, choice, 0
        self.pieces: list[Tensor] = []
        block.observer = self.see

    def see(self, x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        """Keep the sampled tokens of one batch."""
        here = self.sample_T[(self.sample_T >= self.seen) & (self.sample_T < self.seen + x_TD.shape[0])] - self.seen
        self.pieces.append(x_TD[here])
        self.choice.see(here, len(x_TD), logits_TN)
        self.seen += x_TD.shape[0]

    def sampled(self) -> Tensor:
        """Return the inputs of the sampled tokens, [T, D]."""
        if not self.pieces:  # a process without sequences
            return torch.empty(0, self.block.hidden_size, device=self.block.device)
        return torch.cat(self.pieces)


def best_subset(
    block: MoeBlock,
    x_TD: Tensor,
    choice: Choice,
    *,
    keep: int,
    limit: int = SUBSET_LIMIT,
    budget: MemoryBudget = UNLIMITED,
) -> list[int]:
    """Return the `keep` experts, ascending, that change the block's output on x least. Ties go to the lower indices."""
    experts = len(block.experts)
    if keep >= experts:
        return list(range(experts))
    losses = SubsetLosses(block, x_TD, choice, budget)
    with losses.products_TNN:
        return (exhaustive if comb(experts, keep) <= limit else greedy)(losses, experts, keep)


class SubsetLosses:
    """‖y_full − y_subset‖_F² for any subsets of one block's experts, summed over the sampled tokens of all processes."""

    @torch.no_grad()
    def __init__(self, block: MoeBlock, x_TD: Tensor, choice: Choice, budget: MemoryBudget = UNLIMITED) -> None:
        """Run every expert once on every token. Raises DataError where an output is NaN or infinite."""
        self.choice = choice
        self.full_TN = weight_of_each(choice(), len(block.experts))
        self.products_TNN = inner_products(block, x_TD, budget)

    @torch.no_grad()
    def __call__(self, subsets: list[tuple[int, ...]]) -> list[float]:
        """Return one loss per subset."""
        count = self.full_TN.shape[1]
        result = []
        for start in range(0, len(subsets), SUBSETS_AT_ONCE):
            change_TNB = torch.stack(
                [self._weights(subset, count) - self.full_TN for subset in subsets[start : start + SUBSETS_AT_ONCE]], dim=-1
            ).to(self.products_TNN.dtype)
            squares_B = torch.zeros(change_TNB.shape[2], dtype=torch.float64, device=change_TNB.device)
            for begin in range(0, len(change_TNB), TOKENS_AT_ONCE):
                rows = slice(begin, begin + TOKENS_AT_ONCE)
                products_TNB = self.products_TNN[rows].to(change_TNB.device) @ change_TNB[rows]
                squares_B += (change_TNB[rows] * products_TNB).sum((0, 1), dtype=torch.float64)
            result += squares_B.clamp_min(0.0).tolist()  # rounding may make a zero negative
        return processes.added_up(result)

    def _weights(self, subset: tuple[int, ...], count: int) -> Tensor:
        kept_N = torch.zeros(count, dtype=torch.bool)
        kept_N[list(subset)] = True
        return weight_of_each(self.choice(kept_N), count)


def weight_of_each(selection: Selection, experts: int) -> Tensor:
    """Return a Selection as weights [T, N], 0 for experts that are not selected."""
    weights_TS = selection.weights.masked_fill(selection.experts == NO_EXPERT, 0.0)
    zeros_TN = weights_TS.new_zeros(weights_TS.shape[0], experts)
    return zeros_TN.scatter_add_(1, selection.experts.clamp_min(0), weights_TS)


def inner_products(block: MoeBlock, x_TD: Tensor, budget: MemoryBudget = UNLIMITED) -> Activations:
    """Return ⟨FFN_i(x_t), FFN_j(x_t)⟩, [T, N, N], in float32 or better. Raises DataError where one is NaN or infinite."""
    experts, dtype = len(block.experts), torch.promote_types(x_TD.dtype, torch.float32)
    result_TNN = Activations((x_TD.shape[0], experts, experts), dtype, budget=budget)
    piece = max(1, OUTPUT_BYTES // (experts * x_TD.shape[1] * dtype.itemsize))
    with closed_on_error(result_TNN):
        for start in range(0, x_TD.shape[0], piece):
            rows = slice(start, start + piece)
            outputs_PND = torch.stack([output_PD.to(dtype) for output_PD in block.outputs(x_TD[rows])], dim=1)
            products_PNN = outputs_PND @ outputs_PND.mT
            if not bool(torch.isfinite(products_PNN).all()):
                raise DataError(
                    f"outputs of experts are not finite in {x_TD.dtype}; naee cannot compare them; try --dtype float32"
                )
            result_TNN[rows] = products_PNN
    return result_TNN


def exhaustive(losses: SubsetLosses, experts: int, keep: int) -> list[int]:
    """Return the best of all subsets."""
    best: tuple[int, ...] = ()
    least = float("inf")
    for subsets in _some_at_a_time(combinations(range(experts), keep)):
        for subset, loss in zip(subsets, losses(subsets), strict=True):
            if loss < least:
                best, least = subset, loss
    return list(best)


def greedy(losses: SubsetLosses, experts: int, keep: int) -> list[int]:
    """Return a subset by repeatedly removing the expert whose removal changes the layer's output least."""
    kept = tuple(range(experts))
    while len(kept) > keep:
        # Later experts are tried first, so that of equal experts the one with the lower index stays.
        without = [kept[:place] + kept[place + 1 :] for place in reversed(range(len(kept)))]
        kept = min(zip(losses(without), without, strict=True), key=lambda pair: pair[0])[1]
    return list(kept)


def _some_at_a_time(subsets: Iterator[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    while some := list(islice(subsets, SUBSETS_AT_ONCE)):
        yield some


# As a criterion


def _plan(run: MethodRun) -> Plan:
    prepared, budget = run.prepared, run.prepared.budget
    assert budget is not None
    kept = naee(
        prepared.checkpoint,
        prepared.tokens_SL,
        budget.kept_per_layer(prepared.checkpoint.config.experts_by_layer),
        dtype=prepared.dtype,
        device=run.options.device,
        search=SubsetSearch(run.options.naee_limit, run.options.calibration.seed, run.work.once),
        budget=run.memory_budget,
        directory=run.work.path / "naee",
        progress=run.bar("comparing subsets (layers)"),
    )
    return kept_plan(run, kept)


def _figures(run: MethodRun) -> dict[str, SearchFigures]:
    if run.prepared.budget is None:
        return {}
    counts = run.prepared.checkpoint.config.experts_by_layer
    return {"naee": search_used(counts, run.prepared.budget.kept_per_layer(counts), run.options.naee_limit)}


def _memory(demand: MemoryDemand, options: PruneOptions, config: DecoderConfig) -> MemoryDemand:
    return demand.with_other(held_bytes(config))


def _phases(costs: PassCosts, options: RunOptions) -> Iterator[Phase]:
    passes, tokens = costs.passes, costs.tokens
    compared = {
        index: compared_subsets(count, kept_of(count, options.sparsity), options.naee_limit)
        for index, count in passes.config.experts_by_layer.items()
    }
    memory = costs.weights.layer(passes) + costs.streaming_bytes + sample_bytes(passes, tokens)
    yield Phase("comparing subsets", subset_counts(passes, tokens, costs.length, compared), memory)


def subset_counts(passes: Passes, tokens: int, length: int, compared: Mapping[int, int]) -> OperationCounts:
    """Return the cost of a streamed pass, every expert on the sample, and this number of subsets of each layer."""
    sample = min(SAMPLE_TOKENS, tokens)

    def layer(index: int) -> OperationCounts:
        moe = passes.config.layers[index].moe
        if moe is None:
            return OperationCounts()
        pairs = float(sample * moe.experts)
        products = 2.0 * pairs * moe.experts * (passes.config.hidden_size + compared[index])
        moved = 4 * pairs * (moe.experts + SUBSET_PASSES) * compared[index]
        return passes.all_experts(index, sample) + OperationCounts(single_flops=products, moved_bytes=moved)

    return passes.streamed(tokens, length) + passes.sum_layers(layer)


def sample_bytes(passes: Passes, tokens: int) -> float:
    """Return the bytes of the sample: inputs, two pieces of all experts' outputs and, in memory, T · N² inner products."""
    sample, most = min(SAMPLE_TOKENS, tokens), max(passes.config.experts_per_layer)
    outputs = min(float(OUTPUT_BYTES), 4.0 * sample * most * passes.config.hidden_size)
    products = 4.0 * sample * most**2
    kept = products if products <= UNLIMITED.kept_bytes else 0.0
    return 2 * outputs + kept + passes.bytes_per_element * sample * passes.config.hidden_size


NAEE = Criterion(_plan, _phases, _memory, _figures)
