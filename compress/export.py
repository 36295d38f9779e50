"""`compress export`: a model as an ONNX directory, compared with the engine before it gets its name."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from compress.apply import carried_files
from compress.export_parity import Allowed, check_parity
from engine.artifact import check_output, whole_or_nothing, write_provenance
from engine.checkpoint import ONNX_NAME, Checkpoint, resolve
from engine.errors import ExportError, OptionError
from engine.json_file import write_json
from engine.progress import Progress, no_progress
from engine.report import peak_memory_bytes
from engine.routing import Routing
from engine.skip_tables import load_skip_tables, skipping_routings

FORMATS = ("onnx",)
PRECISIONS: dict[str, Allowed] = {"float32": Allowed(1e-4, 1e-4)}
"""What weights are stored and computed in, and how far logits may then be from the engine's in float32."""
EXPERTS = ("moe", "portable")
"""Mixture operators of onnxruntime, or standard operators only."""
_PACKAGES = ("onnx", "onnxruntime")


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
        missing = [package for package in _PACKAGES if find_spec(package) is None]
        if missing:
            raise OptionError(f"an export needs {' and '.join(missing)}; install them with `pip install moe-compress[onnx]`")


def export(options: ExportOptions, progress: Progress = no_progress) -> dict[str, Any]:
    """Write the ONNX directory and compare it with the engine; its figures. Nothing is left where they differ."""
    started = time.monotonic()
    check_output(options.output, options.overwrite, ONNX_NAME)
    checkpoint = Checkpoint(resolve(options.model))
    tables = load_skip_tables(checkpoint.directory, checkpoint.config) if options.skip_threshold else None
    routings = skipping_routings(checkpoint.config, tables, options.skip_threshold, options.skip_min_experts)
    with whole_or_nothing(options.output, options.overwrite, ONNX_NAME) as directory:
        weights_bytes = _write(options, checkpoint, routings, directory, progress)
        difference = _compare(options, checkpoint, routings, directory, progress)
        figures = {
            "artifact": str(options.output),
            "format": options.format,
            "precision": options.precision,
            "experts": options.experts,
            "experts_per_layer": list(checkpoint.config.experts_per_layer),
            "parameters": checkpoint.parameters,
            "weights_bytes": weights_bytes,
            "skip_threshold": options.skip_threshold,
            "max_abs_logit_difference": difference,
            "bytes": sum(path.stat().st_size for path in directory.iterdir()),
            "seconds": time.monotonic() - started,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        write_provenance(directory, _provenance(options, checkpoint, figures))
    return figures


def _write(
    options: ExportOptions, checkpoint: Checkpoint, routings: Sequence[Routing], directory: Path, progress: Progress
) -> int:
    """Everything but compression.json; bytes of the weights."""
    # Imported here: `--help` and every other command do without onnx.
    import onnx

    from engine.onnx_decoder import write_decoder

    weights_bytes = write_decoder(
        checkpoint,
        directory,
        routings,
        dtype=torch.float32,
        portable=options.experts == "portable",
        progress=lambda layers: progress(layers, "writing"),
    )
    onnx.checker.check_model(directory / ONNX_NAME)
    write_json(directory / "config.json", {key: value for key, value in checkpoint.raw_config.items() if key != "auto_map"})
    for path in carried_files(checkpoint.directory):
        shutil.copyfile(path, directory / path.name)
    return weights_bytes


def _compare(
    options: ExportOptions, checkpoint: Checkpoint, routings: Sequence[Routing], directory: Path, progress: Progress
) -> float:
    """The largest difference of a logit. Raises ExportError where the result does not give what the engine gives."""
    from engine.onnx_runtime import OnnxDecoder

    exported = OnnxDecoder(directory, checkpoint.config, options.threads)
    try:
        return check_parity(
            checkpoint, exported, routings, PRECISIONS[options.precision], lambda layers: progress(layers, "comparing")
        )
    except ExportError as error:
        raise ExportError(f"{options.output}: the export differs from the engine: {error}; it was removed") from error


def _provenance(options: ExportOptions, checkpoint: Checkpoint, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": {"model": options.model, "fingerprint": checkpoint.fingerprint()},
        "method": "export",
        "options": {key: value for key, value in asdict(options).items() if key not in ("overwrite", "output", "threads")},
        "experts_per_layer": figures["experts_per_layer"],
        "made_by": checkpoint.provenance and {key: checkpoint.provenance.get(key) for key in ("source", "method", "seed")},
        "figures": figures,
        "versions": {name: version(name) for name in ("torch", "transformers", "onnx", "onnxruntime")},
    }
