"""`compress export`: a model as an ONNX directory, compared with the engine before it gets its name."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compress.export.genai import check_genai, tokenizer_problem, write_genai_config
from compress.export.parity import Allowed, RoundedCheckpoint, check_parity
from compress.plans.apply import carried_files
from compress.run.claims import claims_output
from engine.checkpoint.artifact import check_output, whole_or_nothing, write_provenance
from engine.checkpoint.checkpoint import ONNX_NAME, Checkpoint, resolve
from engine.decoder.model import own_routings
from engine.decoder.routing import Routing
from engine.decoder.skip_tables import load_skip_tables, skipping_routings
from engine.errors import ExportError, OptionError, UnsupportedError
from engine.families.results import check_onnx
from engine.files.json_file import write_json
from engine.generation.report import peak_memory_bytes
from engine.onnx.quantize import BLOCKS, Written, block_size
from engine.progress import Progress, no_progress
from engine.transformers_models.encoder_decoder import EncoderDecoderCheckpoint


class Precision(NamedTuple):
    """What weights are stored and computed in."""

    dtype: torch.dtype
    """Of activations and of what has no `bits`."""
    bits: int | None
    """Of the weights of products."""
    allowed: Allowed
    """How far logits may be from the engine's in float32, which has the same weights, rounded to as many bits."""


FORMATS = ("onnx", "onnx-genai")
PRECISIONS: dict[str, Precision] = {
    "float32": Precision(torch.float32, None, Allowed(1e-4, 1e-4)),
    "float16": Precision(torch.float16, None, Allowed(math.inf, 0.02)),
    "int8": Precision(torch.float32, 8, Allowed(math.inf, 0.1)),
    "int4": Precision(torch.float32, 4, Allowed(math.inf, 0.1)),
}
EXPERTS = ("moe", "portable")
"""Mixture operators of onnxruntime, or standard operators only."""
_OF_WEIGHTS = ("auto_map", "quantization_config")
"""Config keys that say something of the checkpoint's files."""
_PACKAGES = {"onnx": ("onnx", "onnxruntime"), "onnx-genai": ("onnx", "onnxruntime", "onnxruntime_genai")}


MAX_TABLES = 1 << 30
"""Bytes of the angles of all positions in a graph, where the weights are fewer."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """One export. Raises OptionError for what no model can be exported as."""

    model: str
    output: Path
    format: str = "onnx"
    precision: str = "float32"
    experts: str = "moe"
    skip_threshold: float = 0.0
    skip_min_experts: int = 1
    threads: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.format, FORMATS),
            ("precision", self.precision, tuple(PRECISIONS)),
            ("experts", self.experts, EXPERTS),
        ):
            if value not in known:
                raise OptionError(f"{name} {value!r} is not known; choose {', '.join(known)}")
        if self.experts == "portable" and PRECISIONS[self.precision].bits is not None:
            raise OptionError(f"precision {self.precision!r} needs operators of onnxruntime; leave out --experts portable")
        missing = [package for package in _PACKAGES[self.format] if find_spec(package) is None]
        if missing:
            raise OptionError(f"an export needs {' and '.join(missing)}; install them with `pip install moe-compress[onnx]`")


@claims_output
def export(options: ExportOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Write the ONNX directory and compare it with the engine; its figures. Nothing is left where they differ."""
    started = time.monotonic()
    check_output(options.output, options.overwrite, ONNX_NAME)
    checkpoint = Checkpoint(resolve(options.model))
    check_onnx(checkpoint.config)
    _check_sizes(options, checkpoint)
    if options.format == "onnx-genai":
        check_genai(checkpoint, options.experts == "portable")
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
            "tokenizer_problem": tokenizer_problem(directory) if options.format == "onnx-genai" else None,
            "bytes": sum(path.stat().st_size for path in directory.iterdir()),
            "seconds": time.monotonic() - started,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        write_provenance(directory, provenance(options, checkpoint, figures))
    return figures


def _check_sizes(options: ExportOptions, checkpoint: Checkpoint) -> None:
    """check_blocks of all sizes that there are; UnsupportedError also for more positions than tables are made for."""
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
    """Raise UnsupportedError where weights of few bits cannot be cut into blocks, before any work."""
    odd = [f"{name} {size}" for name, size in sizes.items() if block_size(size) is None]
    if odd and PRECISIONS[options.precision].bits is not None:
        raise UnsupportedError(
            f"{options.model}: {options.precision} weights share scales in blocks of {min(BLOCKS)}, and {odd[0]} is "
            "not a multiple; export it in float32 or float16"
        )


def _write(
    options: ExportOptions, checkpoint: Checkpoint, routings: Sequence[Routing], directory: Path, progress: Progress
) -> Written:
    """Everything but compression.json."""
    # Imported here: `--help` and every other command do without onnx.
    import onnx

    from engine.onnx.decoder import write_decoder

    precision = PRECISIONS[options.precision]
    written = write_decoder(
        checkpoint,
        directory,
        routings,
        dtype=precision.dtype,
        bits=precision.bits,
        portable=options.experts == "portable",
        progress=lambda layers: progress(layers, "writing"),
    )
    onnx.checker.check_model(directory / ONNX_NAME)
    left_out = ("auto_map", "quantization_config")
    write_json(
        directory / "config.json", {key: value for key, value in checkpoint.raw_config.items() if key not in left_out}
    )
    if options.format == "onnx-genai":
        write_genai_config(checkpoint, directory)
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
    """The largest difference of a logit. Raises ExportError where the result does not give what the engine gives."""
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
    """What compression.json says of an export."""
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
