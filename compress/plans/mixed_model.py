"""A model with all its experts, in which each matrix of each expert has its own bits, written to a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from compress.plans.apply import apply
from compress.plans.plan import same_plan
from compress.rounding.mixed_widths import Widths, mixed_widths
from compress.rounding.quantizer import Quantiser
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import UnsupportedError
from engine.kernels.stored.quantized_weight import QuantizedWeight
from engine.kernels.stored.scheme import PLAIN_BITS


def write_mixed_widths(
    checkpoint: Checkpoint,
    directory: Path,
    widths: Widths,
    *,
    group_size: int = 32,
    others: int = PLAIN_BITS,
    made: Callable[[str], QuantizedWeight | None] | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> Quantiser:
    """Write a model with all its experts, each matrix with its own bits, into an empty directory; return its quantizer.

    widths, others: see `mixed_widths`. made: returns a matrix that was rounded before, by its name (`round_layers`); others
    are rounded to nearest. Raises UnsupportedError for a model that transformers runs for us.
    """
    if not checkpoint.has_own_decoder:
        raise UnsupportedError(
            f"{checkpoint.directory}: matrices of different bits are written for families that the engine runs itself, and "
            "transformers runs this one; take one width for all with `compress quantize --bits`"
        )
    quantiser = Quantiser(mixed_widths(checkpoint.config, widths, group_size=group_size, others=others), made=made)
    plan = same_plan(checkpoint.config.experts_by_layer)
    apply(plan, checkpoint, directory, quantiser=quantiser, progress=progress)
    return quantiser
