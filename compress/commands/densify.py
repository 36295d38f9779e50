"""The command `compress densify`."""

from collections.abc import Callable

from compress.commands.command import HUB, Figures, Given, command
from compress.commands.figures import show_figures
from compress.commands.kinds import Kind, kind_of
from compress.commands.output import progress_bar
from compress.commands.preset import with_preset
from compress.options.densify import DensifyOptions
from compress.options.presets import PresetOptions
from engine.progress import Progress


def densify(given: Given) -> Figures:
    """Make an ordinary dense model of MODEL: K experts of each layer become one FFN.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default). The result is
    of the dense family that fits, and loads wherever that does; without training its quality is far below MODEL's. Both
    stacks of an encoder-decoder become dense, and --data is then a .jsonl of pairs: `source` and `target`, or
    `instruction`, `input` and `output`.

    Several processes share the work: torchrun --nproc-per-node N --no-python compress densify …
    """
    given = with_preset(given, (DensifyOptions,), "densify")
    figures = _run(kind_of(given.values["model"]), given.job(DensifyOptions, "densify"))
    show_figures(given, figures)
    _show_layers(given, figures)
    for name, part in figures["training"].items():
        given.say(f"{name}: {part['steps']} steps, loss {part['loss_first']:.3f} to {part['loss_last']:.3f}")
    return figures


def _run(kind: Kind, options: DensifyOptions) -> Figures:
    from compress.densify import densify as densify_decoder
    from compress.densify_encoder_decoder import densify_encoder_decoder

    runs: dict[Kind, Callable[[DensifyOptions, Progress], Figures]] = {"encoder-decoder": densify_encoder_decoder}
    return runs.get(kind, densify_decoder)(options, progress_bar)


def _show_layers(given: Given, figures: Figures) -> None:
    errors = figures["block_error_per_layer"]
    given.say(f"{figures['ffns']} experts of each layer as one FFN: {figures['family_note']}")
    given.say(f"a layer's output was off by {min(errors):.0%} to {max(errors):.0%} before any training")
    if weights := figures.get("router_weight_error_per_layer"):
        given.say(f"of that, the mean router probability alone makes {min(weights):.1%} to {max(weights):.1%}")
    if any(dropped := figures.get("dropped_share_per_layer", ())):
        given.say(f"beyond the capacity of an expert were {min(dropped):.1%} to {max(dropped):.1%} of a layer's tokens")
    if gates := figures.get("shared_gate_error_per_layer"):
        given.say(f"of that, the mean gate of the shared expert alone makes {min(gates):.1%} to {max(gates):.1%}")


COMMAND = command("densify", densify, DensifyOptions, PresetOptions, *HUB, is_shared=True)
