"""Options of `compress fit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.options import CalibrationOptions
from compress.options.job import OUTPUT, JobOptions
from compress.options.quantize import ROUND
from compress.options.refit import RefitOptions
from compress.plans.selection import REMOVE
from engine.errors import OptionError
from engine.kernels.stored.scheme import BITS, PLAIN_BITS
from engine.options import changed, declared, left_out, option, part, unlisted

TARGET = "Target"
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class FitOptions(JobOptions):
    """One run of `compress fit`."""

    output: Path = field(metadata=declared(group=OUTPUT, short="-o", unset="MODEL-fit", help="Directory of the result."))
    method: str = "fit"
    target_size: int | None = option(
        None,
        group=TARGET,
        is_size=True,
        several="commas",
        metavar="SIZE",
        unset="no limit",
        help="Most bytes of the result's weights, such as 14GB; this, --target-active or --fit-to is required. Several "
        "sizes make a sweep: a result for each, which share all statistics, and a comparison of them with MODEL.",
    )
    target_active: int | None = option(
        None,
        group=TARGET,
        is_size=True,
        unset="no limit",
        help="Most bytes of weights that a token reads, on average over --data: what decides the speed of decoding.",
    )
    fit_to: str | None = option(
        None,
        group=TARGET,
        choices=(AUTO,),
        unset="no limit",
        help="auto: as large as the main memory that is free on this machine, or in this container, allows beside the KV "
        "cache of one full context.",
    )
    bits: tuple[int, ...] = option(
        (PLAIN_BITS, *BITS),
        group=ROUND,
        several="commas",
        metavar="B",
        unset=",".join(map(str, (PLAIN_BITS, *BITS))),
        help=f"Widths to choose from; {PLAIN_BITS} leaves a matrix as it is.",
    )
    group_size: int = option(32, group=ROUND, minimum=1, help="Inputs of a matrix row that share a scale.")
    by_layer: bool = option(
        False,
        group=ROUND,
        help="All experts of a layer get the same widths, and nothing is removed: `compress export --format gguf --type "
        "stored` writes such a result in the types of its bits.",
    )
    remove_units: bool = option(
        True, group=REMOVE, off="no-remove", help="Also remove hidden units of experts, and experts that lose all of them."
    )
    unit_multiple: int | None = option(
        None,
        group=REMOVE,
        minimum=1,
        metavar="N",
        unset="a power of two up to 64",
        help="Experts keep multiples of N hidden units.",
    )
    min_experts: int = option(0, group=REMOVE, unset="experts per token", help="Fewest experts that a layer keeps.")
    validation_samples: int = option(
        64, group=TARGET, minimum=1, help="Sequences on which candidates are measured, of documents of their own."
    )
    refit: RefitOptions = part(RefitOptions)
    calibration: CalibrationOptions = part(CalibrationOptions, windows=left_out(), samples=changed(128))
    statistics: Path | None = unlisted(JobOptions, "statistics")

    def deciding(self) -> dict[str, Any]:
        """Return the options that decide the result. Parts of a choice are measured where no limit of memory is set."""
        return super().deciding() | {"has_memory_limit": self.memory_limit is not None}

    def check(self) -> None:
        """Raise OptionError without a target, for two sizes, and for widths that do not exist."""
        if self.fit_to is not None and self.target_size is not None:
            raise OptionError("--fit-to auto sets the size, and --target-size sets it too; give one of them")
        if (self.target_size, self.target_active, self.fit_to) == (None, None, None):
            raise OptionError("no target is given; give --target-size, --target-active or --fit-to auto")
        known = (PLAIN_BITS, *BITS)
        if wrong := [each for each in self.bits if each not in known]:
            raise OptionError(f"bits has {wrong[0]}; a matrix can have {', '.join(map(str, sorted(known)))}")
        if len(set(self.bits)) < len(self.bits):
            raise OptionError("a width is named twice in --bits; name each once")
        if not self.low_bits and not self.removes:
            flag = "--by-layer" if self.by_layer else "--no-remove"
            raise OptionError(f"--bits {PLAIN_BITS} and {flag} leave nothing to choose; leave out one of them")

    @property
    def removes(self) -> bool:
        """Return whether hidden units and experts may go."""
        return self.remove_units and not self.by_layer

    @property
    def low_bits(self) -> tuple[int, ...]:
        """Return the widths below 16, descending."""
        return tuple(sorted((each for each in self.bits if each != PLAIN_BITS), reverse=True))
