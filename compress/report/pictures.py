"""Selection and drawing of the pictures of models as PNG files, for a comparison and for an artifact's model card.

Shape suffixes: N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from calibrate.statistics import Statistics, effective_experts, usage_shares
from compress.plans.plan import Plan
from compress.report import canvas, plots
from compress.report.diep_scores import DiepScores
from compress.report.expert_record import Experts, Matrix
from engine.families.config import DecoderConfig
from engine.files.json_file import writing

Drawn = TypeVar("Drawn")
MOST_EXPERTS = 4096
"""Limit of expert numbers: a plan from a file with higher numbers is not drawn."""


@dataclass(frozen=True)
class Picture:
    """A PNG file and its description."""

    path: Path
    title: str
    about: str
    model: str = ""
    """Label of the model that it shows, if each model has a picture of its own; pictures of one title are adjacent."""

    @property
    def name(self) -> str:
        """Its title, and its model if it has one."""
        return f"{self.title}: {self.model}" if self.model else self.title


@dataclass(frozen=True)
class Pictured:
    """Data about one model's experts."""

    label: str
    experts: Mapping[int, int]
    """Number of experts by decoder layer; empty for a dense model."""
    statistics: Statistics | None = None
    kept: Mapping[int, Sequence[int]] | None = None
    """By layer, each expert's number in the source of a pruned model; None for models that were not only pruned."""
    scores: DiepScores | None = None
    routed: Mapping[int, Sequence[int]] | None = None
    """By layer, tokens routed to each expert; None for those of the statistics."""
    units: Mapping[int, Sequence[float]] | None = None
    """By layer, the share of its hidden units that each expert kept; None where all kept all, or for other results."""
    recorded: Experts | None = None
    """The experts as they were recorded, for a model without statistics."""

    @property
    def seen(self) -> Experts:
        """All that is known of the experts' usage and similarity."""
        if self.statistics is None:
            found = self.recorded or Experts()
            return found if self.routed is None else replace(found, routed=self.tokens_routed)
        layers = self.statistics.layers
        between = {layer: layers[layer].rbf_cka_before.tolist() for layer in sorted(layers)[1:]}
        return Experts(self.tokens_routed, {layer: own.rbf_cka.tolist() for layer, own in layers.items()}, between)

    @property
    def tokens_routed(self) -> dict[int, list[int]]:
        """Tokens routed to each expert, by layer; empty where none were counted."""
        if self.routed is not None:
            return {layer: list(counts) for layer, counts in self.routed.items()}
        if self.statistics is None:
            return {} if self.recorded is None else {layer: list(own) for layer, own in self.recorded.routed.items()}
        return {layer: own.tokens_routed.tolist() for layer, own in self.statistics.layers.items()}


def kept_experts(plan: Plan, config: DecoderConfig) -> dict[int, list[int]] | None:
    """Return, by layer, the source numbers of a purely pruned model's experts; None for any other plan."""
    if {layer: len(experts) for layer, experts in plan.layers.items()} != config.experts_by_layer:
        return None
    kept: dict[int, list[int]] = {}
    for layer, experts in plan.layers.items():
        sources = [expert.origin for expert in experts]
        kept[layer] = [number for number in sources if isinstance(number, int) and 0 <= number < MOST_EXPERTS]
        if len(set(kept[layer])) != len(experts):
            return None
    return kept


def unit_shares(plan: Plan, config: DecoderConfig, width: int) -> dict[int, list[float]] | None:
    """Return, by layer, the share of its hidden units that each expert of a pruned model kept; None where all kept all.

    width: hidden units of an expert of the source.
    """
    experts = [expert for own in plan.layers.values() for expert in own]
    if kept_experts(plan, config) is None or all(expert.is_copy for expert in experts):
        return None
    widths = {index: moe.widths for index, layer in enumerate(config.layers) if (moe := layer.moe) is not None}
    return {layer: [min(1.0, own / width) for own in widths[layer]] for layer in plan.layers}


def draw(directory: Path, models: Sequence[Pictured]) -> list[Picture]:
    """Draw experts per layer, usage, similarities and search scores of the models that have them. Raises OutputError."""
    pictures = []
    counts = {model.label: model.experts for model in models if model.experts}
    if counts:
        figure = plots.experts_per_layer(counts)
        about = "Routed experts that each layer has."
        pictures.append(save(directory, "experts_per_layer", figure, "Experts per layer", about))
    if narrowed := [model for model in models if model.units and model.kept]:
        figure = plots.kept_units(
            [plots.ExpertShares(model.label, model.units or {}, model.kept or {}) for model in narrowed]
        )
        about = "Share of its hidden units that each expert kept, per layer; experts carry the numbers that they had before."
        pictures.append(save(directory, "kept_units", figure, "Hidden units that stayed", about))
    if used := [model for model in models if model.tokens_routed]:
        figure = plots.expert_usage([usage(model) for model in used])
        about = "Share of tokens routed to each expert, per layer; experts carry the numbers of the model they come from."
        pictures.append(save(directory, "expert_usage", figure, "Expert usage", about))
    known = [(model, model.seen) for model in models]
    similar = [(model, seen.within) for model, seen in known if seen.within]
    for (model, within), name in _numbered(similar, "expert_similarity"):
        figure, title = plots.expert_similarity(model.label, within), "Similarity of experts"
        about = "RBF CKA of the outputs of each two experts on the same tokens: the brighter, the more they do alike."
        pictures.append(save(directory, name, figure, title, about, model.label))
    neighbors = [(model, by_neighbors(seen)) for model, seen in known if seen.between]
    for (model, matrices), name in _numbered(neighbors, "layer_similarity"):
        figure, title = plots.layer_similarity(model.label, matrices), "Similarity between layers"
        about = "RBF CKA of the outputs of each two experts of neighboring MoE layers, on the same tokens."
        pictures.append(save(directory, name, figure, title, about, model.label))
    for model, name in _numbered([model for model in models if model.scores is not None], "diep_scores"):
        figure, title = plots.search_scores(model.label, search_scores(model)), "α and β"
        about = "What differentiable expert pruning learned: α weighs the experts of a layer, β the layers."
        pictures.append(save(directory, name, figure, title, about, model.label))
    return pictures


