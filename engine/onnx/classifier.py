"""Classifiers as ONNX graphs: writing a graph, and running it with onnxruntime.

Inputs are those of the model in transformers: `pixel_values` [B, C, H, W], normalized (classifier_inputs.py), or
`input_ids` and `attention_mask` [B, tokens]. The output `logits` [B, classes] has log-probabilities for a mixture.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.checkpoint.kinds import ONNX_NAME
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.kernels.devices import resolve_device
from engine.onnx.runtime import backend_of, session
from engine.transformers_models.classifier import Classifier, ClassifierCheckpoint, ClassifierDirectory

INPUTS = {"images": ("pixel_values",), "texts": ("input_ids", "attention_mask")}
LOGITS = "logits"
MIXTURE_SCOPE = "classifier.mixture/"
"""Prefix of the names of the nodes that combine experts and gate."""
_SCOPES = "pkg.torch.onnx.name_scopes"


class _Positional(nn.Module):
    """A classifier that takes its inputs as positional arguments, in the order of INPUTS."""

    def __init__(self, classifier: Classifier, names: tuple[str, ...]) -> None:
        super().__init__()
        self.classifier, self.names = classifier, names

    def forward(self, *values: Tensor) -> Tensor:
        logits: Tensor = self.classifier(**dict(zip(self.names, values, strict=True)))
        return logits


def write_classifier(classifier: Classifier, what: str, sample: Mapping[str, Tensor], path: Path) -> None:
    """Write the graph with its weights, for any batch size and, for texts, any length.

    sample: inputs of two examples or more. Raises UnsupportedError for a model that torch cannot export.
    """
    names = INPUTS[what]
    batch = torch.export.Dim("batch_size", min=1, max=1 << 20)
    sides = {0: batch} if what == "images" else {0: batch, 1: torch.export.Dim("sequence_length", min=1, max=1 << 20)}
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # it lists packages whose operators it would also support
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's exporter warns about its own use of torch
            program = torch.onnx.export(
                _Positional(classifier, names),
                tuple(sample[name] for name in names),
                dynamo=True,
                input_names=list(names),
                output_names=[LOGITS],
                dynamic_shapes=(tuple(sides for _ in names),),
                verbose=False,
            )
        assert program is not None
        for node in program.model.graph.all_nodes():
            # The exporter records the source code of each node; only its module is kept.
            scopes = [scope for scope in ast.literal_eval(node.metadata_props.get(_SCOPES, "[]")) if "." in scope]
            node.name = f"{scopes[-1] if scopes else 'classifier'}/{node.name}"
            node.metadata_props.clear()
        program.save(path)
    except Exception as error:  # torch.export and torch.onnx raise a dozen exception classes
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedError(f"{classifier.name}: torch cannot export it ({reason}); take another model") from error
    finally:
        exporter.setLevel(level)


class OnnxClassifier:
    """A classifier that onnxruntime runs on the CPU, with the call interface of `Classifier`."""

    def __init__(self, directory: ClassifierDirectory, threads: int | None = None) -> None:
        """Raises CheckpointError for a graph that does not match the config."""
        path = directory.directory / ONNX_NAME
        self._session = session(path, threads or torch.get_num_threads())
        inputs = {each.name for each in self._session.get_inputs()}
        shapes = {each.name: each.shape for each in self._session.get_outputs()}
        if inputs != set(INPUTS[directory.what]) or shapes.get(LOGITS, [0])[-1] != len(directory.class_names):
            raise CheckpointError(
                f"{path}: its inputs and outputs are not those of the model that config.json describes; export it again"
            )

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Return the logits [B, C] in float32."""
        (logits_BC,) = self._session.run([LOGITS], {name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(logits_BC)


class Opened(NamedTuple):
    """A classifier that is ready to be called."""

    described: ClassifierDirectory
    classify: Classifier | OnnxClassifier
    device: torch.device
    """Device of its inputs."""


def open_classifier(
    directory: Path,
    backend: str = "auto",
    device: str = "auto",
    dtype: torch.dtype | None = None,
    threads: int | None = None,
) -> Opened:
    """Open the classifier in a directory. Raises OptionError for a backend or device that cannot run it."""
    if backend_of(directory, backend) == "torch":
        checkpoint, where = ClassifierCheckpoint(directory), resolve_device(device)
        return Opened(checkpoint, checkpoint.load(dtype, where), where)
    if device not in ("auto", "cpu"):
        raise OptionError(f"device {device!r} is not available with backend 'onnx'; it runs on the cpu")
    described = ClassifierDirectory(directory)
    return Opened(described, OnnxClassifier(described, threads), torch.device("cpu"))
