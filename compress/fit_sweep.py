"""`compress fit` with several sizes: the statistics are collected once, and all results are compared with the model.

OUTPUT/SIZE is the artifact of each size, and OUTPUT/comparison is written by `compress compare`, with the frontier of
quality against size. What the runs share is in a directory beside OUTPUT that is removed at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from compress.fit import fit, prepare_fitting
from compress.options.compare import CompareOptions
from compress.options.fit import FitOptions
from compress.report.figures import SweepFigures
from compress.run.claims import claiming
from compress.sweep import checked_sweep, make_and_compare
from engine.errors import OptionError
from engine.progress import Progress, no_progress

_UNITS = {"GB": 10**9, "MB": 10**6, "KB": 10**3}


def cells(options: FitOptions, sizes: Sequence[int]) -> list[FitOptions]:
    """Return one run for each size, each with a directory of its own, the smallest first: it may not be possible.

    Raises OptionError for a size that is given twice.
    """
    if len({named(size) for size in sizes}) < len(sizes):
        raise OptionError("target-size names a size twice; name each once")
    return [replace(options, target_size=size, output=options.output / named(size)) for size in sorted(sizes)]


def named(size: int) -> str:
    """Return a size as the name of its directory, such as 14GB."""
    unit = next((unit for unit, own in _UNITS.items() if size >= own), "")
    return f"{size / _UNITS.get(unit, 1):.9g}{unit or 'B'}"


def fit_sweep(
    runs: Sequence[FitOptions], comparison: CompareOptions, progress: Progress = no_progress
) -> SweepFigures | None:
    """Execute all runs of `cells`, then compare; return {"runs": figures of each, "rows": the comparison, …}.

    The options and the size of every run are checked before the first one begins.
    """
    with claiming(runs[0].output.parent):
        started = time.monotonic()
        shared = checked_sweep(runs, lambda: prepare_fitting(runs[0]))
        return make_and_compare(runs, shared, lambda run: fit(run, progress, shared), comparison, progress, started)
