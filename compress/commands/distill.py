"""The command `compress distill`, for language models and classifiers."""

from collections.abc import Callable

from compress.commands.command import Figures, Given, Push, command
from compress.commands.figures import show_figures, show_left_out
from compress.commands.kinds import Kind, kind_of
from compress.commands.output import progress_bar, table
from compress.commands.preset import with_preset
from compress.options.distill import DistillOptions
from compress.options.distill_classifier import ClassifierOptions
from compress.options.presets import CLASSIFIER, PresetOptions
from compress.report.columns import number, size
from engine.options import names


def distill(given: Given) -> Figures:
    """Train a student towards a teacher: on text, or on responses to prompts.

    Teacher and student need the same tokenizer. The best state on data set aside is kept, in the student's shape.

    Both may be classifiers of images or texts instead: --data is a folder of images, an .npz, a .jsonl of text and label, or
    'digits' (the default). Defaults are then 240 epochs, batches of 64, rate 0.05, temperature 4; the last state is kept.

    Several processes share the work: torchrun --nproc-per-node N --no-python compress distill …
    """
    return DISTILLATIONS[kind_of(given.values["student"])](given)


def _distill_language_model(given: Given) -> Figures:
    from compress.distill import distill as run

    own = names(ClassifierOptions) - names(DistillOptions)
    given.refuse(own, "for classifiers, and the student is a language model")
    for file, samples in (("validation", "validation_samples"), ("test", "evaluation_samples")):
        if given.values[file] is not None:
            given.refuse([samples], f"for a part of --data, and all of --{file} is used")
    given = with_preset(given, (DistillOptions,), "distill", given.values["recipe"])
    counts = given.values["teacher_experts"]
    if counts is not None and len(counts) > 1:
        return _sweep(given, counts)
    figures = run(_options(given, None if counts is None else counts[0]), progress_bar)
    show_figures(given, figures)
    _show_training(given, figures)
    before, after = figures["metric_before"], figures["metric_after"]
    given.say(f"{figures['metric_name']} of responses: {before:.3f} to {after:.3f}")
    given.say("time: " + ", ".join(f"{name} {share:.0%}" for name, share in figures["time_share"].items()))
    show_left_out(given, figures)
    return figures


def _options(given: Given, teacher_experts: int | None, name: str | None = None) -> DistillOptions:
    return given.job(DistillOptions, name or given.values["recipe"], teacher_experts=teacher_experts)


def _sweep(given: Given, counts: tuple[int, ...]) -> Figures:
    from compress.distill_sweep import cells, sweep_teacher_experts

    given.refuse(["push_to_hub"], "for one artifact, and a sweep makes several; `compress push` them afterwards")
    base = _options(given, counts[0], f"{given.values['recipe']}-teacher-experts")
    figures = sweep_teacher_experts(cells(base, counts), progress_bar)
    if figures is None:
        return {}  # in a process that is not the first
    name = figures["rows"][0]["metric_name"]
    rows = [["experts of the teacher", f"{name} of the student", f"{name} of the teacher"]]
    for row in figures["rows"]:
        rows.append([str(row["teacher_experts"]), *(number(row[f"{whose}_metric"], 3) for whose in ("student", "teacher"))])
    given.say(table(rows))
    given.say(f"{figures['output']}: {len(figures['runs'])} students in {figures['seconds']:.1f} s")
    return figures


def _distill_classifier(given: Given) -> Figures:
    from compress.classifiers.distill import distill_classifier

    own = names(DistillOptions) - names(ClassifierOptions)
    given.refuse(own, "for language models, and the student is a classifier")
    given = with_preset(given, (ClassifierOptions,), CLASSIFIER, given.values["recipe"])
    # Options that are not on the command line have the defaults of classifiers.
    options = given.make_named(ClassifierOptions, **given.of_job(given.values["recipe"]))
    figures = distill_classifier(options, progress_bar)
    given.say(table(_classifier_rows(figures)))
    if figures["teacher_accuracy"] is not None:
        top_5 = "" if figures["teacher_top5"] is None else f", top-5 {figures['teacher_top5']:.4f}"
        given.say(f"teacher: {figures['teacher_accuracy']:.4f}{top_5}; all on {figures['evaluation']}")
    if figures["experts"]:
        given.say(f"without its {figures['experts']} experts: {figures['accuracy_without_mixture']:.4f}")
    _show_training(given, figures)
    given.say(
        f"{figures['artifact']}: written in {figures['seconds']:.1f} s, peak memory {size(figures['peak_memory_bytes'])}"
    )
    return figures


def _classifier_rows(figures: Figures) -> list[list[str]]:
    rows = [["", "before", "after"], ["accuracy", *(number(figures[f"metric_{when}"], 4) for when in ("before", "after"))]]
    if figures["top5_after"] is not None:
        rows.append(["top-5 accuracy", *(number(figures[f"top5_{when}"], 4) for when in ("before", "after"))])
    if figures["probe_after"] is not None:
        rows.append(["linear probe", *(number(figures[f"probe_{when}"], 4) for when in ("before", "after"))])
    rows.append(["parameters", *(f"{figures[f'parameters_{when}']:,}" for when in ("before", "after"))])
    return rows


def _show_training(given: Given, figures: Figures) -> None:
    given.say(
        f"{figures['recipe']}: {figures['steps']} steps, loss {figures['loss_first']:.3f} to {figures['loss_last']:.3f}"
    )


DISTILLATIONS: dict[Kind, Callable[[Given], Figures]] = {
    "decoder": _distill_language_model,
    "encoder-decoder": _distill_language_model,
    "classifier": _distill_classifier,
}
COMMAND = command("distill", distill, DistillOptions, ClassifierOptions, PresetOptions, Push, is_shared=True)
