"""Statistics of hidden units: one streaming pass over text, with the Gram matrices of each expert where a refit needs them.

The hidden units of expert e are h = act(gate·x) ⊙ up·x, the input of its down projection, and w is the weight that the model
multiplies its output by. A pass keeps the inputs of one MoE layer (in a file beyond the memory limit), and then runs the
experts a few at a time on the tokens that chose them, so that the Gram matrices of few experts are in memory together.

Several processes share the text, and their sums are added up.

Shape suffixes: S sequences, L positions, T tokens, N experts, K top-k, R tokens of one expert, F expert width, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.model import DecoderLayer
from engine.decoder.routing import Selection
from engine.families.config import DecoderConfig
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.passes import processes
from engine.passes.activations import Activations
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import stream_layers

HELD_OUT_ONE_IN = 8
"""One calibration sequence in so many is held out of the fit, for the choice of the ridge: the second, the tenth, …"""
WIDEST_GRAM = 8192
"""Experts with more hidden units have a sample of tokens instead of a Gram matrix, which would have F² entries."""
SAMPLED_TOKENS = 4096
"""Tokens of an expert in such a sample; an eighth as many are held out."""
GRAM_BYTES = 128 << 20
"""Bytes of the Gram matrices that are summed up together; one expert's may take more."""
PARTS = ("fit", "held")


@dataclass(frozen=True)
class UnitSums:
    """Sums over the calibration tokens that chose each expert of a layer, float64."""

    tokens_routed: Tensor
    """[N] number of tokens."""
    square_sum: list[Tensor]
    """Σ h², [F] for each expert."""
    weighted_square_sum: list[Tensor]
    """Σ w²·h², [F] for each expert."""


@dataclass(frozen=True)
class Moments:
    """The second moments Σ w²·h·hᵀ of an expert's hidden units, on the tokens that are fitted and on those held out.

    A Gram matrix has the sum itself. A sample has rows a with Σ a·aᵀ in its place.
    """

    fit: Tensor
    """[F, F] Gram matrix, or a sample [R, F]."""
    held: Tensor
    is_gram: bool


def expert_gram_bytes(width: int) -> int:
    """Return the bytes of one expert's moments while they are summed up."""
    return 2 * 8 * width**2 if width <= WIDEST_GRAM else 2 * 4 * SAMPLED_TOKENS * width


def held_bytes(config: DecoderConfig) -> int:
    """Return the most bytes that `collect_units` holds besides a layer and a batch."""
    widths = [moe.expert_width for layer in config.layers if (moe := layer.moe) is not None]
    return max(GRAM_BYTES, 2 * expert_gram_bytes(max(widths)))


def collect_units(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    directory: Path,
    *,
    moments: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> None:
    """Write the sums of every MoE layer, and the moments of every expert where asked for, into `directory`.

    An interrupted pass resumes at its layer, and a finished one does nothing.
    """
    last = checkpoint.config.moe_layers[-1]
    if processes.told(_sums_path(directory, last).is_file()):
        return
    directory.mkdir(parents=True, exist_ok=True)
    rows = processes.own_rows(*tokens_SL.shape, budget=budget)

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None] | None:
        block = layer.feed_forward
        if not isinstance(block, MoeBlock):
            return None
        collector = _LayerCollector(block, rows, tokens_SL.shape[1], dtype, budget, checkpoint.release)

        def finish() -> None:
            collector.write(directory, index, moments)

        return finish

    states = stream_layers(
        checkpoint,
        tokens_SL[rows],
        visit,
        dtype=dtype,
        device=device,
        budget=budget,
        directory=processes.own_directory(directory / "pass", rows),
        progress=progress,
    )
    states.close()


def unit_sums(directory: Path, layer: int, config: DecoderConfig) -> UnitSums:
    """Read the sums of a layer. Raises DataError for a damaged file."""
    with SafetensorsFile(_sums_path(directory, layer)) as file:
        check_digest(file)
        experts = range(config.experts_by_layer[layer])
        squares = ([file.tensor(f"{expert}.{name}").clone() for expert in experts] for name in ("square", "weighted"))
        return UnitSums(file.tensor("tokens_routed").clone(), *squares)


def unit_moments(directory: Path, layer: int, expert: int) -> Moments:
    """Read the moments of an expert. Raises DataError for a missing or damaged file."""
    with SafetensorsFile(_moments_path(directory, layer, expert)) as file:
        check_digest(file)
        fit, held = (file.tensor(part).clone() for part in PARTS)
        return Moments(fit, held, file.metadata["moments"] == "gram")


def _sums_path(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer}.safetensors"


def _moments_path(directory: Path, layer: int, expert: int) -> Path:
    return directory / f"layer-{layer}-expert-{expert}.safetensors"


