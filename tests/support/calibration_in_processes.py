"""All passes that read text to choose experts. test_processes.py runs this file under torchrun and in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import compress.methods.diep
import compress.methods.gate_gradients
import engine.passes.layerwise
from calibrate.collect import collect
from calibrate.statistics import LayerStatistics
from calibrate.unit_statistics import collect_units, unit_moments, unit_sums
from compress.methods.diep import search
from compress.methods.gate_fisher import fisher_scores
from compress.methods.gate_taylor import taylor_scores
from compress.methods.naee import SubsetSearch, naee
from compress.methods.relaxations import RELAXATIONS
from compress.methods.unit_fisher import unit_gradients
from compress.options.prune import DiepOptions
from compress.options.refit import RefitOptions
from compress.plans.unit_selection import units_plan
from compress.refit.correction import corrected
from compress.run.perplexity import perplexity, routed_counts
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.files.safetensors_writer import write_tensors
from engine.passes import processes
from engine.passes.activations import Shelf
from engine.passes.layerwise import LayerwiseDecoder
from engine.passes.memory_budget import MemoryBudget

TOKENS = torch.randint(3, 96, (7, 12), generator=torch.Generator().manual_seed(1))
IN_PAIRS = MemoryBudget(tokens_per_batch=24)
"""Two sequences of TOKENS in a batch."""
LAYERWISE = DiepOptions("gated", epochs=1, batch_size=3, start="zero")
search_in_pairs = partial(search, budget=IN_PAIRS)


def calibrated(model: Path, place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all results as tensors and as JSON. One reads a single sequence, which leaves one process without work."""
    checkpoint = Checkpoint(model)
    tensors = {
        f"{field.name}.{layer}.{len(text)}": getattr(own, field.name)
        for text in (TOKENS, TOKENS[:1])
        for layer, own in collect(checkpoint, text, dtype=torch.float32, budget=IN_PAIRS).layers.items()
        for field in fields(LayerStatistics)
    }
    decoder = Decoder(checkpoint.config, checkpoint.weights(torch.float32, "cpu"))
    scored = {"fisher": fisher_scores(decoder, TOKENS, 3, budget=IN_PAIRS)}
    scored["taylor"] = taylor_scores(decoder, TOKENS, budget=IN_PAIRS)
    for relaxation in RELAXATIONS:
        options = DiepOptions(relaxation, epochs=3, batch_size=3)  # the last step of an epoch has one sequence
        scored[relaxation] = search_in_pairs(decoder, TOKENS, options, state_path=place / f"{relaxation}.safetensors")
    # Five sequences are three batches: one process has one more than the other, in each step too.
    pieces = processes.load_decoder(checkpoint, torch.float32, "cpu", processes.count() > 1)
    scored["sharded fisher"] = fisher_scores(pieces, TOKENS[:5], 3, budget=IN_PAIRS)
    # One process has no sequence.
    scored["sharded taylor of one sequence"] = taylor_scores(pieces, TOKENS[:1], budget=IN_PAIRS)
    scored["sharded gated of one sequence"] = search_in_pairs(
        pieces, TOKENS[:1], DiepOptions("gated", epochs=2, batch_size=1)
    )
    for relaxation in RELAXATIONS:
        scored[f"sharded {relaxation}"] = search_in_pairs(
            pieces, TOKENS[:5], DiepOptions(relaxation, epochs=4, batch_size=5)
        )
    layerwise = LayerwiseDecoder(checkpoint, torch.float32)
    scored["layerwise fisher"] = fisher_scores(layerwise, TOKENS, 3, budget=IN_PAIRS)
    tensors |= hidden_units(checkpoint, decoder, place)
    scored["layerwise"] = search_in_pairs(layerwise, TOKENS, LAYERWISE)
    tensors |= {f"{name}.{layer}": score for name, own in scored.items() for layer, score in own.items()}
    counts: dict[int, list[int]] = {}
    value = perplexity(checkpoint, TOKENS[:1], dtype=torch.float32, visit=routed_counts(counts), budget=IN_PAIRS)
    kept = dict.fromkeys(checkpoint.config.moe_layers, 3)
    cases = [(TOKENS, 0), (TOKENS, 100), (TOKENS[:1], 100)]
    subsets = [
        naee(checkpoint, text, kept, dtype=torch.float32, search=SubsetSearch(limit), budget=IN_PAIRS)
        for text, limit in cases
    ]
    return tensors, json.loads(json.dumps({"perplexity": value, "routed": counts, "subsets": subsets}))


