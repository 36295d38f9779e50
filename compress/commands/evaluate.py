"""The command `compress evaluate`, which measures one figure of a model's quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compress.commands.command import Figures, Given, Revision, command
from compress.commands.figures import show_left_out
from compress.commands.kinds import Kind, kind_of
from compress.commands.output import progress_bar, table
from compress.distillation.recipes import PERPLEXITY, ROUGE
from compress.options.evaluate import ACCURACY, MEASURE, EvaluateOptions
from compress.report.columns import with_error
from engine.errors import OptionError
from engine.generation.options import SKIP_OPTIONS

NO_LIMIT = "for perplexity, which is measured layer by layer"


def evaluate(given: Given) -> Figures:
    """Measure the quality of MODEL.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default).

    It may be a classifier of images or texts: --data is then a folder of images, an .npz, a .jsonl of text and label, or
    'digits', by default what it was distilled on.
    """
    options = given.make(EvaluateOptions, dtype=given.torch_dtype())
    return EVALUATIONS[kind_of(options.model)](given, options)


def _evaluate_language_model(given: Given, options: EvaluateOptions) -> Figures:
    is_perplexity = options.metric == PERPLEXITY and not options.tasks
    if options.metric != ROUGE or options.tasks:
        given.refuse(["test", "stemming"], "for rouge-l")
    if not is_perplexity:
        given.refuse(["memory_limit"], NO_LIMIT)
        given.refuse(["windows"], "for perplexity")
    if options.metric == ACCURACY or options.probe:
        raise OptionError(f"{options.model}: is no classifier, so it has no accuracy; take --metric perplexity or rouge-l")
    if not is_perplexity and not options.tasks:
        given.refuse(SKIP_OPTIONS, "for perplexity and tasks")
        if options.backend != "auto":
            raise OptionError("--backend is for perplexity, tasks and accuracy; leave it out")
    return _evaluate_tasks(given, options) if options.tasks else MEASURES[options.metric](given, options)


def _evaluate_perplexity(given: Given, options: EvaluateOptions) -> Figures:
    from compress.evaluate import evaluate_model

    given.chosen_device()  # raises OptionError for CUDA on a machine without it
    figures = evaluate_model(options, progress_bar)
    spread = "" if figures["value_stderr"] is None else f" ± {figures['value_stderr']:.4f}"
    given.say(
        f"{figures['metric']} {figures['value']:.4f}{spread} on {figures['tokens']:,} tokens of {figures['documents']} "
        f"documents in {_time_and_skipped(figures)}"
    )
    return figures


def _evaluate_tasks(given: Given, options: EvaluateOptions) -> Figures:
    from compress.evaluate import evaluate_tasks

    given.chosen_device()  # raises OptionError for CUDA on a machine without it
    figures = evaluate_tasks(options, progress_bar)
    given.say(table(task_rows(figures["value"])))
    given.say(_time_and_skipped(figures))
    return figures


def _time_and_skipped(figures: Figures) -> str:
    skipped = figures["experts_skipped_share"]
    return f"{figures['seconds']:.1f} s" + (f", experts skipped {skipped:.1%}" if skipped else "")


def task_rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each figure of each task, with its standard error.

    results: figures by task, under names of lm-evaluation-harness such as "acc,none" and "acc_stderr,none", which have the
    metric and the filter of the answers.
    """
    rows = [["task", "metric", "value"]]
    for task, own in results.items():
        for name, value in own.items():
            metric, _, chosen = name.partition(",")
            if chosen and not metric.endswith("_stderr") and isinstance(value, float | int):
                error = own.get(f"{metric}_stderr,{chosen}")
                shown = metric if chosen == "none" else f"{metric} ({chosen})"
                rows.append([task, shown, with_error(value, error if isinstance(error, float) else None, 4)])
    return rows


def _evaluate_rouge(given: Given, options: EvaluateOptions) -> Figures:
    from compress.distillation.rouge import evaluate_rouge

    if options.test is not None:
        given.refuse(["data", "split"], "for a file that is split, and every row of --test is scored")
    samples = options.calibration.samples if "samples" in given.named else None
    figures = evaluate_rouge(options, given.chosen_device(), samples, progress_bar)
    spread = "" if figures["standard_deviation"] is None else f" ± {figures['standard_deviation']:.4f}"
    part = "" if figures["split"] == "all" else f"{figures['split']} "
    given.say(
        f"rouge-l {figures['value']:.4f}{spread} on {figures['examples']} {part}examples of {figures['data']} "
        f"({figures['rows']} rows) in {figures['seconds']:.1f} s"
    )
    if part and not {"split", "samples"} & given.named:
        given.say("--split all scores every row")
    show_left_out(given, figures)
    return figures


def _evaluate_classifier(given: Given, options: EvaluateOptions) -> Figures:
    from compress.classifiers.accuracy import evaluate_accuracy

    given.refuse(["memory_limit"], NO_LIMIT)
    given.refuse(["windows"], "for perplexity")
    given.refuse(SKIP_OPTIONS, "for language models")
    given.refuse(["test", "stemming"], "for language models")
    if options.tasks or ("metric" in given.named and options.metric != ACCURACY):
        raise OptionError(f"{options.model}: is a classifier; its metric is {ACCURACY}")
    samples = options.calibration.samples if "samples" in given.named else None
    figures = evaluate_accuracy(options, samples, progress_bar)
    part = "" if figures["split"] == "all" else f"{figures['split']} "
    top_5 = "" if figures["top5"] is None else f", top-5 {figures['top5']:.4f},"
    given.say(
        f"{figures['metric']} {figures['value']:.4f}{top_5} on {figures['examples']} {part}examples of {figures['data']} in "
        f"{figures['seconds']:.1f} s"
    )
    return figures


Measure = Callable[[Given, EvaluateOptions], Figures]
MEASURES: dict[str, Measure] = {PERPLEXITY: _evaluate_perplexity, ROUGE: _evaluate_rouge}
EVALUATIONS: dict[Kind, Measure] = {
    "decoder": _evaluate_language_model,
    "encoder-decoder": _evaluate_language_model,
    "classifier": _evaluate_classifier,
}
COMMAND = command("evaluate", evaluate, EvaluateOptions, Revision, first=MEASURE)
