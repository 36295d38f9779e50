"""Every criterion against a second, naive implementation, and the experts that each scope then keeps. The layers of the tiny
model have 4 and 3 experts. Its router uses softmax, or sigmoid with a bias for the choice.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import save_reference
from formulas_for_tests import GRADIENT_SCORES, GROUPS, SCORES
from torch import Tensor

import engine.decoder.model
import engine.decoder.routing
from calibrate.collect import LayerCollector, collect
from calibrate.statistics import Statistics
from compress.methods import DEFAULT_GRANULARITY, DEFAULT_MERGE_METHOD, DEFAULT_METHODS, METHODS
from compress.methods.criterion import Criterion, criterion_of, layer_scores
from compress.methods.gate_gradients import _sample_next
from compress.methods.naee import SubsetSearch, naee
from compress.methods.random_scores import random_scores
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from compress.plans.selection import Budget
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.model import Decoder
from engine.decoder.routing import Routing, SigmoidTopK
from engine.families.layer_config import MoeConfig

TOKENS = torch.randint(3, 96, (4, 11), generator=torch.Generator().manual_seed(1))
COUNTS = {0: 4, 1: 3}
BIAS = [-0.4, 0.3, 0.0, 0.5]
SCALE = 1.5
STEP = 1e-5


def sigmoid_routing(moe: MoeConfig, bias_N: Tensor | None = None, factors_N: Tensor | None = None) -> Routing:
    return SigmoidTopK(moe.experts_per_token, True, torch.tensor(BIAS[: moe.experts]), SCALE)


@pytest.fixture(name="router", params=["softmax", "sigmoid"])
def router_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replace the model's rule for the sigmoid case, because no family of the table had a sigmoid router."""
    if request.param == "sigmoid":
        monkeypatch.setattr(engine.decoder.model, "own_routing", sigmoid_routing)
    return request.param


@pytest.fixture(name="checkpoint")
def uneven_checkpoint(tmp_path: Path) -> Checkpoint:
    """Return a checkpoint with 4 experts in the first layer and 3 in the second, top-2."""
    save_reference("mixtral", tmp_path / "full", num_local_experts=4, num_hidden_layers=2)
    (tmp_path / "uneven").mkdir()
    apply(pruning_plan({0: [0, 1, 2, 3], 1: [0, 1, 3]}), Checkpoint(tmp_path / "full"), tmp_path / "uneven")
    return Checkpoint(tmp_path / "uneven")


# The naive implementation handles every token and expert separately, in float64.


class NaiveLayer:
    """The inputs of one layer in the full model, and the outputs of each of its experts."""

    def __init__(self, decoder: Decoder, layer: int, x: Tensor, router: str) -> None:
        block = decoder.layers[layer].feed_forward
        self.experts, self.router = len(block.experts), router
        self.logits = (x @ block.router_ND.T).tolist()
        self.outputs = [(F.silu(x @ expert.gate_FD.T) * (x @ expert.up_FD.T)) @ expert.down_DF.T for expert in block.experts]

    def probabilities(self, token: int) -> list[float]:
        score = [self.score(logit) for logit in self.logits[token]]
        return [value / sum(score) for value in score]

    def score(self, logit: float) -> float:
        return math.exp(logit) if self.router == "softmax" else 1 / (1 + math.exp(-logit))

    def weights(self, token: int, alive: tuple[int, ...] | None = None) -> dict[int, float]:
        """Return the renormalized top-2 weights of the remaining experts."""
        alive = tuple(range(self.experts)) if alive is None else alive
        score = {i: self.score(self.logits[token][i]) for i in alive}
        bias = BIAS if self.router == "sigmoid" else [0.0] * 4
        chosen = sorted(alive, key=lambda i: -(score[i] + bias[i]))[:2]
        scale = SCALE if self.router == "sigmoid" else 1.0
        return {i: scale * score[i] / sum(score[j] for j in chosen) for i in chosen}

    def output(self, token: int, alive: tuple[int, ...] | None = None) -> Tensor:
        return sum(weight * self.outputs[i][token] for i, weight in self.weights(token, alive).items())

    def change(self, alive: tuple[int, ...]) -> float:
        """Return ‖y_full − y_subset‖_F."""
        tokens = range(len(self.logits))
        return float(torch.stack([self.output(t) - self.output(t, alive) for t in tokens]).norm())


