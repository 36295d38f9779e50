"""The command `compress compare`."""

from pathlib import Path

from compress.commands.command import Figures, Given, command
from compress.commands.output import progress_bar, table
from compress.options.compare import MEASURE, CompareOptions
from compress.report.columns import text_table


def compare(given: Given) -> Figures:
    """Compare the quality, size, speed and memory of MODELS, in one run.

    Each is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model.
    """
    from compress.compare import compare as run

    figures = run(given.make(CompareOptions), progress_bar)
    given.say(table(text_table(figures["rows"])))
    for note in figures["notes"]:
        given.say(note)
    if figures["output"]:
        given.say(f"{figures['output']}: written; open {Path(figures['output']) / 'index.html'}")
    return figures


COMMAND = command("compare", compare, CompareOptions, first=MEASURE)
