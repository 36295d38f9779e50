"""Merging methods by hand on four experts and against naive second implementations; artifacts follow the plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import exp, sqrt
from pathlib import Path

import pytest
import torch
from conftest import EVERY_MOE_FAMILY, others_slow, save_reference
from formulas_for_tests import GROUPS
from scipy.optimize import linear_sum_assignment
from test_apply import TOKENS, logits, transformers_logits, worst
from test_saliency import LAYER
from torch import Tensor, nn

import compress.methods.merging
import compress.methods.ream
from calibrate.collect import collect
from calibrate.statistics import LayerStatistics, Statistics
from compress.methods.alignment import expert_weights
from compress.methods.cka import cka_groups
from compress.methods.criterion import averaging
from compress.methods.groups import Group
from compress.methods.hc_smoe import hc_smoe
from compress.methods.m_smoe import m_smoe
from compress.methods.merging import merge_groups, merging_plan
from compress.methods.ream import ream
from compress.methods.s_smoe import s_smoe
from compress.options.prune import PruneOptions
from compress.plans.apply import apply
from compress.plans.plan import Plan, kept_expert, narrowed_expert
from compress.plans.selection import Budget
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import Expert
from engine.decoder.model import Decoder, own_routing
from engine.errors import UnsupportedError
from engine.families.tensor_names import router_tensor
from engine.passes.memory_need import MemoryDemand

METHODS = pytest.mark.parametrize("method", GROUPS)


def symmetric(**pairs: float) -> Tensor:
    """Return a 4 × 4 matrix of similarities, from `e01=0.9` and so on, with 1 on the diagonal."""
    values = torch.eye(4)
    for name, value in pairs.items():
        one, other = int(name[1]), int(name[2])
        values[one, other] = values[other, one] = value
    return values


def same(got: list[Group], expected: dict[int, dict[int, float]]) -> None:
    assert sorted(group.centre for group in got) == sorted(expected)
    for group in got:
        assert dict(group.weights) == pytest.approx(expected[group.centre], abs=1e-6), group


def test_experts_of_different_widths_are_not_averaged(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path / "full")
    full = Checkpoint(tmp_path / "full")
    narrow = (narrowed_expert(0, range(8)), *(kept_expert(expert) for expert in range(1, 6)))
    apply(Plan(dict.fromkeys(range(3), narrow)), full, tmp_path / "narrow")
    ragged = Checkpoint(tmp_path / "narrow")
    with pytest.raises(UnsupportedError, match="experts of layer 0 differ in width, so they cannot be averaged"):
        merging_plan({layer: [Group(0, {0: 0.5, 1: 0.5})] for layer in range(3)}, ragged)
    with pytest.raises(UnsupportedError, match="prune experts with --merge none"):
        averaging(
            MemoryDemand(torch.float32, 8), PruneOptions(output=tmp_path / "out", budget=Budget(experts=2)), ragged.config
        )


# By hand. LAYER's experts were used 10, 6, 4 and 0 times; their REAP scores are 1.2, 2.0, 2.5 and 0.


def test_cka_by_hand() -> None:
    layer = replace(LAYER, rbf_cka=symmetric(e01=0.5, e03=0.2, e12=0.9, e23=0.3))
    weight_0 = exp(0.5) / (exp(0.5) + exp(0.9) + exp(1.0))
    weight_2 = exp(0.9) / (exp(0.5) + exp(0.9) + exp(1.0))
    same(cka_groups(layer, [3, 1]), {1: {0: weight_0, 1: 1 - weight_0 - weight_2, 2: weight_2}, 3: {3: 1.0}})
    same(cka_groups(layer, [0, 1, 2, 3]), {i: {i: 1.0} for i in range(4)})
    tied = replace(LAYER, rbf_cka=torch.ones(4, 4))
    same(cka_groups(tied, [1, 2]), {1: {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}, 2: {2: 1.0}})


def test_m_smoe_by_hand() -> None:
    """Three tokens have router logits. Expert 2's are like those of 1, and 3's like those of 0 on another scale."""
    z = torch.tensor([[3.0, 0.0, 0.5, 0.3], [0.0, 2.0, 4.0, 0.0], [0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    layer = replace(LAYER, router_gram=z.T @ z)
    same(m_smoe(layer, 2), {0: {0: 1.0}, 1: {1: 0.6, 2: 0.4}})  # 3 joins 0 with no weight, because it was never used
    same(m_smoe(layer, 1), {0: {0: 0.5, 1: 0.3, 2: 0.2}})
    same(m_smoe(layer, 3), {0: {0: 1.0}, 1: {1: 1.0}, 2: {2: 1.0}})
    unused = replace(layer, tokens_routed=torch.zeros(4, dtype=torch.long))
    same(m_smoe(unused, 2), {0: {0: 0.5, 3: 0.5}, 1: {1: 0.5, 2: 0.5}})


def test_s_smoe_by_hand() -> None:
    """Experts 1 and 3 are merged first, at 0.1. Expert 0 is 0.4 from them on average and 0.5 from 2."""
    layer = replace(LAYER, linear_cka=symmetric(e13=0.9, e01=0.7, e03=0.5, e02=0.5, e12=0.2, e23=0.2))
    same(s_smoe(layer, 3), {0: {0: 1.0}, 1: {1: 0.5, 3: 0.5}, 2: {2: 1.0}})
    same(s_smoe(layer, 2), {0: {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}, 2: {2: 1.0}})
    same(s_smoe(layer, 1), {0: dict.fromkeys(range(4), 0.25)})


def test_hc_smoe_by_hand() -> None:
    """The experts lie on a line at 0, 5, 9.5 and 4. First 1 and 3 join, then 0, which is 4.5 from them on average (2: 5)."""
    layer = replace(LAYER, output_mean=torch.tensor([[0.0], [5.0], [9.5], [4.0]]))
    same(hc_smoe(layer, 3), {0: {0: 1.0}, 1: {1: 1.0}, 2: {2: 1.0}})  # 3 is in the group of 1 and was never used
    same(hc_smoe(layer, 2), {0: {0: 10 / 16, 1: 6 / 16}, 2: {2: 1.0}})
    same(hc_smoe(layer, 1), {0: {0: 0.5, 1: 0.3, 2: 0.2}})
    unused = replace(layer, tokens_routed=torch.tensor([1, 0, 0, 0]))
    same(hc_smoe(unused, 3), {0: {0: 1.0}, 1: {1: 0.5, 3: 0.5}, 2: {2: 1.0}})


def test_ream_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Centroids are 2 and 1. By outputs 0 is like 1 and unlike 2; logits are neutral; 3 weighs 1.2, like the least used."""
    layer = replace(
        LAYER,
        weighted_output_mean=torch.tensor([[1.0, 0.1], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]),
        router_gram=torch.eye(4, dtype=torch.float64),
    )
    total = 2.5 + 1.2 + 1.2
    same(ream(layer, 2), {2: {2: 2.5 / total, 0: 1.2 / total, 3: 1.2 / total}, 1: {1: 1.0}})
    monkeypatch.setattr(compress.methods.ream, "GROUP_SIZE", 2)
    same(ream(layer, 2), {2: {2: 2.5 / 3.7, 3: 1.2 / 3.7}, 1: {1: 2.0 / 3.2, 0: 1.2 / 3.2}})
    same(ream(layer, 1), {2: {i: score / 6.9 for i, score in enumerate([1.2, 2.0, 2.5, 1.2])}})
    unused = replace(layer, weighted_norm_sum=torch.zeros(4))
    same(ream(unused, 1), {0: dict.fromkeys(range(4), 0.25)})


