"""Which text a run calibrates on and is measured on, with defaults that suit the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from calibrate.text import token_batches, up_to
from engine.checkpoint.artifact import read_provenance
from engine.checkpoint.checkpoint import DEMO, DEMO_DIRECTORY, ModelDirectory
from engine.errors import DataError, OptionError


@dataclass(frozen=True)
class CalibrationOptions:
    """Which text, and how much of it."""

    data: str | None = None
    """None: the standard library's source for the demo model and what was made of it, C4 otherwise."""
    samples: int = 128
    sequence_length: int | None = None
    """None: 256 for the demo model, otherwise 2,048 or the model's maximum if smaller."""
    evaluation_samples: int = 32
    """Held-out sequences for perplexity; 0 measures none."""
    seed: int = 0

    def filled(self, checkpoint: ModelDirectory) -> CalibrationOptions:
        """The same with every None replaced. Raises OptionError for what the model cannot take."""
        is_demo = _is_of_demo(checkpoint)
        sized = self.sized(is_demo, checkpoint.config.max_positions)
        return replace(sized, data=self.data or ("stdlib" if is_demo else "allenai/c4"))

    def sized(self, is_demo: bool, max_positions: int) -> CalibrationOptions:
        """The same with a sequence length. Raises OptionError for what a model of so many positions cannot take."""
        length = self.sequence_length
        if length is None:
            length = min(256 if is_demo else 2048, max_positions)
        if not 2 <= length <= max_positions:
            raise OptionError(f"sequence length is {length}; this model takes 2 to {max_positions}")
        if self.samples < 1 or self.evaluation_samples < 0:
            raise OptionError("samples must be at least 1, and evaluation samples not negative")
        return replace(self, sequence_length=length)


def _is_of_demo(checkpoint: ModelDirectory) -> bool:
    """The demo model, or an artifact that was made from it."""
    provenance = read_provenance(checkpoint.directory) or {}
    source = provenance.get("source")
    return checkpoint.directory == DEMO_DIRECTORY or (isinstance(source, dict) and source.get("model") == DEMO)


def calibration_texts(calibration: CalibrationOptions, tokenizer: Any, vocabulary: int) -> tuple[Tensor, Tensor | None]:
    """(calibration tokens [S, L], held-out tokens [S, L] or None). Raises DataError where they do not fit the model."""
    assert calibration.data is not None and calibration.sequence_length is not None
    common = {"sequence_length": calibration.sequence_length, "seed": calibration.seed}
    tokens = token_batches(calibration.data, tokenizer, samples=calibration.samples, split="calibration", **common)
    held_out = None
    if calibration.evaluation_samples:
        held_out = token_batches(
            calibration.data, tokenizer, samples=calibration.evaluation_samples, split="held-out", **common
        )
    if int(tokens.max()) >= vocabulary:
        raise DataError(f"the tokenizer makes token {int(tokens.max())} and the model knows {vocabulary}; wrong tokenizer")
    return tokens, held_out


MAX_TRAINING_TOKENS = 1 << 26
"""Held in memory; a longer training passes over them several times, each time in another order."""


def training_text(calibration: CalibrationOptions, tokenizer: Any, sequences: int, validation: int) -> tuple[Tensor, Tensor]:
    """(tokens to train on [S, L], tokens to validate on [V, L]) of the part of the text that calibration may see.

    No document is in both. S is `sequences`, or fewer where the text or MAX_TRAINING_TOKENS ends. Raises DataError where
    there is less than one, or too little to validate on.
    """
    assert calibration.data is not None and calibration.sequence_length is not None
    common = {"sequence_length": calibration.sequence_length, "seed": calibration.seed}
    most = min(sequences, max(1, MAX_TRAINING_TOKENS // calibration.sequence_length))
    tokens = up_to(calibration.data, tokenizer, samples=most, split="training", **common)
    if not len(tokens):
        raise DataError(
            f"{calibration.data}: too short to train on: not one sequence of {calibration.sequence_length} tokens; give "
            "more text, or a shorter sequence length"
        )
    if not validation:
        return tokens, tokens[:0]
    return tokens, token_batches(calibration.data, tokenizer, samples=validation, split="validation", **common)
