"""`compress export` of a classifier: an ONNX graph of student and mixture, compared with the engine before it is kept.

Shape suffixes: B batch, C classes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.classifiers.accuracy import examples_for, groups
from compress.export.exporting import Export, run_export
from compress.export.parity import Allowed
from compress.options.export import CLASSIFIER_PRECISIONS, ClassifierExportOptions
from engine.checkpoint.kinds import ONNX_NAME
from engine.checkpoint.model_directory import resolve
from engine.errors import DataError, ExportError, OptionError
from engine.onnx.classifier import MIXTURE_SCOPE, OnnxClassifier, write_classifier
from engine.progress import Progress
from engine.transformers_models.classifier import Classifier, ClassifierCheckpoint, ClassifierDirectory
from engine.transformers_models.classifier_inputs import SMALL_SIZE, image_inputs

ALLOWED = {"float32": Allowed(1e-4, 1e-4), "int8": Allowed(math.inf, 0.3)}
"""Allowed difference of centered logits from the engine's in float32, by precision."""
COMPARED = 256
"""Number of data examples on which logits and predictions are compared, and ranges of activations calibrated."""
BATCHES = (1, 2, 7)
LENGTHS = (3, 8, 21)
"""Batch sizes of random inputs, and their numbers of tokens for texts."""
Given = dict[str, Tensor]


def export_classifier(options: ClassifierExportOptions) -> dict[str, Any]:
    """Export a classifier; see `run_export`."""
    return run_export(options, ClassifierExport)


class ClassifierExport(Export[ClassifierExportOptions]):
    """The export of a classifier."""

    packages = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")

    def __init__(self, options: ClassifierExportOptions, progress: Progress) -> None:
        super().__init__(options, progress)
        self.checkpoint = ClassifierCheckpoint(resolve(options.model))
        self.checkpoint.check_finite()
        self._classifier = self.checkpoint.load(torch.float32)
        self._chance, self._real = random_inputs(self.checkpoint), _real(options, self.checkpoint)
        self._is_convolutional = self._classifier.split(**self._chance[1]).map is not None
        self._rounds = CLASSIFIER_PRECISIONS[options.precision]
        if self._rounds and self._is_convolutional and not self._real:
            raise OptionError(
                f"{options.model}: int8 of convolutions needs the ranges of activations; give images as --data"
            )

    def write(self, directory: Path) -> None:
        graph = directory / ONNX_NAME
        write_classifier(self._classifier, self.checkpoint.what, self._chance[1], graph)
        if self._rounds:
            quantise(graph, self._real if self._is_convolutional else None)

    def compare(self, directory: Path) -> None:
        exported = OnnxClassifier(ClassifierDirectory(directory), self.options.threads)
        # Random inputs are no realistic images, so they say nothing about rounding.
        compared = self._real if self._rounds and self._real else [*self._chance, *self._real]
        self._found = compare(self._classifier, exported, compared)
        _check(ALLOWED[self.options.precision], self._found)

    def figures(self, directory: Path) -> dict[str, Any]:
        return {
            "experts": self.checkpoint.experts,
            "parameters": self.checkpoint.parameters,
            "weights_bytes": ClassifierDirectory(directory).bytes,
            "max_abs_logit_difference": self._found.largest,
            "typical_relative_difference": self._found.typical,
            "predictions_equal_share": self._found.equal_predictions,
            "compared_examples": self._found.examples,
        }

    def recorded_options(self) -> dict[str, Any]:
        return super().recorded_options() | {"data": self.options.data or self.checkpoint.data}