def draw_usage(
    directory: Path,
    label: str,
    statistics: Statistics,
    chosen: Mapping[int, Sequence[int]],
    layers: Mapping[int, str] | None = None,
) -> Picture:
    """Draw how concentrated usage is in each layer, with the selected experts. Raises OutputError.

    layers: names of the layers; None for their numbers.
    """
    shares = {layer: usage_shares(own).tolist() for layer, own in statistics.layers.items()}
    alike = {layer: effective_experts(own) for layer, own in statistics.layers.items()}
    figure = plots.usage_histogram(label, shares, alike, chosen, layers)
    about = (
        "Share of tokens routed to each expert before, by layer; orange: those that this model is made of. The dashed line "
        "is where all would stand if they were used alike; a title says how many experts used alike would be as spread out."
    )
    return save(directory, "usage_histogram", figure, "Concentration of usage", about)


def draw_training(
    directory: Path,
    label: str,
    histories: Mapping[str, tuple[Sequence[Mapping[str, float]], Sequence[tuple[int, float]]]],
    measure: str = "perplexity",
) -> list[Picture]:
    """Draw the parts of a training by name: loss terms at each step, and (step, measure) of validations."""
    pictures = []
    for name, (history, validations) in histories.items():
        terms = {term: [step[term] for step in history] for term in history[0] if term != "loss"}
        name_of_measure = measure if measure == "perplexity" else f"1 − {measure}"
        figure = plots.training(f"{label}, {name}", terms, validations, name_of_measure)
        about = f"Terms of the loss, and {name_of_measure} on data that was set aside to tell the best state by."
        pictures.append(save(directory, f"training_{name}", figure, f"Training: {name}", about))
    return pictures


def draw_token_accuracy(
    directory: Path, label: str, curves: Mapping[str, Sequence[tuple[int, float]]], mixture: float
) -> Picture:
    """Draw the token accuracy of each validation beside that of the mixture. Raises OutputError."""
    figure = plots.token_accuracy(label, curves, mixture)
    about = "Share of target tokens predicted correctly, on pairs that were set aside; the dashed line is the mixture."
    return save(directory, "token_accuracy", figure, "Token accuracy in training", about)


def draw_frontier(
    directory: Path,
    label: str,
    predicted: Sequence[tuple[float, float]],
    measured: Sequence[tuple[float, float]],
    target: float | None,
) -> Picture:
    """Draw the frontier of `compress fit`: (bytes, divergence) of predicted and of measured choices."""
    figure = plots.frontier(label, predicted, measured, target)
    about = "KL divergence of the predictions from the model's by the size of the result; the dashed line is the target."
    return save(directory, "frontier", figure, "Divergence by size", about)


def save(directory: Path, name: str, figure: Any, title: str, about: str, model: str = "") -> Picture:
    """Write NAME.png into the directory."""
    path = directory / f"{name}.png"
    with writing(path, "a picture"):
        canvas.save(figure, path)
    return Picture(path, title, about, model)


def _numbered(drawn: Sequence[Drawn], name: str) -> list[tuple[Drawn, str]]:
    """Return each drawing with a file name, which ends in a number where there are several."""
    return [(own, name if len(drawn) == 1 else f"{name}_{index}") for index, own in enumerate(drawn, start=1)]


def by_neighbors(experts: Experts) -> dict[tuple[int, int], Matrix]:
    """Return CKA between the experts of neighboring MoE layers, by (layer, the layer before)."""
    layers = sorted({*experts.within, *experts.between})
    return {(layer, before): experts.between[layer] for before, layer in pairwise(layers) if layer in experts.between}


def usage(model: Pictured) -> plots.ExpertShares:
    """Return shares of routed tokens. Experts whose source numbers are unknown are numbered from 0."""
    shares = {layer: [count / max(1, sum(counts)) for count in counts] for layer, counts in model.tokens_routed.items()}
    numbers = model.kept or {layer: list(range(len(own))) for layer, own in shares.items()}
    return plots.ExpertShares(model.label, shares, numbers)


def search_scores(model: Pictured) -> plots.SearchScores:
    """Return α and β. No expert is crossed out where the remaining ones are unknown."""
    assert model.scores is not None
    every = {layer: list(range(len(own))) for layer, own in model.scores.alpha.items()}
    return plots.SearchScores(model.scores.alpha, model.scores.beta, model.kept or every)
