"""Statistics of hidden units: one streaming pass over text, with the Gram matrices of each expert where a refit needs them.

The hidden units of expert e are h = act(gate·x) ⊙ up·x, the input of its down projection, and w is the weight that the model
multiplies its output by. The FFN that every token uses (a shared expert, or the FFN of a dense layer) is like one more
expert where it is included; its w is the gate of the shared expert, or 1.

A pass keeps the inputs of one MoE layer (in a file beyond the memory limit), and then runs the experts a few at a time on
the tokens that chose them, so that the Gram matrices of few experts are in memory together.

Several processes share the text, and their sums are added up.

Shape suffixes: S sequences, L positions, T tokens, N experts, K top-k, R tokens of one expert, F expert width, D hidden.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from calibrate.ffn_inputs import FfnInputs, Text, groups_within
from engine.adapted.adapted_pass import visit_layers
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock
from engine.decoder.model import DecoderLayer
from engine.errors import OutputError
from engine.families.config import DecoderConfig
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.passes import processes
from engine.passes.memory_budget import UNLIMITED, MemoryBudget

WIDEST_GRAM = 8192
"""Experts with more hidden units have a sample of tokens instead of a Gram matrix, which would have F² entries."""
SAMPLED_TOKENS = 4096
"""Most tokens of an expert in such a sample, about an eighth of them held out. An expert with fewer tokens than this
number and than it has hidden units also gets a sample, of all its tokens: it is as exact as a Gram matrix, and smaller.
"""
GRAM_BYTES = 128 << 20
"""Bytes of the Gram matrices that are summed up together; one expert's may take more."""
PARTS = ("fit", "held")


@dataclass(frozen=True)
class UnitSums:
    """Sums over the calibration tokens that use each FFN of a layer (DecoderConfig.ffn_widths), float64."""

    tokens: Tensor
    """[N] number of tokens."""
    square_sum: list[Tensor]
    """Σ h², [F] for each FFN."""
    weighted_square_sum: list[Tensor]
    """Σ w²·h², [F] for each FFN."""


@dataclass(frozen=True)
class Moments:
    """The second moments Σ w²·h·hᵀ of an FFN's hidden units, on the tokens that are fitted and on those held out.

    They are stored as the Gram matrix itself, or as sampled rows a whose Σ a·aᵀ stands for it. Where tokens are few, the
    rows are those of all tokens.
    """

    fit: Tensor
    """[F, F] Gram matrix, or a sample [R, F]."""
    held: Tensor
    is_gram: bool


def expert_gram_bytes(width: int) -> int:
    """Return the bytes of one expert's moments while they are summed up."""
    return 2 * 8 * width**2 if width <= WIDEST_GRAM else 2 * 4 * SAMPLED_TOKENS * width


def held_bytes(config: DecoderConfig, include: Collection[str] = ()) -> int:
    """Return the most bytes that `collect_units` holds besides a layer and a batch."""
    return max(GRAM_BYTES, 2 * expert_gram_bytes(config.widest_ffn(include)))


def moments_bytes(config: DecoderConfig, tokens: int, include: Collection[str] = ()) -> int:
    """Return the most bytes on disk that the moments of all layers take after so many tokens of text."""
    total = 0
    for index, widths in config.ffn_widths(include).items():
        moe = config.layers[index].moe
        experts, chosen = (0, 0) if moe is None else (moe.experts, tokens * moe.experts_per_token)
        every = [_most_bytes(width, tokens) for width in widths]
        shared_out = chosen * max((_bytes_per_token(width) for width in widths[:experts]), default=0)
        total += min(sum(every[:experts]), shared_out) + sum(every[experts:])
    return total


def _has_gram(width: int, tokens: int) -> bool:
    """Return whether the moments of an FFN that so many tokens use are a Gram matrix; otherwise they are a sample."""
    return width <= WIDEST_GRAM and tokens >= min(width, SAMPLED_TOKENS)


def _most_bytes(width: int, tokens: int) -> int:
    """Return the most bytes on disk of the moments of an FFN that at most so many tokens use."""
    if _has_gram(width, tokens):
        return 2 * 4 * width**2
    return 4 * width * min(tokens, SAMPLED_TOKENS + len(PARTS))


