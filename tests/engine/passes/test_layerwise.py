"""Layer by layer: gradients equal those with all weights in memory, and passes resume in the interrupted layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from diep_references import gradients_at
from interruptions import Interruption, interrupting

import engine.passes.layerwise
import engine.passes.streaming
from calibrate.collect import collect
from calibrate.statistics import LayerStatistics
from compress.methods.diep import new_state, search
from compress.methods.gate_fisher import fisher_scores
from compress.methods.gate_gradients import gate_gradients
from compress.methods.naee import SubsetSearch, naee
from compress.options.prune import DiepOptions
from compress.run.perplexity import perplexity, routed_counts
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, DecoderLayer
from engine.errors import DataError, OptionError
from engine.passes.activations import Activations, Shelf
from engine.passes.layerwise import LayerwiseDecoder
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.memory_need import MemoryDemand, budget_for

TOKENS = torch.randint(3, 96, (5, 8), generator=torch.Generator().manual_seed(1))
RELAXATIONS = pytest.mark.parametrize("relaxation", ["paper", "routed", "gated"])


@pytest.fixture(name="checkpoint", params=["qwen2_moe", "deepseek_v3"])
def some_checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    """Return a model with two MoE layers of six experts around a dense one, or one with latent attention."""
    changes = {"mlp_only_layers": [1]} if request.param == "qwen2_moe" else {}
    save_reference(request.param, tmp_path / "model", **changes)
    return Checkpoint(tmp_path / "model")


def whole(checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(checkpoint.config, checkpoint.weights(dtype))
    decoder.checkpoint_activations = True
    return decoder


@RELAXATIONS
@pytest.mark.parametrize("tokens_per_batch", [4096, 16])
def test_gradients_of_alpha_and_beta_equal_those_with_all_weights_in_memory(
    checkpoint: Checkpoint, relaxation: str, tokens_per_batch: int
) -> None:
    budget = MemoryBudget(tokens_per_batch)
    options, rows = DiepOptions(relaxation, reconstruction_weight=0.1).filled(), [3, 0, 4, 1]
    found = []
    for decoder in (whole(checkpoint, torch.float32), LayerwiseDecoder(checkpoint, torch.float32)):
        generator = torch.Generator().manual_seed(2)
        counts = checkpoint.config.experts_per_layer
        state = new_state([0.3 * torch.randn(count, generator=generator) for count in counts], options)
        state.betas = [torch.tensor(value, requires_grad=True) for value in (0.8, 1.3)]
        found.append(gradients_at(state, decoder, TOKENS, rows, options, budget))
    (loss, expected), (own_loss, own) = found
    assert float(expected.abs().median()) > 0
    assert torch.allclose(own_loss, loss, rtol=1e-6)
    assert torch.allclose(own, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("own_samples", [True, False], ids=["fisher", "taylor"])
def test_gate_gradients_equal_those_with_all_weights_in_memory(
    checkpoint: Checkpoint, own_samples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"own_samples": own_samples, "seed": 4, "budget": MemoryBudget(tokens_per_batch=16)}
    monkeypatch.setattr("engine.passes.layerwise.SWEEP_TOKENS", 32)  # a sweep of two batches, one of half a batch
    models = whole(checkpoint, torch.float32), LayerwiseDecoder(checkpoint, torch.float32)
    (sums, squares), (own_sums, own_squares) = (gate_gradients(m, TOKENS, **options) for m in models)
    for one, other in ((sums, own_sums), (squares, own_squares)):
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[layer], other[layer], rtol=1e-5, atol=1e-10) for layer in one)


def counted(function: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """Return the function, which appends each requested layer to `seen`."""

    def called(checkpoint: Checkpoint, index: int, *others: Any) -> Any:
        seen.append(index)
        return function(checkpoint, index, *others)

    return called


LAYERS_OF_A_STEP = 3 + 3
"""Forward and backward layers of a step, in a model of three layers whose first one holds experts."""


@pytest.mark.parametrize("layers_run", [*range(3 + 2 * LAYERS_OF_A_STEP + 1)])
def test_a_search_goes_on_from_the_layer_where_it_was(
    layers_run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference("qwen2_moe", tmp_path / "model", mlp_only_layers=[1])
    checkpoint = Checkpoint(tmp_path / "model")
    options = DiepOptions("gated", epochs=1, batch_size=3, start="zero", seed=5)  # two steps
    decoder, path = LayerwiseDecoder(checkpoint, torch.float32), tmp_path / "work" / "diep.safetensors"
    path.parent.mkdir()
    straight = search(decoder, TOKENS, options)
    one_layer = engine.passes.streaming.one_layer
    with monkeypatch.context() as patched:
        interrupted = interrupting(one_layer, layers_run)
        patched.setattr(engine.passes.streaming, "one_layer", interrupted)
        patched.setattr(engine.passes.layerwise, "one_layer", interrupted)
        try:
            search(decoder, TOKENS, options, state_path=path)
        except Interruption:
            assert layers_run < 3 + 2 * LAYERS_OF_A_STEP
    seen: list[int] = []
    for module in (engine.passes.streaming, engine.passes.layerwise):
        monkeypatch.setattr(module, "one_layer", counted(one_layer, seen))
    resumed = search(decoder, TOKENS, options, state_path=path, resume=True)
    assert all(torch.equal(resumed[layer], straight[layer]) for layer in straight), "to the bit"
    every = [0, 1, 2] + 2 * [0, 1, 2, 2, 1, 0]
    assert seen == every[layers_run:], "no layer again"
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def interrupt_in_layer(monkeypatch: pytest.MonkeyPatch, index: int, run: Callable[[], Any]) -> None:
    """Run until the forward pass of layer `index` has begun and its first batch is done."""
    forward = DecoderLayer.forward

    def interrupted(self: DecoderLayer, *arguments: Any) -> Any:
        if getattr(self, "batches", 0) and self.index == index:
            raise Interruption
        self.batches = getattr(self, "batches", 0) + 1
        return forward(self, *arguments)

    one_layer = engine.passes.streaming.one_layer

    @contextmanager
    def numbered(checkpoint: Checkpoint, number: int, *others: Any) -> Iterator[DecoderLayer]:
        with one_layer(checkpoint, number, *others) as layer:
            layer.index = number
            yield layer

    with monkeypatch.context() as patched:
        patched.setattr(engine.passes.streaming, "one_layer", numbered)
        patched.setattr(DecoderLayer, "forward", interrupted)
        with pytest.raises(Interruption):
            run()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_passes_go_on_from_the_layer_where_they_were(
    checkpoint: Checkpoint, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "budget": MemoryBudget(tokens_per_batch=16)}
    kept = dict.fromkeys(checkpoint.config.moe_layers, 3)
    remembered: dict[str, Any] = {}

    def once(name: str, compute: Callable[[], Any]) -> Any:
        remembered[name] = remembered[name] if name in remembered else compute()
        return remembered[name]

    def count(directory: Path | None) -> tuple[float, dict[int, list[int]]]:
        counts: dict[int, list[int]] = {}
        visit = routed_counts(counts, directory)
        return perplexity(checkpoint, TOKENS, visit=visit, directory=directory, **options), counts

    runs: dict[str, Callable[[Path | None], Any]] = {
        "collect": lambda directory: collect(checkpoint, TOKENS, directory=directory, **options),
        "naee": lambda directory: naee(
            checkpoint,
            TOKENS,
            kept,
            search=SubsetSearch() if directory is None else SubsetSearch(once=once),
            directory=directory,
            **options,
        ),
        "perplexity": count,
    }
    for name, run in runs.items():
        straight, directory = run(None), tmp_path / name
        interrupt_in_layer(monkeypatch, index, lambda run=run, directory=directory: run(directory))
        seen: list[int] = []
        with monkeypatch.context() as patched:
            patched.setattr(engine.passes.streaming, "one_layer", counted(engine.passes.streaming.one_layer, seen))
            resumed = run(directory)
        assert seen == list(range(index, 3)), name
        if name != "collect":
            assert resumed == straight, name
            continue
        assert resumed.header == straight.header and list(resumed.layers) == list(straight.layers)
        for layer, field in ((layer, field.name) for layer in straight.layers for field in fields(LayerStatistics)):
            one, other = (getattr(each.layers[layer], field) for each in (straight, resumed))
            assert torch.equal(one, other), f"{layer} {field}"


def test_interrupted_gate_gradients_draw_the_same_samples(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, path = LayerwiseDecoder(checkpoint, torch.float32), tmp_path / "fisher.safetensors"
    monkeypatch.setattr("engine.passes.layerwise.SWEEP_TOKENS", 24)
    straight = fisher_scores(decoder, TOKENS)
    for at in (4, 4):  # after the head, where samples are drawn: in the backward pass of the first sweep, and in the second
        with monkeypatch.context() as patched:
            patched.setattr(engine.passes.layerwise, "one_layer", interrupting(engine.passes.layerwise.one_layer, at))
            with pytest.raises(Interruption):
                fisher_scores(decoder, TOKENS, state_path=path)
    resumed = fisher_scores(decoder, TOKENS, state_path=path)
    assert all(torch.equal(resumed[layer], straight[layer]) for layer in straight)


def test_the_next_layer_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint, asked, ranges = Checkpoint(tmp_path), [], []
    read_ahead = Checkpoint.read_ahead
    noted = lambda self, layer: (asked.append(layer), read_ahead(self, layer))  # noqa: E731
    monkeypatch.setattr(Checkpoint, "read_ahead", noted)
    monkeypatch.setattr("os.posix_fadvise", lambda descriptor, begin, size, advice: ranges.append((begin, size)))
    fisher_scores(LayerwiseDecoder(checkpoint, torch.float32), TOKENS)
    assert asked == [1, 2, 3, 1, 0, -1]
    (file,) = checkpoint.files
    of_layer = {layer: f"model.layers.{layer}." for layer in range(3)}
    wanted = [
        [(e.begin, e.nbytes) for n, e in sorted(file.entries.items()) if n.startswith(of_layer[k])] for k in (1, 2, 1, 0)
    ]
    assert ranges == [own for layer in wanted for own in layer]


# The budget


def test_batches_shrink_and_activations_leave_memory_within_a_limit(checkpoint: Checkpoint) -> None:
    work = MemoryDemand(torch.float32, 8, gradients=True)
    assert budget_for(None, checkpoint, work) == UNLIMITED
    ample = budget_for(1 << 40, checkpoint, work)
    assert ample.tokens_per_batch == UNLIMITED.tokens_per_batch
    wide = replace(work, experts_per_token=3000)  # large enough that batches matter
    with pytest.raises(OptionError, match=r"needs \d\.\d\dGB at least: .* give that much") as refused:
        budget_for(100 << 20, checkpoint, wide)
    least = float(str(refused.value).split("needs ")[1].split("GB")[0])
    tight = budget_for(int((least + 0.04) * 1e9), checkpoint, wide)  # resident memory varies by one step of rounding
    assert 8 <= tight.tokens_per_batch < UNLIMITED.tokens_per_batch
    assert next(tight.batches(1000, 8)).stop == max(1, tight.tokens_per_batch // 8)
    for length, in_file in ((5 << 20, True), (8, False)):
        with Activations((1, 1, length), torch.float32, budget=tight) as kept:
            assert (kept._file is not None) == in_file


def test_pages_go_back_between_experts_where_the_limit_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    released: list[int] = []
    monkeypatch.setattr(Checkpoint, "release", lambda self: released.append(1))
    unlimited = fisher_scores(LayerwiseDecoder(checkpoint, torch.float32), TOKENS)
    between_layers = len(released)
    released.clear()
    scores = fisher_scores(LayerwiseDecoder(checkpoint, torch.float32), TOKENS, budget=MemoryBudget(limit=1))
    assert all(torch.equal(scores[layer], unlimited[layer]) for layer in scores)
    experts, passes, layers = 6, 3, 3  # forward, forward again, backward
    assert len(released) >= between_layers + experts * passes * layers


def test_activations_that_end_too_early_are_refused(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, (3, 2, 4), torch.float32)
    with shelf.begin("layer-0") as made:
        made[slice(0, 3)] = torch.arange(24.0).view(3, 2, 4)
        assert shelf.find("layer-0") is None, "not whole yet"
        shelf.finish("layer-0")
    found = shelf.find("layer-0")
    assert found is not None
    with found:
        assert torch.equal(found[slice(1, 3)], torch.arange(8.0, 24.0).view(2, 2, 4))
        (tmp_path / "layer-0").write_bytes(b"short")
        with pytest.raises(DataError, match="ends too early"):
            found[slice(0, 3)]
