"""NAEE: the losses against the layer's own outputs, both searches, the saved results, and the command."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, listing, make_workplace, run
from click.testing import CliRunner
from conftest import save_reference
from torch import Tensor

import cli
import compress.methods.naee
import compress.prune
from compress.methods.naee import MaskedChoice, SubsetLosses, SubsetSearch, best_subset, naee, search_used
from compress.options.prune import SUBSET_LIMIT
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert, MoeBlock, grouped
from engine.decoder.routing import Masked, Routing, SigmoidTopK, TopK
from engine.errors import DataError
from engine.passes.memory_budget import MemoryBudget

TOKENS = torch.randint(3, 96, (5, 13), generator=torch.Generator().manual_seed(7))
GROUPED = SigmoidTopK(2, True, torch.linspace(-0.5, 0.5, 6), 2.0, ((0, 1, 2), (3, 4), (5,)), 2)


def random_block(routing: Routing, experts: int = 6, hidden: int = 8) -> tuple[MoeBlock, Tensor, Tensor]:
    """Return a block, inputs and their logits."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    parts = [Expert(normal(5, hidden), normal(5, hidden), normal(hidden, 5)) for _ in range(experts)]
    block = MoeBlock(normal(experts, hidden), parts, routing)
    x = normal(50, hidden)
    return block, x, x @ block.router_ND.T


@torch.no_grad()
def true_loss(block: MoeBlock, x: Tensor, logits: Tensor, subset: tuple[int, ...]) -> float:
    """Return ‖y_full − y_subset‖_F², computed by the block itself."""
    kept = torch.zeros(len(block.experts), dtype=torch.bool)
    kept[list(subset)] = True
    full = grouped(x, block.routing(logits), block.experts)
    return float((full - grouped(x, Masked(block.routing, kept)(logits), block.experts)).square().sum())


@pytest.mark.parametrize("routing", [TopK(2, True), TopK(3, False), GROUPED], ids=["normalised", "plain", "sigmoid"])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_losses_are_those_of_the_layer_s_outputs(
    routing: Routing, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress.methods.naee, "OUTPUT_BYTES", piece_bytes)
    monkeypatch.setattr(compress.methods.naee, "SUBSETS_AT_ONCE", 4)
    block, x, logits = random_block(routing)
    for size in (1, 2, 4, 6):  # of one, fewer than k
        subsets = list(combinations(range(6), size))
        got = SubsetLosses(block, x, MaskedChoice(block, logits))(subsets)
        assert got == pytest.approx([true_loss(block, x, logits, subset) for subset in subsets], rel=1e-3, abs=1e-4)
    assert got == [0.0], "all experts are the full layer"


@pytest.mark.parametrize("routing", [TopK(2, True), TopK(2, False), GROUPED], ids=["normalised", "plain", "sigmoid"])
def test_exhaustive_finds_the_least_and_greedy_goes_step_by_step(routing: Routing) -> None:
    block, x, logits = random_block(routing)
    for keep in range(1, 6):
        best = min(combinations(range(6), keep), key=lambda subset: true_loss(block, x, logits, subset))
        assert best_subset(block, x, MaskedChoice(block, logits), keep=keep) == list(best)
    kept = tuple(range(6))
    while len(kept) > 1:
        kept = min(combinations(kept, len(kept) - 1), key=lambda subset: true_loss(block, x, logits, subset))
        assert best_subset(block, x, MaskedChoice(block, logits), keep=len(kept), limit=0) == list(kept)
    every = best_subset(block, x, MaskedChoice(block, logits), keep=9)
    assert every == [0, 1, 2, 3, 4, 5], "a layer may have fewer than are to stay"


@pytest.mark.parametrize("limit", [0, SUBSET_LIMIT])
@pytest.mark.parametrize("routing", [TopK(1, True), TopK(2, False), GROUPED], ids=["one", "plain", "sigmoid"])
def test_a_subset_that_changes_nothing_is_chosen(routing: Routing, limit: int) -> None:
    """Experts 1 and 4 are never among the best, as if they had no router rows."""
    block, x, logits = random_block(routing)
    logits[:, [1, 4]] = -torch.inf
    assert best_subset(block, x, MaskedChoice(block, logits), keep=4, limit=limit) == [0, 2, 3, 5]
    assert SubsetLosses(block, x, MaskedChoice(block, logits))([(0, 2, 3, 5)]) == [0.0]


def test_one_of_two_equal_experts_goes() -> None:
    """With renormalized top-1, each token uses one expert with weight 1. Expert 3 has the same output as expert 2."""
    block, x, _ = random_block(TopK(1, True))
    block.experts[3] = block.experts[2]
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    logits[:, 3] = logits[:, 2] + torch.linspace(-1e-4, 1e-4, 50)
    assert set(range(6)) == set(logits.argmax(1).tolist()), "each is used"
    for limit in (0, SUBSET_LIMIT):
        left = best_subset(block, x, MaskedChoice(block, logits), keep=5, limit=limit)
        assert left == [0, 1, 2, 4, 5], "of equals the lower index stays"
    losses = SubsetLosses(block, x, MaskedChoice(block, logits))
    assert losses([(0, 1, 2, 4, 5), (0, 1, 3, 4, 5)]) == [0.0, pytest.approx(0.0, abs=1e-3)]


def test_outputs_that_are_not_finite_are_refused() -> None:
    block, x, logits = random_block(TopK(2, True))
    with pytest.raises(DataError, match="not finite"):
        best_subset(block, x * 1e30, MaskedChoice(block, logits), keep=3)