@torch.no_grad()
def naive_layers(checkpoint: Checkpoint, router: str) -> dict[int, NaiveLayer]:
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    inputs: dict[int, Tensor] = {}
    for layer in COUNTS:
        decoder.layers[layer].feed_forward.register_forward_pre_hook(
            lambda _, arguments, layer=layer: inputs.__setitem__(layer, arguments[0])
        )
    decoder(TOKENS)
    return {layer: NaiveLayer(decoder, layer, x, router) for layer, x in inputs.items()}


def naive_score(method: str, layer: NaiveLayer) -> list[float]:
    tokens = range(len(layer.logits))
    result = []
    for i in range(layer.experts):
        here = [t for t in tokens if i in layer.weights(t)]
        norms = [float(layer.outputs[i][t].norm()) for t in here]
        weights = [layer.weights(t)[i] for t in here]
        used = max(len(here), 1)
        result.append(
            {
                "frequency": len(here) / len(tokens),
                "probability": sum(layer.probabilities(t)[i] for t in tokens) / len(tokens),
                "reap": sum(w * n for w, n in zip(weights, norms, strict=True)) / used,
                "man": sum(norms) / used,
                "mc-moe": len(here) / len(tokens) * sum(weights) / used,
            }[method]
        )
    return result


@torch.no_grad()
def finite_differences(decoder: Decoder, targets_SL: Tensor) -> list[Tensor]:
    """Return ∂L_s/∂g, [S, N] for each layer, where g scales an expert's output, with hooks on the experts."""
    result = [torch.zeros(len(TOKENS), count, dtype=torch.float64) for count in COUNTS.values()]
    for derivative, block in zip(result, decoder.moe_blocks, strict=True):
        for i, expert in enumerate(block.experts):
            losses = []
            for sign in (1, -1):
                hook = expert.register_forward_hook(lambda _, __, output, sign=sign: output * (1 + sign * STEP))
                predicted = decoder(TOKENS)[:, :-1].log_softmax(-1)
                losses.append(-predicted.gather(-1, targets_SL[:, 1:, None])[..., 0].sum(1))
                hook.remove()
            derivative[:, i] = (losses[0] - losses[1]) / (2 * STEP)
    return result


# Scores


@pytest.mark.parametrize("method", SCORES)
def test_scores_by_statistics(checkpoint: Checkpoint, router: str, method: str) -> None:
    got = layer_scores(SCORES[method], collect(checkpoint, TOKENS, dtype=torch.float32))
    assert list(got) == list(COUNTS)
    for index, layer in naive_layers(checkpoint, router).items():
        assert torch.allclose(got[index].double(), torch.tensor(naive_score(method, layer)).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", GRADIENT_SCORES)
def test_scores_by_gradients(checkpoint: Checkpoint, router: str, method: str) -> None:
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float64))
    assert isinstance(decoder.moe_blocks[0].routing, SigmoidTopK) == (router == "sigmoid")
    targets = TOKENS
    if method == "fisher":
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            drawn = [_sample_next(decoder.hidden_states(row[None]), decoder.head_VD, row[None], generator) for row in TOKENS]
        targets = torch.cat(drawn)
    got = GRADIENT_SCORES[method](decoder, TOKENS, 2)
    for layer, derivative in zip(COUNTS, finite_differences(decoder, targets), strict=True):
        expected = derivative.square().sum(0) if method == "fisher" else derivative.sum(0).abs()
        assert torch.allclose(got[layer], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [1000, 0], ids=["exhaustive", "greedy"])