def _bytes_per_token(width: int) -> int:
    """Return the most bytes of moments per token: a Gram matrix is used only from min(width, SAMPLED_TOKENS) tokens on."""
    return 2 * 4 * width * max(1, -(-width // SAMPLED_TOKENS))


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free + sum(path.stat().st_size for path in directory.glob("layer-*"))
    if needed > free:
        raise OutputError(
            f"{directory}: moments of hidden units take up to {needed / 1e9:,.1f} GB and {free / 1e9:,.1f} GB are free; "
            "make space, give an output on another disk, or take fewer --samples"
        )


def collect_units(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    directory: Path,
    *,
    moments: bool,
    include: Collection[str] = (),
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget: MemoryBudget = UNLIMITED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> None:
    """Write the sums of every layer, and the moments of every FFN where asked for, into `directory`.

    include: "shared" or "dense", for the FFNs that every token uses. An interrupted pass resumes at its layer, and a
    finished one does nothing. Raises OutputError where the disk has not enough space for the moments, before the pass.
    """
    last = max(checkpoint.config.ffn_widths(include))
    if processes.told(_sums_path(directory, last).is_file()):
        return
    directory.mkdir(parents=True, exist_ok=True)
    if moments:
        _check_space(directory, moments_bytes(checkpoint.config, tokens_SL.numel(), include))
    rows = processes.own_rows(*tokens_SL.shape, budget=budget)

    def visit(index: int, layer: DecoderLayer) -> Callable[[], None] | None:
        block = layer.feed_forward
        if block is None or not (isinstance(block, MoeBlock) or "dense" in include):
            return None
        text = Text(rows, tokens_SL.shape[1])
        inputs = FfnInputs(block, text, dtype, include=include, budget=budget, release=checkpoint.release)
        return partial(_LayerCollector(inputs, moments).write, directory, index)

    visit_layers(
        checkpoint,
        tokens_SL[rows],
        visit,
        dtype=dtype,
        device=device,
        budget=budget,
        directory=processes.own_directory(directory / "pass", rows),
        progress=progress,
    )


def unit_sums(directory: Path, layer: int) -> UnitSums:
    """Read the sums of a layer. Raises DataError for a damaged file."""
    with SafetensorsFile(_sums_path(directory, layer)) as file:
        check_digest(file)
        tokens_N = file.tensor("tokens").clone()
        numbers = range(len(tokens_N))
        squares = ([file.tensor(f"{number}.{name}").clone() for number in numbers] for name in ("square", "weighted"))
        return UnitSums(tokens_N, *squares)


def unit_moments(directory: Path, layer: int, number: int) -> Moments:
    """Read the moments of one of a layer's FFNs. Raises DataError for a missing or damaged file."""
    with SafetensorsFile(_moments_path(directory, layer, number)) as file:
        check_digest(file)
        fit, held = (file.tensor(part).clone() for part in PARTS)
        return Moments(fit, held, file.metadata["moments"] == "gram")


def _sums_path(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer}.safetensors"


def _moments_path(directory: Path, layer: int, number: int) -> Path:
    return directory / f"layer-{layer}-ffn-{number}.safetensors"


class _LayerCollector:
    """Sums up the hidden units of one layer's FFNs after the layer has run."""

    def __init__(self, inputs: FfnInputs, moments: bool) -> None:
        self.inputs, self.moments = inputs, moments

    def write(self, directory: Path, layer: int) -> None:
        """Write the layer's files."""
        self.inputs.stop()
        _write(directory, layer, self.moments, self._summed())
        self.inputs.close()

    def _summed(self) -> Iterator[_UnitSums]:
        """Yield the sums of each FFN."""
        for group in self._groups():
            counts = {number: sum(processes.all_told(self.inputs.count(number))) for number in group}
            widths = {number: self.inputs.networks[number].width for number in group}
            found = [_UnitSums(number, widths[number], counts[number], self.moments) for number in group]
            for batch in self.inputs.batches():
                for own in found:
                    use = self.inputs.use(batch, own.number)
                    own.add(use.h_RF, use.weight_R, batch.is_held_T[use.token_R])
            yield from found

    def _groups(self) -> Iterator[list[int]]:
        """Return the FFNs whose moments are summed up together, group by group."""
        sizes = [expert_gram_bytes(network.width) if self.moments else 0 for network in self.inputs.networks]
        return groups_within(GRAM_BYTES, sizes)


def _write(directory: Path, layer: int, moments: bool, found: Iterable[_UnitSums]) -> None:
    """Write a layer's files; the sums come last, and mark the others as complete."""
    sums: dict[str, Tensor] = {}
    tokens = []
    for own in found:
        own.add_up_processes()
        tokens.append(own.tokens)
        sums |= {f"{own.number}.square": own.square_F, f"{own.number}.weighted": own.weighted_F}
        if moments and processes.is_first():
            kind = {"moments": "gram" if own.is_gram else "sample"}
            write_state(_moments_path(directory, layer, own.number), own.moments(), kind, "moments of hidden units")
    if processes.is_first():
        sums["tokens"] = torch.tensor(tokens)
        write_state(_sums_path(directory, layer), sums, {}, "statistics of hidden units")
    processes.wait()


class _UnitSums:
    """The sums of one FFN."""

    def __init__(self, number: int, width: int, count: int, moments: bool) -> None:
        """count: the FFN's tokens in all processes, which decide whether and how they are sampled."""
        self.number, self.tokens = number, 0
        self.is_gram = _has_gram(width, count)
        self._step = max(1, -(-count // SAMPLED_TOKENS))
        self.square_F = torch.zeros(width, dtype=torch.float64)
        self.weighted_F = torch.zeros_like(self.square_F)
        self.grams = {part: torch.zeros(width, width, dtype=torch.float64) for part in PARTS if moments and self.is_gram}
        self.samples: dict[str, list[Tensor]] = {part: [] for part in PARTS if moments and not self.is_gram}
        self._passed = dict.fromkeys(PARTS, 0)
        """Tokens of each part so far, so that sampled tokens are equally far apart across batches."""

    def add(self, h_RF: Tensor, weight_R: Tensor, is_held_R: Tensor) -> None:
        """Add some tokens."""
        self.tokens += len(h_RF)
        self.square_F += h_RF.double().square().sum(0)
        a_RF = weight_R[:, None] * h_RF
        self.weighted_F += a_RF.double().square().sum(0)
        for part, is_part_R in zip(PARTS, (~is_held_R, is_held_R), strict=True):
            if self.grams:
                own_RF = a_RF[is_part_R]
                self.grams[part] += own_RF.T @ own_RF
            elif self.samples:
                own_RF, step = a_RF[is_part_R], self._step
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
