"""Speed and memory of the models of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compress.comparison.subject import Subject
from compress.options.compare import CompareOptions
from engine.bench.backends import BenchSpec
from engine.bench.side_by_side import bench, cases_for
from engine.progress import Progress


def measure_speed(
    rows: Sequence[dict[str, Any]], subjects: Sequence[Subject], options: CompareOptions, progress: Progress
) -> None:
    """Write the speed and the peak memory of each model into its row; all are measured in turn."""
    cases = cases_for(options.prompt_tokens, options.generated_tokens)
    specs = [
        BenchSpec(
            subject.name,
            "onnx" if subject.is_exported else "torch",
            device="cpu" if subject.is_exported else options.device,
            dtype=options.dtype,
            threads=options.threads,
            skip_threshold=0.0 if subject.is_exported else subject.skip_threshold or 0.0,
            skip_rule=options.skip_rule,
            seed=options.text.seed,
        )
        for subject in subjects
    ]
    found = iter(bench(specs, cases, options.repetitions, lambda rounds: progress(rounds, "speed (rounds)")))
    for row in rows:
        for case in cases:
            measured = next(found)
            kind = "prefill" if case.kind == "pp" else "decode"
            row[f"{kind}_tokens_per_second_mean"] = measured["tokens_per_second_mean"]
            row[f"{kind}_tokens_per_second_sd"] = measured["tokens_per_second_sd"]
            row["peak_memory_bytes"] = measured["peak_memory_bytes"]
            if case.kind == "pp":
                # The prefill test ends when the first new token has been chosen.
                row["time_to_first_token_seconds"] = case.tokens / measured["tokens_per_second_median"]
            elif row["experts_per_layer"]:
                row["decode_experts_skipped_share"] = measured["experts_skipped_share"]
