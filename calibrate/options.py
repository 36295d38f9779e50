"""Options of the text on which a run calibrates and evaluates, with defaults that suit the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from calibrate.cutting import SPREAD, WINDOWS
from engine.errors import OptionError
from engine.options import check, option

if TYPE_CHECKING:
    from engine.checkpoint.model_directory import ModelDirectory

TEXT, RESPONSES = "Calibration text", "Prompts and responses"


@dataclass(frozen=True)
class CalibrationOptions:
    """Source of the text, and how much of it is used."""

    data: str | None = option(
        None,
        group=TEXT,
        unset="stdlib for the demo model, else allenai/c4",
        help="Text: a file, a folder, rows (.jsonl or .json), 'stdlib' (the source of Python's library) or a dataset id.",
    )
    samples: int = option(128, group=TEXT, help="Number of sequences.")
    sequence_length: int | None = option(
        None, group=TEXT, unset="2048 or the model's maximum; demo 256", help="Tokens per sequence."
    )
    evaluation_samples: int = option(
        32, group=TEXT, help="Held-out sequences that perplexity is measured on, before and after; 0 for none."
    )
    seed: int = 0
    windows: str = option(
        SPREAD,
        group=TEXT,
        choices=tuple(WINDOWS),
        help="Windows for perplexity: 'spread' takes one from each document first; 'packed' fills them end to end.",
    )

    def __post_init__(self) -> None:
        check(self)

    def filled(self, checkpoint: ModelDirectory) -> CalibrationOptions:
        """Return these options with every None replaced. Raises OptionError for values that the model does not support."""
        is_demo = _is_of_demo(checkpoint)
        sized = self.sized(is_demo, checkpoint.config.max_positions)
        return replace(sized, data=self.data or ("stdlib" if is_demo else "allenai/c4"))

    def sized(self, is_demo: bool, max_positions: int) -> CalibrationOptions:
        """Return these options with a sequence length. Raises OptionError for a length above the model's positions."""
        length = self.sequence_length
        if length is None:
            length = min(256 if is_demo else 2048, max_positions)
        if not 2 <= length <= max_positions:
            raise OptionError(f"sequence length is {length}; this model takes 2 to {max_positions}")
        if self.samples < 1 or self.evaluation_samples < 0:
            raise OptionError("samples must be at least 1, and evaluation samples not negative")
        return replace(self, sequence_length=length)


@dataclass(frozen=True)
class Limits:
    """Maximum lengths of prompts and responses, in tokens."""

    length: int = option(
        512, group=RESPONSES, flag="max-length", help="Tokens of prompt and response; responses are cut to it."
    )
    prompt: int = option(
        256,
        group=RESPONSES,
        flag="max-prompt-length",
        help="Tokens of a prompt; a longer one is left out of training, and cut where ROUGE-L is measured.",
    )

    def __post_init__(self) -> None:
        check(self)

    def check(self, max_positions: int) -> None:
        """Raise OptionError for lengths that the model does not support."""
        if not 2 <= self.length <= max_positions or not 1 <= self.prompt < self.length:
            raise OptionError(
                f"max-length is {self.length} and max-prompt-length {self.prompt}; the model takes up to {max_positions} "
                "tokens, and a prompt must leave room for a response"
            )


def _is_of_demo(checkpoint: ModelDirectory) -> bool:
    """Whether this is the demo model, or an artifact that was made from it."""
    from engine.checkpoint.artifact import read_provenance
    from engine.checkpoint.model_directory import DEMO, DEMO_DIRECTORY

    provenance = read_provenance(checkpoint.directory) or {}
    source = provenance.get("source")
    return checkpoint.directory == DEMO_DIRECTORY or (isinstance(source, dict) and source.get("model") == DEMO)
