"""Which kind of model a directory holds, read from config.json and file names, without torch."""

from __future__ import annotations

from pathlib import Path

from engine.families.classifiers import classified
from engine.families.encoder_decoders import ENCODER_DECODERS
from engine.files.gguf_file import is_gguf
from engine.files.json_file import load_json

ONNX_NAME = "model.onnx"
"""The graph of an exported model; its directory has no safetensors."""
ENCODER_NAME, DECODER_NAME = "encoder_model.onnx", "decoder_model_merged.onnx"
"""The graphs of an exported encoder-decoder, named as programs that run such models expect; no safetensors beside them."""


def is_classifier(directory: Path) -> bool:
    """Whether config.json there is that of a classifier. Raises CheckpointError where it cannot be read."""
    return not is_gguf(directory) and classified(load_json(directory / "config.json", "model config")) is not None


def is_encoder_decoder(directory: Path) -> bool:
    """Whether config.json there names a family of encoder-decoders. Raises CheckpointError where it cannot be read."""
    if is_gguf(directory):
        return False
    model_type = load_json(directory / "config.json", "model config").get("model_type")
    return isinstance(model_type, str) and model_type in ENCODER_DECODERS


def is_exported(directory: Path) -> bool:
    """Whether this is the directory of an exported model: a decoder or a classifier."""
    return (directory / ONNX_NAME).is_file()


def is_exported_encoder_decoder(directory: Path) -> bool:
    """Whether this is the directory of an exported encoder-decoder."""
    return (directory / ENCODER_NAME).is_file()