@pytest.mark.parametrize("kept", [{0: 2, 1: 2}, {0: 3, 1: 1}, {0: 1, 1: 3}])
def test_naee(checkpoint: Checkpoint, router: str, kept: dict[int, int], limit: int) -> None:
    got = naee(checkpoint, TOKENS, kept, dtype=torch.float32, search=SubsetSearch(limit))
    for index, layer in naive_layers(checkpoint, router).items():
        best = tuple(range(layer.experts))
        if limit:
            best = min(combinations(best, kept[index]), key=layer.change)
        while len(best) > kept[index]:
            best = min(combinations(best, len(best) - 1), key=layer.change)
        assert got[index] == list(best)


def test_every_method_is_here_and_has_its_functions() -> None:
    units = {name for name, method in METHODS.items() if method.granularity == "unit"}
    assert units == {"unit-magnitude", "unit-fisher", "unit-obs"} and set(DEFAULT_METHODS.values()) <= set(METHODS)
    assert set(METHODS) == {*SCORES, *GRADIENT_SCORES, *units, "naee", "random", "diep", *GROUPS}
    assert DEFAULT_GRANULARITY in DEFAULT_METHODS and METHODS[DEFAULT_MERGE_METHOD].kind == "merge"
    assert all(isinstance(criterion_of(name), Criterion) for name in METHODS)


def test_the_table_of_methods_needs_no_torch() -> None:
    code = "import sys, compress.methods; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


# Kept experts


def ranked(method: str, checkpoint: Checkpoint) -> dict[int, Tensor]:
    if method in GRADIENT_SCORES:
        return GRADIENT_SCORES[method](Decoder(checkpoint.config, checkpoint.source(torch.float32)), TOKENS, 0)
    statistics = collect(checkpoint, TOKENS, dtype=torch.float32)
    return random_scores(statistics, 5) if method == "random" else layer_scores(SCORES[method], statistics)


@pytest.mark.parametrize("method", [*SCORES, *GRADIENT_SCORES, "random"])
def test_each_scope_keeps_the_best(checkpoint: Checkpoint, router: str, method: str) -> None:
    values = ranked(method, checkpoint)
    every = sorted(((float(values[layer][i]), layer, i) for layer in COUNTS for i in range(COUNTS[layer])), reverse=True)
    assert len({score for score, _, _ in every}) == 7 or method == "frequency", "no ties, or the order would not be one"

    def best(layer: int, count: int) -> list[int]:
        own = sorted(range(COUNTS[layer]), key=lambda i: (-float(values[layer][i]), i))
        return sorted(own[:count])

    # round(0.3 · 4) = 1 and round(0.3 · 3) = 1 are removed; the average layer has round(3.5) = 4 experts, so 3 stay in each;
    # round(0.3 · 7) = 2 of all are removed.
    assert Budget(0.3, scope="layer").select(values) == {0: best(0, 3), 1: best(1, 2)}
    assert Budget(0.3, scope="uniform").select(values) == {0: best(0, 3), 1: best(1, 3)}
    assert Budget(0.6, scope="uniform").select(values) == {0: best(0, 2), 1: best(1, 2)}
    kept = Budget(0.3).select(values)
    assert sum(map(len, kept.values())) == 5 and all(kept.values())
    left = [float(values[layer][i]) for layer in COUNTS for i in range(COUNTS[layer]) if i not in kept[layer]]
    assert all(float(values[layer][i]) >= max(left) for layer in COUNTS for i in kept[layer][1:] if len(kept[layer]) > 1)
    assert kept == {layer: best(layer, len(kept[layer])) for layer in COUNTS}


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (Budget(0.3, scope="layer"), (3, 2)),
        (Budget(0.3, scope="uniform"), (3, 3)),
        (Budget(experts=2, scope="layer"), (2, 2)),
        (Budget(experts=3, scope="uniform"), (3, 3)),
    ],
)
def test_naee_keeps_as_many_as_its_scope_says(checkpoint: Checkpoint, budget: Budget, sizes: tuple[int, int]) -> None:
    got = naee(checkpoint, TOKENS, budget.kept_per_layer(COUNTS), dtype=torch.float32)
    assert tuple(map(len, got.values())) == sizes
    assert sizes[1] < 3 or got[1] == [0, 1, 2]


# Experts that no token uses


