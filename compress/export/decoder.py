"""`compress export` of a decoder: an ONNX directory, compared with the engine before it is kept."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compress.export.genai import check_genai, tokenizer_problem, write_genai_config
from compress.export.parity import Allowed, RoundedCheckpoint, check_parity
from compress.options.export import FORMAT_PACKAGES, PRECISION_BITS, ExportOptions
from compress.plans.apply import carried_files
from compress.run.claims import claims_output
from engine.checkpoint.artifact import check_output, whole_or_nothing, write_provenance
from engine.checkpoint.checkpoint import Checkpoint, resolve
from engine.checkpoint.kinds import ONNX_NAME
from engine.decoder.model import own_routings
from engine.decoder.routing import Routing
from engine.decoder.skip_tables import load_skip_tables, skipping_routings
from engine.errors import ExportError, UnsupportedError
from engine.families.results import check_onnx
from engine.files.json_file import write_json
from engine.generation.report import peak_memory_bytes
from engine.onnx.quantize import BLOCKS, Written, block_size
from engine.progress import Progress, no_progress
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint


class Precision(NamedTuple):
    """Dtype and bit width of an exported model."""

    dtype: torch.dtype
    """Dtype of activations, and of weights where `bits` is None."""
    bits: int | None
    """Bits of the weights of matrix products; None for the dtype."""
    allowed: Allowed
    """Allowed difference of logits from the engine's in float32 with equal weights, rounded to the same number of bits."""


@dataclass(frozen=True)
class ExportFormat:
    """One row of FORMATS; the checkpoint's own files are in every format."""

    check: Callable[[Checkpoint, bool], None] = lambda checkpoint, portable: None
    """Raises an error for a model that the format cannot represent. portable: standard operators only."""
    write: Callable[[Checkpoint, Path], None] = lambda checkpoint, directory: None
    """Writes the format's own files."""
    tokenizer_problem: Callable[[Path], str | None] = lambda directory: None
    """Returns why the format's runtime cannot read the tokenizer, or None where it can."""
    runs_encoder_decoders: bool = True


FORMATS: dict[str, ExportFormat] = {
    "onnx": ExportFormat(),
    "onnx-genai": ExportFormat(check_genai, write_genai_config, tokenizer_problem, runs_encoder_decoders=False),
}
"""Formats; FORMAT_PACKAGES (compress/options/export.py) has the packages that each needs."""
assert tuple(FORMATS) == tuple(FORMAT_PACKAGES)
PRECISIONS: dict[str, Precision] = {
    "float32": Precision(torch.float32, PRECISION_BITS["float32"], Allowed(1e-4, 1e-4)),
    "float16": Precision(torch.float16, PRECISION_BITS["float16"], Allowed(math.inf, 0.02)),
    "int8": Precision(torch.float32, PRECISION_BITS["int8"], Allowed(math.inf, 0.1)),
    "int4": Precision(torch.float32, PRECISION_BITS["int4"], Allowed(math.inf, 0.1)),
}
assert tuple(PRECISIONS) == tuple(PRECISION_BITS)
FILE_KEYS = ("auto_map", "quantization_config")
"""Config keys that describe the checkpoint's own files and not the export's."""
MAX_TABLES = 1 << 30
"""Limit in bytes of a graph's table of rotation angles for all positions, where the weights are smaller."""


