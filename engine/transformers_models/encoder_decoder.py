"""An encoder-decoder on disk: validated when opened, described, and loaded through transformers, which runs it.

Layers are named by stack and index, such as "encoder.1". Where numbers are needed, sparse layers are counted from 0,
the encoder's first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.artifact import check_sizes, read_provenance
from engine.checkpoint.kinds import is_exported_encoder_decoder
from engine.checkpoint.model_directory import check_generation
from engine.errors import CheckpointError, UnsupportedError
from engine.families.checks import check_token_ids
from engine.families.encoder_decoders import ENCODER_DECODERS, EXPERT_OF_BLOCK, FFN_PROJECTIONS, STACKS, EncoderDecoder
from engine.families.resolve import load_transformers_config
from engine.families.values import positive
from engine.files.json_file import load_json, shown
from engine.files.mapped_file import TensorEntry, state_of
from engine.files.model_files import check_entries
from engine.files.safetensors_file import SafetensorsFile, open_shards
from engine.transformers_models.transformers_model import SAME_MODEL, load_model


class EncoderDecoderDirectory:
    """An encoder-decoder with weights in any format: the content of config.json and compression.json."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError for damaged or inconsistent files, UnsupportedError for another family."""
        check_entries(directory)
        self.directory = directory
        self.provenance = read_provenance(directory)
        if self.provenance is not None:
            check_sizes(directory, self.provenance)
        self.raw_config: dict[str, Any] = load_json(directory / "config.json", "model config")
        model_type = self.raw_config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ENCODER_DECODERS:
            raise UnsupportedError(f"{directory}: model family {shown(model_type)} is not a supported encoder-decoder")
        if self.raw_config.get("auto_map"):
            raise UnsupportedError(f"{directory}: config.json has auto_map, code of its own, which is never run; remove it")
        self.row: EncoderDecoder = ENCODER_DECODERS[model_type]
        try:
            self.config: Any = load_transformers_config(self.raw_config)
            vocabulary = positive(self.config, "vocab_size")
            check_token_ids("config.json", self.raw_config, vocabulary)
            for key in ("num_layers", "num_decoder_layers", "hidden_size", self.row.width_key):
                positive(self.config, key)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        check_generation(directory, vocabulary)

    @property
    def layers(self) -> dict[str, int]:
        """Number of layers of each stack."""
        return {"encoder": int(self.config.num_layers), "decoder": int(self.config.num_decoder_layers)}