def random_inputs(checkpoint: ClassifierCheckpoint) -> list[Given]:
    """Return random batches of several sizes; texts have several lengths with padding."""
    generator = torch.Generator().manual_seed(0)
    made: list[Given] = []
    for count, length in zip(BATCHES, LENGTHS, strict=True):
        if checkpoint.what == "images":
            inputs = image_inputs(checkpoint.directory, checkpoint.config)
            shape = (count, inputs.channels, *(inputs.size or SMALL_SIZE))
            made.append(inputs(torch.randint(256, shape, generator=generator, dtype=torch.uint8)))
            continue
        real = torch.ones(count, length, dtype=torch.long)
        real[0, length // 2 :] = int(count == 1)
        made.append(
            {
                "input_ids": torch.randint(checkpoint.config.vocab_size, (count, length), generator=generator) * real,
                "attention_mask": real,
            }
        )
    return made


def _real(options: ClassifierExportOptions, checkpoint: ClassifierCheckpoint) -> list[Given]:
    """Return batches of the given data or, if still available, of the data that the artifact was distilled on."""
    source = options.data or checkpoint.data
    if source is None:
        return []
    try:
        examples, inputs = examples_for(checkpoint, source)
    except DataError:
        if options.data is not None:
            raise
        return []
    few = examples.part("calibration").only(range(min(COMPARED, len(examples.part("calibration")))))
    return list(groups(few, inputs, "cpu"))


class Compared(NamedTuple):
    """Differences between an export and the engine over some inputs."""

    largest: float
    """Largest difference of a logit, relative to its example's largest logit where that is above 1."""
    typical: float
    """Median over examples of the root mean square of the differences relative to that of the logits."""
    equal_predictions: float
    """Share of the examples with equal predictions."""
    examples: int


@torch.no_grad()
def compare(classifier: Classifier, exported: OnnxClassifier, batches: Sequence[Given]) -> Compared:
    """Compare both on equal inputs. Logits are centered per example, which changes no prediction and no probability."""
    largest, typical, equal, count = 0.0, [], 0, 0
    for given in batches:
        own_BC, other_BC = (
            logits_BC - logits_BC.mean(dim=1, keepdim=True) for logits_BC in _both(classifier, exported, given)
        )
        away_BC = other_BC - own_BC
        size_B = own_BC.abs().amax(dim=1).clamp_min(1.0)
        largest = max(largest, float((away_BC.abs().amax(dim=1) / size_B).nan_to_num(math.inf).max()))
        typical += (away_BC.norm(dim=1) / own_BC.norm(dim=1).clamp_min(1e-9)).nan_to_num(math.inf).tolist()
        equal += int((own_BC.argmax(dim=1) == other_BC.argmax(dim=1)).sum())
        count += len(own_BC)
    return Compared(largest, statistics.median(typical), equal / count, count)


def _both(classifier: Classifier, exported: OnnxClassifier, given: Given) -> tuple[Tensor, Tensor]:
    return classifier(**given), exported(**given)


def _check(allowed: Allowed, found: Compared) -> None:
    """Raise ExportError where an export differs too much from the engine."""
    if not (found.largest <= allowed.single and found.typical <= allowed.typical):
        raise ExportError(f"logits by up to {found.largest:.1e}, typically by {found.typical:.1e}")


def quantise(path: Path, real: Sequence[Given] | None) -> None:
    """Quantize weights and products of a graph to int8 in place, by onnxruntime's own tools; the mixture stays unchanged.

    real: inputs that give the ranges of activations (static quantization); None for ranges computed in each run (dynamic).
    """
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(path)
    kept = [node.name for node in model.graph.node if node.name.startswith(MIXTURE_SCOPE)]
    del model.graph.value_info[:]  # includes shapes of weights, which the tools transpose without updating them
    onnx.save(model, path)
    prepared = path.with_suffix(".prepared")
    quant_pre_process(path, prepared, skip_symbolic_shape=True)
    if real is None:
        quantization.quantize_dynamic(
            prepared, path, op_types_to_quantize=["MatMul", "Gemm", "Gather"], per_channel=True, nodes_to_exclude=kept
        )
    else:
        quantization.quantize_static(
            prepared,
            path,
            _Ranges(real),
            per_channel=True,
            nodes_to_exclude=kept,
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
        )
    prepared.unlink()


class _Ranges:
    """Yields one batch of inputs after another, as onnxruntime's tool requests them."""

    def __init__(self, batches: Sequence[Given]) -> None:
        self._left = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        given = next(self._left, None)
        return None if given is None else {name: value.numpy() for name, value in given.items()}