@claims_output
def export(options: ExportOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Write the ONNX directory and compare it with the engine; return the figures. Nothing is left where they differ."""
    started = time.monotonic()
    check_output(options.output, options.overwrite, ONNX_NAME)
    checkpoint = Checkpoint(resolve(options.model))
    check_onnx(checkpoint.config)
    _check_sizes(options, checkpoint)
    FORMATS[options.format].check(checkpoint, options.is_portable)
    tables = load_skip_tables(checkpoint.directory, checkpoint.config) if options.skip_threshold else None
    own = own_routings(checkpoint.config, checkpoint.source(torch.float32))
    routings = skipping_routings(checkpoint.config, tables, options.skip_threshold, options.skip_min_experts, own=own)
    with whole_or_nothing(options.output, options.overwrite, ONNX_NAME) as directory:
        written = _write(options, checkpoint, routings, directory, progress)
        difference = _compare(options, checkpoint, routings, written, directory, progress)
        figures = {
            "artifact": str(options.output),
            "format": options.format,
            "precision": options.precision,
            "experts": options.experts,
            "experts_per_layer": list(checkpoint.config.experts_per_layer),
            "parameters": checkpoint.parameters,
            "weights_bytes": written.weights_bytes,
            "skip_threshold": options.skip_threshold,
            "max_abs_logit_difference": difference,
            "tokenizer_problem": FORMATS[options.format].tokenizer_problem(directory),
            "bytes": sum(path.stat().st_size for path in directory.iterdir()),
            "seconds": time.monotonic() - started,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        write_provenance(directory, provenance(options, checkpoint, figures))
    return figures


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
    for layer in config.layers:
        widths = {"FFN width": layer.dense_width} if layer.moe is None else {"expert width": layer.moe.expert_width}
        sizes |= widths | ({"shared expert's width": layer.moe.shared_width} if layer.moe and layer.moe.shared_width else {})
    check_blocks(options, sizes)


def check_blocks(options: ExportOptions, sizes: Mapping[str, int]) -> None:
    """Raise UnsupportedError where low-bit weights cannot be divided into blocks, before any work."""
    odd = [f"{name} {size}" for name, size in sizes.items() if block_size(size) is None]
    if odd and PRECISIONS[options.precision].bits is not None:
        raise UnsupportedError(
            f"{options.model}: {options.precision} weights share scales in blocks of {min(BLOCKS)}, and {odd[0]} is "
            "not a multiple; export it in float32 or float16"
        )


def _write(
    options: ExportOptions, checkpoint: Checkpoint, routings: Sequence[Routing], directory: Path, progress: Progress
) -> Written:
    """Write every file except compression.json."""
    # Imported here, since `--help` and every other command work without onnx.
    import onnx

    from engine.onnx.decoder import write_decoder

    precision = PRECISIONS[options.precision]
    written = write_decoder(
        checkpoint,
        directory,
        routings,
        dtype=precision.dtype,
        bits=precision.bits,
        portable=options.is_portable,
        progress=lambda layers: progress(layers, "writing"),
    )
    onnx.checker.check_model(directory / ONNX_NAME)
    kept = {key: value for key, value in checkpoint.raw_config.items() if key not in FILE_KEYS}
    write_json(directory / "config.json", kept)
    FORMATS[options.format].write(checkpoint, directory)
    for path in carried_files(checkpoint.directory):
        shutil.copyfile(path, directory / path.name)
    return written


def _compare(
    options: ExportOptions,
    checkpoint: Checkpoint,
    routings: Sequence[Routing],
    written: Written,
    directory: Path,
    progress: Progress,
) -> float:
    """Return the largest difference of a logit. Raises ExportError where the result differs from the engine."""
    from engine.onnx.runtime import OnnxDecoder

    exported = OnnxDecoder(directory, checkpoint.config, options.threads)
    same = RoundedCheckpoint(checkpoint.directory, written.packings) if written.packings else checkpoint
    try:
        return check_parity(
            same,
            exported,
            routings,
            PRECISIONS[options.precision].allowed,
            lambda layers: progress(layers, "comparing"),
        )
    except ExportError as error:
        raise ExportError(f"{options.output}: the export differs from the engine: {error}; it was removed") from error


def provenance(
    options: ExportOptions, checkpoint: Checkpoint | EncoderDecoderCheckpoint, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of compression.json for an export."""
    made_by = checkpoint.provenance or {}
    exported = {"model": options.model, "fingerprint": checkpoint.fingerprint()}
    return {
        "source": made_by.get("source", exported),
        "exported": exported | {"method": made_by.get("method")},
        "method": "export",
        "options": {key: value for key, value in asdict(options).items() if key not in ("overwrite", "output", "threads")},
        "experts_per_layer": figures["experts_per_layer"],
        "figures": figures,
        "versions": {name: version(name) for name in ("torch", "transformers", "onnx", "onnxruntime")},
    }
