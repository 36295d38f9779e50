"""Token sequences for calibration, evaluation and training, all read from one source of text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from calibrate.options import CalibrationOptions
from calibrate.text import Split, token_batches, up_to
from calibrate.windows import Windows, text_windows
from engine.errors import DataError


def calibration_texts(calibration: CalibrationOptions, tokenizer: Any, vocabulary: int) -> tuple[Tensor, Windows | None]:
    """Return (calibration tokens [S, L], held-out windows or None).

    Raises DataError where they do not fit the model.
    """
    assert calibration.data is not None and calibration.sequence_length is not None
    common = {"sequence_length": calibration.sequence_length, "seed": calibration.seed}
    tokens = token_batches(calibration.data, tokenizer, samples=calibration.samples, split="calibration", **common)
    held_out = None
    if calibration.evaluation_samples:
        held_out = evaluation_windows(calibration, tokenizer, calibration.evaluation_samples)
    if int(tokens.max()) >= vocabulary:
        raise DataError(f"the tokenizer gives token {int(tokens.max())}; the model has {vocabulary} tokens: wrong tokenizer")
    return tokens, held_out


def evaluation_windows(calibration: CalibrationOptions, tokenizer: Any, samples: int, split: Split = "held-out") -> Windows:
    """Return the windows of a split on which perplexity is measured. Raises DataError where the text is too short."""
    assert calibration.data is not None and calibration.sequence_length is not None
    return text_windows(
        calibration.data,
        tokenizer,
        samples=samples,
        sequence_length=calibration.sequence_length,
        seed=calibration.seed,
        split=split,
        windows=calibration.windows,
    )


MAX_TRAINING_TOKENS = 1 << 26
"""The most training tokens held in memory. A longer training repeats them in several epochs, each in another order."""


def training_text(calibration: CalibrationOptions, tokenizer: Any, sequences: int, validation: int) -> tuple[Tensor, Tensor]:
    """Return (training tokens [S, L], validation tokens [V, L]), both from the text that is not held out.

    No document is in both. S is `sequences`, or fewer where the text ends or MAX_TRAINING_TOKENS is reached. Raises
    DataError where the text has less than one training sequence, or too few validation sequences.
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
