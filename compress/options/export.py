"""Options of `compress export`."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from calibrate.options import CalibrationOptions
from compress.options.job import OUTPUT, JobOptions
from engine.errors import OptionError
from engine.generation.options import OpenOptions
from engine.options import changed, check, declared, left_out, like, option, part

if TYPE_CHECKING:
    import torch

WRITE = "What to write"
PRECISION_BITS = {"float32": None, "float16": None, "int8": 8, "int4": 4}
"""Bits of the weights of matrix products; None where they have the precision's dtype."""
CLASSIFIER_PRECISIONS = {"float32": False, "int8": True}
"""Whether each precision rounds weights and activations to 8 bits."""
EXPERT_FORMS = {"moe": False, "portable": True}
"""Whether each form builds experts from standard operators only, instead of onnxruntime's mixture operators."""
FORMAT_PACKAGES = {"onnx": ("onnx", "onnxruntime"), "onnx-genai": ("onnx", "onnxruntime", "onnxruntime_genai")}
_OLDER_TYPES = ("bf16", "f16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_K_TYPES = ("q6_k", "q5_k_m", "q5_k_s", "q5_k", "q4_k_m", "q4_k_s", "q4_k", "q3_k_l", "q3_k_m", "q3_k_s", "q3_k", "q2_k")
STORED = "stored"
"""Value of `type` for which each matrix gets the GGUF type of the form in which it is stored."""
GGUF_TYPES = (*_OLDER_TYPES, *_K_TYPES, STORED)
"""Types in which a GGUF file is written; WRITTEN_TYPES (engine/families/gguf/mixes.py) describes each one except STORED."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """One export of a decoder or encoder-decoder. Raises OptionError for invalid combinations."""

    model: str = like(JobOptions, "model")
    output: Path = field(
        metadata=declared(
            group=OUTPUT,
            short="-o",
            unset="MODEL-FORMAT, or MODEL-TYPE.gguf",
            help="Directory of the result; a file for gguf.",
        )
    )
    format: str = option(
        "onnx",
        group=WRITE,
        choices=tuple(FORMAT_PACKAGES),
        help="Files for onnxruntime (onnx), for onnxruntime-genai, or for llama.cpp (gguf).",
    )
    precision: str = option("float32", group=WRITE, choices=tuple(PRECISION_BITS), help="Precision of the weights.")
    experts: str = option(
        "moe",
        group=WRITE,
        choices=tuple(EXPERT_FORMS),
        help="Operators: those of onnxruntime for mixtures and attention (moe), or standard ones only (portable).",
    )
    skip_threshold: float = like(OpenOptions, "skip_threshold", help="Skip unneeded experts in the graph.")
    skip_min_experts: int = like(OpenOptions, "skip_min_experts")
    skip_rule: str = like(OpenOptions, "skip_rule")
    threads: int | None = None
    overwrite: bool = like(JobOptions, "overwrite")

    def __post_init__(self) -> None:
        check(self)
        if self.is_portable and PRECISION_BITS[self.precision] is not None:
            raise OptionError(f"precision {self.precision!r} needs operators of onnxruntime; leave out --experts portable")
        check_packages(FORMAT_PACKAGES[self.format])

    @property
    def is_portable(self) -> bool:
        """Whether the graph consists of standard operators only."""
        return EXPERT_FORMS[self.experts]


@dataclass(frozen=True, kw_only=True)
class ClassifierExportOptions:
    """One export of a classifier. Raises OptionError for invalid combinations."""

    format: ClassVar[str] = "onnx"
    model: str = like(JobOptions, "model")
    output: Path = like(ExportOptions, "output")
    precision: str = like(ExportOptions, "precision", choices=tuple(CLASSIFIER_PRECISIONS), models="classifiers")
    data: str | None = like(CalibrationOptions, "data", unset="those it was distilled on")
    threads: int | None = None
    overwrite: bool = like(JobOptions, "overwrite")

    def __post_init__(self) -> None:
        check(self)
        check_packages(("onnx", "onnxscript", "onnxruntime"))


@dataclass(frozen=True, kw_only=True)
class GgufExportOptions:
    """One export of a decoder as a GGUF file. Raises OptionError for an unknown type, and for names not ending in .gguf."""

    model: str = like(JobOptions, "model")
    output: Path = like(ExportOptions, "output")
    format: str = like(ExportOptions, "format", default="gguf", choices=("gguf",))
    type: str = option("bf16", group=WRITE, metavar="|".join(GGUF_TYPES), help="Type of the numbers in a GGUF file.")
    imatrix_output: Path | None = option(
        None,
        group=OUTPUT,
        help="Also write the importance matrix of --data, by which llama-quantize of llama.cpp weighs errors.",
    )
    calibration: CalibrationOptions = part(
        CalibrationOptions,
        data=changed(
            unset="none for a GGUF file; for classifiers those they were distilled on",
            help="Text that weighs the rounding to a GGUF file; for classifiers, examples to calibrate int8 on and to "
            "compare predictions on.",
        ),
        evaluation_samples=left_out(0),
        windows=left_out(),
    )
    overwrite: bool = like(JobOptions, "overwrite")
    dtype: torch.dtype | None = None
    device: str = "cpu"

    @property
    def reads_text(self) -> bool:
        """Whether the inputs of products are collected on a text."""
        return self.calibration.data is not None or self.imatrix_output is not None

    def __post_init__(self) -> None:
        check(self)
        if self.type not in GGUF_TYPES:
            raise OptionError(
                f"type {self.type!r} is not written; take one of {', '.join(GGUF_TYPES)}, or quantize a bf16 file with "
                "llama-quantize of llama.cpp"
            )
        for path, flag in ((self.output, "--output"), (self.imatrix_output, "--imatrix-output")):
            if path is not None and path.suffix != ".gguf":
                raise OptionError(f"{path}: the name of a GGUF file ends in .gguf; give another {flag}")
        if self.imatrix_output is not None and self.imatrix_output.resolve() == self.output.resolve():
            raise OptionError(f"{self.output}: is the model and the importance matrix; give another --imatrix-output")
        check_packages(("gguf",), extra="gguf")


def check_packages(needed: tuple[str, ...], extra: str = "onnx") -> None:
    """Raise OptionError where a package that the export needs is not installed. `extra`: the group that has it."""
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise OptionError(f"an export needs {' and '.join(missing)}; install them with `pip install moe-compress[{extra}]`")
