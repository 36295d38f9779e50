"""The command `compress calibrate`."""

from compress.commands.command import Figures, Given, Revision, command
from compress.commands.output import progress_bar
from compress.options.calibrate import CalibrateOptions
from compress.report.columns import size


def calibrate(given: Given) -> Figures:
    """Run text through MODEL once and save the statistics that every method reads.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default).

    Several processes share the work: torchrun --nproc-per-node N --no-python compress calibrate …
    """
    from compress.statistics_file import calibrate_to_file

    figures = calibrate_to_file(given.job(CalibrateOptions, "statistics"), progress_bar)
    given.say(
        f"{figures['statistics']}: {figures['tokens']:,} tokens in {figures['seconds']:.1f} s, "
        f"peak memory {size(figures['peak_memory_bytes'])}"
    )
    shares = " ".join(f"{share:.0%}" for share in figures["unselected_share_per_layer"])
    given.say(f"router probability of experts that are not chosen, by layer: {shares}")
    return figures


COMMAND = command("calibrate", calibrate, CalibrateOptions, Revision, is_shared=True)
