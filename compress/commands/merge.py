"""The command `compress merge`."""

from compress.commands.command import HUB, Figures, Given, command
from compress.commands.figures import show_figures
from compress.commands.output import progress_bar
from compress.commands.prune import Afterwards, recovery
from compress.options.prune import MergeOptions


def merge(given: Given) -> Figures:
    """Merge similar experts of MODEL and write the smaller model.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default).

    Several processes share the work: torchrun --nproc-per-node N --no-python compress merge …
    """
    from compress.prune import prune as run

    options = given.job(MergeOptions, given.values["method"], distill=recovery(given))
    return show_figures(given, run(options, progress_bar))


COMMAND = command("merge", merge, MergeOptions, Afterwards, *HUB, is_shared=True)
