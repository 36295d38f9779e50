"""The closed set of errors that input can cause.

Each message says what is wrong, where, and what to do, in one line: the command line prints it as it stands and exits 1.
Anything else that escapes is a bug of ours and shows its traceback.
"""


class CompressError(Exception):
    """Base of every error that input, not a bug, can cause."""


class CheckpointError(CompressError):
    """A checkpoint on disk is missing, damaged, or disagrees with itself."""


class HubError(CompressError):
    """The hub does not give a model, or does not take one."""


class UnsupportedError(CompressError):
    """A model asks for something that this engine does not have; it is refused, never approximated."""


class PlanError(CompressError):
    """A plan does not fit the model it is for."""


class DataError(CompressError):
    """Text, tokenizer or statistics cannot serve for what was asked."""


class OptionError(CompressError):
    """An option's value cannot be honoured for this model."""


class OutputError(CompressError):
    """A result cannot be written where it was asked for."""


class TrainingError(CompressError):
    """Training cannot go on: its loss is no longer a number."""


class BusyError(CompressError):
    """An engine has as many requests waiting as it takes; later it will have room again."""


class ExportError(CompressError):
    """An exported model does not give what the engine gives."""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust has panicked: its error is no Exception, and no module names the class."""
    return type(error).__name__ == "PanicException"
