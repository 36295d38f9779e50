"""A sweep over methods and sparsities with one calibration, followed by a comparison of all results with the model.

OUTPUT/METHOD-SPARSITY is the artifact of each run, and OUTPUT/comparison is written by `compress compare`. Statistics, the
perplexity before, DiEP's search and gate gradients are computed once and shared, in a directory beside OUTPUT that is
removed at the end. Each artifact appears complete or not at all, and `--resume` continues with the missing ones.

Several processes make the artifacts together; the first compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from compress.compare import compare
from compress.comparison.pages import COMPARISON
from compress.methods import METHODS
from compress.methods.inputs import Prunable
from compress.options.compare import CompareOptions
from compress.options.job import JobOptions
from compress.options.prune import PruneOptions
from compress.prune import Shared, check_shard, checked_budget, prepare_pruning, prune
from compress.report import canvas
from compress.report.figures import SweepFigures
from compress.run.claims import claiming
from compress.run.job import check_weights, fingerprints
from compress.run.result import check_sweep
from compress.run.work_directory import WorkDirectory
from engine.errors import CompressError, OptionError
from engine.generation.report import peak_memory_bytes
from engine.passes import processes
from engine.progress import Progress, no_progress

COMPARISON_DIRECTORY = "comparison"
OWN_OPTIONS = ("method", "budget", "target_size", "output")
"""Options in which the runs of a sweep differ."""


def cells(
    options: PruneOptions,
    methods: Sequence[str],
    sparsities: Sequence[float],
    scope: str | None,
    granularity: str | None = None,
) -> list[PruneOptions]:
    """Return one run for each method and sparsity; without a scope or a granularity, each method has its own."""
    if len(set(methods)) < len(methods) or len(set(sparsities)) < len(sparsities):
        raise OptionError("a method or a sparsity is named twice; name each once")
    assert options.budget is not None
    return [
        replace(
            options,
            method=method,
            budget=replace(
                options.budget,
                sparsity=sparsity,
                scope=scope or METHODS[method].scopes[0],
                granularity=granularity or METHODS[method].granularity,
            ),
            output=options.output / f"{method}-{sparsity:g}",
        )
        for method in methods
        for sparsity in sparsities
    ]


def sweep(runs: Sequence[PruneOptions], comparison: CompareOptions, progress: Progress = no_progress) -> SweepFigures | None:
    """Execute all runs of `cells`, then compare; return {"runs": figures of each, "rows": the comparison, …}.

    Every run is checked before the first one begins; invalid input raises a CompressError at that point.
    """
    with claiming(runs[0].output.parent):
        started = time.monotonic()
        shared = checked_sweep(runs, lambda: _prepared(runs))
        return make_and_compare(runs, shared, lambda run: prune(run, progress, shared), comparison, progress, started)


def _prepared(runs: Sequence[PruneOptions]) -> Prunable:
    check_shard(runs)
    prepared = prepare_pruning(runs[0])
    for run in runs:
        checked_budget(run, prepared.checkpoint)
    return prepared


def checked_sweep(runs: Sequence[JobOptions], prepare: Callable[[], Prunable]) -> Shared:
    """Check the outputs and the inputs of all runs, and return what they share. prepare: opens and checks the inputs."""
    output = runs[0].output.parent
    check_sweep(output, runs, f"{COMPARISON_DIRECTORY}/{COMPARISON}")
    shared = Shared(prepare(), WorkDirectory(output, "shared"))
    canvas.require()
    return shared


OptionsT = TypeVar("OptionsT", bound=JobOptions)


def make_and_compare(
    runs: Sequence[OptionsT],
    shared: Shared,
    make: Callable[[OptionsT], Any],
    comparison: CompareOptions,
    progress: Progress,
    started: float,
) -> SweepFigures | None:
    """Make every result, then compare; return the figures, or None in a process that is not the first.

    make: makes one result, and returns its figures. started: the start of the sweep by time.monotonic().
    """
    first, output = runs[0], runs[0].output.parent
    check_weights(shared.prepared.checkpoint, progress)
    processes.wait()
    shared.work.begin(in_common(first) | fingerprints(shared.prepared), first.resume)
    output.mkdir(parents=True, exist_ok=True)
    with _removed_if_empty(output), shared.work.until_whole(output):
        figures = [make(run) for run in progress(runs, "artifacts")]
        alone = processes.is_first()
        processes.leave()
        if not alone:
            return None
        models = (first.model, *(str(run.output) for run in runs))
        compared = compare(
            replace(comparison, models=models, output=output / COMPARISON_DIRECTORY, overwrite=True), progress
        )
    return {
        "output": str(output),
        "runs": figures,
        "rows": compared["rows"],
        "notes": compared["notes"],
        "seconds": time.monotonic() - started,
        "peak_memory_bytes": peak_memory_bytes(),
    }


@contextmanager
def _removed_if_empty(directory: Path) -> Iterator[None]:
    """Remove a directory without files after an error in the body."""
    try:
        yield
    except CompressError:
        with suppress(OSError):
            directory.rmdir()
        raise


def in_common(run: JobOptions) -> dict[str, Any]:
    """Return the options that all runs of a sweep have in common, as JSON."""
    return {key: value for key, value in run.deciding().items() if key not in OWN_OPTIONS}