def hidden_units(checkpoint: Checkpoint, decoder: Decoder, place: Path) -> dict[str, Tensor]:
    """Return the statistics of hidden units, on all sequences and on a single one, and their gradients."""
    found: dict[str, Tensor] = {}
    for text in (TOKENS, TOKENS[:1]):
        # All processes read the moments that one of them wrote.
        directory = Path(processes.told(str(place / f"units-{processes.count()}-{len(text)}")))
        collect_units(checkpoint, text, directory, moments=True, dtype=torch.float32, budget=IN_PAIRS)
        for layer, count in checkpoint.config.experts_by_layer.items():
            sums = unit_sums(directory, layer)
            found[f"unit tokens.{layer}.{len(text)}"] = sums.tokens
            found[f"unit squares.{layer}.{len(text)}"] = torch.cat([*sums.square_sum, *sums.weighted_square_sum])
            for expert in range(count):
                moments = unit_moments(directory, layer, expert)
                parts = [own if moments.is_gram else own.T @ own for own in (moments.fit, moments.held)]
                found[f"unit moments.{layer}.{expert}.{len(text)}"] = torch.stack(parts)
    found |= {f"unit correction.{name}": own.float() for name, own in correction(checkpoint, place).items()}
    gradients = unit_gradients(decoder, TOKENS, 3, budget=IN_PAIRS)
    for layer, output in gradients.output.items():
        found[f"unit gradients.{layer}"] = torch.cat([*gradients.units[layer], output])
    return found


