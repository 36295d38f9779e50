"""Text output of the figures of a smaller model."""

from __future__ import annotations

from compress.commands.command import Figures, Given
from compress.commands.output import table
from compress.report.columns import size, with_error, with_interval
from engine.kernels.stored.scheme import PLAIN_BITS

REFIT_LINES = (
    ("output error of each layer, before and after the refit", "error_without_per_layer", "error_per_layer", 1),
    ("error after each layer, before and after its correction", "drift_before_per_layer", "drift_per_layer", 2),
)
"""The line of a refit, and of a correction without one: its text, the figures by layer, and their digits."""

NEARLY_COPIES = 0.9
"""Cosine from which experts are said to be nearly copies. Those that were trained apart from the start are near 0."""


def show_figures(given: Given, figures: Figures) -> Figures:
    """Print the figures of a smaller model beside those of the model it was made from, and return them."""
    given.say(table(_rows(figures)))
    for line in layer_lines(figures):
        given.say(line)
    if refit := figures.get("refit"):
        title, before, after, digits = next(line for line in REFIT_LINES if line[1] in refit)
        pairs = zip(refit[before], refit[after], strict=True)
        layers = [f"{without:.{digits}%} {fitted:.{digits}%}" for without, fitted in pairs if fitted is not None]
        given.say(f"{title}: {', '.join(layers) or 'not measured'}")
    if bits := figures.get("weight_bits"):
        share, off = figures["bytes_not_quantized_share"], figures["relative_weight_error"]
        several = [each for each in figures.get("matrices_by_bits", ()) if each != str(PLAIN_BITS)]
        widths = ", ".join(several) or bits
        given.say(f"weights of {widths} bits are off by {off or 0:.2%}; {share:.0%} of the bytes keep their dtype")
    if "naee" in figures:
        given.say(f"naee: {figures['naee']['search']} search; a layer has up to {figures['naee']['subsets']} subsets")
    given.say(
        f"{figures['artifact']}: written in {figures['seconds']:.1f} s, peak memory {size(figures['peak_memory_bytes'])}"
    )
    if figures.get("loading_note"):
        given.say(f"note: {figures['loading_note']}")
    if (likeness := figures.get("expert_likeness")) is not None and likeness >= NEARLY_COPIES:
        given.say(
            f"note: the experts of a layer are nearly copies of each other (cosine {likeness:.2f}), so that one can "
            "stand for another; compare with --granularity expert"
        )
    if "prediction_note" in figures:
        given.say(f"note: {figures['prediction_note']}")
    if figures.get("plots", True) == []:
        given.say("no plots: matplotlib is not installed (pip install moe-compress[plots])")
    return figures


def layer_lines(figures: Figures) -> list[str]:
    """Return a line with the experts of each layer if experts were removed, and one with their widths if units were."""
    lines = []
    if figures["experts_per_layer"] and figures["experts_before"] != figures["experts_after"]:
        lines.append(f"experts per layer: {' '.join(map(str, figures['experts_per_layer']))}")
    if figures.get("granularity", "expert") != "expert":
        ends = [(min(widths), max(widths)) for widths in figures["widths_per_layer"] if widths]
        layers = [str(low) if low == high else f"{low}–{high}" for low, high in ends]
        lines.append(f"hidden units of an expert, by layer: {' '.join(layers)}")
    return lines


def _rows(figures: Figures) -> list[list[str]]:
    rows = [
        ["", "before", "after"],
        ["experts", str(figures["experts_before"]), str(figures["experts_after"])],
        *_unit_rows(figures),
        ["parameters", f"{figures['parameters_before']:,}", f"{figures['parameters_after']:,}"],
        ["weights", size(figures["bytes_before"]), size(figures["bytes_after"])],
        ["perplexity", *(_perplexity(figures, when) for when in ("before", "after"))],
    ]
    if figures.get("perplexity_ratio") is not None:
        ends = (figures["perplexity_ratio_low"], figures["perplexity_ratio_high"])
        rows.append(["perplexity ratio, 95 %", "", with_interval(figures["perplexity_ratio"], *ends)])
    if "token_accuracy_after" in figures:
        rows.append(["token accuracy", *(_accuracy(figures, when) for when in ("before", "after"))])
    return rows


def _unit_rows(figures: Figures) -> list[list[str]]:
    """Return the row of hidden units, for results that lost more than whole experts."""
    if figures.get("granularity", "expert") == "expert":
        return []
    return [["hidden units", f"{figures['units_before']:,}", f"{figures['units_after']:,}"]]


def _perplexity(figures: Figures, when: str) -> str:
    return with_error(figures[f"perplexity_{when}"], figures.get(f"perplexity_{when}_stderr"))


def _accuracy(figures: Figures, when: str) -> str:
    return with_error(figures[f"token_accuracy_{when}"], figures.get(f"token_accuracy_{when}_stderr"), 3)


LEFT_OUT = {
    "rows_left_out": "rows without a prompt or a response were left out",
    "prompts_left_out": "prompts longer than --max-prompt-length were left out",
    "prompts_cut": "prompts longer than --max-prompt-length were cut to it",
}
"""Figures of prompts with responses that are not used as they are, each with the end of the sentence that says so."""


def show_left_out(given: Given, figures: Figures) -> None:
    """Print how many prompts with responses were left out or cut, and why."""
    for key, why in LEFT_OUT.items():
        if figures.get(key):
            given.say(f"{figures[key]} {why}")
