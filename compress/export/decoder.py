"""`compress export` of a decoder: an ONNX directory, compared with the engine before it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compress.export.exporting import Export, run_export
from compress.export.formats import FORMATS, PRECISIONS, check_blocks
from compress.export.parity import RoundedCheckpoint, check_parity
from compress.options.export import ExportOptions
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.kinds import ONNX_NAME
from engine.checkpoint.model_directory import resolve
from engine.decoder.model import own_routings
from engine.decoder.skip_tables import load_skip_tables, skipping_routings
from engine.errors import UnsupportedError
from engine.families.results import check_onnx
from engine.onnx.quantize import block_size
from engine.progress import Progress, no_progress

FILE_KEYS = ("auto_map", "quantization_config")
"""Config keys that describe the checkpoint's own files and not the export's."""
MAX_TABLES = 1 << 30
"""Limit in bytes of a graph's table of rotation angles for all positions, where the weights are smaller."""


def export(options: ExportOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Export a decoder; see `run_export`."""
    return run_export(options, DecoderExport, progress)


class DecoderExport(Export[ExportOptions]):
    """The export of a decoder."""

    def __init__(self, options: ExportOptions, progress: Progress) -> None:
        super().__init__(options, progress)
        self.checkpoint = checkpoint = Checkpoint(resolve(options.model))
        check_onnx(checkpoint.config)
        _check_sizes(options, checkpoint)
        FORMATS[options.format].check(checkpoint, options.is_portable)
        tables = load_skip_tables(checkpoint.directory, checkpoint.config) if options.skip_threshold else None
        own = own_routings(checkpoint.config, checkpoint.source(torch.float32))
        threshold, kept, rule = options.skip_threshold, options.skip_min_experts, options.skip_rule
        self._routings = skipping_routings(checkpoint.config, tables, threshold, kept, own=own, rule=rule)

    def write(self, directory: Path) -> None:
        # Imported here, since `--help` and every other command work without onnx.
        import onnx

        from engine.onnx.decoder import write_decoder

        precision = PRECISIONS[self.options.precision]
        self._written = write_decoder(
            self.checkpoint,
            directory,
            self._routings,
            dtype=precision.dtype,
            bits=precision.bits,
            portable=self.options.is_portable,
            progress=lambda layers: self.progress(layers, "writing"),
        )
        onnx.checker.check_model(directory / ONNX_NAME)
        FORMATS[self.options.format].write(self.checkpoint, directory)

    @property
    def config(self) -> Mapping[str, Any]:
        return {key: value for key, value in self.checkpoint.raw_config.items() if key not in FILE_KEYS}

    @property
    def files_directory(self) -> Path:
        directory: Path = self.checkpoint.files_directory
        return directory

    def compare(self, directory: Path) -> None:
        from engine.onnx.runtime import OnnxDecoder

        packings = self._written.packings
        self._difference = check_parity(
            RoundedCheckpoint(self.checkpoint.directory, packings) if packings else self.checkpoint,
            OnnxDecoder(directory, self.checkpoint.config, self.options.threads),
            self._routings,
            PRECISIONS[self.options.precision].allowed,
            lambda layers: self.progress(layers, "comparing"),
        )

    def figures(self, directory: Path) -> dict[str, Any]:
        return {
            "experts": self.options.experts,
            "experts_per_layer": list(self.checkpoint.config.experts_per_layer),
            "parameters": self.checkpoint.parameters,
            "weights_bytes": self._written.weights_bytes,
            "skip_threshold": self.options.skip_threshold,
            "max_abs_logit_difference": self._difference,
            "tokenizer_problem": FORMATS[self.options.format].tokenizer_problem(directory),
        }


def _check_sizes(options: ExportOptions, checkpoint: Checkpoint) -> None:
    """Run check_blocks on all weight sizes; raise UnsupportedError also for more positions than the tables may have."""
    config = checkpoint.config
    if config.max_positions * config.rotary_dimension * 4 > max(MAX_TABLES, checkpoint.bytes):
        raise UnsupportedError(
            f"{options.model}: config.json: max_position_embeddings is {config.max_positions}, and a graph has a table of "
            "all positions; lower it to what is used"
        )
    value = config.head_dimension if config.latent is None else config.latent.value_dimension
    sizes = {"hidden size": config.hidden_size, "attention width": config.attention_heads * value}
    if config.latent is not None and config.latent.query_rank:
        sizes["query rank"] = config.latent.query_rank
    for index, layer in enumerate(config.layers):
        if layer.moe is None:
            sizes["FFN width"] = layer.dense_width
            continue
        sizes |= {f"layer {index}'s expert width": width for width in layer.moe.widths if block_size(width) is None}
        sizes |= {"shared expert's width": layer.moe.shared_width} if layer.moe.shared_width else {}
    check_blocks(options, sizes)
