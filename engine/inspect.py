"""Description and validation of a checkpoint or artifact, for `compress inspect`.

A decoder is described without torch, which takes seconds to import. Models of other kinds are loaded to be checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engine.checkpoint.artifact import FILE_NAME, compare_checksums, read_provenance
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.hub import describe, is_hub_id, lacks_weights, outline
from engine.checkpoint.kinds import is_classifier, is_encoder_decoder, is_exported, is_exported_encoder_decoder
from engine.checkpoint.model_directory import ModelDirectory, resolve
from engine.checkpoint.skip_table_file import has_skip_tables
from engine.errors import CheckpointError, CompressError
from engine.families.config import DecoderConfig
from engine.families.resolve import runs_through_transformers
from engine.files.json_file import load_json

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def inspect(path: str, *, checksums: bool, progress: Progress) -> dict[str, Any]:
    """Return the content of `compress inspect --json`. Raises CheckpointError if the model is not complete and valid.

    For a decoder on the hub whose weights are not cached, only the config and the headers are fetched; no weight is
    read.
    """
    if not checksums and not os.path.exists(path) and is_hub_id(path) and _is_decoder(path) and lacks_weights(path):
        return _outlined(path)
    directory = resolve(path)
    if checksums:
        compare_checksums(directory)
    provenance = read_provenance(directory)
    if is_classifier(directory):
        return _classifier(directory, checksums, progress)
    if is_exported(directory):
        return _exported(directory, checksums)
    if is_exported_encoder_decoder(directory):
        return _exported_encoder_decoder(directory, checksums)
    if is_encoder_decoder(directory):
        return _encoder_decoder(directory, checksums, provenance, progress)
    checkpoint = _opened(directory)
    checkpoint.check_finite(lambda names: progress(names, "reading weights"))
    return _decoder(checkpoint) | {"checksums_compared": checksums}


def _opened(directory: Path, header_only: frozenset[str] = frozenset()) -> Checkpoint:
    """Return a decoder's checkpoint; transformers builds those of families that it runs."""
    if directory.is_dir() and runs_through_transformers(load_json(directory / "config.json", "model config")):
        from engine.adapted.adapted_checkpoint import AdaptedCheckpoint  # here: it imports torch

        return AdaptedCheckpoint(directory, header_only)
    return Checkpoint(directory, header_only)


def _is_decoder(model: str) -> bool:
    """Return whether a model on the hub is a decoder, which its config and headers alone describe."""
    directory = describe(model)
    if is_classifier(directory) or is_encoder_decoder(directory):
        return False
    listed = (read_provenance(directory) or {"files": ()})["files"]
    return not any(name.endswith(".onnx") for name in listed)


def _outlined(model: str) -> dict[str, Any]:
    """Describe a decoder on the hub, fetching only the headers of its weights."""
    with outline(model) as (directory, shards):
        try:
            return _decoder(_opened(directory, shards)) | {"weights_read": False}
        except CompressError as error:
            raise type(error)(str(error).replace(str(directory), model)) from error


