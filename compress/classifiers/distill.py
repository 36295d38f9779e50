"""`compress distill` of classifiers: a student of images or texts is trained towards a teacher (MoE-KD)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from calibrate.labelled import DIGITS, Labelled, is_nameless
from compress.classifiers.accuracy import Accuracy, Inputs, accuracy, examples_for, on, probe
from compress.classifiers.distillation import ClassifierLoss, Mixture, Side, TeacherPass, ask, mixture_for
from compress.classifiers.recipes import ABLATIONS
from compress.classifiers.training import ClassifierTrainer
from compress.options.distill_classifier import OPTIMISERS, ClassifierOptions
from compress.plans.apply import carried_files
from compress.report import canvas
from compress.report.card import front_matter
from compress.report.pictures import draw_training
from compress.run.claims import claims_output
from compress.run.job import Run, teacher_identity
from compress.run.result import check_outputs, finished_before
from compress.run.work_directory import WorkDirectory
from engine.checkpoint.artifact import whole_or_nothing, write_provenance
from engine.checkpoint.model_directory import resolve
from engine.errors import OptionError
from engine.files.json_file import write_json
from engine.files.safetensors_writer import write_tensors
from engine.generation.report import peak_memory_bytes
from engine.progress import Progress, no_progress
from engine.transformers_models.classifier import MIXTURE_KEY, MIXTURE_NAME, PROTOTYPES, Classifier, ClassifierCheckpoint
from engine.transformers_models.classifier_inputs import PREPROCESSOR, ImageInputs
from engine.transformers_models.image_frame import Frame
from engine.transformers_models.transformers_model import quiet_transformers


@dataclass
class Pair:
    """Teacher, student and examples that have passed all checks."""

    student: ClassifierCheckpoint
    teacher: ClassifierCheckpoint | None
    inputs: Inputs
    training: Labelled
    held_out: Labelled
    labels_N: Tensor
    held_out_N: Tensor
    class_names: tuple[str, ...]

    def side(self, model: Classifier) -> Side:
        """Return the student, loaded, with its examples."""
        return Side(model, self.inputs, self.training, self.held_out)

    def fingerprints(self) -> dict[str, str]:
        """Return the identity of the models and the examples, as JSON."""
        texts = {"training": self.training.fingerprint(), "held_out": self.held_out.fingerprint()}
        return _identities(self.student, self.teacher) | texts


ClassifierRun = Run[ClassifierOptions, Pair]


def _identities(student: ClassifierCheckpoint, teacher: ClassifierCheckpoint | None) -> dict[str, str]:
    return student.identity() | teacher_identity(teacher)


@claims_output
def distill_classifier(options: ClassifierOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Run the job; return the figures of the result, with the keys of `compress distill --json`."""
    started = time.monotonic()
    options = replace(options, calibration=replace(options.calibration, data=options.calibration.data or DIGITS))
    options.check()
    work = WorkDirectory(options.output)
    student = ClassifierCheckpoint(resolve(options.model))
    if (done := finished_before(options, work, lambda: _identities(student, _teacher(options)))) is not None:
        return done
    check_outputs(options)
    pair = prepare(options, student)
    for checkpoint in (pair.student, pair.teacher):
        if checkpoint is not None:
            checkpoint.check_finite()
    with work.until_whole(options.output):
        work.begin(options.deciding() | pair.fingerprints(), options.resume)
        return _make(Run(options, pair, work, progress, started))


def _teacher(options: ClassifierOptions) -> ClassifierCheckpoint | None:
    return None if options.teacher is None else ClassifierCheckpoint(resolve(options.teacher))


def prepare(options: ClassifierOptions, student: ClassifierCheckpoint) -> Pair:
    """Open and check every input of the run, and write nothing. Raises a CompressError for invalid input."""
    teacher = _teacher(options)
    if student.experts:
        raise OptionError(
            f"{student.directory}: is a mixture of experts already; distill into the plain student from which it was made"
        )
    class_names = student.class_names if teacher is None else _common_names(teacher, student)
    examples, inputs = examples_for(student, options.calibration.data, options.max_length)
    training, held_out = _parts(examples, options)
    if len(training) < 2:
        raise OptionError(f"{examples.name}: has one example to train on; give more")
    labels_N, held_out_N = (part.numbers(class_names) for part in (training, held_out))
    names = _names_of(examples, class_names)
    return Pair(student, teacher, inputs, training, held_out, labels_N, held_out_N, names)


