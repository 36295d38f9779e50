"""A model's directory or GGUF file without its weights: found by name, its config resolved, its sizes counted."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.checkpoint.artifact import check_sizes, read_provenance
from engine.checkpoint.compressed_floats import formats_of
from engine.checkpoint.gguf.model import GgufModel
from engine.checkpoint.hub import fetch, is_hub_id
from engine.errors import CheckpointError, UnsupportedError
from engine.families.checks import check_token_ids
from engine.families.config import DecoderConfig
from engine.families.resolve import decoder_config
from engine.families.results import loading_note
from engine.families.rotary_check import check_rotary
from engine.families.table import ARCHITECTURES
from engine.families.tensor_shapes import expected_tensors, expert_shapes
from engine.families.wrappers import language_model
from engine.files.gguf_file import SUFFIX, is_gguf
from engine.files.json_file import load_json
from engine.files.model_files import check_entries
from engine.kernels.stored.scheme import Scheme

DEMO = "demo"
DEMO_DIRECTORY = Path(__file__).resolve().parent.parent / "demo_model"
GENERATION_NAME = "generation_config.json"


def resolve(model: str) -> Path:
    """Return the directory of MODEL: `demo`, a local directory, or a hub id (downloaded, or found in the cache).

    The result is the path itself for a GGUF file, the first one of a split model.
    """
    if model == DEMO:
        return DEMO_DIRECTORY
    if os.path.isdir(model):
        check_entries(Path(model))
        files = [] if os.path.lexists(os.path.join(model, "config.json")) else sorted(Path(model).glob(f"*{SUFFIX}"))
        if files:
            raise CheckpointError(f"{model}: holds GGUF files and no config.json; give one of them, such as {files[0]}")
        return Path(model)
    if os.path.exists(model) and model.endswith(SUFFIX):
        return Path(model)
    if os.path.exists(model) or model.endswith(SUFFIX) or not is_hub_id(model):
        found = "not a directory" if os.path.exists(model) else "no such directory"
        raise CheckpointError(f"{model}: {found}; give a checkpoint directory, a GGUF file, a hub id or 'demo'")
    return fetch(model)


def check_generation(directory: Path, vocabulary: int) -> None:
    """Raise CheckpointError if generation_config.json is damaged or names tokens outside the vocabulary."""
    path = directory / GENERATION_NAME
    if os.path.lexists(path):
        check_token_ids(str(path), load_json(path, "generation config"), vocabulary)


class ModelDirectory:
    """A model on disk, with weights in any format: the content of config.json and compression.json."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError for damaged or inconsistent files, UnsupportedError for features the engine lacks."""
        self.directory = directory
        """The directory, or the path of a GGUF file."""
        self.gguf = GgufModel(directory) if is_gguf(directory) else None
        """The model's GGUF files; None for a directory of safetensors."""
        if self.gguf is None and not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory; give the directory of a checkpoint")
        check_entries(directory)
        self.provenance = read_provenance(directory)
        """Content of compression.json; None for a checkpoint that was not written by this project."""
        if self.provenance is not None:
            check_sizes(directory, self.provenance)
        raw = load_json(directory / "config.json", "model config") if self.gguf is None else self.gguf.config
        _refuse_foreign_code(directory, raw)
        try:
            self.raw_config, self.wrapper = language_model(raw)
            """Config of the language model alone, and its wrapper in a multimodal model, whose other parts are not read."""
            formats = formats_of(self.raw_config)
            self.schemes = formats.schemes
            """Storage schemes of low-bit weights; empty if there are none."""
            self.float8 = formats.float8
            """How FP8 weights are scaled; None if there are none."""
            self.nvfp4 = formats.nvfp4
            """Whether weights may be in NVFP4."""
            self.config: DecoderConfig = decoder_config(self.raw_config)
            check_token_ids("config.json", self.raw_config, self.config.vocabulary_size)
            check_rotary(self.config)
        except (CheckpointError, UnsupportedError) as error:
            message = str(error) if self.gguf is None else str(error).replace("config.json", "metadata")
            raise type(error)(f"{directory}: {message}") from error
        check_generation(directory, self.config.vocabulary_size)

    @property
    def files_directory(self) -> Path:
        """Directory of the tokenizer and of generation_config.json: `directory`, or one that is made for a GGUF file."""
        return self.directory if self.gguf is None else self.gguf.files_directory

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of a checkpoint of this model, by name."""
        return expected_tensors(self.config)

    @property
    def fewest_bits(self) -> Scheme | None:
        """Storage scheme with the lowest bit width; None if the model has no low-bit weights."""
        return min(self.schemes, default=None)

    @property
    def loading_note(self) -> str | None:
        """The programs that load this model, as a clause; None if transformers loads it."""
        return loading_note(self.raw_config, bool(self.schemes))

    @property
    def parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses: only the top-k of the routed experts count, with their mean width."""
        total = self.parameters
        for index, layer in enumerate(self.config.layers):
            if layer.moe is not None:
                idle = layer.moe.experts - layer.moe.experts_per_token
                total -= idle * self._expert_parameters(index) // layer.moe.experts
        return total

    def _expert_parameters(self, layer: int) -> int:
        """Return the number of parameters of all routed experts of a layer."""
        experts = range(self.config.experts_by_layer[layer])
        return sum(math.prod(shape) for expert in experts for shape in expert_shapes(self.config, layer, expert).values())


def _refuse_foreign_code(directory: Path, config: Mapping[str, Any]) -> None:
    if config.get("auto_map") and str(config.get("model_type")) not in ARCHITECTURES:
        raise UnsupportedError(
            f"{directory}: model_type {config.get('model_type')!r} needs code of its own (trust_remote_code), which this "
            "engine never runs; convert it to a supported family first"
        )
