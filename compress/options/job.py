"""Options that every job has: the model, the text, and the place of the result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from calibrate.options import TEXT, CalibrationOptions
from engine.files.gguf_file import is_gguf
from engine.options import check, declared, left_out, option, part

if TYPE_CHECKING:
    import torch

OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of one run of any job."""

    writes_gguf: ClassVar[bool] = False
    """Whether the result can be a GGUF file."""
    model: str = option("demo", group="", is_argument=True, help="Directory, hub id or 'demo'.")
    output: Path = field(metadata=declared(group=OUTPUT, short="-o", unset="MODEL-METHOD", help="Directory of the result."))
    method: str
    calibration: CalibrationOptions = part(CalibrationOptions, windows=left_out())
    statistics: Path | None = option(
        None, group=TEXT, help="Statistics file of `compress calibrate`, instead of a run over the text."
    )
    plan_output: Path | None = option(None, group=OUTPUT, help="Also write the plan to this file.")
    dtype: torch.dtype | None = None
    device: str = "cpu"
    overwrite: bool = option(False, group=OUTPUT, help="Replace an existing result.")
    resume: bool = option(False, group=OUTPUT, help="Continue an interrupted run.")
    memory_limit: int | None = option(
        None,
        group="Machine",
        is_size=True,
        unset="no limit",
        help="Most resident memory, such as 8GB: the model is run layer by layer, with activations on disk.",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def makes_file(self) -> bool:
        """Whether the result is one GGUF file; otherwise it is a directory."""
        return is_gguf(self.output)

    def deciding(self) -> dict[str, Any]:
        """Return the options that decide the result, as JSON."""
        values = asdict(self)
        for key in ("resume", "overwrite", "plan_output", "memory_limit"):
            del values[key]
        return dict(json.loads(json.dumps(values, default=str)))

    def recorded(self) -> dict[str, Any]:
        """Return the deciding options with all defaults filled in, as provenance records them."""
        return self.deciding()