# Naive second implementations, on random statistics of more experts


def random_layer(experts: int, seed: int) -> LayerStatistics:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(experts, 12, generator=g).double()
    normal = torch.nn.functional.normalize(x, dim=1)
    z = torch.randn(30, experts, generator=g).double()
    return replace(
        LAYER,
        tokens_routed=torch.randint(0, 9, (experts,), generator=g),
        weighted_norm_sum=torch.rand(experts, generator=g),
        output_mean=torch.randn(experts, 5, generator=g),
        weighted_output_mean=torch.randn(experts, 5, generator=g),
        router_gram=z.T @ z,
        linear_cka=(normal @ normal.T).square().float(),
        rbf_cka=(normal @ normal.T).abs().float(),
    )


def naive_clusters(distances: Tensor, count: int) -> set[frozenset[int]]:
    clusters = {frozenset([i]) for i in range(len(distances))}
    while len(clusters) > count:
        a, b = min(
            itertools.combinations(sorted(clusters, key=min), 2),
            key=lambda two: sum(float(distances[i, j]) for i in two[0] for j in two[1]) / (len(two[0]) * len(two[1])),
        )
        clusters = (clusters - {a, b}) | {a | b}
    return clusters


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("experts", [1, 4, 10])
def test_hierarchical_clusters_are_the_naive_ones(seed: int, experts: int) -> None:
    layer = random_layer(11, seed)
    outputs = layer.output_mean.double()
    apart = torch.stack([torch.stack([(a - b).square().sum().sqrt() for b in outputs]) for a in outputs])
    for method, distances in ((hc_smoe, apart), (s_smoe, 1.0 - layer.linear_cka.double())):
        every = replace(layer, tokens_routed=layer.tokens_routed + 1)  # so that all members have weight
        groups = method(every, experts)
        assert {frozenset(group.weights) for group in groups} == naive_clusters(distances, experts)
        for group in groups:
            assert every.tokens_routed[group.centre] == max(every.tokens_routed[i] for i in group.weights)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("experts", "size"), [(5, 16), (5, 3), (1, 2), (10, 2)])
