"""`compress evaluate`: one figure of a model's quality."""

from __future__ import annotations

from compress.commands.command import Figures, Given, Revision, command
from compress.commands.output import progress_bar, table
from compress.options.evaluate import ACCURACY, MEASURE, PERPLEXITY, EvaluateOptions
from engine.errors import OptionError


def evaluate(given: Given) -> Figures:
    """Measure the quality of MODEL.

    MODEL is a checkpoint directory, a hub id, or 'demo', the built-in model (the default).

    It may be a classifier of images or texts: --data is then a folder of images, an .npz, a .jsonl of text and label, or
    'digits', by default what it was distilled on.
    """
    from engine.checkpoint.checkpoint import resolve
    from engine.transformers_models.classifier import is_classifier

    options = given.make(EvaluateOptions, dtype=given.torch_dtype())
    a_classifier = is_classifier(resolve(options.model))
    if a_classifier or options.tasks or options.metric != PERPLEXITY:
        given.refuse(["memory_limit"], "for perplexity, which is measured layer by layer")
    if a_classifier:
        return _evaluate_classifier(given, options)
    if options.metric == ACCURACY or options.probe:
        raise OptionError(f"{options.model}: is no classifier, so it has no accuracy; take --metric perplexity or rouge-l")
    if options.backend != "auto" and (options.tasks or options.metric != PERPLEXITY):
        raise OptionError("--backend is for perplexity and accuracy; leave it out")
    if options.tasks:
        return _evaluate_tasks(given, options)
    if options.metric != PERPLEXITY:
        return _evaluate_rouge(given, options)
    return _evaluate_perplexity(given, options)


def _evaluate_perplexity(given: Given, options: EvaluateOptions) -> Figures:
    from compress.evaluate import evaluate_model

    given.chosen_device()  # CUDA where there is none is refused
    figures = evaluate_model(options, progress_bar)
    given.say(f"{figures['metric']} {figures['value']:.4f} on {figures['tokens']:,} tokens in {figures['seconds']:.1f} s")
    return figures


def _evaluate_tasks(given: Given, options: EvaluateOptions) -> Figures:
    from compress.evaluate import evaluate_tasks

    figures = evaluate_tasks(options.model, list(options.tasks), limit=options.limit, device=given.chosen_device())
    given.say(table([["task", "value"], *([name, str(value)] for name, value in figures["value"].items())]))
    return figures


def _evaluate_rouge(given: Given, options: EvaluateOptions) -> Figures:
    from compress.distillation.rouge import evaluate_rouge

    figures = evaluate_rouge(options, given.chosen_device(), progress_bar)
    spread = "" if figures["standard_deviation"] is None else f" ± {figures['standard_deviation']:.4f}"
    given.say(f"rouge-l {figures['value']:.4f}{spread} on {figures['examples']} examples in {figures['seconds']:.1f} s")
    return figures


def _evaluate_classifier(given: Given, options: EvaluateOptions) -> Figures:
    from compress.classifiers.accuracy import evaluate_accuracy

    if options.tasks or ("metric" in given.named and options.metric != ACCURACY):
        raise OptionError(f"{options.model}: is a classifier; its metric is {ACCURACY}")
    samples = options.calibration.samples if "samples" in given.named else None
    figures = evaluate_accuracy(options, samples, progress_bar)
    part = "" if figures["split"] == "all" else f"{figures['split']} "
    given.say(
        f"{figures['metric']} {figures['value']:.4f} on {figures['examples']} {part}examples of {figures['data']} in "
        f"{figures['seconds']:.1f} s"
    )
    return figures


COMMAND = command("evaluate", evaluate, EvaluateOptions, Revision, first=MEASURE)
