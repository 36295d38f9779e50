"""The command `compress plan-run`."""

from compress.commands.command import Figures, Given, command
from compress.commands.output import table
from compress.commands.prune import default_method
from compress.options.plan_run import RunOptions
from compress.report.columns import size


def plan_run(given: Given) -> Figures:
    """Say what `compress prune` of MODEL would cost: bytes moved, time and peak memory, before it starts.

    MODEL is a directory with a config.json, a GGUF file, a hub id, or 'demo'. Only config.json, or the header of the file,
    is read or downloaded. The figures of this processor are measured for a moment; those of other devices are published.

    With --memory-limit, say also how fast text from MODEL would come with that much memory for weights and KV cache. The
    disk is then measured for a moment on MODEL's files.
    """
    from compress.run_plan import plan_run as run
    from compress.run_plan import shown, shown_decoding

    method = given.values["method"] if "method" in given.named else default_method(given)
    figures = run(given.make(RunOptions, method=method, dtype=given.torch_dtype()))
    given.say(table(shown(figures)))
    given.say(f"{figures['device']}: {figures['device_source']}; {figures['calibration']}")
    if not figures["fits"]:
        given.say(f"this does not fit into the {size(figures['device_memory_bytes'])} of the device")
    if (decoding := figures["decoding"]) is not None:
        limit, slot = size(decoding["memory_limit_bytes"]), size(decoding["slot_bytes"])
        given.say(
            f"decoding within {limit}: {decoding['slots']:,} of {decoding['experts']:,} experts of {slot} fit; "
            f"{decoding['tokens_per_second_all_in_memory']:,.2f} tokens/s if all did"
        )
        given.say(table(shown_decoding(decoding)))
        given.say(f"routing: {decoding['routing']} ({decoding['tokens_simulated']:,} simulated)")
        given.say(f"disk: {size(int(decoding['disk_bytes_per_second']))}/s, {decoding['disk_source']}")
    return figures


COMMAND = command("plan-run", plan_run, RunOptions)