@torch.no_grad()
def test_statistics_of_a_router_that_leaves_slots_empty_by_hand() -> None:
    """One token has scores 0.8, 0.5, 0.4, 0.1. Its best group is {0} alone, so the second of its two slots is empty."""
    routing = SigmoidTopK(2, True, torch.tensor([1.0, 0.0, 0.0, 0.0]), 3.0, ((0,), (1, 2), (3,)), 1)
    ones = torch.ones(1, 1)
    experts = [Expert(ones, ones, ones * size) for size in (1.0, 2.0, 3.0, 4.0)]
    block = MoeBlock(torch.logit(torch.tensor([[0.8], [0.5], [0.4], [0.1]])), experts, routing)
    collector = LayerCollector(block, torch.tensor([0, 1]))
    block(ones.expand(5, 1))
    layer, _ = collector.statistics()
    norm = float(F.silu(ones))
    assert layer.tokens_routed.tolist() == [5, 0, 0, 0]
    assert layer.weight_sum.tolist() == [15.0, 0.0, 0.0, 0.0], "renormalized to one, times the scale"
    assert layer.probability_sum.tolist() == pytest.approx([5 * score / 1.8 for score in (0.8, 0.5, 0.4, 0.1)])
    assert layer.routed_probability_sum.tolist() == pytest.approx([4.0 / 1.8, 0.0, 0.0, 0.0])
    assert float(layer.unselected_probability_share) == pytest.approx(1.0 / 1.8)
    assert layer.weight_ratio_median.tolist() == [0.0]
    statistics = Statistics({0: layer}, {})
    by_hand = {"frequency": 1.0, "probability": 0.8 / 1.8, "reap": 3 * norm, "man": norm, "mc-moe": 3.0}
    for method, first in by_hand.items():
        rest = [score / 1.8 for score in (0.5, 0.4, 0.1)] if method == "probability" else [0.0] * 3
        assert layer_scores(SCORES[method], statistics)[0].tolist() == pytest.approx([first, *rest])


@pytest.mark.parametrize("method", [*SCORES, *GRADIENT_SCORES, "naee"])
def test_unused_experts_go_first_and_nothing_is_divided_by_zero(
    checkpoint: Checkpoint, router: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = Without([2], router)
    monkeypatch.setattr(engine.decoder.model, "own_routing", without)
    if method == "naee":
        got = naee(checkpoint, TOKENS, {0: 3, 1: 2}, dtype=torch.float32)
        assert got == {0: [0, 1, 3], 1: [0, 1]}, "masking what is never chosen changes nothing at all"
        return
    values = ranked(method, checkpoint)
    for index, score in values.items():
        assert torch.isfinite(score).all()
        assert float(score[2]) == 0.0 if method != "probability" else score[2] == score.min(), index


class Without:
    """The model's own rule, changed so that it never takes some experts, as if their logits were always far below."""

    def __init__(self, never: list[int], router: str) -> None:
        self.never, self.router = never, router

    def __call__(self, moe: MoeConfig, bias_N: Tensor | None = None, factors_N: Tensor | None = None) -> Any:
        base: Callable[[MoeConfig], Routing] = sigmoid_routing if self.router == "sigmoid" else original_routing
        return Lowered(base(moe), self.never)


original_routing = engine.decoder.model.own_routing


class Lowered:
    """A routing with some logits 60 lower. A sigmoid router must also have no bias for these to choose them last."""

    def __init__(self, base: Routing, never: list[int]) -> None:
        self.base, self.never = base, never
        if isinstance(base, SigmoidTopK):
            bias = base.bias_N.clone()
            bias[never] = -1.0
            self.base = SigmoidTopK(base.experts_per_token, base.normalise, bias, base.scale)

    def lowered(self, logits_TN: Tensor) -> Tensor:
        shift = torch.zeros(logits_TN.shape[-1])
        shift[self.never] = -60.0
        return logits_TN + shift

    def __call__(self, logits_TN: Tensor) -> Any:
        return self.base(self.lowered(logits_TN))

    def probabilities(self, logits_TN: Tensor) -> Tensor:
        return engine.decoder.routing.probabilities(self.base, self.lowered(logits_TN))
