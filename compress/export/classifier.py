"""`compress export` of a classifier: an ONNX graph of student and mixture, compared with the engine before it is kept.

Shape suffixes: B batch, C classes.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.classifiers.accuracy import examples_for, groups
from compress.export.parity import Allowed
from compress.options.export import CLASSIFIER_PRECISIONS, ClassifierExportOptions
from compress.plans.apply import carried_files
from compress.run.claims import claims_output
from engine.checkpoint.artifact import check_output, whole_or_nothing, write_provenance
from engine.checkpoint.checkpoint import resolve
from engine.checkpoint.kinds import ONNX_NAME
from engine.errors import DataError, ExportError, OptionError
from engine.files.json_file import write_json
from engine.generation.report import peak_memory_bytes
from engine.onnx.classifier import MIXTURE_SCOPE, OnnxClassifier, write_classifier
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


@claims_output
def export_classifier(options: ClassifierExportOptions) -> dict[str, Any]:
    """Write the ONNX directory and compare it with the engine; return the figures. Nothing is left where they differ."""
    started = time.monotonic()
    check_output(options.output, options.overwrite, ONNX_NAME)
    checkpoint = ClassifierCheckpoint(resolve(options.model))
    checkpoint.check_finite()
    classifier = checkpoint.load(torch.float32)
    chance, real = random_inputs(checkpoint), _real(options, checkpoint)
    is_convolutional = classifier.split(**chance[1]).map is not None
    rounds = CLASSIFIER_PRECISIONS[options.precision]
    if rounds and is_convolutional and not real:
        raise OptionError(f"{options.model}: int8 of convolutions needs the ranges of activations; give images as --data")
    with whole_or_nothing(options.output, options.overwrite, ONNX_NAME) as directory:
        graph = directory / ONNX_NAME
        write_classifier(classifier, checkpoint.what, chance[1], graph)
        if rounds:
            quantise(graph, real if is_convolutional else None)
        write_json(directory / "config.json", checkpoint.raw_config)
        for path in carried_files(checkpoint.directory):
            shutil.copyfile(path, directory / path.name)
        described = ClassifierDirectory(directory)
        exported = OnnxClassifier(described, options.threads)
        # Random inputs are no realistic images, so they say nothing about rounding.
        compared = real if rounds and real else [*chance, *real]
        found = compare(classifier, exported, compared)
        _check(options, found)
        figures = {
            "artifact": str(options.output),
            "format": "onnx",
            "precision": options.precision,
            "experts": checkpoint.experts,
            "parameters": checkpoint.parameters,
            "weights_bytes": described.bytes,
            "max_abs_logit_difference": found.largest,
            "typical_relative_difference": found.typical,
            "predictions_equal_share": found.equal_predictions,
            "compared_examples": found.examples,
            "bytes": sum(path.stat().st_size for path in directory.iterdir()),
            "seconds": time.monotonic() - started,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        write_provenance(directory, _provenance(options, checkpoint, figures))
    return figures


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


def _check(options: ClassifierExportOptions, found: Compared) -> None:
    """Raise ExportError where an export differs too much from the engine."""
    allowed = ALLOWED[options.precision]
    if not (found.largest <= allowed.single and found.typical <= allowed.typical):
        raise ExportError(
            f"{options.output}: the export differs from the engine: logits by up to {found.largest:.1e}, typically by "
            f"{found.typical:.1e}; it was removed"
        )


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


def _provenance(
    options: ClassifierExportOptions, checkpoint: ClassifierCheckpoint, figures: dict[str, Any]
) -> dict[str, Any]:
    made_by = checkpoint.provenance or {}
    recorded = asdict(replace(options, data=options.data or checkpoint.data))
    exported = {"model": options.model, "fingerprint": checkpoint.fingerprint()}
    return {
        "source": made_by.get("source", exported),
        "exported": exported | {"method": made_by.get("method")},
        "method": "export",
        "options": {key: value for key, value in recorded.items() if key not in ("overwrite", "output", "threads")},
        "figures": figures,
        "versions": {name: version(name) for name in ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")},
    }
