"""The first layer for multi-token prediction of a checkpoint, as the tensors of a decoder of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from engine.checkpoint.block_float8 import SUFFIXES
from engine.checkpoint.checkpoint import Checkpoint, computed_dtype
from engine.checkpoint.stored_views import Scales, StoredView, views_of
from engine.errors import CheckpointError
from engine.families.config import DecoderConfig
from engine.families.tensor_names import PREDICTION_NORMS, PREDICTION_PROJECTION, prediction_names
from engine.families.tensor_shapes import layer_tensors
from engine.files.mapped_file import MappedFile, TensorEntry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FIRST = "model.layers.0"
"""Prefix of the names of its tensors."""


def prediction_config(config: DecoderConfig) -> DecoderConfig | None:
    """Return the config of a decoder of one layer, which is like a model's layers for multi-token prediction.

    These are like its last layer with experts and with attention without a state; None if there is no such layer.
    """
    fitting = (layer for layer in reversed(config.layers) if layer.moe is not None and layer.linear is None)
    last = next((layer for layer in fitting if layer.attends), None)
    return None if last is None else replace(config, layers=(last,))


class PredictionTensors:
    """The tensors of the first layer for multi-token prediction, by names of layer 0."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError, with the first tensor that is missing or of another shape, and for other layers."""
        config = prediction_config(checkpoint.config)
        if config is None:
            raise CheckpointError(
                f"{checkpoint.directory}: no layer of the decoder has experts and attention without a state"
            )
        self.config: DecoderConfig = config
        """Config of a decoder with this layer alone."""
        self._checkpoint = checkpoint
        row, there = config.architecture, checkpoint.prediction_files
        names = prediction_names(row, len(checkpoint.config.layers), there)
        renamed = {ours: cast(MappedFile, _Renamed(there[stored], names)) for ours, stored in names.items()}
        self._views: dict[str, StoredView] = dict(views_of(config, renamed))
        for name, view in self._views.items():
            scales = next((name + suffix for suffix in SUFFIXES if name + suffix in renamed), None)
            if scales is not None and checkpoint.float8 is not None:
                view.scales = Scales(renamed[scales], scales, checkpoint.float8)
                view.scales.check(view, f"{checkpoint.directory}: tensor {names[name]}")
                view.element = checkpoint.model_element
        for name, shape in _shapes(config).items():
            found = self._views.get(name)
            if found is None or found.shape != shape:
                what = "is missing" if found is None else f"has shape {list(found.shape)}"
                raise CheckpointError(
                    f"{checkpoint.directory}: tensor {names.get(name, name)} of the layer for multi-token prediction "
                    f"{what}; config.json asks for {list(shape)}"
                )

    def source(self, dtype: torch.dtype, device: torch.device | str) -> Callable[[str], Tensor]:
        """Return a function from name to tensor, as `Checkpoint.source` does."""
        row = self.config.architecture
        return lambda name: self._views[name].read().to(device=device, dtype=computed_dtype(row, name, dtype))


class _Renamed:
    """A file whose tensors have other names."""

    def __init__(self, file: MappedFile, names: dict[str, str]) -> None:
        """names: the name in the file of each tensor."""
        self._file, self._names = file, names
        self.entries: dict[str, TensorEntry] = {
            ours: file.entries[stored] for ours, stored in names.items() if stored in file.entries
        }

    def tensor(self, name: str) -> Any:
        return self._file.tensor(self._names[name])


def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the layer with their shapes."""
    hidden = config.hidden_size
    own: dict[str, tuple[int, ...]] = {f"{FIRST}.{name}": (hidden,) for name in PREDICTION_NORMS}
    return own | {f"{FIRST}.{PREDICTION_PROJECTION}": (hidden, 2 * hidden)} | layer_tensors(config, 0)
