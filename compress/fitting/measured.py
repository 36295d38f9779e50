"""The choices of a run, carried out and measured: points of the frontier of size against divergence.

A choice is measured as a whole and, without a memory limit, in parts: the routed experts of a band of layers alone, and the
other matrices alone, in an otherwise unchanged model. The parts say by how much each band's predicted divergence is off, and
their sum says how the bands act together. Both correct the costs (`corrections_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from compress.fitting.candidate import Candidate, Choice, carried_out, remove_models, smaller_of, written
from compress.fitting.costs import NO_FACTORS, OTHERS, Corrections, Divergence, Factors, Option, Table
from compress.fitting.divergence import Reference
from compress.fitting.statistics import FitRun, pruning_run, reference
from compress.fitting.substitution import with_blocks_of, with_matrices_of
from compress.run.work_directory import WorkDirectory
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES

FRONTIER_POINTS = 8
"""Number of steps between the sizes, from smallest to largest, for which a divergence is predicted and not measured."""
SPEED_TOKENS = 32
"""Tokens that are decoded to measure a candidate's speed."""
LEAST_FACTOR = 0.05
"""Smallest factor: a divergence that is measured as zero or below would make every option free."""
MOST_BANDS = 8
"""Most bands of layers that are measured by themselves: each takes two passes over the text."""


class Measuring:
    """Carries out the choices of one run."""

    def __init__(self, run: FitRun, table: Table) -> None:
        self._run, self._table = run, table

    def measured(
        self, number: int, choice: Choice, options: Sequence[Option], corrections: Corrections
    ) -> tuple[dict[str, Any], Candidate]:
        """Carry out a choice and measure it; return its point of the frontier, and what writes it.

        corrections: those of the costs by which the choice was made.
        """
        own = WorkDirectory(self._run.work.path / f"choice-{number}", shared=self._run.work)
        own.path.mkdir(exist_ok=True)
        run = pruning_run(self._run, own)
        candidate = carried_out(run, choice, self._run.options.group_size)

        def measure() -> dict[str, Any]:
            result = written(candidate, run)
            smaller = smaller_of(candidate, run)
            with reference(self._run) as full:
                kl = full.divergence(result)
                without = kl * choice.removes if smaller is None else full.divergence(smaller)
                parts = {full.checkpoint.config.moe_layers[0]: Divergence(without, kl - without)}
                if self._run.memory_budget.limit is None:  # parts hold a layer of two models
                    parts = self._parts(full, result, smaller, choice)
            return self._predicted(options, corrections) | {
                "bytes": weight_file_bytes(result.directory),
                "measured_kl": kl,
                "measured_kl_of_removal": without,
                "measured_kl_of_parts": {str(layer): list(part) for layer, part in parts.items()},
                "tokens_per_second": self._speed(result.directory),
            }

        point = self._run.work.once(f"measured-{number}", measure)
        remove_models(run)
        return point, candidate

    def _speed(self, directory: Path) -> float | None:
        """Return the tokens per second at which the engine decodes one sequence; None under a memory limit."""
        is_limited = self._run.memory_budget.limit is not None
        return None if is_limited else decoding_speed(directory, self._run.options.device)

    def _parts(
        self, full: Reference, result: Checkpoint, smaller: Checkpoint | None, choice: Choice
    ) -> dict[int, Divergence]:
        """Return the divergence of each band alone, by its first layer, and of the other matrices alone."""
        layers, found = full.checkpoint.config.moe_layers, dict[int, Divergence]()
        place = full.dtype, full.device
        for band in bands(layers):
            both = full.divergence(full.checkpoint, with_blocks_of(result, band, *place))
            removal = both * choice.removes
            if smaller is not None:
                removal = full.divergence(full.checkpoint, with_blocks_of(smaller, band, *place))
            found[band[0]] = Divergence(removal, both - removal)
        names = choice.others & choice.bits.keys()
        others = full.divergence(with_matrices_of(full.checkpoint, result, names)) if names else 0.0
        return found | {OTHERS: Divergence(0.0, others)}

    def _predicted(self, options: Sequence[Option], corrections: Corrections) -> dict[str, Any]:
        return {
            "bytes": self._table.total_bytes(options),
            "active_bytes": self._table.read_bytes(options),
            "predicted_kl": self._table.predicted_total(options, corrections),
            "measured_kl": None,
        }

    def predictions(self, corrections: Corrections) -> list[dict[str, Any]]:
        """Return points between the least size and that of the whole model, with predicted divergences alone."""
        least, most = self._table.least_and_most()
        sizes = [least * (most / least) ** (step / FRONTIER_POINTS) for step in range(FRONTIER_POINTS + 1)]
        return [self._predicted(self._table.chosen(size + 1, None, corrections), corrections) for size in sizes]


def bands(layers: Sequence[int]) -> list[list[int]]:
    """Return the MoE layers in at most MOST_BANDS groups of neighbors, of nearly equal size."""
    count = min(MOST_BANDS, len(layers))
    ends = [round(place * len(layers) / count) for place in range(count + 1)]
    return [list(layers[start:end]) for start, end in pairwise(ends)]


def corrections_of(
    point: Mapping[str, Any], predicted: Mapping[int, Divergence], known: Corrections, *, keeps_rounding: bool = False
) -> Corrections:
    """Return the factors of each layer.

    A factor is the ratio of the measured divergence of the layer's band to the predicted one, times the ratio of the whole
    choice's measured divergence to the sum over its parts. A band for which nothing was predicted, because the choice
    removes or rounds nothing there, keeps its known factor.

    predicted: by layer, without corrections. keeps_rounding: whether all known factors of rounding stay, because they were
    measured where nothing was removed.
    """
    parts = {int(layer): Divergence(*part) for layer, part in point["measured_kl_of_parts"].items()}
    removal, both = point["measured_kl_of_removal"], point["measured_kl"]
    together = Factors(
        _ratio(removal, sum(part.removal for part in parts.values())),
        _ratio(both - removal, sum(part.rounding for part in parts.values())),
    )
    found: dict[int, Factors] = {}
    firsts = sorted(parts)
    for layer in predicted:
        first = _band(layer, firsts)
        band, part = _summed(own for at, own in predicted.items() if _band(at, firsts) == first), parts[first]
        own = known.get(layer, NO_FACTORS)
        found[layer] = Factors(
            max(together.removal * _ratio(part.removal, band.removal), LEAST_FACTOR) if band.removal > 0.0 else own.removal,
            own.rounding
            if keeps_rounding or band.rounding <= 0.0
            else max(together.rounding * _ratio(part.rounding, band.rounding), LEAST_FACTOR),
        )
    return found


def _summed(every: Iterable[Divergence]) -> Divergence:
    return Divergence(*map(sum, zip(*every, strict=True)))


def _band(layer: int, firsts: Sequence[int]) -> int:
    """Return the first layer of the band that a layer is in; other matrices without a part of their own are in the first."""
    return max((own for own in firsts if own <= layer), default=firsts[0])


def _ratio(measured: float, predicted: float) -> float:
    """Return a factor; 1 where nothing was predicted."""
    return max(measured / predicted, LEAST_FACTOR) if predicted > 0.0 else 1.0


def weight_file_bytes(directory: Path) -> int:
    """Return the size of a model's weight files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.name != SKIP_TABLES)


def decoding_speed(directory: Path, device: str) -> float:
    """Return the tokens per second at which the engine decodes one sequence."""
    (row,) = bench([BenchSpec(str(directory), device=device)], cases_for(0, SPEED_TOKENS), repetitions=3)
    return float(row["tokens_per_second_mean"])
