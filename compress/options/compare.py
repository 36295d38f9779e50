"""Options of `compress compare`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from calibrate.options import CalibrationOptions
from compress.options.evaluate import EvaluateOptions
from engine.bench.options import BenchOptions
from engine.generation.options import OpenOptions
from engine.options import changed, check, declared, like, option, part

MEASURE, TEXT = "What to measure", "Text"
PICTURE_SEQUENCES = 16


@dataclass(frozen=True)
class CompareOptions:
    """One comparison."""

    models: tuple[str, ...] = field(
        metadata=declared(group="", is_argument=True, several="repeated", help="Models to compare.")
    )
    output: Path | None = option(None, group="Output", short="-o", help="Directory for JSON, CSV, plots and an HTML page.")
    text: CalibrationOptions = part(
        CalibrationOptions,
        data=changed(
            group=TEXT,
            unset=None,
            help="Text: a file, a folder, a .jsonl, 'stdlib' or a dataset id; the same for all models.",
        ),
        samples=changed(
            PICTURE_SEQUENCES,
            group=TEXT,
            flag="calibration-samples",
            minimum=0,
            help="Sequences for the plots of expert usage and similarity, with --output; 0 draws what artifacts recorded.",
        ),
        sequence_length=changed(group=TEXT, unset="the shortest default of the models"),
        evaluation_samples=changed(
            group=TEXT, flag="samples", minimum=0, help="Held-out sequences that perplexity is measured on; 0 for none."
        ),
        windows=changed(group=TEXT),
    )
    tasks: tuple[str, ...] = like(
        EvaluateOptions, "tasks", help="Tasks of lm-evaluation-harness, names or YAML files, besides perplexity."
    )
    limit: int | None = like(EvaluateOptions, "limit")
    speed: bool = option(True, group=MEASURE, off="no-speed", help="Measure tokens/s and memory.")
    prompt_tokens: int = like(BenchOptions, "prompt_tokens")
    generated_tokens: int = like(BenchOptions, "generated_tokens")
    repetitions: int = like(BenchOptions, "repetitions")
    skip_threshold: float = like(
        OpenOptions,
        "skip_threshold",
        help="Skip unneeded experts, in perplexity, tasks and speed, of the models that have tables for it.",
    )
    """Skip threshold of checkpoints; an export has the threshold that it was exported with."""
    skip_rule: str = like(OpenOptions, "skip_rule")
    dtype: str = like(OpenOptions, "dtype")
    device: str = like(OpenOptions, "device")
    """Device of checkpoints; exports run on the CPU where this is "auto"."""
    threads: int | None = like(OpenOptions, "threads")
    overwrite: bool = option(False, group="Output", help="Replace an existing comparison.")

    def __post_init__(self) -> None:
        check(self)
