"""The files of a comparison: comparison.json, comparison.csv, pictures, and a page with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from calibrate.statistics import Statistics
from compress.comparison.subject import Subject
from compress.options.compare import CompareOptions
from compress.plans.plan import plan_from_json
from compress.report import canvas
from compress.report.columns import to_csv
from compress.report.diep_scores import load_scores
from compress.report.expert_record import load_record
from compress.report.page import page
from compress.report.pictures import Picture, Pictured, kept_experts, save, unit_shares
from compress.report.pictures import draw as draw_experts
from compress.report.scatter import Point, scatter
from engine.checkpoint.artifact import whole_or_nothing
from engine.errors import PlanError
from engine.files.json_file import write_json, writing

COMPARISON = "comparison.json"
"""The file that marks a directory as a comparison, which --overwrite may replace."""
MOST_IN_HEADING = 4


def write_report(
    options: CompareOptions,
    result: dict[str, Any],
    subjects: Sequence[Subject],
    statistics: Sequence[Statistics | None],
    settings: dict[str, Any],
) -> None:
    """Write comparison.json, comparison.csv, PNG pictures and index.html, all or none of them."""
    assert options.output is not None
    with whole_or_nothing(options.output, options.overwrite, COMPARISON) as directory:
        write_json(directory / COMPARISON, {"schema_version": 1} | result | {"settings": settings})
        with writing(directory, "the comparison"):
            (directory / "comparison.csv").write_text(to_csv(result["rows"]), encoding="utf-8")
            pictures = draw(directory, result["rows"], subjects, statistics)
            html = page(
                result["rows"],
                title=heading([subject.label for subject in subjects]),
                notes=result["notes"],
                settings=settings,
                pictures=pictures,
            )
            (directory / "index.html").write_text(html, encoding="utf-8")


def heading(labels: Sequence[str]) -> str:
    """Return the models in one line: the first and a count where there are many."""
    if len(labels) <= MOST_IN_HEADING:
        return " · ".join(canvas.short(label) for label in labels)
    return f"{canvas.short(labels[0])} and {len(labels) - 1} others"


def draw(
    directory: Path, rows: Sequence[dict[str, Any]], subjects: Sequence[Subject], statistics: Sequence[Statistics | None]
) -> list[Picture]:
    """Draw every picture for which these models have data; return the PNG files of the directory in the page's order."""
    pictures = []
    y_label = "held-out perplexity (lower is better)"
    if points := _points(rows, "bytes", "", 1e-6):
        figure = scatter(points, "weights in MB", y_label)
        about = "Down and to the left is better."
        pictures.append(save(directory, "quality_and_size", figure, "Quality against size", about))
    if points := _points(rows, "decode_tokens_per_second_mean", "decode_tokens_per_second_sd"):
        figure = scatter(points, "decode, tokens per second", y_label)
        about = "Down and to the right is better; bars are standard deviations."
        pictures.append(save(directory, "quality_and_speed", figure, "Quality against speed", about))
    pairs = zip(subjects, statistics, strict=True)
    return pictures + draw_experts(directory, [model for pair in pairs for model in _pictured(*pair)])


def _points(rows: Sequence[dict[str, Any]], key: str, deviation: str, scale: float = 1.0) -> list[Point]:
    """Return the points of the rows that have both figures.

    The points are perplexity over `key`, with the standard deviation under `deviation`.
    """
    return [
        Point(
            name=row["label"],
            x=row[key] * scale,
            y=row["perplexity"],
            group=row["perplexity_group"],
            x_sd=row.get(deviation) or 0.0,
            series=row["method"],
        )
        for row in rows
        if row[key] is not None and row["perplexity"] is not None
    ]


def _pictured(subject: Subject, statistics: Statistics | None) -> list[Pictured]:
    """Return the experts of a model as measured now, or else as its artifact recorded them, after those of its source."""
    model, kept, units = subject.model, None, None
    # the plan of an artifact of a later version, for example; its experts are then numbered from 0
    with suppress(PlanError):
        plan, figures = plan_from_json((model.provenance or {}).get("plan")), (model.provenance or {}).get("figures", {})
        kept, before = kept_experts(plan, model.config), (figures.get("units_before"), figures.get("experts_before"))
        if all(type(count) is int and count > 0 for count in before):
            units = unit_shares(plan, model.config, before[0] // before[1])
    scores, counts = load_scores(model.directory), model.config.experts_by_layer
    record = load_record(model.directory) if statistics is None and counts else None
    if record is None or {layer: len(own) for layer, own in record.after.routed.items()} != counts:
        return [Pictured(subject.label, counts, statistics, kept, scores, units=units)]
    source = Pictured(f"{subject.label} (before)", {}, recorded=record.before)
    return [source, Pictured(subject.label, counts, None, kept, scores, units=units, recorded=record.after)]
