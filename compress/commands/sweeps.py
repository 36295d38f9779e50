"""Commands that make several results with one set of statistics, and compare them with the model."""

from __future__ import annotations

from dataclasses import replace

from compress.commands.command import Figures, Given
from compress.commands.output import table
from compress.options.compare import PICTURE_SEQUENCES, CompareOptions
from compress.options.fit import FitOptions
from compress.options.prune import PruneOptions
from compress.report.columns import text_table
from compress.report.figures import SweepFigures


def comparison_of(given: Given, base: PruneOptions | FitOptions) -> CompareOptions:
    """Return the options of the comparison at the end. Raises OptionError for options of single results."""
    given.refuse(["memory_limit"], "for one artifact at a time, and this makes several")
    given.refuse(["plan_output"], "for one artifact, and a sweep makes several; each artifact carries its plan")
    given.refuse(["push_to_hub"], "for one artifact, and a sweep makes several; `compress push` them afterwards")
    return CompareOptions(
        models=(),
        text=replace(base.calibration, samples=PICTURE_SEQUENCES),
        speed=False,
        dtype=given.common.dtype,
        device=given.chosen_device(),
        threads=given.common.threads,
    )


def show_sweep(given: Given, figures: SweepFigures) -> Figures:
    """Print the comparison, and return the figures."""
    given.say(table(text_table(figures["rows"])))
    given.say(
        f"{figures['output']}: {len(figures['runs'])} artifacts in {figures['seconds']:.1f} s; open comparison/index.html"
    )
    return dict(figures)
