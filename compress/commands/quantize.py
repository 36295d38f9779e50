"""The command `compress quantize`."""

from compress.commands.command import HUB, Figures, Given, command
from compress.commands.figures import show_figures
from compress.commands.output import progress_bar
from compress.options.quantize import ROUND, QuantizeOptions


def quantize(given: Given) -> Figures:
    """Round the weights of MODEL to 8, 4, 3 or 2 bits, and store them in the form of compressed-tensors.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default). Router, norms
    and biases keep their dtype, and so do the embedding and the output head unless --embedding-bits or --quantize-head is
    given.

    Several processes share the rounding with error feedback (--rounding gptq): torchrun --nproc-per-node N --no-python
    compress quantize …
    """
    from compress.quantize import quantize as run

    return show_figures(given, run(given.job(QuantizeOptions, f"{given.values['bits']}-bit"), progress_bar))


COMMAND = command("quantize", quantize, QuantizeOptions, *HUB, first=ROUND, is_shared=True)
