"""The plugin against a stand-in of vLLM: the chosen class, and that each layer has the experts of its weights.

docs/vllm.md lists the runs on vLLM itself.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_stand_in
from conftest import save_reference
from transformers import AutoConfig

from compress.plans.apply import apply
from compress.plans.plan import Plan, narrowed_expert, pruning_plan
from engine.checkpoint import vllm_plugin
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import expert_tensor, router_tensor

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
ROOT = Path(__file__).resolve().parents[3]
KEPT = {0: [0, 2, 3], 1: [4], 2: [1, 2, 3, 5]}
"""Kept experts of 6, with two for each token. The second layer keeps fewer than top-k."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's registry after the plugin has registered its classes."""
    registry = vllm_stand_in.ModelRegistry()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    monkeypatch.setattr(vllm_plugin, "_theirs", {})
    vllm_plugin._class.cache_clear()
    vllm_plugin.register()
    return registry


def pruned(family: str, path: Path, kept: dict[int, list[int]] = KEPT, **changes: Any) -> Checkpoint:
    """Write the weights and config of an artifact."""
    save_reference(family, path / "full", **changes)
    apply(pruning_plan(kept), Checkpoint(path / "full"), path / "pruned")
    return Checkpoint(path / "pruned")


def build(registry: Any, directory: Path, eplb: bool = False) -> Any:
    """Build the model as vLLM does: config.json through transformers, and the class named first in `architectures`."""
    config = AutoConfig.from_pretrained(directory)
    entry = registry.models[config.architectures[0]]
    parallel = SimpleNamespace(enable_eplb=eplb)
    return entry.load_model_cls()(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config), parallel_config=parallel)
    )


def check_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Check that every expert and router of the checkpoint has its place in vLLM's layer, and that no other places exist."""
    row = checkpoint.config.architecture
    for layer, block in model.moe.items():
        assert tuple(block.gate.shape) == checkpoint.shapes[router_tensor(row, layer)]
        gate, down = (checkpoint.shapes[expert_tensor(row, layer, 0, place)] for place in (0, 2))
        assert tuple(block.w13.shape[1:]) == (2 * gate[0], gate[1]) and tuple(block.w2.shape[1:]) == down
        assert expert_tensor(row, layer, block.experts - 1, 0) in checkpoint.shapes
        assert expert_tensor(row, layer, block.experts, 0) not in checkpoint.shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_built_with_its_own_count(registry: Any, family: str, tmp_path: Path) -> None:
    checkpoint = pruned(family, tmp_path)
    model = build(registry, tmp_path / "pruned")
    assert {layer: block.experts for layer, block in model.moe.items()} == {0: 3, 1: 1, 2: 4}
    assert [block.top_k for block in model.moe.values()] == [2, 1, 2]
    check_weights(model, checkpoint)
    # vLLM reads the config again later, so it must be unchanged, with the largest count.
    assert vllm_stand_in.Layer(model.config, "model.layers.0").moe.experts == 4
    assert model.config.num_experts_per_tok == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_uniform_model_is_built_as_vllm_does(registry: Any, family: str, tmp_path: Path) -> None:
    checkpoint = pruned(family, tmp_path, {0: [0, 2, 3], 1: [1, 2, 4], 2: [3, 4, 5]})
    model = build(registry, tmp_path / "pruned", eplb=True)
    assert [(block.experts, block.top_k) for block in model.moe.values()] == [(3, 2)] * 3
    check_weights(model, checkpoint)


def narrowed(family: str, path: Path, units: Any, **changes: Any) -> Checkpoint:
    """Write an artifact that keeps the first `units(layer, expert)` hidden units of each of its experts 0 to 3."""
    save_reference(family, path / "full", **changes)
    full = Checkpoint(path / "full")
    layers = {i: tuple(narrowed_expert(e, range(units(i, e))) for e in range(4)) for i in full.config.moe_layers}
    apply(Plan(layers), full, path / "pruned")
    return Checkpoint(path / "pruned")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_built_with_its_own_width(registry: Any, family: str, tmp_path: Path) -> None:
    checkpoint = narrowed(family, tmp_path, lambda layer, _: 8 + 4 * layer)
    model = build(registry, tmp_path / "pruned")
    assert {layer: block.w2.shape[2] for layer, block in model.moe.items()} == {0: 8, 1: 12, 2: 16}
    check_weights(model, checkpoint)
    assert vllm_stand_in.Layer(model.config, "model.layers.0").moe.w2.shape[2] > 16, "the config is as it was"


def test_experts_of_different_widths_in_a_layer_are_refused(registry: Any, tmp_path: Path) -> None:
    narrowed("mixtral", tmp_path, lambda layer, expert: 8 + 4 * expert)
    with pytest.raises(UnsupportedError, match="experts of one layer of this model differ in width"):
        build(registry, tmp_path / "pruned")