def _decoder(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a decoder's checkpoint, whose weights the caller has checked as far as it wants."""
    skips, scheme = has_skip_tables(checkpoint.directory, checkpoint.config), checkpoint.fewest_bits
    float8 = checkpoint.float8
    return {
        "kind": "checkpoint" if checkpoint.provenance is None else "artifact",
        "architecture": checkpoint.config.architecture.model_type,
        "layers": len(checkpoint.config.layers),
        "experts_per_layer": list(checkpoint.config.experts_per_layer),
        "widths_per_layer": _widths(checkpoint.config),
        "experts_per_token": checkpoint.config.experts_per_token,
        "parameters": checkpoint.parameters,
        "active_parameters": checkpoint.active_parameters,
        "bytes": checkpoint.bytes,
        "dtype": checkpoint.model_element.name,
        "weight_bits": None if scheme is None else scheme.bits,
        "group_size": None if scheme is None else scheme.group_size,
        "parameters_by_bits": checkpoint.parameters_by_bits or None,
        "bytes_not_quantized": checkpoint.plain_bytes,
        "float8_block": None if float8 is None or float8.block is None else list(float8.block),
        "gguf_types": None if checkpoint.gguf is None else checkpoint.gguf.block_types,
        "prediction_layers_not_read": checkpoint.prediction_layers,
        "parts_not_read": checkpoint.parts_not_read,
        "skip_tables": skips,
        "valid": True,
        "weights_read": True,
        "checksums_compared": False,
        "provenance": checkpoint.provenance,
    }


def _widths(config: DecoderConfig) -> list[int | list[int]]:
    """Return the number of hidden units of each MoE layer's experts: one number, or one for each expert."""
    return [width if isinstance(width, int) else list(width) for width in config.widths_per_layer]


def _exported(directory: Path, checksums: bool) -> dict[str, Any]:
    """Describe an ONNX export; loading it checks that its weights are complete."""
    from engine.onnx.runtime import open_exported  # here: it imports torch

    model = ModelDirectory(directory)
    exported = open_exported(model)
    return {
        "kind": "onnx",
        "architecture": model.config.architecture.model_type,
        "layers": len(model.config.layers),
        "experts_per_layer": list(model.config.experts_per_layer),
        "widths_per_layer": _widths(model.config),
        "experts_per_token": model.config.experts_per_token,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "bytes": exported.weights_bytes,
        "dtype": str(exported.dtype).removeprefix("torch."),
        "skip_tables": False,
        "valid": True,
        "checksums_compared": checksums,
        "provenance": model.provenance,
    }


def _classifier(directory: Path, checksums: bool, progress: Progress) -> dict[str, Any]:
    """Describe a classifier, exported or not. A mixture behind its head counts as one layer of experts, all active."""
    import torch  # here: a decoder is described without it

    from engine.onnx.classifier import OnnxClassifier
    from engine.transformers_models.classifier import ClassifierCheckpoint, ClassifierDirectory

    if is_exported(directory):
        described = ClassifierDirectory(directory)
        OnnxClassifier(described)
        kind, dtype = "onnx", torch.float32
    else:
        checkpoint = described = ClassifierCheckpoint(directory)
        checkpoint.check_finite(lambda names: progress(names, "reading weights"))
        checkpoint.load()
        kind, dtype = "checkpoint" if described.provenance is None else "artifact", checkpoint.model_dtype
    return {
        "kind": kind,
        "architecture": described.family,
        "classifies": described.what,
        "classes": len(described.class_names),
        "experts_per_layer": [described.experts] if described.experts else [],
        "experts_per_token": described.experts,
        "parameters": described.parameters,
        "active_parameters": described.parameters,
        "bytes": described.bytes,
        "dtype": str(dtype).removeprefix("torch."),
        "skip_tables": False,
        "valid": True,
        "checksums_compared": checksums,
        "provenance": described.provenance,
    }


def _encoder_decoder(
    directory: Path, checksums: bool, provenance: dict[str, Any] | None, progress: Progress
) -> dict[str, Any]:
    """Describe an encoder-decoder; loading it through transformers checks that its tensors are complete."""
    from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint  # here: it imports torch

    checkpoint = EncoderDecoderCheckpoint(directory)
    checkpoint.check_finite(lambda names: progress(names, "reading weights"))
    checkpoint.load(checkpoint.model_dtype)
    return {
        "kind": "checkpoint" if provenance is None else "artifact",
        "architecture": checkpoint.row.model_type,
        "layers": sum(checkpoint.layers.values()),
        "experts_per_layer": list(checkpoint.experts.values()),
        "experts_per_token": int(bool(checkpoint.experts)),
        "parameters": checkpoint.parameters,
        "active_parameters": checkpoint.active_parameters,
        "bytes": checkpoint.bytes,
        "dtype": str(checkpoint.model_dtype).removeprefix("torch."),
        "skip_tables": False,
        "valid": True,
        "checksums_compared": checksums,
        "provenance": provenance,
    }


def _exported_encoder_decoder(directory: Path, checksums: bool) -> dict[str, Any]:
    """Describe an exported encoder-decoder.

    The export's figures give the experts and parameters, which the graphs do not.
    """
    from engine.onnx.encoder_decoder_runtime import OnnxEncoderDecoder  # here: it imports torch
    from engine.transformers_models.encoder_decoder import EncoderDecoderDirectory

    model = EncoderDecoderDirectory(directory)
    exported = OnnxEncoderDecoder(directory, model.config)
    figures = (model.provenance or {}).get("figures")
    counted = ("experts_per_layer", "parameters", "active_parameters")
    if not isinstance(figures, dict) or not set(counted) <= set(figures):
        raise CheckpointError(f"{directory}: has no figures of its export ({FILE_NAME}); export the model again")
    return {
        "kind": "onnx",
        "architecture": model.row.model_type,
        "layers": sum(model.layers.values()),
        "experts_per_token": int(bool(figures["experts_per_layer"])),
        **{name: figures[name] for name in counted},
        "bytes": exported.weights_bytes,
        "dtype": str(exported.dtype).removeprefix("torch."),
        "skip_tables": False,
        "valid": True,
        "checksums_compared": checksums,
        "provenance": model.provenance,
    }
