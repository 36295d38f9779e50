"""ROUGE-L of a model's responses against those of the data (Lin 2004), by the package rouge-score."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from calibrate.instructions import Example, ExampleMaker, instructions_of
from compress.distillation.responses import write_responses
from compress.options.evaluate import EvaluateOptions
from engine.checkpoint.checkpoint import Checkpoint, resolve
from engine.checkpoint.tokenizer import end_tokens, load_tokenizer
from engine.decoder.model import Decoder
from engine.errors import OptionError
from engine.generation.options import SamplingOptions
from engine.progress import Progress, no_progress

GROUP = 16
"""Number of prompts that are continued together."""


def scorer() -> Any:
    """Return the package's scorer. Raises OptionError where the package is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise OptionError("ROUGE-L needs rouge-score; install it with `pip install moe-compress[tasks]`") from error
    return RougeScorer(["rougeL"])


def rouge_l(
    decoder: Decoder,
    tokenizer: Any,
    examples: Sequence[Example],
    max_length: int,
    ends: frozenset[int],
    *,
    sampling: SamplingOptions,
    progress: Any = iter,
) -> float:
    """Return the mean F-measure over the examples, 0 to 1, of responses sampled with the options' seed."""
    score, generator = scorer(), sampling.generator()
    values = []
    groups: Iterable[int] = progress(range(0, len(examples), GROUP))
    for start in groups:
        group = examples[start : start + GROUP]
        written = write_responses(decoder, [each.prompt for each in group], max_length, ends, sampling, generator)
        for own, reference in zip(written, group, strict=True):
            texts = [tokenizer.decode(each.response, skip_special_tokens=True) for each in (reference, own)]
            values.append(float(score.score(*texts)["rougeL"].fmeasure))
    return statistics.mean(values)


def evaluate_rouge(options: EvaluateOptions, device: str, progress: Progress = no_progress) -> dict[str, Any]:
    """Run `compress evaluate --metric rouge-l`; return mean and deviation over sampling seeds, on held-out examples."""
    started = time.monotonic()
    data, samples, seed = options.calibration.data, options.calibration.samples, options.calibration.seed
    limits, sampling, seeds = options.limits, options.sampling, options.seeds
    if data is None:
        raise OptionError("ROUGE-L needs prompts with responses; give --data FILE.jsonl")
    if samples < 1:
        raise OptionError(f"samples is {samples}; ROUGE-L needs at least one example")
    scorer()
    checkpoint = Checkpoint(resolve(options.model))
    limits.check(checkpoint.config.max_positions)
    tokenizer = load_tokenizer(checkpoint)
    maker = ExampleMaker(tokenizer, limits, options.template, keeps_long_prompts=True)
    examples = instructions_of(data, maker, "held-out", seed=seed).examples[:samples]
    decoder = Decoder(checkpoint.config, checkpoint.weights(options.dtype or checkpoint.model_dtype, device))
    ends = end_tokens(checkpoint)
    values = []
    for own in range(seeds):
        drawn = SamplingOptions(sampling.temperature, sampling.top_p, sampling.top_k, seed + own)

        def bar(groups: Iterable[int], own: int = own) -> Iterable[int]:
            return progress(groups, f"ROUGE-L, seed {own} (batches)")

        values.append(rouge_l(decoder, tokenizer, examples, limits.length, ends, sampling=drawn, progress=bar))
    return {
        "metric": "rouge-l",
        "value": statistics.mean(values),
        "standard_deviation": statistics.stdev(values) if seeds > 1 else None,
        "values": values,
        "examples": len(examples),
        "tokens": sum(len(each.response) for each in examples),
        "seconds": time.monotonic() - started,
        "data": data,
        "split": "held-out",
    }
