"""Accuracy of a classifier, and linear probing of its features on another task.

Shape suffixes: N examples, B batch, C classes, D features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.labelled import DIGITS, Labelled, labelled
from compress.options.evaluate import EvaluateOptions
from compress.training.training import batch_rows
from engine.checkpoint.model_directory import resolve
from engine.errors import CheckpointError, DataError, OptionError
from engine.onnx.classifier import open_classifier
from engine.progress import Progress, no_progress
from engine.transformers_models.classifier import Classifier, ClassifierDirectory
from engine.transformers_models.classifier_inputs import Examples, ImageInputs, TextInputs

GROUP = 64
"""Number of examples per forward pass where nothing is trained."""
TOP = 5
"""Number of classes among which the correct one has to be for top-5 accuracy."""
Inputs = ImageInputs | TextInputs
Bar = Callable[[Iterable[int]], Iterable[int]]


def examples_for(directory: ClassifierDirectory, source: str | None, length: int | None = None) -> tuple[Labelled, Inputs]:
    """Return the examples of a source, by default the digits, and the preprocessing of a model's inputs."""
    inputs = directory.inputs(length)
    found = labelled(source or DIGITS, inputs.frame if isinstance(inputs, ImageInputs) else None)
    if found.what != directory.what:
        raise DataError(
            f"{found.name}: has {found.what}, and {directory.directory} classifies {directory.what}; give others"
        )
    return found, inputs


def on(inputs: Inputs, examples: Examples, device: torch.device | str) -> dict[str, Tensor]:
    """Return a model's inputs on its device."""
    if isinstance(examples, Tensor):
        examples = examples.to(device)
    return {name: value.to(device) for name, value in inputs(examples).items()}


def groups(examples: Labelled, inputs: Inputs, device: torch.device | str, bar: Bar = iter) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of all examples in their order, GROUP at a time."""
    for start in bar(range(0, len(examples), GROUP)):
        yield on(inputs, examples.read(range(start, min(start + GROUP, len(examples)))), device)


class Accuracy(NamedTuple):
    """Shares of the examples whose correct class is the most probable, and among the five most probable."""

    top_1: float
    top_5: float | None
    """None for five classes or fewer, among which the correct one always is."""


@torch.no_grad()
def accuracy(
    classify: Callable[..., Tensor],
    examples: Labelled,
    inputs: Inputs,
    labels_N: Tensor,
    device: torch.device | str = "cpu",
    bar: Bar = iter,
) -> Accuracy:
    """Return top-1 and top-5 accuracy on all examples. Raises CheckpointError for NaN logits."""
    right, among, start, classes = 0, 0, 0, 0
    for given in groups(examples, inputs, device, bar):
        logits_BC = classify(**given)
        if not bool(logits_BC.isfinite().all()):
            raise CheckpointError(f"{examples.name}: the model's logits are not finite; try --dtype float32")
        labels_B, classes = labels_N[start : start + len(logits_BC)], logits_BC.shape[1]
        right += int((logits_BC.argmax(dim=-1).cpu() == labels_B).sum())
        best_BT = logits_BC.topk(min(TOP, classes), dim=-1).indices.cpu()
        among += int((best_BT == labels_B[:, None]).any(dim=-1).sum())
        start += len(logits_BC)
    return Accuracy(right / len(examples), among / len(examples) if classes > TOP else None)


def evaluate_accuracy(options: EvaluateOptions, samples: int | None, progress: Progress = no_progress) -> dict[str, Any]:
    """Run `compress evaluate` of a classifier: its accuracy, or the accuracy of a linear probe on its features.

    The default data are the examples that the classifier was distilled on, or the digits where it was not. `samples`: how
    many of them; None for all.
    """
    started = time.monotonic()
    model, split, probes = options.model, options.split, options.probe
    if split == "selection" or split == "report":
        raise OptionError(f"--split {split} is for text and for prompts with responses; take held-out for a classifier")
    described, classify, where = open_classifier(resolve(model), options.backend, options.device, options.dtype)
    found, inputs = examples_for(described, options.calibration.data or described.data, options.limits.length)
    part = found.part("held-out" if probes else split)
    part = part if samples is None else part.only(range(min(samples, len(part))))
    top_5 = None
    if not probes:
        labels_N = part.numbers(described.class_names)
        value, top_5 = accuracy(classify, part, inputs, labels_N, where, lambda rows: progress(rows, "accuracy (batches)"))
    elif isinstance(classify, Classifier):
        value = probe(classify, found.name, inputs, where, options.calibration.seed)
    else:
        raise OptionError(f"{model}: an export gives no features to probe; take the model it was made from")
    return {
        "metric": "probe" if probes else "accuracy",
        "value": value,
        "top5": top_5,
        "tokens": None,
        "examples": len(part),
        "seconds": time.monotonic() - started,
        "data": found.name,
        "split": "held-out" if probes else split,
    }


# Linear probing

PROBE_EPOCHS, PROBE_BATCH, PROBE_RATE, PROBE_FALLS = 100, 64, 0.1, (30, 60, 90)
"""Settings of MoE-KD's appendix B: SGD with momentum 0.9, no weight decay, the rate divided by 10 at these epochs."""


def probe(classifier: Classifier, source: str, inputs: Inputs, device: torch.device | str, seed: int = 0) -> float:
    """Return the accuracy of a linear classifier on the frozen features z, on examples that it was not trained on.

    The experiment is MoE-KD §5.3, table 5. The examples' classes are their own, not the model's.
    """
    examples = labelled(source, inputs.frame if isinstance(inputs, ImageInputs) else None)
    names = sorted({str(label) for label in examples.labels})
    numbers = {name: number for number, name in enumerate(names)}
    parts = []
    for split in ("calibration", "held-out"):
        part = examples.part(split)
        labels_N = torch.tensor([numbers[str(label)] for label in part.labels])
        parts.append((_features(classifier, part, inputs, device), labels_N))
    (train_ND, labels_N), (held_out_ND, held_out_N) = parts
    linear = _linear(train_ND, labels_N, len(names), seed)
    return float((linear(held_out_ND).argmax(dim=-1) == held_out_N).float().mean())


@torch.no_grad()
def _features(classifier: Classifier, examples: Labelled, inputs: Inputs, device: torch.device | str) -> Tensor:
    return torch.cat([classifier.split(**given).features_BD.float().cpu() for given in groups(examples, inputs, device)])


def _linear(features_ND: Tensor, labels_N: Tensor, classes: int, seed: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linear = nn.Linear(features_ND.shape[1], classes)
    optimiser = torch.optim.SGD(linear.parameters(), lr=PROBE_RATE, momentum=0.9)
    per_epoch = max(1, len(features_ND) // PROBE_BATCH)
    for step in range(PROBE_EPOCHS * per_epoch):
        optimiser.param_groups[0]["lr"] = PROBE_RATE * 0.1 ** sum(step // per_epoch >= epoch for epoch in PROBE_FALLS)
        rows_B = batch_rows(len(features_ND), PROBE_BATCH, step, seed)
        optimiser.zero_grad()
        F.cross_entropy(linear(features_ND[rows_B]), labels_N[rows_B]).backward()
        optimiser.step()
    return linear.requires_grad_(False)
