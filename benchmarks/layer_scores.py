"""DiEP's layer scores β on the demo model: how far they move at several rates η_β, and what that does to the ranking.

    python benchmarks/layer_scores.py [--rates 0,0.005,0.02,…] [--sequences 128] [--length 32]

Each search has the paper's settings (relaxation `paper`, α and β from 0 and 1, η_α = 5e-3, 10 epochs, batches of 16), but
for its rate η_β; a rate of 0 leaves β at 1. Both scores of `--score` rank the experts of the same search.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from results import markdown, save

from calibrate.batches import calibration_texts, evaluation_windows
from calibrate.options import CalibrationOptions
from compress.methods.diep import SCORES, search
from compress.options.prune import DiepOptions
from compress.plans.selection import Budget
from compress.report.diep_scores import DiepScores, scores_of_state
from compress.run.losses import Losses
from compress.run.perplexity import routed_losses
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import Decoder, own_routings
from engine.decoder.routing import Masked

PAPER_RATE = 5e-3
RATES = (0.0, PAPER_RATE, 0.02, 0.1, 0.5)
SPARSITIES = (0.25, 0.5)
HELD_OUT, WINDOW = 256, 256


class Model:
    """The demo model with its texts; searches and pruned models are made from it."""

    def __init__(self, sequences: int, length: int) -> None:
        self.checkpoint = Checkpoint(DEMO_DIRECTORY)
        self.decoder = Decoder(self.checkpoint.config, self.checkpoint.source(torch.float32))
        tokenizer, vocabulary = load_tokenizer(self.checkpoint), self.checkpoint.config.vocabulary_size
        searched = CalibrationOptions("stdlib", sequences, length, evaluation_samples=0)
        self.tokens_SL, _ = calibration_texts(searched, tokenizer, vocabulary)
        self.held_out = evaluation_windows(CalibrationOptions("stdlib", 1, WINDOW), tokenizer, HELD_OUT)

    def scores(self, rate: float) -> DiepScores:
        """Return α and β after a search with η_β = rate."""
        options = DiepOptions("paper", beta_learning_rate=rate, start="zero", score="raw", recenter=False)
        with tempfile.TemporaryDirectory() as place:
            state = Path(place) / "state.safetensors"
            search(self.decoder, self.tokens_SL, options, state_path=state)
            return scores_of_state(state, self.checkpoint.config.moe_layers)

    def losses(self, kept: Mapping[int, Sequence[int]]) -> Losses:
        """Return the held-out losses where only these experts are left."""
        config = self.checkpoint.config
        own = own_routings(config, self.checkpoint.source(torch.float32))
        masks = [torch.isin(torch.arange(config.experts_by_layer[layer]), torch.tensor(kept[layer])) for layer in kept]
        routings = [Masked(routing, mask) for routing, mask in zip(own, masks, strict=True)]
        return routed_losses(self.checkpoint, self.held_out.tokens_SL, routings, dtype=torch.float32)[0]


def judged(model: Model, searches: Mapping[float, DiepScores]) -> list[dict[str, Any]]:
    """Return a row of figures for each rate; perplexities are compared with those of the first rate, paired by document."""
    rows: list[dict[str, Any]] = []
    measured: dict[str, Losses] = {}
    first: dict[str, Losses] = {}
    for rate, scores in searches.items():
        row: dict[str, Any] = {"rate": f"{rate:g}", "rankings": {}}
        row |= {"alpha": list(scores.alpha.values()), "beta": list(scores.beta.values())}
        for place, kept in rankings(scores):
            losses = measured.get(str(kept)) or model.losses(kept)
            measured[str(kept)] = losses
            ratio = losses.ratio_to(first.setdefault(place, losses), model.held_out.documents_S)
            row["rankings"][place] = {
                "kept": {str(layer): list(own) for layer, own in kept.items()},
                "perplexity": losses.perplexity,
                "perplexity_stderr": losses.standard_error(model.held_out.documents_S),
                "ratio": [ratio.value, ratio.low, ratio.high],
            }
        rows.append(row)
        print(f"η_β = {rate:g}", flush=True)
    return rows


def rankings(scores: DiepScores) -> Iterator[tuple[str, dict[int, list[int]]]]:
    """Yield the name of each ranking and the experts that it keeps, by layer."""
    for score, function in SCORES.items():
        scored = {
            layer: function(torch.tensor(own), torch.tensor(scores.beta[layer])) for layer, own in scores.alpha.items()
        }
        for sparsity in SPARSITIES:
            kept = Budget(sparsity, min_experts=1).select(scored)
            yield f"`{score}`, {sparsity:.0%}", {layer: list(own) for layer, own in kept.items()}


def table(figures: Mapping[str, Any]) -> str:
    """Return the table with its introductory sentence; experts are compared with those of the row of the lowest rate."""
    rows, first = figures["rows"], figures["rows"][0]
    header = ["η_β", "lowest and highest β", *first["rankings"]]
    body = []
    for row in rows:
        cells = [row["rate"], f"{min(row['beta']):.3f}, {max(row['beta']):.3f}"]
        for place, own in row["rankings"].items():
            cells.append(f"{others(first['rankings'][place]['kept'], own['kept'])} · {own['perplexity']:.2f}")
            if row is first:
                cells[-1] += f" ± {own['perplexity_stderr']:.2f}"
            else:
                _, low, high = own["ratio"]
                cells[-1] += f" ({low:.3f} to {high:.3f})"
        body.append(cells)
    intro = (
        f"{figures['sequences']} sequences of {figures['length']} tokens, {figures['epochs']} epochs, one seed, "
        f"{figures['experts']} experts in {figures['layers']} layers. Each cell:\nexperts that are kept although "
        f"η_β = {first['rate']} removes them, and the perplexity on {figures['held_out']} × {figures['window']} held-out "
        f"tokens of {figures['documents']} documents,\nwith its standard error over documents, or with the 95 % "
        f"interval of its ratio to that of "
        f"η_β = {first['rate']}, paired by document.\n\n"
    )
    return intro + markdown(header, body)


def others(before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> int:
    """Return how many experts are kept after that were not kept before."""
    return sum(len(set(after[layer]) - set(before[layer])) for layer in after)


def figures_of(model: Model, searches: Mapping[float, DiepScores]) -> dict[str, Any]:
    """Return all figures."""
    counts = model.checkpoint.config.experts_by_layer
    return {
        "sequences": len(model.tokens_SL),
        "length": model.tokens_SL.shape[1],
        "epochs": DiepOptions().epochs,
        "experts": sum(counts.values()),
        "layers": len(counts),
        "held_out": HELD_OUT,
        "window": WINDOW,
        "documents": model.held_out.documents,
        "rows": judged(model, searches),
    }


def main() -> None:
    """Search at every rate, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES))
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=32)
    given = parser.parse_args()
    model = Model(given.sequences, given.length)
    searches = {rate: model.scores(rate) for rate in map(float, given.rates.split(","))}
    save("layer_scores", figures_of(model, searches))


TABLES = {"layer_scores": table}


if __name__ == "__main__":
    main()