def test_the_shared_expert_of_a_layer_keeps_its_width(tmp_path: Path) -> None:
    """Its key is a multiple of the routed experts' width, which must divide it."""
    row = ARCHITECTURES["deepseek_v3"]
    shared = {"n_shared_experts": 1, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    blocks = [{"ffn": {"moe": {"num_local_experts": 4, "intermediate_size": width}}} for width in (8, 12)]
    config = SimpleNamespace(block_configs=blocks, **shared)
    seen = vllm_plugin._shown(row, config, 0, 4)
    assert (seen["moe_intermediate_size"], seen["n_shared_experts"]) == (8, 2)
    with pytest.raises(UnsupportedError, match="layer 1 has experts of 12 hidden units"):
        vllm_plugin._shown(row, config, 1, 4)


def test_dense_layers_stay_dense(registry: Any, tmp_path: Path) -> None:
    checkpoint = pruned("qwen3_moe", tmp_path, {0: KEPT[0], 2: KEPT[2]}, mlp_only_layers=[1])
    model = build(registry, tmp_path / "pruned")
    assert {layer: block.experts for layer, block in model.moe.items()} == {0: 3, 2: 4}
    check_weights(model, checkpoint)


def test_counts_are_those_of_the_layers_of_a_pipeline_stage(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned("mixtral", tmp_path)
    monkeypatch.setattr(vllm_stand_in, "STAGE", [1, 3])
    model = build(registry, tmp_path / "pruned")
    assert {layer: block.experts for layer, block in model.moe.items()} == {1: 1, 2: 4}


def test_without_the_plugin_the_weights_do_not_fit(tmp_path: Path) -> None:
    checkpoint = pruned("mixtral", tmp_path)
    model = build(vllm_stand_in.ModelRegistry(), tmp_path / "pruned")
    with pytest.raises(AssertionError):
        check_weights(model, checkpoint)


def test_registered_twice_is_registered_once(registry: Any) -> None:
    before = dict(registry.models)
    vllm_plugin.register()
    assert registry.models == before
    entry = registry.models["OlmoeForCausalLM"]
    assert entry.load_model_cls() is entry.load_model_cls()
    assert entry.load_model_cls().__bases__ == (vllm_stand_in.OlmoeForCausalLM,)
    assert registry.models["LlamaForCausalLM"].module_name == "vllm_stand_in", "a dense family is vLLM's own"
    assert "LlamaMoEForCausalLM" not in registry.models, "vLLM has no such family"


def test_balancing_experts_among_processes_is_refused(registry: Any, tmp_path: Path) -> None:
    pruned("mixtral", tmp_path)
    with pytest.raises(OptionError, match="enable-eplb"):
        build(registry, tmp_path / "pruned", eplb=True)


@pytest.mark.parametrize(("count", "message"), [(0, "can hold 1 to 4"), (5, "can hold 1 to 4"), ("3", "can hold 1 to 4")])
def test_counts_that_cannot_be_are_refused(registry: Any, tmp_path: Path, count: Any, message: str) -> None:
    pruned("mixtral", tmp_path)
    path = tmp_path / "pruned" / "config.json"
    config = json.loads(path.read_text())
    config["block_configs"][1]["ffn"]["moe"]["num_local_experts"] = count
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        build(registry, tmp_path / "pruned")


def test_a_vllm_that_builds_layers_in_another_way_is_refused(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned("mixtral", tmp_path)
    monkeypatch.delattr(vllm_stand_in, "make_layers")
    with pytest.raises(UnsupportedError, match="no make_layers"):
        build(registry, tmp_path / "pruned")


def test_a_model_that_fails_leaves_vllm_as_it_was(registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned("mixtral", tmp_path)
    own = vllm_stand_in.make_layers

    def failing(experts: int, width: int, config: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(vllm_stand_in, "MoeBlock", failing)
    with pytest.raises(MemoryError):
        build(registry, tmp_path / "pruned")
    assert vllm_stand_in.make_layers is own


def test_a_name_that_was_not_registered_is_no_attribute(registry: Any) -> None:
    with pytest.raises(AttributeError, match="LlamaForCausalLM"):
        _ = vllm_plugin.LlamaForCausalLM


def test_the_entry_point_names_the_function_and_costs_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["moe-compress"].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm_plugin.register
    code = f"import sys, {module}; assert not {{'torch', 'transformers', 'vllm', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_stand_in_refuses_what_does_not_fit(tmp_path: Path) -> None:
    config = SimpleNamespace(num_experts_per_tok=2, hidden_size=8)
    with pytest.raises(ValueError, match="top-k"):
        vllm_stand_in.MoeBlock(1, 4, config)
    assert torch.Size([2, 8, 8]) == vllm_stand_in.MoeBlock(2, 4, config).w13.shape
