"""Layers for multi-token prediction in results: their experts are those that the last layer with experts keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import save_reference
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.plans.apply import apply
from compress.plans.plan import Part, Plan, PlannedExpert, Source, kept_expert, narrowed_expert, pruning_plan
from engine.checkpoint.checkpoint import Checkpoint

KEPT = [0, 2, 3, 5]
CHOICES = {6: (KEPT, [0, 1, 3, 4]), 12: ([0, 2, 3, 4, 7, 8, 9, 11], [0, 1, 3, 4, 6, 7, 9, 10])}
"""Experts that the last layer keeps, and those that others keep, by the number of experts; 12 are in four groups."""
FORMS = {
    "deepseek_v3": ("num_nextn_predict_layers", "model.layers.{more}."),
    "glm4_moe": ("num_nextn_predict_layers", "model.layers.{more}."),
    "glm4_moe_lite": ("num_nextn_predict_layers", "model.layers.{more}."),
    "minimax_m2": ("num_mtp_modules", "model.layers.{more}."),
    "qwen3_next": ("num_nextn_predict_layers", "mtp.layers.0."),
    "qwen3_5_moe_text": ("mtp_num_hidden_layers", "mtp.layers.0."),
    "nemotron_h": ("num_nextn_predict_layers", "mtp.layers.1."),
}
"""Config key of the number of these layers, and beginning of the names of their tensors."""


def with_prediction_layer(family: str, path: Path, **changes: object) -> tuple[Checkpoint, dict[str, Tensor], str]:
    """Return a model whose layer for prediction is its last layer with experts plus 0.5, and all that has other names."""
    save_reference(family, path, **changes)
    key, prefix = FORMS[family]
    plain = Checkpoint(path)
    last, more = plain.config.moe_layers[-1], len(plain.config.layers)
    prefix = prefix.format(more=more)
    tensors = load_file(path / "model.safetensors")
    own = {name: tensor + 0.5 for name, tensor in tensors.items() if f"layers.{last}." in name}
    added = {f"{prefix}{name.partition(f'.{last}.')[2]}": tensor for name, tensor in own.items()}
    added[f"{prefix}eh_proj.weight"] = torch.randn(4, 8)
    save_file(tensors | added, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {key: 1}))
    return Checkpoint(path), added, prefix


def result(plan: Plan, checkpoint: Checkpoint, path: Path) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return the result of a plan, and its stored tensors."""
    path.mkdir()
    apply(plan, checkpoint, path)
    return Checkpoint(path), load_file(path / "model.safetensors")


def expected(added: dict[str, Tensor], rows: list[int], experts: int) -> dict[str, Tensor]:
    """Return the tensors with the experts `rows`, found by their shapes and by the numbers in their names."""
    found: dict[str, Tensor] = {}
    for name, tensor in added.items():
        number = re.search(r"\.experts\.(\d+)\.", name)
        if number is not None:
            places = [place for place, row in enumerate(rows) if row == int(number[1])]
            found |= {name.replace(number[0], f".experts.{place}."): tensor for place in places}
        elif re.search(r"\.gate\.|\.experts\.|e_score", name):
            found[name] = tensor[rows] if tensor.shape[0] == experts else tensor
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("family", FORMS)
def test_experts_leave_as_in_the_last_layer(family: str, tmp_path: Path) -> None:
    checkpoint, added, prefix = with_prediction_layer(family, tmp_path / "whole")
    experts = checkpoint.config.experts_per_layer[-1]
    *moes, last = checkpoint.config.moe_layers
    kept, others = CHOICES[experts]
    layers = dict.fromkeys(moes, others) | {last: kept}
    pruned, stored = result(pruning_plan(layers), checkpoint, tmp_path / "pruned")
    assert pruned.raw_config[FORMS[family][0]] == 1 and pruned.prediction_layers == 1
    there = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
    wanted = expected(added, kept, experts)
    assert there.keys() == wanted.keys() and all(torch.equal(there[name], wanted[name]) for name in wanted)
    shrunk = [name for name in wanted if added[name].shape[0] == experts and wanted[name].shape[0] == len(kept)]
    assert any("gate.weight" in name for name in shrunk)
    note = str(pruned.prediction_choice(checkpoint))
    assert f"keep those that layer {last} keeps" in note
    again, same = result(pruning_plan(dict.fromkeys(layers, range(len(kept)))), pruned, tmp_path / "again")
    assert again.prediction_choice(pruned) is None and same.keys() == stored.keys()


def test_a_layer_without_experts_is_copied(tmp_path: Path) -> None:
    save_reference("ernie4_5_moe", tmp_path / "whole")
    path = tmp_path / "whole" / "model.safetensors"
    added = {"model.mtp_block.0.mlp.up_proj.weight": torch.randn(6, 4), "model.mtp_emb_norm.0.weight": torch.randn(4)}
    save_file(load_file(path) | added, path, metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path / "whole")
    plan = pruning_plan(dict.fromkeys(checkpoint.config.moe_layers, KEPT))
    _, stored = result(plan, checkpoint, tmp_path / "pruned")
    assert all(torch.equal(stored[name], tensor) for name, tensor in added.items())


