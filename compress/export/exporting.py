"""The job that all exports share: check, write, compare with the engine, and keep the result only if they agree.

Each kind of model has a class with what differs: `DecoderExport`, `EncoderDecoderExport` and `ClassifierExport`.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from compress.options.export import ClassifierExportOptions, ExportOptions
from compress.plans.apply import carried_files
from compress.run.claims import claims_output
from engine.checkpoint.artifact import check_output, whole_or_nothing, write_provenance
from engine.checkpoint.kinds import ONNX_NAME
from engine.errors import ExportError
from engine.files.json_file import write_json
from engine.generation.report import peak_memory_bytes
from engine.progress import Progress, no_progress

AnyOptions = ExportOptions | ClassifierExportOptions
Options = TypeVar("Options", bound=AnyOptions)
NOT_RECORDED = ("overwrite", "output", "threads")
"""Options that do not change the result."""


class Export(ABC, Generic[Options]):
    """One export. Creating it opens and checks the model; the methods are called in the order of their definitions."""

    graph: ClassVar[str] = ONNX_NAME
    """A file that every result of this class has, by which an earlier result is recognized."""
    reference: ClassVar[str] = "the engine"
    """The implementation that the graphs are compared with."""
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers", "onnx", "onnxruntime")
    """Packages whose versions are recorded."""
    checkpoint: Any

    def __init__(self, options: Options, progress: Progress) -> None:
        self.options, self.progress = options, progress

    @abstractmethod
    def write(self, directory: Path) -> None:
        """Write the graphs, and further files that depend on the format."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of config.json."""
        config: Mapping[str, Any] = self.checkpoint.raw_config
        return config

    @property
    def files_directory(self) -> Path:
        """Directory of the tokenizer and of the other files that the result carries."""
        directory: Path = self.checkpoint.directory
        return directory

    @abstractmethod
    def compare(self, directory: Path) -> None:
        """Compare the graphs with the reference; raise ExportError where they differ."""

    @abstractmethod
    def figures(self, directory: Path) -> dict[str, Any]:
        """Return the figures that not every kind of model has."""

    def recorded_options(self) -> dict[str, Any]:
        """Return the options for compression.json."""
        return {key: value for key, value in asdict(self.options).items() if key not in NOT_RECORDED}

    def provenance(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of compression.json."""
        made_by = self.checkpoint.provenance or {}
        exported = {"model": self.options.model, "fingerprint": self.checkpoint.fingerprint()}
        layers = {name: figures[name] for name in ("experts_per_layer",) if name in figures}
        return {
            "source": made_by.get("source", exported),
            "exported": exported | {"method": made_by.get("method")},
            "method": "export",
            "options": self.recorded_options(),
            **layers,
            "figures": figures,
            "versions": {name: version(name) for name in self.packages},
        }


@claims_output
def run_export(options: Options, kind: type[Export[Options]], progress: Progress = no_progress) -> dict[str, Any]:
    """Write the ONNX directory and compare it with the reference; return the figures. Nothing is left where they differ."""
    started = time.monotonic()
    check_output(options.output, options.overwrite, kind.graph)
    export = kind(options, progress)
    with whole_or_nothing(options.output, options.overwrite, kind.graph) as directory:
        export.write(directory)
        write_json(directory / "config.json", export.config)
        for path in carried_files(export.files_directory):
            shutil.copyfile(path, directory / path.name)
        try:
            export.compare(directory)
        except ExportError as error:
            message = f"{options.output}: the export differs from {kind.reference}: {error}; it was removed"
            raise ExportError(message) from error
        figures = {
            "artifact": str(options.output),
            "format": options.format,
            "precision": options.precision,
            **export.figures(directory),
            "bytes": sum(path.stat().st_size for path in directory.iterdir()),
            "seconds": time.monotonic() - started,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        write_provenance(directory, export.provenance(figures))
    return figures
