"""`compress export` of an encoder-decoder: two ONNX graphs, compared with transformers before they are kept."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.export.decoder import FORMATS, PRECISIONS, check_blocks, provenance
from compress.export.encoder_decoder_parity import check_encoder_decoder_parity, round_weights
from compress.options.export import ExportOptions
from compress.plans.apply import carried_files
from compress.run.claims import claims_output
from engine.checkpoint.artifact import check_output, whole_or_nothing, write_provenance
from engine.checkpoint.checkpoint import resolve
from engine.checkpoint.kinds import DECODER_NAME, ENCODER_NAME
from engine.errors import ExportError, OptionError, UnsupportedError
from engine.files.json_file import write_json
from engine.generation.report import peak_memory_bytes
from engine.onnx.encoder_decoder_runtime import OnnxEncoderDecoder
from engine.onnx.quantize import Written
from engine.progress import Progress, no_progress
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint


@claims_output
def export_encoder_decoder(options: ExportOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Write the ONNX directory and compare it with transformers; return the figures. Nothing is left where they differ."""
    # Imported here, since `--help` and every other command work without onnx.
    from engine.onnx.encoder_decoder import check_graphs

    started = time.monotonic()
    _check_options(options)
    check_output(options.output, options.overwrite, ENCODER_NAME)
    checkpoint = EncoderDecoderCheckpoint(resolve(options.model))
    check_graphs(checkpoint)
    config = checkpoint.config
    width = config.num_heads * config.d_kv
    check_blocks(options, {"hidden size": config.d_model, "attention width": width, "FFN width": config.d_ff})
    model = checkpoint.load(torch.float32)  # also detects missing or malformed tensors before any work
    with whole_or_nothing(options.output, options.overwrite, ENCODER_NAME) as directory:
        written = _write(options, checkpoint, directory, progress)
        differences = _compare(options, checkpoint, model, written, directory, progress)
        figures = {
            "artifact": str(options.output),
            "format": options.format,
            "precision": options.precision,
            "experts": options.experts,
            "experts_per_layer": list(checkpoint.experts.values()),
            "parameters": checkpoint.parameters,
            "active_parameters": checkpoint.active_parameters,
            "weights_bytes": written.weights_bytes,
            "skip_threshold": options.skip_threshold,
            "max_abs_logit_difference": differences["logits"],
            "max_abs_hidden_state_difference": differences["last_hidden_state"],
            "tokenizer_problem": None,
            "bytes": sum(path.stat().st_size for path in directory.iterdir()),
            "seconds": time.monotonic() - started,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        write_provenance(directory, provenance(options, checkpoint, figures))
    return figures


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


def _write(options: ExportOptions, checkpoint: EncoderDecoderCheckpoint, directory: Path, progress: Progress) -> Written:
    """Write every file except compression.json."""
    import onnx

    from engine.onnx.encoder_decoder import write_encoder_decoder

    precision = PRECISIONS[options.precision]
    written = write_encoder_decoder(
        checkpoint,
        directory,
        dtype=precision.dtype,
        bits=precision.bits,
        portable=options.is_portable,
        progress=lambda layers: progress(layers, "writing"),
    )
    for name in (ENCODER_NAME, DECODER_NAME):
        onnx.checker.check_model(directory / name)
    write_json(directory / "config.json", checkpoint.raw_config)
    for path in carried_files(checkpoint.directory):
        shutil.copyfile(path, directory / path.name)
    return written


def _compare(
    options: ExportOptions,
    checkpoint: EncoderDecoderCheckpoint,
    model: nn.Module,
    written: Written,
    directory: Path,
    progress: Progress,
) -> dict[str, float]:
    """Return the largest difference of each output. Raises ExportError where the result differs from transformers."""
    exported = OnnxEncoderDecoder(directory, checkpoint.config, options.threads)
    round_weights(model, written.packings)
    try:
        return check_encoder_decoder_parity(
            model,
            checkpoint,
            exported,
            PRECISIONS[options.precision].allowed,
            lambda batches: progress(batches, "comparing"),
        )
    except ExportError as error:
        raise ExportError(f"{options.output}: the export differs from transformers: {error}; it was removed") from error
