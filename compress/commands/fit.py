"""The command `compress fit`."""

from __future__ import annotations

from collections.abc import Sequence

from compress.commands.command import HUB, Figures, Given, command
from compress.commands.figures import show_figures
from compress.commands.output import progress_bar, table
from compress.commands.sweeps import comparison_of, show_sweep
from compress.options.fit import TARGET, FitOptions
from compress.report.columns import size


def fit(given: Given) -> Figures:
    """Make the best model of MODEL that fits into a size: remove hidden units and experts, and round what stays.

    What goes, and how many bits each matrix of each expert gets, is decided together by what each choice costs. MODEL is a
    checkpoint directory, a hub id, or 'demo', the built-in model (the default).
    """
    from compress.fit import fit as run

    sizes = given.values["target_size"]
    if sizes is not None and len(sizes) > 1:
        return _sweep(given, sizes)
    figures = show_figures(given, run(_options(given, sizes), progress_bar))
    given.say(table(frontier_rows(figures["frontier"])))
    return figures


def _options(given: Given, sizes: Sequence[int] | None) -> FitOptions:
    return given.job(FitOptions, "fit", target_size=None if sizes is None else sizes[0])


def _sweep(given: Given, sizes: Sequence[int]) -> Figures:
    from compress.fit_sweep import cells, fit_sweep

    base = _options(given, sizes)
    figures = fit_sweep(cells(base, sizes), comparison_of(given, base), progress_bar)
    assert figures is not None  # in one process
    return show_sweep(given, figures)


def frontier_rows(points: Sequence[Figures]) -> list[list[str]]:
    """Return the rows of the frontier, the largest model first."""
    rows = [["weights", "read for a token", "KL, predicted", "measured", "tokens/s"]]
    for point in sorted(points, key=lambda point: -point["bytes"]):
        measured, speed = point["measured_kl"], point.get("tokens_per_second")
        rows.append(
            [
                *(size(point["bytes"]), size(int(point["active_bytes"])), f"{point['predicted_kl']:.4f}"),
                *("–" if measured is None else f"{measured:.4f}", "–" if speed is None else f"{speed:.0f}"),
            ]
        )
    return rows


COMMAND = command("fit", fit, FitOptions, *HUB, first=TARGET)