def correction(checkpoint: Checkpoint, place: Path) -> dict[str, Tensor]:
    """Return the corrected down projections of a model that keeps half of every expert's units."""
    widths = checkpoint.config.ffn_widths()
    plan = units_plan({layer: [range(width // 2) for width in own] for layer, own in widths.items()}, widths)
    work = Path(processes.told(str(place / f"correction-{processes.count()}")))
    work.mkdir(exist_ok=True)
    run: Any = SimpleNamespace(
        prepared=SimpleNamespace(checkpoint=checkpoint, dtype=torch.float32, tokens_SL=TOKENS, plan=plan, budget=None),
        options=SimpleNamespace(device="cpu", refit=RefitOptions()),
        memory_budget=IN_PAIRS,
        work=SimpleNamespace(path=work),
        bar=lambda title: iter,
    )
    return {name: own.clone() for name, own in corrected(run, plan, {}).tensors.items()}


class Interrupted(Exception):
    """Raised in the place of a signal, at a known point."""


def interrupted(items: Sequence[Any]) -> Iterator[Any]:
    """Yield the first item, and then raise Interrupted."""
    yield items[0]
    raise Interrupted


def resumed(place: Path) -> dict[str, dict[int, Tensor]]:
    """Return the results of passes that were interrupted and resumed. Each process has more than one batch left."""
    checkpoint, options = Checkpoint(place / "model"), DiepOptions("gated", epochs=3, batch_size=3)
    decoder = Decoder(checkpoint.config, checkpoint.weights(torch.float32, "cpu"))
    compress.methods.gate_gradients.SAVE_EVERY_SECONDS = 0.0
    pieces = processes.load_decoder(checkpoint, torch.float32, "cpu", shard=True)
    state = place / "sharded-again.safetensors"  # one process is done and one is not
    passes: dict[str, Callable[..., dict[int, Tensor]]] = {
        "sharded fisher": partial(fisher_scores, pieces, TOKENS[:5], 3, state_path=state, budget=IN_PAIRS),
        "fisher": partial(fisher_scores, decoder, TOKENS, 3, state_path=place / "fisher-again.safetensors", budget=IN_PAIRS),
        "gated": partial(search_in_pairs, decoder, TOKENS, options, state_path=place / "gated-again.safetensors"),
    }
    for name in ("sharded fisher", "fisher"):
        with suppress(Interrupted):
            passes[name](progress=interrupted)
    with suppress(Interrupted):
        passes["gated"](progress=interrupted)
    return {name: passes[name]() for name in ("sharded fisher", "fisher")} | {"gated": passes["gated"](resume=True)}


def calibrated_again(place: Path) -> dict[str, Tensor]:
    """Return the results of `calibrated` after an interruption while the two processes finish the second layer."""
    checkpoint, finish = Checkpoint(place / "model"), Shelf.finish

    def interrupted_at_its_end(self: Shelf, name: str) -> None:
        if name == "layer-2" and processes.rank():
            raise Interrupted
        finish(self, name)
        if name == "layer-2":
            raise Interrupted

    Shelf.finish = interrupted_at_its_end  # type: ignore[method-assign]
    with suppress(Interrupted):
        collect(checkpoint, TOKENS, dtype=torch.float32, budget=IN_PAIRS, directory=place / "calibration")
    Shelf.finish = finish  # type: ignore[method-assign]
    (own,) = (place / "calibration").glob(f"process-{processes.rank()}-*")
    assert sorted(path.name for path in own.glob("layer-?")) == ["layer-1", "layer-2"][: 2 - processes.rank()]
    layers = collect(checkpoint, TOKENS, dtype=torch.float32, budget=IN_PAIRS, directory=place / "calibration").layers
    return {
        f"{field.name}.{layer}.{len(TOKENS)}": getattr(own, field.name)
        for layer, own in layers.items()
        for field in fields(LayerStatistics)
    }


def searched_again(place: Path) -> dict[int, Tensor]:
    """Return a layer-by-layer search, resumed after each process was interrupted in another layer of the first step."""
    decoder, path = LayerwiseDecoder(Checkpoint(place / "model"), torch.float32), place / "layerwise.safetensors"
    one_layer, left = engine.passes.layerwise.one_layer, iter(range(2 + 2 * processes.rank()))

    def interrupted_later(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise Interrupted
        return one_layer(*arguments)

    engine.passes.layerwise.one_layer = interrupted_later
    with suppress(Interrupted):
        search_in_pairs(decoder, TOKENS, LAYERWISE, state_path=path)
    engine.passes.layerwise.one_layer = one_layer
    (kept,) = (place / "layerwise" / "step-0").glob(f"process-{processes.rank()}-*")
    assert (kept / "gradient-2").exists() == bool(processes.rank()), "forward through 2 of 3 layers, or backward through one"
    return search_in_pairs(decoder, TOKENS, LAYERWISE, state_path=path, resume=True)


def main(place: Path) -> None:
    """Write this process's results to a directory of its own."""
    processes.join("cpu")
    own = place / f"process-{processes.rank()}"
    own.mkdir()
    tensors, values = calibrated(place / "model", place)
    write_tensors(own / "tensors.safetensors", tensors, {}, "tensors")
    (own / "values.json").write_text(json.dumps(values))
    for name, scores in resumed(place).items():
        assert all(torch.equal(score, tensors[f"{name}.{layer}"]) for layer, score in scores.items()), name
    assert all(torch.equal(score, tensors[f"layerwise.{layer}"]) for layer, score in searched_again(place).items())
    assert all(torch.equal(statistic, tensors[name]) for name, statistic in calibrated_again(place).items())
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
