"""Errors that user input can cause: a closed set of classes.

Each message says in one line what is wrong, where, and what to do. The command line prints the message and exits with
1. Any other exception is a bug in this project and shows its traceback.
"""


class CompressError(Exception):
    """Base class of every error that is caused by input and not by a bug."""


class CheckpointError(CompressError):
    """A checkpoint on disk is missing, damaged or inconsistent."""


class HubError(CompressError):
    """The Hugging Face Hub does not deliver or does not accept a model."""


class UnsupportedError(CompressError):
    """A model needs a feature that this engine does not have; the model is refused, never approximated."""


class PlanError(CompressError):
    """A plan does not fit its model."""


class DataError(CompressError):
    """Text, a tokenizer or statistics are not usable for the requested operation."""


class OptionError(CompressError):
    """An option's value cannot be used with this model."""


class OutputError(CompressError):
    """A result cannot be written to the requested place."""


class TrainingError(CompressError):
    """Training cannot continue: its loss is not a finite number."""


class BusyError(CompressError):
    """No request is taken now: a queue or a limit on bytes is full, or the engine is shutting down."""


class ExportError(CompressError):
    """An exported model's outputs differ from the engine's outputs."""


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust has panicked; its exception cannot be imported and is no Exception."""
    return type(error).__name__ == "PanicException"