def test_what_is_said_of_the_search() -> None:
    assert search_used({0: 8, 1: 8}, {0: 4, 1: 4}, SUBSET_LIMIT) == {"search": "exhaustive", "subsets": 70}
    assert search_used({0: 16, 1: 4}, {0: 8, 1: 2}, SUBSET_LIMIT) == {"search": "greedy", "subsets": 12870}
    assert search_used({0: 16}, {0: 12}, SUBSET_LIMIT) == {"search": "exhaustive", "subsets": 1820}
    assert search_used({0: 4}, {0: 2}, 5) == {"search": "greedy", "subsets": 6}


# A model


@pytest.fixture(name="checkpoint")
def tiny_checkpoint(tmp_path: Path) -> Checkpoint:
    save_reference("qwen2_moe", tmp_path / "model", mlp_only_layers=[1])
    return Checkpoint(tmp_path / "model")


def test_only_sampled_tokens_count_and_batches_do_not_matter(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(block: MoeBlock, x: Tensor, choice: MaskedChoice, **options: Any) -> list[int]:
        seen.append((x, choice().experts))
        return best_subset(block, x, choice, **options)

    monkeypatch.setattr(compress.methods.naee, "best_subset", watched)
    kept = {0: 3, 2: 2}
    whole = naee(checkpoint, TOKENS, kept, dtype=torch.float32)
    assert list(whole) == [0, 2] and [len(whole[0]), len(whole[2])] == [3, 2]
    assert [x.shape for x, _ in seen] == [(65, 32), (65, 32)], "there are fewer than SAMPLE_TOKENS"
    monkeypatch.setattr(compress.methods.naee, "SAMPLE_TOKENS", 20)
    naee(
        checkpoint, TOKENS, kept, dtype=torch.float32, search=SubsetSearch(seed=1), budget=MemoryBudget(tokens_per_batch=26)
    )
    rows = torch.randperm(65, generator=torch.Generator().manual_seed(1))[:20].sort().values
    for (every, chosen), (x, experts) in zip(seen[:2], seen[2:], strict=True):
        assert torch.allclose(x, every[rows], atol=1e-5) and torch.equal(experts, chosen[rows])


def test_layers_that_are_remembered_are_not_searched_again(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered: dict[str, list[int]] = {"naee_0": [1, 3, 5]}

    def once(name: str, compute: Any) -> list[int]:
        return remembered.setdefault(name, [] if name in remembered else compute())

    result = naee(checkpoint, TOKENS, {0: 3, 2: 3}, dtype=torch.float32, search=SubsetSearch(once=once))
    assert result[0] == [1, 3, 5] and remembered == {"naee_0": [1, 3, 5], "naee_2": result[2]}


# The command


@pytest.fixture(name="place")
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PRUNE = ["prune", "model", "--method", "naee", *CALIBRATION, "--evaluation-samples", "2", "-o", "out"]


@pytest.mark.parametrize("scope", [[], ["--scope", "layer"], ["--uniform"]], ids=["default", "layer", "uniform"])
def test_command_cuts_each_layer_by_the_same_share(place: Path, scope: list[str]) -> None:
    values = run(*PRUNE, "--sparsity", "0.5", *scope)
    assert values["method"] == "naee" and values["experts_per_layer"] == [3, 3, 3]
    assert values["naee"] == {"search": "exhaustive", "subsets": 20}
    provenance = json.loads((place / "out" / "compression.json").read_text())
    assert provenance["figures"]["naee"] == values["naee"]
    assert provenance["options"]["naee_limit"] == SUBSET_LIMIT


def test_people_read_which_search_was_used(place: Path) -> None:
    result = CliRunner().invoke(cli.main, [*PRUNE, "--experts", "2", "--naee-limit", "14"], catch_exceptions=False)
    assert result.exit_code == 0 and "naee: greedy search; a layer has up to 15 subsets\n" in result.stdout


def test_sixteen_experts_are_searched_greedily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path, num_local_experts=16, num_hidden_layers=1)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.main, [*PRUNE, "--sparsity", "0.5"], catch_exceptions=False)
    assert result.exit_code == 0 and "naee: greedy search; a layer has up to 12870 subsets\n" in result.stdout


def test_other_methods_say_nothing_of_it(place: Path) -> None:
    values = run(*("probability" if word == "naee" else word for word in [*PRUNE, "--sparsity", "0.5"]))
    assert values["method"] == "probability" and "naee" not in values


def test_scope_global_is_refused(place: Path) -> None:
    before = listing(place)
    result = CliRunner().invoke(cli.main, [*PRUNE, "--sparsity", "0.5", "--scope", "global"], catch_exceptions=False)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("Error: naee ") and result.stderr.count("\n") == 1 and "--scope global" in result.stderr
    assert listing(place) == before


def test_an_interrupted_run_keeps_the_layers_that_are_done(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = run(*PRUNE, "--sparsity", "0.5")
    searched: list[int] = []

    def interrupted(*arguments: Any, **options: Any) -> list[int]:
        if len(searched) == 2:
            raise KeyboardInterrupt
        searched.append(1)
        return best_subset(*arguments, **options)

    monkeypatch.setattr(compress.methods.naee, "best_subset", interrupted)
    again = [*PRUNE[:-1], "again", "--sparsity", "0.5"]
    assert CliRunner().invoke(cli.main, again).exit_code == 130
    assert sorted(path.name for path in (place / ".again.work").glob("naee_*")) == ["naee_0.json", "naee_1.json"]
    monkeypatch.setattr(compress.methods.naee, "best_subset", lambda *a, **o: searched.append(1) or best_subset(*a, **o))
    resumed = run(*again, "--resume")
    assert len(searched) == 3
    assert resumed["experts_per_layer"] == straight["experts_per_layer"]
    plans = [json.loads((place / name / "compression.json").read_text())["plan"] for name in ("out", "again")]
    assert plans[0] == plans[1]
