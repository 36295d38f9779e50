"""Several methods and sparsities from one calibration, ending in the comparison of all results with the model itself.

OUTPUT/METHOD-SPARSITY is the artifact of each; OUTPUT/comparison what `compress compare` writes of them. Statistics, the
perplexity before, DiEP's search and gate gradients are computed once and shared, in a directory beside OUTPUT that is
removed at the end. Each artifact appears whole or not at all, and `--resume` goes on with those that are missing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.compare import COMPARISON, CompareOptions, compare
from compress.prune import DEFAULT_SCOPE, Prepared, PruneOptions, fingerprints, prepare, prune, resumable
from compress.selection import Budget
from engine.artifact import check_output
from engine.errors import OptionError
from engine.json_file import load_json, write_json
from engine.progress import Progress, no_progress
from engine.report import peak_memory_bytes

COMPARISON_DIRECTORY = "comparison"


def cells(
    options: PruneOptions, methods: Sequence[str], sparsities: Sequence[float], scope: str | None
) -> list[PruneOptions]:
    """One run for each method and sparsity; without a scope, each method's own default."""
    if len(set(methods)) < len(methods) or len(set(sparsities)) < len(sparsities):
        raise OptionError("a method or a sparsity is named twice; name each once")
    assert options.budget is not None
    return [
        replace(
            options,
            method=method,
            budget=_budget(options.budget, sparsity, scope or DEFAULT_SCOPE.get(method, "global")),
            output=options.output / f"{method}-{sparsity:g}",
        )
        for method in methods
        for sparsity in sparsities
    ]


def _budget(budget: Budget, sparsity: float, scope: str) -> Budget:
    return replace(budget, sparsity=sparsity, scope=scope)


def sweep(runs: Sequence[PruneOptions], comparison: CompareOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Carry out all runs of `cells`, then compare. {"runs": figures of each, "rows": the comparison, …}.

    Every run is checked before the first begins; bad input raises a CompressError then.
    """
    started = time.monotonic()
    output = runs[0].output.parent
    check_sweep(output, runs)
    prepared, *_ = [prepare(_fresh(run)) for run in runs]
    prepared.checkpoint.check_finite(lambda names: progress(names, "checking weights"))
    shared = output.absolute().parent / f".{output.name}.shared"
    begin(shared, runs[0], prepared)
    output.mkdir(parents=True, exist_ok=True)
    figures = [prune(run, progress, shared) for run in progress(runs, "artifacts")]
    models = (runs[0].model, *(str(run.output) for run in runs))
    compared = compare(replace(comparison, models=models, output=output / COMPARISON_DIRECTORY, overwrite=True), progress)
    shutil.rmtree(shared, ignore_errors=True)
    return {
        "output": str(output),
        "runs": figures,
        "rows": compared["rows"],
        "notes": compared["notes"],
        "seconds": time.monotonic() - started,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def begin(shared: Path, run: PruneOptions, prepared: Prepared) -> None:
    """Make the shared directory afresh, or go on with it. Raises OptionError where it is of another run."""
    values = resumable(run) | fingerprints(prepared)
    wanted = {key: value for key, value in values.items() if key not in ("method", "budget", "output")}
    found = shared / "options.json"
    if run.resume and found.is_file():
        if load_json(found, "interrupted sweep") != wanted:
            raise OptionError(f"{shared}: was begun with other options, model or text; repeat those, or leave out --resume")
        return
    shutil.rmtree(shared, ignore_errors=True)
    shared.mkdir(parents=True)
    write_json(found, wanted)


def check_sweep(output: Path, runs: Sequence[PruneOptions]) -> None:
    """Raise OutputError where results cannot be written; an earlier sweep is gone on with or, asked to, replaced."""
    if not (runs[0].resume and output.is_dir()):
        check_output(output, runs[0].overwrite, f"{COMPARISON_DIRECTORY}/{COMPARISON}")


def _fresh(run: PruneOptions) -> PruneOptions:
    """For checks alone: what is there already was looked at for the sweep as a whole."""
    return replace(run, overwrite=True) if run.resume else run
