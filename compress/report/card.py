"""The model card of an artifact, with its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.report.columns import with_error, with_interval
from compress.report.figures import ModelFigures, TrainingFigures
from compress.report.pictures import Picture
from engine.checkpoint.hub import is_hub_id, split


def model_card(
    figures: ModelFigures,
    source: str,
    layers: Sequence[int],
    skipping: bool,
    pictures: Sequence[Picture] = (),
    title: str | None = None,
    own: Sequence[str] = (),
    loader: str = "AutoModelForCausalLM",
    needs_code: bool = False,
) -> str:
    """Return README.md of an artifact.

    `layers`: decoder layer index of each MoE layer. `pictures` are in the same directory. `title` replaces the number of
    removed experts; `own` has lines that are particular to the command. `needs_code`: whether transformers needs the
    modeling file.
    """
    rows: list[tuple[str, object, object]] = [
        ("experts", figures["experts_before"], figures["experts_after"]),
        ("hidden units of experts", f"{figures.get('units_before', 0):,}", f"{figures.get('units_after', 0):,}"),
        ("parameters", f"{figures['parameters_before']:,}", f"{figures['parameters_after']:,}"),
        ("bytes of weights", f"{figures['bytes_before']:,}", f"{figures['bytes_after']:,}"),
        (
            "perplexity",
            _number(figures["perplexity_before"], figures.get("perplexity_before_stderr")),
            _number(figures["perplexity_after"], figures.get("perplexity_after_stderr")),
        ),
    ]
    if (ratio := figures.get("perplexity_ratio")) is not None:
        ends = (figures["perplexity_ratio_low"], figures["perplexity_ratio_high"])
        rows.append(("perplexity ratio, 95 %", "", with_interval(ratio, *ends)))
    if "token_accuracy_before" in figures:
        before = _number(figures["token_accuracy_before"], figures.get("token_accuracy_before_stderr"))
        after = _number(figures["token_accuracy_after"], figures.get("token_accuracy_after_stderr"))
        rows.append(("token accuracy", before, after))
    kept = [f"| {layer} | {count} |" for layer, count in zip(layers, figures["experts_per_layer"], strict=True)]
    lost = "fewer experts" if figures["experts_after"] < figures["experts_before"] else "fewer hidden units"
    heading = title or f"{source}, {figures['sparsity']:.0%} {lost}"
    return "\n".join(
        [
            *front_matter(
                ["mixture-of-experts", _kind(figures, title), "moe-compress"],
                library=None if figures.get("loading_note") else "transformers",
                base=split(source)[0] if is_hub_id(source) and not Path(source).exists() else None,
            ),
            f"# {heading}",
            "",
            f"Made by moe-compress with method `{figures['method']}`. Every option, the plan (what became of each",
            "expert) and the checksums of all files are in `compression.json`.",
            "",
            "| | before | after |",
            "| --- | ---: | ---: |",
            *(f"| {name} | {before} | {after} |" for name, before, after in rows if (before, after) != ("0", "0")),
            "",
            f"Perplexity is on {figures['evaluation']}{_documents(figures)}.",
            f"It took {figures['seconds']:.0f} s and at most {figures['peak_memory_bytes'] / 1e9:.2f} GB of memory.",
            "",
            *_loading(figures, loader, needs_code),
            "",
            *(f"{note[0].upper()}{note[1:]}.\n" for note in [figures.get("prediction_note")] if note),
            *(
                [
                    "Tables for adaptive expert skipping are in `skip_tables.safetensors`; to use them:",
                    "`compress generate … --skip-threshold 1`.",
                    "",
                ]
                if skipping
                else []
            ),
            *own,
            *(["| layer | experts |", "| ---: | ---: |", *kept, ""] if kept else []),
            *(line for picture in pictures for line in (f"![{picture.name}]({picture.path.name})", "", picture.about, "")),
        ]
    )


def front_matter(tags: list[str], library: str | None, base: str | None = None) -> list[str]:
    """Return the model card's YAML front matter for the hub. base: the hub id of the model that it was made from."""
    from huggingface_hub import ModelCardData  # imported here: tables and columns are used without the hub

    return ["---", ModelCardData(base_model=base, library_name=library, tags=tags).to_yaml(), "---"]


def training_lines(parts: Mapping[str, TrainingFigures]) -> list[str]:
    """Return lines on the cost and the gain of each part of the training; empty without training."""
    lines = []
    for name, part in parts.items():
        lines.append(f"`{name}`: {part['steps']} steps, loss {part['loss_first']:.3f} to {part['loss_last']:.3f}.")
        if part["best_step"] is not None:
            best = next(value for step, value in part["validation_perplexity"] if step == part["best_step"])
            lines.append(f"Kept is the state of step {part['best_step']}, perplexity {best:.3f} on text set aside for that.")
    return [*lines, ""] if lines else []


def _documents(figures: ModelFigures) -> str:
    """Return how many documents the text is from, where that is known, and what the standard errors are of."""
    if figures.get("token_accuracy_before_stderr") is not None:
        return " (± standard error over pairs)"
    documents = figures.get("evaluation_documents")
    return f", from {documents} documents (± standard error over documents)" if documents else ""


def _kind(figures: Mapping[str, Any], title: str | None) -> str:
    kind = "pruned" if title is None else "dense"
    return kind if "weight_bits" not in figures else "quantized" if title else f"{kind}, quantized"


def _loading(figures: Mapping[str, Any], loader: str, needs_code: bool) -> list[str]:
    """Return how the artifact is loaded, and by which library where that is not transformers."""
    if note := figures.get("loading_note"):
        code = ["from engine import Engine", 'engine = Engine.open("this directory")']
        return [f"{note[0].upper()}{note[1:]}.", "", "```python", *code, "```"]
    load = ", trust_remote_code=True" if needs_code else ""
    code = [f"from transformers import {loader}", f'model = {loader}.from_pretrained("this directory"{load})']
    return ["```python", *code, "```"]


def _number(value: float | None, error: float | None = None) -> str:
    return "not measured" if value is None else with_error(value, error, 3)