def test_ream_is_the_naive_one(seed: int, experts: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress.methods.ream, "GROUP_SIZE", size)
    layer = random_layer(11, seed)
    gram, u = layer.router_gram, layer.weighted_output_mean.double()
    score = [float(s) / max(1, int(n)) for s, n in zip(layer.weighted_norm_sum, layer.tokens_routed, strict=True)]

    def apart(i: int, j: int) -> float:
        return sqrt(max(0.0, 2 - 2 * float(gram[i, j]) / sqrt(float(gram[i, i]) * float(gram[j, j]))))

    widest = max(apart(i, j) for i in range(11) for j in range(11))

    def similarity(i: int, j: int) -> float:
        cosine = float(u[i] @ u[j]) / (float(u[i].norm()) * float(u[j].norm()))
        return ((1 + cosine) / 2 + 1 - apart(i, j) / widest) / 2

    centroids = sorted(range(11), key=lambda i: -score[i])[:experts]
    free = set(range(11)) - set(centroids)
    room = max(size, -(-11 // experts))
    expected = {}
    for centroid in centroids:
        taken = sorted(free, key=lambda i: -similarity(centroid, i))[: room - 1]
        free -= set(taken)
        total = sum(score[i] for i in (centroid, *taken))
        expected[centroid] = {i: score[i] / total for i in (centroid, *taken)}
    same(ream(layer, experts), expected)


@METHODS
@pytest.mark.parametrize("seed", range(3))
def test_groups_are_disjoint_and_as_many_as_asked_for(method: str, seed: int) -> None:
    for experts in range(1, 7):
        layer = random_layer(7, seed)
        for used in (layer.tokens_routed, torch.zeros(7, dtype=torch.long)):
            groups = GROUPS[method](replace(layer, tokens_routed=used), experts)
            members = [expert for group in groups for expert in group.weights]
            assert len(groups) == experts == len({group.centre for group in groups})
            assert len(members) == len(set(members))
            for group in groups:
                assert group.centre in group.weights and sum(group.weights.values()) == pytest.approx(1.0)
                assert min(group.weights.values()) > 0


@METHODS
def test_experts_that_are_all_alike(method: str) -> None:
    """Every distance is 0 and every similarity the same. The requested number of groups is still made."""
    layer = replace(
        LAYER,
        output_mean=torch.ones(4, 2),
        weighted_output_mean=torch.ones(4, 2),
        router_gram=torch.ones(4, 4, dtype=torch.float64),
        linear_cka=torch.ones(4, 4),
    )
    for experts in (1, 2, 3):
        assert len(GROUPS[method](layer, experts)) == experts


@METHODS
def test_a_layer_with_no_more_experts_than_asked_for_stays(method: str) -> None:
    statistics = Statistics({1: random_layer(6, 0), 4: random_layer(3, 1), 5: random_layer(2, 2)}, {})
    groups = merge_groups(GROUPS[method], statistics, 3)
    assert [len(groups[index]) for index in (1, 4, 5)] == [3, 3, 2]
    assert all(group.weights == {group.centre: 1.0} for index in (4, 5) for group in groups[index])


# Plans and artifacts


def naive_logits(full: Checkpoint, groups: dict[int, list[Group]]) -> Tensor:
    """Return logits of the full model whose experts are averaged here, matched by their distances."""
    decoder = Decoder(full.config, full.source(torch.float32))
    for index, of_layer in groups.items():
        block, moe = decoder.layers[index].feed_forward, full.config.layers[index].moe
        assert moe is not None
        ordered = sorted(of_layer, key=lambda group: group.centre)
        block.experts = nn.ModuleList([naive_expert(full, index, group) for group in ordered])
        router = full.tensor(router_tensor(full.config.architecture, index))
        centres = [group.centre for group in ordered]
        block.router_ND = nn.Parameter(router[centres], requires_grad=False)
        if block.logit_bias_N is not None:
            block.logit_bias_N = nn.Parameter(block.logit_bias_N[centres], requires_grad=False)
        count = len(ordered)
        block.routing = own_routing(replace(moe, experts=count, experts_per_token=min(count, moe.experts_per_token)))
    with torch.no_grad():
        return decoder(TOKENS)


def naive_expert(full: Checkpoint, layer: int, group: Group) -> Expert:
    moe = full.config.layers[layer].moe
    hidden = full.config.hidden_size

    def units(expert: int) -> Tensor:
        gate, up, down, *biases = expert_weights(full, layer, expert)
        return torch.cat([gate, up, down.T, *(bias[:, None] for bias in biases[:2])], dim=1).double()

    centre = units(group.centre)
    total = torch.zeros_like(centre)
    for expert, weight in group.weights.items():
        _, order = linear_sum_assignment(torch.cdist(centre, units(expert)).square().numpy())
        total += weight * units(expert)[order]
    gate, up, down, *biases = total.float().split([hidden, hidden, hidden, *[1] * (total.shape[1] - 3 * hidden)], dim=1)
    if biases:
        last = sum(weight * expert_weights(full, layer, expert)[5] for expert, weight in group.weights.items())
        biases = [*(bias[:, 0] for bias in biases), last]
    return Expert(gate, up, down.T.contiguous(), *biases, swiglu=moe.swiglu)


@pytest.fixture(scope="module", name="models")
def models_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Checkpoint, Statistics]]:
    models = {}
    for family in EVERY_MOE_FAMILY:
        path = tmp_path_factory.mktemp(family)
        save_reference(family, path)
        models[family] = (Checkpoint(path), collect(Checkpoint(path), TOKENS, dtype=torch.float32))
    return models


