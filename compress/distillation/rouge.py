"""ROUGE-L of a model's responses against those of the data (Lin 2004), by the package rouge-score."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from calibrate.instructions import WHOLE, Example, ExampleMaker, instructions_of
from compress.distillation.writer import Writer
from compress.options.evaluate import EvaluateOptions
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import resolve
from engine.checkpoint.tokenizer import end_tokens, load_tokenizer
from engine.decoder.model import Decoder
from engine.errors import OptionError
from engine.generation.options import SamplingOptions
from engine.progress import Progress, no_progress

GROUP = 16
"""Number of prompts that are continued together."""


def scorer(stemming: bool = False) -> Any:
    """Return the package's scorer, which compares words in lower case without punctuation, or their Porter stems.

    Raises OptionError where the package is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise OptionError("ROUGE-L needs rouge-score; install it with `pip install moe-compress[tasks]`") from error
    return RougeScorer(["rougeL"], use_stemmer=stemming)


def best_score(score: Any, references: Iterable[str], response: str) -> float:
    """Return the F-measure against the reference that is nearest to the response."""
    return max(float(score.score(reference, response)["rougeL"].fmeasure) for reference in references)


def rouge_l(
    writer: Writer,
    tokenizer: Any,
    examples: Sequence[Example],
    max_length: int,
    ends: frozenset[int],
    *,
    sampling: SamplingOptions,
    stemming: bool = False,
    progress: Any = iter,
) -> float:
    """Return the mean F-measure over the examples, 0 to 1, of responses sampled with the options' seed."""
    score, generator = scorer(stemming), sampling.generator()
    values = []
    groups: Iterable[int] = progress(range(0, len(examples), GROUP))
    for start in groups:
        group = examples[start : start + GROUP]
        written = writer([each.prompt for each in group], max_length, ends, sampling, generator)
        for own, each in zip(written, group, strict=True):
            response = tokenizer.decode(own.response, skip_special_tokens=True)
            values.append(best_score(score, each.references, response))
    return statistics.mean(values)


def evaluate_rouge(
    options: EvaluateOptions, device: str, samples: int | None = None, progress: Progress = no_progress
) -> dict[str, Any]:
    """Run `compress evaluate --metric rouge-l`; return mean and deviation over sampling seeds.

    samples: the most examples that are scored; None for all of the split, or of the test file.
    """
    started = time.monotonic()
    limits, sampling, seeds, seed = options.limits, options.sampling, options.seeds, options.calibration.seed
    data = options.calibration.data if options.test is None else options.test
    split = options.split if options.test is None else WHOLE
    if data is None:
        raise OptionError("ROUGE-L needs prompts with responses; give --data FILE.jsonl or --test FILE.jsonl")
    if samples is not None and samples < 1:
        raise OptionError(f"samples is {samples}; ROUGE-L needs at least one example")
    scorer()
    checkpoint = Checkpoint(resolve(options.model))
    limits.check(checkpoint.config.max_positions)
    tokenizer = load_tokenizer(checkpoint)
    maker = ExampleMaker(tokenizer, limits, options.template, keeps_long_prompts=True)
    found = instructions_of(data, maker, split, seed=seed)
    examples = found.examples[:samples]
    writer = Writer(Decoder(checkpoint.config, checkpoint.weights(options.dtype or checkpoint.model_dtype, device)))
    ends = end_tokens(checkpoint)
    values = []
    for own in range(seeds):
        drawn = SamplingOptions(sampling.temperature, sampling.top_p, sampling.top_k, seed + own)

        def bar(groups: Iterable[int], own: int = own) -> Iterable[int]:
            return progress(groups, f"ROUGE-L, seed {own} (batches)")

        values.append(
            rouge_l(
                writer, tokenizer, examples, limits.length, ends, sampling=drawn, stemming=options.stemming, progress=bar
            )
        )
    return {
        "metric": "rouge-l",
        "value": statistics.mean(values),
        "standard_deviation": statistics.stdev(values) if seeds > 1 else None,
        "values": values,
        "stemming": options.stemming,
        "examples": len(examples),
        "rows": found.rows,
        "rows_left_out": found.rows_left_out,
        "prompts_cut": found.prompts_cut,
        "references": sum(len(each.references) for each in examples),
        "tokens": sum(len(each.response) for each in examples),
        "seconds": time.monotonic() - started,
        "data": data,
        "split": split,
    }