class EncoderDecoderCheckpoint(EncoderDecoderDirectory):
    """An encoder-decoder checkpoint. Opening checks config, headers and experts; `load` compares all names and shapes."""

    def __init__(self, directory: Path) -> None:
        """Raises the errors of EncoderDecoderDirectory, also for weights."""
        super().__init__(directory)
        if is_exported_encoder_decoder(directory):
            raise UnsupportedError(
                f"{directory}: is an ONNX export, and this needs a checkpoint; inspect describes it, other commands need "
                "the checkpoint that was exported"
            )
        self.by_name, self.files = open_shards(directory)
        if self.row.embedding not in self.by_name:
            raise CheckpointError(f"{directory}: tensor {self.row.embedding} is missing; {SAME_MODEL}")
        self._check_experts()

    @cached_property
    def experts(self) -> dict[str, int]:
        """Number of experts of each sparse layer by its name, the encoder's first."""
        counts: dict[str, int] = {}
        for stack in STACKS:
            for layer in range(self.layers[stack]):
                prefix = re.escape(f"{self.row.block(stack, layer)}.{EXPERT_OF_BLOCK.format(expert='')}")
                pattern = re.compile(rf"{prefix}(\d+)\.")
                numbers = {int(found[1]) for name in self.by_name if (found := pattern.match(name))}
                if numbers:
                    counts[f"{stack}.{layer}"] = len(numbers)
        return counts

    def block(self, name: str, row: EncoderDecoder | None = None) -> str:
        """Return the prefix of the layer's FFN or MoE block. `row`: the family to use instead of this model's own."""
        stack, layer = name.split(".")
        return (row or self.row).block(stack, int(layer))

    def _check_experts(self) -> None:
        if not self.row.experts_key:
            return
        wanted = getattr(self.config, self.row.experts_key)
        width, hidden = getattr(self.config, self.row.width_key), self.config.hidden_size
        for layer, count in self.experts.items():
            if count != wanted:
                raise CheckpointError(
                    f"{self.directory}: layer {layer} has {count} experts and config.json says {shown(wanted)}; {SAME_MODEL}"
                )
            for expert in range(count):
                for projection, shape in zip(FFN_PROJECTIONS, ((width, hidden), (hidden, width)), strict=True):
                    name = f"{self.block(layer)}.{EXPERT_OF_BLOCK.format(expert=expert)}.{projection}"
                    if name not in self.by_name:
                        raise CheckpointError(f"{self.directory}: tensor {name} is missing; {SAME_MODEL}")
                    if (stored := self.by_name[name].entries[name].shape) != shape:
                        raise CheckpointError(
                            f"{self.directory}: tensor {name} has shape {list(stored)} and config.json says {list(shape)}"
                        )

    @cached_property
    def model_dtype(self) -> torch.dtype:
        """Dtype of the embeddings, which is the compute dtype for `--dtype auto`."""
        return self._entry(self.row.embedding).dtype

    @property
    def parameters(self) -> int:
        """Number of stored parameters."""
        return sum(torch.Size(self._entry(name).shape).numel() for name in self.by_name)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token of source and target uses: one expert of each sparse layer."""
        expert = 2 * int(getattr(self.config, self.row.width_key)) * int(self.config.hidden_size)
        return self.parameters - expert * sum(count - 1 for count in self.experts.values())

    @property
    def bytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return sum(self._entry(name).nbytes for name in self.by_name)

    def _entry(self, name: str) -> TensorEntry:
        return self.by_name[name].entries[name]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as stored: memory-mapped and read-only. Its pages stay resident until `release`."""
        return self.by_name[name].tensor(name)

    def table(self, name: str) -> str:
        """Return the stored name of an embedding or head: `name` if it exists and differs from the shared embedding."""
        if name in self.by_name and not torch.equal(self.tensor(name), self.tensor(self.row.embedding)):
            return name
        return self.row.embedding

    def release(self) -> None:
        """Give resident pages of weights back to the operating system; tensors stay valid."""
        for file in self.files:
            file.release()

    def check_finite(self, progress: Callable[[Iterable[str]], Iterable[str]] = iter) -> None:
        """Read every tensor once; raise CheckpointError naming the first that is quantized or holds NaN or infinity."""
        for name in progress(list(self.by_name)):
            file: SafetensorsFile = self.by_name[name]
            if not file.entries[name].dtype.is_floating_point:
                raise CheckpointError(
                    f"{self.directory}: tensor {name} is {file.entries[name].dtype}; quantized weights are not read"
                )
            low, high = torch.aminmax(file.tensor(name))
            if not bool(low.isfinite() & high.isfinite()):
                raise CheckpointError(f"{self.directory}: tensor {name} holds NaN or infinity; the file is damaged")
            file.release()

    def fingerprint(self) -> str:
        """Return a SHA-256 over config, headers and samples of every tensor; few of the weights are read."""
        digest = hashlib.sha256(repr(sorted(self.raw_config.items())).encode())
        for name in sorted(self.by_name):
            entry = self._entry(name)
            digest.update(f"{name} {entry.dtype} {entry.shape} {entry.begin}\n".encode())
        for file in self.files:
            for _, sample in file.samples():
                digest.update(sample)
        return digest.hexdigest()

    def identity(self) -> dict[str, str]:
        """Return the fingerprint and the state of the files, as for a decoder."""
        return {"fingerprint": self.fingerprint(), "state": state_of(self.files)}

    def load(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
        """Return the model, frozen and in eval mode.

        Raises CheckpointError for a tensor that is missing, extra or misshapen.
        """
        from transformers import AutoModelForSeq2SeqLM

        return load_model(AutoModelForSeq2SeqLM, self.directory, self.raw_config, dtype, self.parameters).to(device)
