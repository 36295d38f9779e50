"""Tokens per second with a draft and without, on text that both models know.

python benchmarks/speculative_decoding.py [MODEL DRAFT] [--draft-tokens 1,2,4,8] [--temperature 0] [--repetitions 5]

MODEL is the demo model by default, and DRAFT what `compress prune --sparsity 0.5` makes of it. All rows come from one
process and interleaved rounds over the same prompts; ratios are of medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from results import ROOT, markdown, save, times

from calibrate.text import load_documents
from engine.generation.generate import Engine, Generation
from engine.generation.options import SamplingOptions

Round = tuple[float, list[Generation], list[float], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("draft", nargs="?", help="by default the demo model pruned to half")
    parser.add_argument("--draft-tokens", default="1,2,4,8")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-characters", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        draft = given.draft or pruned_demo(Path(scratch) / "half")
        rows = measure(given, Engine.open(given.model, draft=draft, dtype=given.dtype, threads=given.threads))
    draft_name = Path(given.draft).name if given.draft else "demo, pruned to half"
    options = vars(given) | {"model": Path(given.model).name, "draft": draft_name}
    save("speculative_decoding", {"options": options, "rows": rows})


def pruned_demo(output: Path) -> str:
    """Return the directory of the demo model pruned to half, made here."""
    command = ["prune", "demo", "--sparsity", "0.5", "--evaluation-samples", "0", "-o", str(output)]
    subprocess.run([sys.executable, "-m", "cli", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return str(output)


def measure(given: argparse.Namespace, engine: Engine) -> list[dict[str, Any]]:
    """Return a row for each number of drafted tokens, from interleaved rounds."""
    long_enough = (text for text in load_documents(given.data, split="held-out") if len(text) > given.prompt_characters)
    prompts = [text[: given.prompt_characters] for text in islice(long_enough, given.prompts)]
    counts = [0, *map(int, given.draft_tokens.split(","))]
    rounds: dict[int, list[Round]] = {count: [] for count in counts}
    draft = engine.draft
    for _ in range(given.repetitions + 1):
        for count in counts:
            engine.draft, engine.draft_tokens = (draft, count) if count else (None, 1)
            rounds[count].append(one_round(engine, prompts, given.tokens, SamplingOptions(given.temperature)))
    return [row(count, rounds[count][1:], rounds[0][1:]) for count in counts]  # the first round was the warm-up


def one_round(engine: Engine, prompts: list[str], tokens: int, sampling: SamplingOptions) -> Round:
    """Return tokens per second over all prompts, the texts, and each prompt's share of kept drafts and tokens a forward."""
    written, kept, per_forward = [], [], []
    seconds = 0.0
    for prompt in prompts:
        written += engine.generate(prompt, max_new_tokens=tokens, sampling=sampling)
        report = engine.report()
        if report.tokens_per_second is not None:
            seconds += (report.generated_tokens - 1) / report.tokens_per_second
        if report.draft_acceptance_rate is not None:
            kept.append(report.draft_acceptance_rate)
        if report.tokens_per_target_forward is not None:
            per_forward.append(report.tokens_per_target_forward)
    return sum(each.generated_tokens - 1 for each in written) / seconds, written, kept, per_forward


def row(count: int, rounds: list[Round], plain: list[Round]) -> dict[str, Any]:
    """Return the figures of one number of drafted tokens, 0 for no draft."""
    speed, alone = (statistics.median(each[0] for each in of) for of in (rounds, plain))
    _, written, kept, per_forward = rounds[0]
    return {
        "draft_tokens": count,
        "tokens_per_second": speed,
        "rounds": [each[0] for each in rounds],
        "ratio": speed / alone,
        "draft_acceptance_rate": statistics.mean(kept) if kept else None,
        "tokens_per_target_forward": statistics.mean(per_forward) if per_forward else 1.0,
        "texts_as_without": sum(a.text == b.text for a, b in zip(written, plain[0][1], strict=True)) / len(written),
    }


def table(figures: dict[str, Any]) -> str:
    """Return one line for each number of drafted tokens."""
    rows, options = figures["rows"], figures["options"]

    def rate(each: dict[str, Any]) -> str:
        ratio = f", {times(each['ratio'], each['rounds'], rows[0]['rounds'])}" if each["draft_tokens"] else ""
        return f"{each['tokens_per_second']:.1f}{ratio}"

    lines = [
        [
            f"draft of {each['draft_tokens']}" if each["draft_tokens"] else "no draft",
            rate(each),
            "" if each["draft_acceptance_rate"] is None else f"{each['draft_acceptance_rate']:.0%}",
            f"{each['tokens_per_target_forward']:.2f}",
            f"{each['texts_as_without']:.0%}",
        ]
        for each in rows
    ]
    about = f"{options['model']} with the draft {options['draft']}: {options['tokens']} tokens after each of "
    about += f"{options['prompts']} held-out prompts, temperature {options['temperature']:g}.\n\n"
    return about + markdown(["", "tokens/s", "drafted tokens kept", "tokens a forward", "texts as without"], lines)


TABLES = {"speculative_decoding": table}


if __name__ == "__main__":
    main()
