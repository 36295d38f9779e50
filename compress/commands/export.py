"""The command `compress export`, for decoders, encoder-decoders and classifiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compress.commands.command import HUB, Figures, Given, command
from compress.commands.kinds import Kind, kind_of
from compress.commands.output import progress_bar
from compress.options.export import ClassifierExportOptions, ExportOptions, GgufExportOptions
from compress.report.columns import size
from engine.errors import OptionError
from engine.generation.options import SKIP_OPTIONS
from engine.progress import Progress


def export(given: Given) -> Figures:
    """Write MODEL for another runtime, then compare it with the engine; where they differ, nothing is left.

    MODEL is a checkpoint directory, a GGUF file, a hub id, or 'demo', the built-in model (the default). An
    encoder-decoder becomes two graphs, the encoder's and the decoder's.
    """
    kind = kind_of(given.values["model"])
    if given.values["format"] in FILE_EXPORTS:
        return FILE_EXPORTS[given.values["format"]](given, kind)
    given.refuse(("type",), "for GGUF files; --precision is that of a graph")
    given.refuse(("imatrix_output", "samples", "sequence_length"), "for GGUF files")
    return EXPORTS[kind](given)


def _export_decoder(given: Given) -> Figures:
    from compress.export.decoder import export as run

    return _export_language_model(given, run)


def _export_encoder_decoder(given: Given) -> Figures:
    from compress.export.encoder_decoder import export_encoder_decoder as run

    return _export_language_model(given, run)


def _export_language_model(given: Given, run: Callable[[ExportOptions, Progress], Figures]) -> Figures:
    given.refuse(("data",), "for classifiers, and this is a language model")
    figures = run(given.make(ExportOptions, output=_output(given, given.values["format"])), progress_bar)
    given.say(f"{_written(figures)}, in {_cost(figures)}")
    if figures["tokenizer_problem"]:
        given.say(f"note: onnxruntime-genai cannot read the tokenizer ({figures['tokenizer_problem']}); give it token ids")
    return figures


def _export_classifier(given: Given) -> Figures:
    from compress.export.classifier import export_classifier

    given.refuse(("experts", *SKIP_OPTIONS), "not for classifiers")
    if given.values["format"] != "onnx":
        raise OptionError(f"{given.values['model']}: is a classifier; its format is onnx")
    figures = export_classifier(given.make(ClassifierExportOptions, output=_output(given, "onnx")))
    given.say(
        f"{_written(figures)}, {figures['predictions_equal_share']:.1%} of {figures['compared_examples']} predictions "
        f"equal, in {_cost(figures)}"
    )
    return figures


def _export_gguf(given: Given, kind: Kind) -> Figures:
    from compress.export.gguf import export_gguf

    if kind != "decoder":
        raise OptionError(f"{given.values['model']}: is a model of the kind {kind}, which is not written as GGUF")
    given.refuse(("precision", "experts", *SKIP_OPTIONS), "for ONNX graphs")
    given.refuse(("push_to_hub",), "for directories, and a GGUF file is one file")
    output = given.values["output"] or Path(f"{given.result_name.removesuffix('.gguf')}-{given.values['type']}.gguf")
    figures = export_gguf(given.make(GgufExportOptions, **given.of_job("", output=output)), progress_bar)
    given.say(f"{_written(figures)}, in {_cost(figures)}")
    if figures["imatrix"]:
        given.say(f"{figures['imatrix']}: importance matrix of {figures['calibration_tokens']:,} tokens")
    if figures["tokenizer_problem"]:
        given.say(
            f"note: the file has no tokenizer ({figures['tokenizer_problem']}); put the model's tokenizer.json and "
            "tokenizer_config.json beside it for this engine, and give other programs token ids"
        )
    return figures


def _output(given: Given, name: str) -> Path:
    return given.values["output"] or Path(f"{given.result_name}-{name}")


def _written(figures: Figures) -> str:
    off = figures["max_abs_logit_difference"]
    return f"{figures['artifact']}: {size(figures['bytes'])}, logits off by at most {off:.1e}"


def _cost(figures: Figures) -> str:
    return f"{figures['seconds']:.1f} s, peak memory {size(figures['peak_memory_bytes'])}"


EXPORTS: dict[Kind, Callable[[Given], Figures]] = {
    "decoder": _export_decoder,
    "encoder-decoder": _export_encoder_decoder,
    "classifier": _export_classifier,
}
FILE_EXPORTS: dict[str, Callable[[Given, Kind], Figures]] = {"gguf": _export_gguf}
"""Formats that are one file."""
COMMAND = command("export", export, ExportOptions, GgufExportOptions, ClassifierExportOptions, *HUB)
