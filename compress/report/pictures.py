"""Which pictures models have something for, drawn as PNG files: in a comparison, and beside the model card of an artifact.

Shape suffixes: N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from calibrate.statistics import Statistics, effective_experts, usage_shares
from compress.plans.plan import Plan
from compress.report import plots
from compress.report.diep_scores import DiepScores
from engine.families.config import DecoderConfig
from engine.files.json_file import writing

Drawn = TypeVar("Drawn")
MOST_EXPERTS = 4096
"""A plan read from a file that numbers its experts higher is not drawn."""


@dataclass(frozen=True)
class Picture:
    """A PNG file and what to say of it."""

    path: Path
    title: str
    about: str
    model: str = ""
    """Whose it is, where each model has one of its own; pictures of the same title then follow each other."""

    @property
    def name(self) -> str:
        """Its title, and whose it is."""
        return f"{self.title}: {self.model}" if self.model else self.title


@dataclass(frozen=True)
class Pictured:
    """What is known of one model's experts."""

    label: str
    experts: Mapping[int, int]
    """Count by decoder layer; empty for a dense model."""
    statistics: Statistics | None = None
    kept: Mapping[int, Sequence[int]] | None = None
    """By layer, the number of each expert in the model that it was pruned from; None for what is not plainly pruned."""
    scores: DiepScores | None = None
    routed: Mapping[int, Sequence[int]] | None = None
    """By layer, tokens routed to each expert; where None, those of the statistics."""

    @property
    def tokens_routed(self) -> dict[int, list[int]]:
        """By layer, of each expert; empty where it was not observed."""
        if self.routed is not None:
            return {layer: list(counts) for layer, counts in self.routed.items()}
        return (
            {} if self.statistics is None else {n: own.tokens_routed.tolist() for n, own in self.statistics.layers.items()}
        )


def kept_experts(plan: Plan, config: DecoderConfig) -> dict[int, list[int]] | None:
    """Of a model made by pruning alone: by layer its experts' numbers in the source. None for any other plan."""
    if {layer: len(experts) for layer, experts in plan.layers.items()} != config.experts_by_layer:
        return None
    kept: dict[int, list[int]] = {}
    for layer, experts in plan.layers.items():
        sources = [expert.parts[0].sources[0].expert for expert in experts if expert.is_copy]
        kept[layer] = [number for number in sources if isinstance(number, int) and 0 <= number < MOST_EXPERTS]
        if len(set(kept[layer])) != len(experts):
            return None
    return kept


def draw(directory: Path, models: Sequence[Pictured]) -> list[Picture]:
    """Experts per layer, usage, similarities and search scores, of those models that have them. Raises OutputError."""
    pictures = []
    counts = {model.label: model.experts for model in models if model.experts}
    if counts:
        figure = plots.experts_per_layer(counts)
        about = "Routed experts that each layer has."
        pictures.append(save(directory, "experts_per_layer", figure, "Experts per layer", about))
    if used := [model for model in models if model.tokens_routed]:
        figure = plots.expert_usage([usage(model) for model in used])
        about = "Share of tokens routed to each expert, per layer; experts carry the numbers of the model they come from."
        pictures.append(save(directory, "expert_usage", figure, "Expert usage", about))
    known = [model for model in models if model.statistics is not None]
    for model, name in _numbered(known, "expert_similarity"):
        assert model.statistics is not None
        within = {layer: own.rbf_cka.tolist() for layer, own in model.statistics.layers.items()}
        figure, title = plots.expert_similarity(model.label, within), "Similarity of experts"
        about = "RBF CKA of the outputs of each two experts on the same tokens: the brighter, the more they do alike."
        pictures.append(save(directory, name, figure, title, about, model.label))
    neighbours = [(model, matrices) for model in known if (matrices := between_layers(model))]
    for (model, matrices), name in _numbered(neighbours, "layer_similarity"):
        figure, title = plots.layer_similarity(model.label, matrices), "Similarity between layers"
        about = "RBF CKA of the outputs of each two experts of neighbouring MoE layers, on the same tokens."
        pictures.append(save(directory, name, figure, title, about, model.label))
    for model, name in _numbered([model for model in models if model.scores is not None], "diep_scores"):
        figure, title = plots.search_scores(model.label, search_scores(model)), "α and β"
        about = "What differentiable expert pruning learned: α weighs the experts of a layer, β the layers."
        pictures.append(save(directory, name, figure, title, about, model.label))
    return pictures


def draw_usage(directory: Path, label: str, statistics: Statistics, chosen: Mapping[int, Sequence[int]]) -> Picture:
    """How concentrated usage is in each layer, with the experts that were chosen. Raises OutputError."""
    shares = {layer: usage_shares(own).tolist() for layer, own in statistics.layers.items()}
    alike = {layer: effective_experts(own) for layer, own in statistics.layers.items()}
    figure = plots.usage_histogram(label, shares, alike, chosen)
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
    """The parts of a training by name: terms of the loss at each step, and (step, measure) of validation."""
    pictures = []
    for name, (history, validations) in histories.items():
        terms = {term: [step[term] for step in history] for term in history[0] if term != "loss"}
        name_of_measure = measure if measure == "perplexity" else f"1 − {measure}"
        figure = plots.training(f"{label}, {name}", terms, validations, name_of_measure)
        about = f"Terms of the loss, and {name_of_measure} on data that was set aside to tell the best state by."
        pictures.append(save(directory, f"training_{name}", figure, f"Training: {name}", about))
    return pictures


def save(directory: Path, name: str, figure: Any, title: str, about: str, model: str = "") -> Picture:
    """Write NAME.png into the directory."""
    path = directory / f"{name}.png"
    with writing(path, "a picture"):
        plots.save(figure, path)
    return Picture(path, title, about, model)


def _numbered(drawn: Sequence[Drawn], name: str) -> list[tuple[Drawn, str]]:
    """Each with a file name, which ends in a number where there are several."""
    return [(own, name if len(drawn) == 1 else f"{name}_{index}") for index, own in enumerate(drawn, start=1)]


def between_layers(model: Pictured) -> dict[tuple[int, int], list[list[float]]]:
    """CKA of experts of neighbouring MoE layers, by (layer, the one before)."""
    assert model.statistics is not None
    layers = sorted(model.statistics.layers)
    return {(layer, before): model.statistics.layers[layer].rbf_cka_before.tolist() for before, layer in pairwise(layers)}


def usage(model: Pictured) -> plots.UsageShares:
    """Shares of routed tokens; experts are numbered from 0 where it is not known which of a source they are."""
    shares = {layer: [count / max(1, sum(counts)) for count in counts] for layer, counts in model.tokens_routed.items()}
    numbers = model.kept or {layer: list(range(len(own))) for layer, own in shares.items()}
    return plots.UsageShares(model.label, shares, numbers)


def search_scores(model: Pictured) -> plots.SearchScores:
    """α and β; where it is not known which experts stayed, none is crossed out."""
    assert model.scores is not None
    every = {layer: list(range(len(own))) for layer, own in model.scores.alpha.items()}
    return plots.SearchScores(model.scores.alpha, model.scores.beta, model.kept or every)