@METHODS
@pytest.mark.parametrize("family", EVERY_MOE_FAMILY)
@pytest.mark.parametrize("experts", others_slow([1, 4], 4))
def test_the_artifact_is_the_naive_merged_model(
    models: dict[str, tuple[Checkpoint, Statistics]], method: str, family: str, experts: int, tmp_path: Path
) -> None:
    full, statistics = models[family]
    experts = max(experts, full.config.architecture.least_experts)
    groups = merge_groups(GROUPS[method], statistics, experts)
    apply(merging_plan(groups, full), full, tmp_path / "merged")
    merged = Checkpoint(tmp_path / "merged")
    assert merged.config.experts_per_layer == (experts,) * 3 and merged.parameters < full.parameters
    assert merged.config.experts_per_token == min(experts, 2)
    assert "auto_map" not in merged.raw_config, "uniform: a plain checkpoint"
    assert worst(logits(merged), naive_logits(full, groups)) <= 1e-4
    assert worst(logits(merged), logits(full)) > 1e-2


def test_a_pruning_with_layers_of_their_own_merged_by_cka(
    models: dict[str, tuple[Checkpoint, Statistics]], tmp_path: Path
) -> None:
    full, statistics = models["mixtral"]
    kept = {0: [4], 1: [0, 1, 2, 3, 4, 5], 2: [0, 2, 3]}
    groups = {index: cka_groups(statistics.layers[index], experts) for index, experts in kept.items()}
    plan = merging_plan(groups, full)
    assert plan.layers[1] == tuple(kept_expert(expert) for expert in range(6)), "where nothing was pruned nothing changes"
    apply(plan, full, tmp_path / "merged")
    merged = Checkpoint(tmp_path / "merged")
    assert merged.config.experts_per_layer == (1, 6, 3)
    assert worst(logits(merged), naive_logits(full, groups)) <= 1e-4
    theirs = transformers_logits(tmp_path / "merged", trust_remote_code=True)
    assert worst(theirs, logits(merged)) <= 1e-4


def test_weights_are_released_layer_by_layer(
    models: dict[str, tuple[Checkpoint, Statistics]], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, statistics = models["olmoe"]
    seen: list[str] = []
    monkeypatch.setattr(full, "release", lambda: seen.append("released"))
    original = compress.methods.merging.expert_weights
    monkeypatch.setattr(
        compress.methods.merging, "expert_weights", lambda *where: (seen.append(f"layer {where[1]}"), original(*where))[1]
    )
    merging_plan(merge_groups(ream, statistics, 2), full)
    assert [name for name, _ in itertools.groupby(seen)] == [
        *("layer 0", "released"),
        *("layer 1", "released"),
        *("layer 2", "released"),
    ]