def test_stacked_experts_and_scales_of_8_bits_are_read(tmp_path: Path) -> None:
    """Published files stack the experts of Qwen3.5; those of DeepSeek V3 are in 8 bits, and the result is not."""
    checkpoint, added, prefix = with_prediction_layer("qwen3_5_moe_text", tmp_path / "whole")
    path = tmp_path / "whole" / "model.safetensors"
    stacks = {
        f"{prefix}mlp.experts.down_proj": torch.randn(6, 32, 16),
        f"{prefix}mlp.experts.gate_up_proj": torch.randn(6, 32, 32),
    }
    others = {name: tensor for name, tensor in load_file(path).items() if f"{prefix}mlp.experts" not in name}
    save_file(others | stacks, path, metadata={"format": "pt"})
    plan = pruning_plan(dict.fromkeys(checkpoint.config.moe_layers, KEPT))
    _, stored = result(plan, Checkpoint(tmp_path / "whole"), tmp_path / "pruned")
    assert all(torch.equal(stored[name], stack[KEPT]) for name, stack in stacks.items())

    checkpoint, added, prefix = with_prediction_layer("deepseek_v3", tmp_path / "eight")
    path, name = tmp_path / "eight" / "model.safetensors", f"{prefix}mlp.experts.4.up_proj.weight"
    values, scales = torch.randn_like(added[name]).to(torch.float8_e4m3fn), torch.rand(1, 1) + 0.5
    save_file(load_file(path) | {name: values, f"{name}_scale_inv": scales}, path, metadata={"format": "pt"})
    raw = json.loads((tmp_path / "eight" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "eight" / "config.json").write_text(json.dumps(raw))
    kept = CHOICES[12][0]
    plan = pruning_plan(dict.fromkeys(checkpoint.config.moe_layers, kept))
    _, stored = result(plan, Checkpoint(tmp_path / "eight"), tmp_path / "without scales")
    new = stored[name.replace(".4.", f".{kept.index(4)}.")]
    assert new.dtype == torch.float32 and torch.equal(new, values.float() * scales)
    assert not any("scale_inv" in each for each in stored)

    own = "model.layers.1.mlp.experts.4.up_proj.weight"  # with a matrix of its own in 8 bits, the model stays so
    scales_of_own = torch.rand(1, 1) + 0.5
    added = {own: torch.randn_like(load_file(path)[own].float()).to(torch.float8_e4m3fn), f"{own}_scale_inv": scales_of_own}
    save_file(load_file(path) | added, path, metadata={"format": "pt"})
    _, stored = result(plan, Checkpoint(tmp_path / "eight"), tmp_path / "with scales")
    for each, numbers, factors in ((name, values, scales), (own, added[own], scales_of_own)):
        new = each.replace(".experts.4.", f".experts.{kept.index(4)}.")
        assert torch.equal(stored[new].view(torch.uint8), numbers.view(torch.uint8))
        assert torch.equal(stored[f"{new}_scale_inv"], factors)


@pytest.mark.parametrize("is_summed", [False, True], ids=["rows of one expert", "sums of rows"])
def test_merged_experts_keep_the_experts_of_their_router_rows(is_summed: bool, tmp_path: Path) -> None:
    checkpoint, added, prefix = with_prediction_layer("qwen3_next", tmp_path / "whole")
    pairs = (Source(0, 0.5), Source(1, 0.5)), (Source(3, 0.5), Source(4, 0.5))
    experts = tuple(PlannedExpert((Part(pair),), pair if is_summed else (Source(pair[0].expert),)) for pair in pairs)
    plan = Plan(dict.fromkeys(checkpoint.config.moe_layers, experts))
    merged, stored = result(plan, checkpoint, tmp_path / "merged")
    there = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
    wanted = {} if is_summed else expected(added, [0, 3], 6)
    assert there.keys() == wanted.keys() and all(torch.equal(there[name], wanted[name]) for name in wanted)
    assert bool(merged.prediction_layers) != is_summed


def narrowed(checkpoint: Checkpoint) -> Plan:
    """Return a plan where every expert keeps half of its hidden units."""
    experts: dict[int, tuple[PlannedExpert, ...]] = {}
    for layer in checkpoint.config.moe_layers:
        moe = checkpoint.config.layers[layer].moe
        assert moe is not None
        units = tuple(range(moe.expert_width // 2))
        experts[layer] = tuple(narrowed_expert(expert, units) for expert in range(moe.experts))
    return Plan(experts)


@pytest.mark.parametrize("what", ["other counts", "narrower experts"])
def test_they_are_left_out_of_results_that_programs_could_not_load(what: str, tmp_path: Path) -> None:
    checkpoint, _, prefix = with_prediction_layer("deepseek_v3", tmp_path / "whole", n_group=1, topk_group=1)
    moes = checkpoint.config.moe_layers
    if what == "other counts":
        plan = Plan({layer: tuple(kept_expert(each) for each in range(6 - (layer == moes[0]))) for layer in moes})
    else:
        plan = narrowed(checkpoint)
    smaller, stored = result(plan, checkpoint, tmp_path / "smaller")
    assert not any(name.startswith(prefix) for name in stored)
    assert smaller.raw_config["num_nextn_predict_layers"] == 0
    assert "are left out" in str(smaller.prediction_choice(checkpoint))
