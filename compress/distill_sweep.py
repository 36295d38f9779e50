"""A sweep over the number of experts that the teacher uses for each token (Every Expert Matters, figure 2).

OUTPUT/k-K is the student of a teacher with K experts. OUTPUT/teacher_experts.json has the metric of each student and of its
teacher, and teacher_experts.png draws both. Each student appears complete or not at all, and `--resume` continues with the
missing ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compress.distill import distill
from compress.distillation.inputs import check_teacher_experts, prepare_distillation
from compress.options.distill import DistillOptions
from compress.report import canvas, plots
from compress.report.figures import DistillFigures, TeacherExpertsFigures
from compress.report.pictures import save
from compress.run.claims import claiming
from compress.run.result import check_sweep
from engine.errors import OptionError
from engine.files.json_file import write_json
from engine.generation.report import peak_memory_bytes
from engine.passes import processes
from engine.progress import Progress, no_progress

SUMMARY = "teacher_experts.json"
"""The file that marks a directory as a sweep, which --overwrite may replace."""
SCHEMA_VERSION = 1


def cells(options: DistillOptions, counts: Sequence[int]) -> list[DistillOptions]:
    """Return one run for each number of experts. Raises OptionError for a number that is given twice."""
    if len(set(counts)) < len(counts):
        raise OptionError("teacher-experts names a number twice; name each once")
    return [replace(options, teacher_experts=count, output=options.output / f"k-{count}") for count in counts]


def sweep_teacher_experts(runs: Sequence[DistillOptions], progress: Progress = no_progress) -> TeacherExpertsFigures | None:
    """Execute all runs of `cells` and write their summary; return its figures, or None in a process that is not the first.

    Every run is checked before the first one begins; invalid input raises a CompressError at that point.
    """
    started, first, output = time.monotonic(), runs[0], runs[0].output.parent
    with claiming(output):
        check_sweep(output, runs, SUMMARY)
        for run in runs:
            run.check()
        teacher = prepare_distillation(first).teacher
        assert teacher is not None
        for run in runs:
            check_teacher_experts(teacher, run.teacher_experts)
        if processes.is_first():
            output.mkdir(parents=True, exist_ok=True)
        processes.wait()
        figures = [distill(run, progress) for run in progress(runs, "students")]
        alone = processes.is_first()
        processes.leave()
        if not alone:
            return None
        rows = [row_of(each) for each in figures]
        write_json(output / SUMMARY, {"schema_version": SCHEMA_VERSION, "recipe": first.recipe, "rows": rows})
        if canvas.available():
            by_count = [{row["teacher_experts"]: row[f"{whose}_metric"] for row in rows} for whose in ("student", "teacher")]
            name = figures[0]["metric_name"]
            panels = {f"{name} of the student": by_count[0], f"{name} of the teacher": by_count[1]}
            figure = plots.by_number("Experts of the teacher for each token", "experts for each token", panels)
            save(output, "teacher_experts", figure, "Experts of the teacher", "Metric of students and teachers.")
    return {
        "output": str(output),
        "runs": figures,
        "rows": rows,
        "seconds": time.monotonic() - started,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def row_of(figures: DistillFigures) -> dict[str, Any]:
    """Return the line of the summary for one student."""
    return {
        "teacher_experts": figures["teacher_experts"],
        "artifact": figures["artifact"],
        "metric_name": figures["metric_name"],
        "student_metric_before": figures["metric_before"],
        "student_metric": figures["metric_after"],
        "teacher_metric": figures["teacher_metric"],
    }
