"""Alignment finds the order that brings two experts closest, and an expert merged with its own shuffle is the expert."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
from conftest import EVERY_MOE_FAMILY, save_reference
from safetensors.torch import save_file
from torch import Tensor

import compress.methods.alignment
from compress.methods.alignment import Projections, alignment, expert_weights
from compress.methods.groups import Group
from compress.methods.merging import merging_plan
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.families.tensor_names import expert_tensor


def expert(seed: int, width: int, hidden: int, dtype: torch.dtype = torch.float32, biased: bool = False) -> Projections:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(width, hidden), (width, hidden), (hidden, width)] + biased * [(width,), (width,), (hidden,)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def reordered(weights: Projections, order: list[int]) -> Projections:
    """Unit j of the result is unit order[j]."""
    gate, up, down, *biases = weights
    return gate[order], up[order], down[:, order], *(bias[order] for bias in biases[:2]), *biases[2:]


def distance(one: Projections, other: Projections) -> float:
    return sum(float((a.double() - b.double()).square().sum()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_no_order_is_closer(seed: int, biased: bool) -> None:
    centre, other = (expert(each, 5, 3, biased=biased) for each in (seed, seed + 100))
    found = alignment(centre, other) or tuple(range(5))
    best = min(permutations(range(5)), key=lambda order: distance(centre, reordered(other, list(order))))
    assert found == best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 7, 512])
def test_a_shuffle_is_undone(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress.methods.alignment, "BLOCK", block)
    centre = expert(1, 40, 20, dtype)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2)).tolist()
    found = alignment(centre, reordered(centre, order))
    assert found is not None and distance(centre, reordered(reordered(centre, order), list(found))) == 0.0
    noisy = (centre[0] + 0.1 * expert(3, 40, 20)[0].to(dtype), *centre[1:])
    assert alignment(centre, reordered(noisy, order)) == found, "and so it is with some noise"


def test_what_is_in_order_needs_no_permutation() -> None:
    assert alignment(expert(1, 16, 8), expert(1, 16, 8)) is None
    alike = (torch.ones(6, 4), torch.ones(6, 4), torch.ones(4, 6))
    found = alignment(alike, alike)
    assert found is None or sorted(found) == list(range(6)), "equal units may come in any order"


@pytest.mark.parametrize("family", EVERY_MOE_FAMILY)
def test_an_expert_merged_with_its_own_shuffle_is_the_expert(family: str, tmp_path: Path) -> None:
    config = save_reference(family, tmp_path / "source").config
    source = Checkpoint(tmp_path / "source")
    row, width = source.config.architecture, source.config.layers[0].moe.expert_width
    tensors: dict[str, Tensor] = {name: source.tensor(name).clone() for name in source.shapes}
    order = torch.randperm(width, generator=torch.Generator().manual_seed(4)).tolist()
    for layer in range(3):
        for projection, tensor in enumerate(reordered(expert_weights(source, layer, 0), order)):
            tensors[expert_tensor(row, layer, 2, projection)] = tensor.contiguous()
    (tmp_path / "twin").mkdir()
    save_file(tensors, tmp_path / "twin" / "model.safetensors")
    config.save_pretrained(tmp_path / "twin")
    twin = Checkpoint(tmp_path / "twin")
    plan = merging_plan({layer: [Group(0, {0: 0.5, 2: 0.5}), Group(3, {3: 1.0})] for layer in range(3)}, twin)
    apply(plan, twin, tmp_path / "merged")
    apply(pruning_plan({layer: [0, 3] for layer in range(3)}), twin, tmp_path / "pruned")
    merged, pruned = Checkpoint(tmp_path / "merged"), Checkpoint(tmp_path / "pruned")
    assert all(torch.equal(merged.tensor(name), pruned.tensor(name)) for name in pruned.shapes)
