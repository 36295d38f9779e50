"""DiEP's layer scores β on the demo model: how far they move at several rates η_β, and what that does to the ranking.

    python benchmarks/layer_scores.py [--rates 0,0.005,0.02,…] [--sequences 128] [--length 32]

Each search has the paper's settings (relaxation `paper`, α and β from 0 and 1, η_α = 5e-3, 10 epochs, batches of 16), but
for its rate η_β; a rate of 0 leaves β at 1. Both scores of `--score` rank the experts of the same search.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from results import markdown, save
from torch import Tensor

from calibrate.batches import calibration_texts
from calibrate.options import CalibrationOptions
from compress.methods.diep import SCORES, search
from compress.options.prune import DiepOptions
from compress.plans.selection import Budget
from compress.report.diep_scores import scores_of_state
from compress.run.perplexity import routed_perplexity
from engine.checkpoint.checkpoint import DEMO_DIRECTORY, Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import Decoder, own_routings
from engine.decoder.routing import Masked

PAPER_RATE = 5e-3
RATES = (0.0, PAPER_RATE, 0.02, 0.1, 0.5)
SPARSITIES = (0.25, 0.5)
HELD_OUT = 32


class Model:
    """The demo model with its texts; searches and pruned models are made from it."""

    def __init__(self, sequences: int, length: int) -> None:
        self.checkpoint = Checkpoint(DEMO_DIRECTORY)
        self.decoder = Decoder(self.checkpoint.config, self.checkpoint.source(torch.float32))
        tokenizer, vocabulary = load_tokenizer(self.checkpoint), self.checkpoint.config.vocabulary_size
        searched = CalibrationOptions("stdlib", sequences, length, evaluation_samples=0)
        judged = CalibrationOptions("stdlib", 1, 256, evaluation_samples=HELD_OUT)
        self.tokens_SL, _ = calibration_texts(searched, tokenizer, vocabulary)
        _, self.held_out_SL = calibration_texts(judged, tokenizer, vocabulary)

    def scores(self, rate: float) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return α, [N] by layer, and β by layer, after a search with η_β = rate."""
        options = DiepOptions("paper", beta_learning_rate=rate, start="zero", score="raw", recenter=False)
        with tempfile.TemporaryDirectory() as place:
            state = Path(place) / "state.safetensors"
            search(self.decoder, self.tokens_SL, options, state_path=state)
            found = scores_of_state(state, self.checkpoint.config.moe_layers)
        alpha = {layer: torch.tensor(own) for layer, own in found.alpha.items()}
        return alpha, {layer: torch.tensor(own) for layer, own in found.beta.items()}

    def perplexity(self, kept: Mapping[int, Sequence[int]]) -> float:
        """Return the held-out perplexity where only these experts are left."""
        config = self.checkpoint.config
        own = own_routings(config, self.checkpoint.source(torch.float32))
        masks = [torch.isin(torch.arange(config.experts_by_layer[layer]), torch.tensor(kept[layer])) for layer in kept]
        routings = [Masked(routing, mask) for routing, mask in zip(own, masks, strict=True)]
        return routed_perplexity(self.checkpoint, self.held_out_SL, routings, dtype=torch.float32)[0]


def measured(model: Model, rate: float) -> dict[str, Any]:
    """Return the figures of one search."""
    alpha, beta = model.scores(rate)
    row: dict[str, Any] = {"rate": rate, "alpha": {}, "beta": {}, "rankings": []}
    row["alpha"] = {str(layer): own.tolist() for layer, own in alpha.items()}
    row["beta"] = {str(layer): float(own) for layer, own in beta.items()}
    for score, function in SCORES.items():
        scored = {layer: function(alpha[layer], beta[layer]) for layer in alpha}
        for sparsity in SPARSITIES:
            kept = Budget(sparsity, min_experts=1).select(scored)
            found = {"kept": {str(layer): list(own) for layer, own in kept.items()}, "perplexity": model.perplexity(kept)}
            row["rankings"].append({"score": score, "sparsity": sparsity, **found})
    return row


def table(figures: Mapping[str, Any]) -> str:
    """Return the table with its introductory sentence; experts are compared with those of the row of the lowest rate."""
    rows = figures["rows"]
    header = ["η_β", "lowest and highest β"]
    for place in rows[0]["rankings"]:
        header += [f"`{place['score']}`, {place['sparsity']:.0%}: others kept", "perplexity"]
    body = []
    for row in rows:
        betas = row["beta"].values()
        cells = [f"{row['rate']:g}", f"{min(betas):.3f}, {max(betas):.3f}"]
        for first, own in zip(rows[0]["rankings"], row["rankings"], strict=True):
            cells += [str(others(first["kept"], own["kept"])), f"{own['perplexity']:.2f}"]
        body.append(cells)
    intro = (
        f"{figures['sequences']} sequences of {figures['length']} tokens, {figures['epochs']} epochs, {figures['experts']} "
        f'experts in {figures["layers"]} layers. "Others kept" are experts that are kept and that η_β = '
        f"{rows[0]['rate']:g} removes.\n\n"
    )
    return intro + markdown(header, body)


def others(before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> int:
    """Return how many experts are kept after that were not kept before."""
    return sum(len(set(after[layer]) - set(before[layer])) for layer in after)


def main() -> None:
    """Search at every rate, and save the figures and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES))
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=32)
    given = parser.parse_args()
    model = Model(given.sequences, given.length)
    rows = []
    for rate in map(float, given.rates.split(",")):
        rows.append(measured(model, rate))
        print(f"η_β = {rate:g}: β {sorted(rows[-1]['beta'].values())}", flush=True)
    counts = model.checkpoint.config.experts_by_layer
    figures = {
        "sequences": given.sequences,
        "length": given.length,
        "epochs": DiepOptions().epochs,
        "experts": sum(counts.values()),
        "layers": len(counts),
        "rows": rows,
    }
    save("layer_scores", figures, table(figures))


if __name__ == "__main__":
    main()
