"""The choices of a run, carried out and measured: points of the frontier of size against divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.fitting.candidate import Candidate, Choice, carried_out, smaller_of, written
from compress.fitting.costs import Factors, Option, Table
from compress.fitting.statistics import FitRun, pruning_run, reference
from compress.run.work_directory import WorkDirectory
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES

FRONTIER_POINTS = 8
"""Sizes for which a divergence is predicted and not measured."""
SPEED_TOKENS = 32
"""Tokens that are decoded to measure a candidate's speed."""
LEAST_FACTOR = 0.05
"""Smallest factor: a divergence that is measured as zero or below would make every option free."""


class Measuring:
    """Carries out the choices of one run."""

    def __init__(self, run: FitRun, table: Table) -> None:
        self._run, self._table = run, table

    def measured(
        self, number: int, choice: Choice, options: Sequence[Option], factors: Factors
    ) -> tuple[dict[str, Any], Candidate]:
        """Carry out a choice and measure it; return its point of the frontier, and what writes it.

        factors: with which the costs were corrected when the choice was made.
        """
        own = WorkDirectory(self._run.work.path / f"choice-{number}", shared=self._run.work)
        own.path.mkdir(exist_ok=True)
        run = pruning_run(self._run, own)
        candidate = carried_out(run, choice, self._run.options.group_size)

        def measure() -> dict[str, Any]:
            result = written(candidate, run)
            with reference(self._run) as full:
                divergence = full.divergence(result)
                smaller = smaller_of(candidate, run)
                without = divergence * choice.removes if smaller is None else full.divergence(smaller)
            return self._predicted(options, factors) | {
                "bytes": weight_file_bytes(result.directory),
                "measured_kl": divergence,
                "measured_kl_of_removal": without,
                "tokens_per_second": decoding_speed(result.directory, self._run.options.device),
            }

        return self._run.work.once(f"measured-{number}", measure), candidate

    def _predicted(self, options: Sequence[Option], factors: Factors) -> dict[str, Any]:
        removal, rounding = self._table.predicted(options)
        return {
            "bytes": self._table.total_bytes(options),
            "active_bytes": self._table.read_bytes(options),
            "predicted_kl": factors.removal * removal + factors.rounding * rounding,
            "measured_kl": None,
        }

    def predictions(self, factors: Factors) -> list[dict[str, Any]]:
        """Return points between the least size and that of the whole model, with predicted divergences alone."""
        least, most = self._table.least_and_most()
        sizes = [least * (most / least) ** (step / FRONTIER_POINTS) for step in range(FRONTIER_POINTS + 1)]
        return [self._predicted(self._table.chosen(size + 1, None, factors), factors) for size in sizes]


def corrected(point: Mapping[str, Any], predicted: tuple[float, float], factors: Factors) -> Factors:
    """Return the factors by which measured divergences differ from those predicted: of removing units, and of rounding.

    predicted: without factors. factors: kept where nothing was predicted.
    """
    measured = point["measured_kl_of_removal"], point["measured_kl"] - point["measured_kl_of_removal"]
    return Factors(
        *(
            max(found / own, LEAST_FACTOR) if own > 0.0 else known
            for found, own, known in zip(measured, predicted, factors, strict=True)
        )
    )


def weight_file_bytes(directory: Path) -> int:
    """Return the size of a model's weight files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors") if path.name != SKIP_TABLES)


def decoding_speed(directory: Path, device: str) -> float:
    """Return the tokens per second at which the engine decodes one sequence."""
    (row,) = bench([BenchSpec(str(directory), device=device)], cases_for(0, SPEED_TOKENS), repetitions=3)
    return float(row["tokens_per_second_mean"])
