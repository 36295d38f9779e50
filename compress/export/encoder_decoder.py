"""`compress export` of an encoder-decoder: two ONNX graphs, compared with transformers before they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compress.export.encoder_decoder_parity import check_encoder_decoder_parity, round_weights
from compress.export.exporting import Export, run_export
from compress.export.formats import FORMATS, PRECISIONS, check_blocks
from compress.options.export import ExportOptions
from engine.checkpoint.kinds import DECODER_NAME, ENCODER_NAME
from engine.checkpoint.model_directory import resolve
from engine.errors import OptionError, UnsupportedError
from engine.onnx.encoder_decoder_runtime import OnnxEncoderDecoder
from engine.progress import Progress, no_progress
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint


def export_encoder_decoder(options: ExportOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Export an encoder-decoder; see `run_export`."""
    return run_export(options, EncoderDecoderExport, progress)


class EncoderDecoderExport(Export[ExportOptions]):
    """The export of an encoder-decoder."""

    graph = ENCODER_NAME
    reference = "transformers"

    def __init__(self, options: ExportOptions, progress: Progress) -> None:
        # Imported here, since `--help` and every other command work without onnx.
        from engine.onnx.encoder_decoder import check_graphs

        super().__init__(options, progress)
        _check_options(options)
        self.checkpoint = EncoderDecoderCheckpoint(resolve(options.model))
        check_graphs(self.checkpoint)
        config = self.checkpoint.config
        width = config.num_heads * config.d_kv
        check_blocks(options, {"hidden size": config.d_model, "attention width": width, "FFN width": config.d_ff})
        self._model = self.checkpoint.load(torch.float32)  # also detects missing or malformed tensors before any work

    def write(self, directory: Path) -> None:
        import onnx

        from engine.onnx.encoder_decoder import write_encoder_decoder

        precision = PRECISIONS[self.options.precision]
        self._written = write_encoder_decoder(
            self.checkpoint,
            directory,
            dtype=precision.dtype,
            bits=precision.bits,
            portable=self.options.is_portable,
            progress=lambda layers: self.progress(layers, "writing"),
        )
        for name in (ENCODER_NAME, DECODER_NAME):
            onnx.checker.check_model(directory / name)

    def compare(self, directory: Path) -> None:
        round_weights(self._model, self._written.packings)
        self._differences = check_encoder_decoder_parity(
            self._model,
            self.checkpoint,
            OnnxEncoderDecoder(directory, self.checkpoint.config, self.options.threads),
            PRECISIONS[self.options.precision].allowed,
            lambda batches: self.progress(batches, "comparing"),
        )

    def figures(self, directory: Path) -> dict[str, Any]:
        return {
            "experts": self.options.experts,
            "experts_per_layer": list(self.checkpoint.experts.values()),
            "parameters": self.checkpoint.parameters,
            "active_parameters": self.checkpoint.active_parameters,
            "weights_bytes": self._written.weights_bytes,
            "skip_threshold": self.options.skip_threshold,
            "max_abs_logit_difference": self._differences["logits"],
            "max_abs_hidden_state_difference": self._differences["last_hidden_state"],
            "tokenizer_problem": None,
        }


def _check_options(options: ExportOptions) -> None:
    if not FORMATS[options.format].runs_encoder_decoders:
        raise UnsupportedError(
            f"{options.model}: is an encoder-decoder with relative positions, which onnxruntime-genai does not run; use "
            "--format onnx"
        )
    if options.skip_threshold:
        raise OptionError(
            "an encoder-decoder's tokens have one expert each, so there is none to skip; leave out --skip-threshold"
        )