def _parts(examples: Labelled, options: ClassifierOptions) -> tuple[Labelled, Labelled]:
    """Return the examples to train on, and those held out for the figures."""
    training, held_out = examples.part("calibration"), examples.part("held-out")
    if options.evaluation_samples is not None:
        held_out = held_out.only(range(min(options.evaluation_samples, len(held_out))))
    return training, held_out


def _common_names(teacher: ClassifierCheckpoint, student: ClassifierCheckpoint) -> tuple[str, ...]:
    """Return the class names of both models. Raises OptionError where they differ."""
    own, other = teacher.class_names, student.class_names
    if teacher.what != student.what or len(own) != len(other):
        raise OptionError(
            f"{teacher.directory} tells {len(own)} classes of {teacher.what} and {student.directory} {len(other)} of "
            f"{student.what}; a student needs a teacher of the same classes"
        )
    if own != other and not is_nameless(own) and not is_nameless(other):
        raise OptionError(
            f"{teacher.directory} and {student.directory} name their classes differently; give both the same id2label"
        )
    return other if is_nameless(own) else own


def _names_of(examples: Labelled, class_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the class names, taken from the data where the models have none."""
    found = sorted({label for label in examples.labels if isinstance(label, str)})
    return tuple(found) if is_nameless(class_names) and len(found) == len(class_names) else class_names


@dataclass
class TrainedClassifier:
    """The result of a training."""

    student: Classifier
    mixture: Mixture | None
    taught: TeacherPass | None
    trainer: ClassifierTrainer
    before: dict[str, Any]
    """Figures before the first step, as JSON: `accuracy` and `teacher` have top-1 and top-5 accuracy."""


def _train(run: ClassifierRun) -> TrainedClassifier:
    options, pair = run.options, run.prepared
    device, teaching = options.device, options.teaching
    student = pair.student.load(torch.float32, device)
    teacher = None
    if pair.teacher is not None:
        # The teacher's own preprocessing reads the examples: its size and crop may differ from the student's.
        examples, own_inputs = examples_for(pair.teacher, options.calibration.data, options.max_length)
        teacher = Side(pair.teacher.load(options.dtype, device), own_inputs, *_parts(examples, options))
    before = run.work.once("before", lambda: _before(run, student, teacher))
    taught, mixture = None, None
    if teacher is not None:
        taught = ask(teacher.model, teaching, teacher.training, teacher.inputs, device, run.bar("teacher"))
    if teaching.recipe.has_gate:
        assert teacher is not None and taught is not None
        gated = _gated(student, pair, device)
        mixture = mixture_for(
            teaching.ablation, student, teacher.model, taught.means_KE, gated, options.calibration.seed
        ).to(device)
    parameters = dict(student.model.requires_grad_(True).named_parameters(prefix="student"))
    buffers = dict(student.model.named_buffers(prefix="student"))
    if mixture is not None:
        own = mixture.named_parameters(prefix="mixture")
        parameters |= {name: parameter for name, parameter in own if parameter.requires_grad}
        buffers |= dict(mixture.named_buffers(prefix="mixture"))
    loss = ClassifierLoss(teaching, pair.side(student), teacher, mixture, taught, pair.labels_N, device)
    steps = options.epochs * max(1, len(pair.training) // options.batch_size)
    momentum = options.momentum if OPTIMISERS[options.optimiser] else None
    training, falls = options.training(steps), options.falls(steps)
    trainer = ClassifierTrainer(parameters, buffers, loss, training, len(pair.training), momentum, falls)
    for module in (student, mixture):
        if module is not None:
            module.train()
    with torch.random.fork_rng(devices=[]):
        trainer.run(
            state_path=run.work.path / "distill.safetensors",
            resume=options.resume,
            progress=run.bar(f"{options.recipe} (steps)"),
        )
    for module in (student, mixture):
        if module is not None:
            module.eval()
    return TrainedClassifier(student, mixture, taught, trainer, before)


@torch.no_grad()
def _gated(student: Classifier, pair: Pair, device: str) -> Tensor:
    return student.split(**on(pair.inputs, pair.training.read([0]), device)).gated


def _before(run: ClassifierRun, student: Classifier, teacher: Side | None) -> dict[str, Any]:
    options, pair = run.options, run.prepared

    def of(side: Side, name: str) -> Accuracy:
        return accuracy(side.model, side.held_out, side.inputs, pair.held_out_N, options.device, run.bar(name))

    own = pair.side(student)
    return {
        "accuracy": of(own, "accuracy before"),
        "teacher": (None, None) if teacher is None else of(teacher, "accuracy of the teacher"),
        "probe": _probe(options, own),
    }


def _probe(options: ClassifierOptions, side: Side) -> float | None:
    if options.probe is None:
        return None
    return probe(side.model, options.probe, side.inputs, options.device, options.calibration.seed)


# The artifact


def _make(run: ClassifierRun) -> dict[str, Any]:
    options, pair, done = run.options, run.prepared, _train(run)
    with whole_or_nothing(options.output, options.overwrite) as directory:
        _write_model(directory, pair, done)
        result = ClassifierCheckpoint(directory)
        figures = _figures(run, done, result)
        if canvas.available():
            draw_training(directory, options.output.name, {options.recipe: (done.trainer.history, [])}, "accuracy")
        figures |= {"seconds": time.monotonic() - run.started, "peak_memory_bytes": peak_memory_bytes()}
        (directory / "README.md").write_text(_card(options, figures), encoding="utf-8")
        write_provenance(directory, _provenance(options, pair, figures))
    return figures


@torch.no_grad()
def _write_model(directory: Path, pair: Pair, done: TrainedClassifier) -> None:
    """Write the student, and the mixture in a file of its own.

    The mean prototype is added to the head's bias and subtracted from all prototypes. The mixture stays the same, and the
    student alone is then the classifier of the mean of all experts.
    """
    source, model = pair.student, cast(Any, done.student.model)
    config = source.raw_config | _named(pair.class_names)
    if done.mixture is not None and done.mixture.means_KE is not None:
        assert done.taught is not None
        prototypes_KD = done.mixture.prototypes().detach().cpu()
        head = done.student.head
        if head.bias is not None:
            mean_D = done.taught.shares_K.cpu() @ prototypes_KD
            head.bias.add_(head.weight @ mean_D.to(head.weight.device))
            prototypes_KD = prototypes_KD - mean_D
        gate = {name: tensor.cpu().contiguous() for name, tensor in done.mixture.gate.state_dict().items()}
        write_tensors(directory / MIXTURE_NAME, {PROTOTYPES: prototypes_KD} | gate, {"format": "pt"}, "the mixture")
        config[MIXTURE_KEY] = len(prototypes_KD)
    with quiet_transformers():
        model.to(source.model_dtype).save_pretrained(directory)
    write_json(directory / "config.json", config)
    for path in carried_files(source.directory):
        shutil.copyfile(path, directory / path.name)
    if isinstance(pair.inputs, ImageInputs) and not (directory / PREPROCESSOR).is_file():
        images = pair.training.read([0])
        assert isinstance(images, Tensor)
        frame = pair.training.frame or pair.inputs.frame or Frame((images.shape[2], images.shape[3]))
        write_json(directory / PREPROCESSOR, pair.inputs.described(frame))


def _named(class_names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "id2label": {str(number): name for number, name in enumerate(class_names)},
        "label2id": {name: number for number, name in enumerate(class_names)},
    }


def _figures(run: ClassifierRun, done: TrainedClassifier, result: ClassifierCheckpoint) -> dict[str, Any]:
    options, pair = run.options, run.prepared
    made, history = result.load(options.dtype, options.device), done.trainer.history
    side = pair.side(made)
    after = accuracy(made, pair.held_out, pair.inputs, pair.held_out_N, options.device, run.bar("accuracy after"))
    alone = None
    if made.mixture is not None:
        made.mixture, mixture = None, made.mixture
        alone = accuracy(made, pair.held_out, pair.inputs, pair.held_out_N, options.device)
        made.mixture = mixture
    (before, top5_before), (teacher, teacher_top5) = done.before["accuracy"], done.before["teacher"]
    first, last = history[0], history[-1]
    return {
        "artifact": str(options.output),
        "teacher": options.teacher,
        "recipe": options.recipe,
        "ablation": options.ablation,
        "steps": len(history),
        "epochs": options.epochs,
        **{f"{name}_{when}": terms[name] for name in first for when, terms in (("first", first), ("last", last))},
        "metric_name": "accuracy",
        "metric_before": before,
        "metric_after": after.top_1,
        "top5_before": top5_before,
        "top5_after": after.top_5,
        "accuracy_without_mixture": None if alone is None else alone.top_1,
        "teacher_accuracy": teacher,
        "teacher_top5": teacher_top5,
        "probe_before": done.before["probe"],
        "probe_after": _probe(options, side),
        "training_examples": len(pair.training),
        "held_out_examples": len(pair.held_out),
        "evaluation": f"{len(pair.held_out)} held-out examples of {pair.held_out.name}",
        "classes": len(pair.class_names),
        "experts": result.experts,
        "parameters_before": pair.student.parameters,
        "parameters_after": result.parameters,
        "bytes_before": pair.student.bytes,
        "bytes_after": result.bytes,
        "examples_per_second": done.trainer.tokens_per_second or None,
    }


def _card(options: ClassifierOptions, figures: Mapping[str, Any]) -> str:
    """Return the artifact's README.md."""
    rows = [("accuracy", figures["metric_before"], figures["metric_after"])]
    if figures["top5_after"] is not None:
        rows.append(("top-5 accuracy", figures["top5_before"], figures["top5_after"]))
    if options.probe is not None:
        rows.append((f"linear probe on {options.probe}", figures["probe_before"], figures["probe_after"]))
    whom = "on the labels alone" if options.teacher is None else f"from `{options.teacher}`"
    ablation = f", ablation ({options.ablation}): {ABLATIONS[options.ablation].about}" if options.ablation else ""
    teacher, teacher_top_5 = figures["teacher_accuracy"], figures["teacher_top5"]
    top_5 = "" if teacher_top_5 is None else f", top-5 {teacher_top_5:.4f}"
    return "\n".join(
        [
            *front_matter(["classifier", "distilled", "moe-compress"], library="transformers"),
            f"# {options.model}, distilled",
            "",
            f"Distilled {whom} by recipe `{options.recipe}`{ablation}: {figures['steps']} steps, loss "
            f"{figures['loss_first']:.3f} to {figures['loss_last']:.3f}. Every option and the checksums of all files are in",
            "`compression.json`.",
            "",
            "| | before | after |",
            "| --- | ---: | ---: |",
            *(f"| {name} | {before:.4f} | {after:.4f} |" for name, before, after in rows),
            "",
            f"On {figures['evaluation']}" + (f"; the teacher has {teacher:.4f}{top_5}." if teacher is not None else "."),
            f"It took {figures['seconds']:.0f} s and at most {figures['peak_memory_bytes'] / 1e9:.2f} GB of memory.",
            "",
            *(_mixture_lines(figures) if figures["experts"] else []),
        ]
    )


def _mixture_lines(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"`{MIXTURE_NAME}` holds {figures['experts']} experts behind the student's head and their gate; moe-compress runs",
        f"them. Without that file this is an ordinary classifier, of accuracy {figures['accuracy_without_mixture']:.4f}.",
        "",
    ]


def _provenance(options: ClassifierOptions, pair: Pair, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "source": {"model": options.model} | _identities(pair.student, pair.teacher),
        "method": f"distill-{options.recipe}",
        "options": options.recorded(),
        "seed": options.calibration.seed,
        "figures": dict(figures),
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors", "numpy")},
    }