class _LayerCollector:
    """Keeps the inputs and the selections of one MoE block, and sums up its hidden units afterwards."""

    def __init__(
        self,
        block: MoeBlock,
        rows: slice,
        length: int,
        dtype: torch.dtype,
        budget: MemoryBudget,
        release: Callable[[], None],
    ) -> None:
        self.block, self.rows, self.length, self.budget, self.release = block, rows, length, budget, release
        self.kept = Activations((rows.stop - rows.start, length, block.hidden_size), dtype, together=2, budget=budget)
        self.chosen: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.sequences = 0
        block.observer = self.see

    def see(self, x_TD: Tensor, logits_TN: Tensor, selection: Selection) -> None:
        """Keep one batch."""
        count = len(x_TD) // self.length
        self.kept[slice(self.sequences, self.sequences + count)] = x_TD.view(count, self.length, -1).cpu()
        self.sequences += count
        self.chosen.append(selection.experts.cpu())
        self.weights.append(selection.weights.float().cpu())
        scales_TN = self.block.input_scales(logits_TN)
        if scales_TN is not None:
            self.scales.append(scales_TN.gather(1, selection.experts.clamp_min(0)).cpu())

    def write(self, directory: Path, layer: int, moments: bool) -> None:
        """Write the layer's files; the sums come last, and mark the others as complete."""
        self.block.observer = None
        sums: dict[str, Tensor] = {}
        routed_N = torch.zeros(len(self.block.experts), dtype=torch.float64)
        for group in self._groups(moments):
            found = [_ExpertSums(expert, self._expert(expert).width, moments) for expert in group]
            self._add_up(found)
            for own in found:
                own.add_up_processes()
                routed_N[own.expert] = own.tokens
                sums |= {f"{own.expert}.square": own.square_F, f"{own.expert}.weighted": own.weighted_F}
                if moments and processes.is_first():
                    kind = {"moments": "gram" if own.is_gram else "sample"}
                    write_state(_moments_path(directory, layer, own.expert), own.moments(), kind, "moments of hidden units")
        self.kept.close()
        if processes.is_first():
            sums["tokens_routed"] = routed_N.long()
            write_state(_sums_path(directory, layer), sums, {}, "statistics of hidden units")
        processes.wait()

    def _expert(self, index: int) -> Expert:
        expert = self.block.experts[index]
        assert isinstance(expert, Expert)
        return expert

    def _groups(self, moments: bool) -> Iterator[list[int]]:
        """Yield the experts whose moments are summed up together."""
        group: list[int] = []
        held = 0
        for expert in range(len(self.block.experts)):
            size = expert_gram_bytes(self._expert(expert).width) if moments else 0
            if group and held + size > GRAM_BYTES:
                yield group
                group, held = [], 0
            group.append(expert)
            held += size
        yield group

    def _add_up(self, group: Sequence[_ExpertSums]) -> None:
        """Run these experts on all their tokens, batch by batch."""
        device = self.block.router_ND.device
        counts = {own.expert: sum(int((chosen_TK == own.expert).sum()) for chosen_TK in self.chosen) for own in group}
        start = 0
        for number, chosen_TK in enumerate(self.chosen):
            rows = slice(start, start + len(chosen_TK) // self.length)
            x_TD = self.kept[rows].flatten(0, 1).to(device)
            is_held_T = self._is_held(rows).repeat_interleave(self.length)
            for own in group:
                token_R, slot_R = (chosen_TK == own.expert).nonzero(as_tuple=True)
                if not len(token_R):
                    continue
                x_RD = x_TD[token_R.to(device)]
                if self.scales:
                    x_RD = x_RD * self.scales[number][token_R, slot_R, None].to(x_RD)
                h_RF = self._expert(own.expert).units(x_RD).float().cpu()
                own.add(h_RF, self.weights[number][token_R, slot_R], is_held_T[token_R], counts[own.expert])
                self.budget.relieve(self.release)
            start = rows.stop

    def _is_held(self, rows: slice) -> Tensor:
        """Return whether each sequence is held out; sequences are numbered over all processes."""
        first = self.rows.start
        return torch.arange(first + rows.start, first + rows.stop) % HELD_OUT_ONE_IN == 1


class _ExpertSums:
    """The sums of one expert."""

    def __init__(self, expert: int, width: int, moments: bool) -> None:
        self.expert, self.is_gram, self.tokens = expert, width <= WIDEST_GRAM, 0
        self.square_F = torch.zeros(width, dtype=torch.float64)
        self.weighted_F = torch.zeros_like(self.square_F)
        self.grams = {part: torch.zeros(width, width, dtype=torch.float64) for part in PARTS if moments and self.is_gram}
        self.samples: dict[str, list[Tensor]] = {part: [] for part in PARTS if moments and not self.is_gram}
        self._passed = dict.fromkeys(PARTS, 0)
        """Tokens of each part so far, so that sampled tokens are equally far apart across batches."""

    def add(self, h_RF: Tensor, weight_R: Tensor, is_held_R: Tensor, count: int) -> None:
        """Add some tokens. count: number of the expert's tokens in this process, which decides how many are sampled."""
        self.tokens += len(h_RF)
        self.square_F += h_RF.double().square().sum(0)
        a_RF = weight_R[:, None] * h_RF
        self.weighted_F += a_RF.double().square().sum(0)
        for part, is_part_R in zip(PARTS, (~is_held_R, is_held_R), strict=True):
            if self.grams:
                own_RF = a_RF[is_part_R]
                self.grams[part] += own_RF.T @ own_RF
            elif self.samples:
                step = max(1, -(-count * processes.count() // SAMPLED_TOKENS))
                own_RF = a_RF[is_part_R]
                self.samples[part].append(own_RF[(step // 2 - self._passed[part]) % step :: step] * step**0.5)
                self._passed[part] += len(own_RF)

    def add_up_processes(self) -> None:
        """Combine the sums of all processes."""
        self.tokens = int(sum(processes.all_told(self.tokens)))
        processes.add_up([self.square_F, self.weighted_F, *self.grams.values()])
        for part, pieces in self.samples.items():
            own = torch.cat(pieces) if pieces else torch.zeros(0, len(self.square_F))
            self.samples[part] = [processes.gathered(own)]

    def moments(self) -> dict[str, Tensor]:
        """Return the moments in float32."""
        if self.is_gram:
            return {part: gram_FF.float() for part, gram_FF in self.grams.items()}
        return {part: pieces[0] for part, pieces in self.samples.items()}
