"""The token sequences that a run calibrates on, is measured on and trains on, all from one source of text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from calibrate.options import CalibrationOptions
from calibrate.text import token_batches, up_to
from engine.errors import DataError


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
