"""Matrices in packed floats that a plan only copies stay as they are stored, and transformers reads the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_matrix import logits_of, own_logits, worst
from float_models_for_tests import save_compressed_float8, save_float8, save_nvfp4
from safetensors.torch import load_file, save_file

from compress.plans.apply import apply
from compress.plans.plan import Part, Plan, PlannedExpert, Source, pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import UnsupportedError

KEPT = {0: [1, 4], 1: [0, 3], 2: [2, 5]}


@pytest.fixture(autouse=True)
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cache into which transformers copies remote code. It read the path when it was imported."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def dequantized_by_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    options = {"quantization_config": FineGrainedFP8Config(dequantize=True), "attn_implementation": "eager"}
    model: Any = AutoModelForCausalLM
    return model.from_pretrained(path, dtype=torch.float32, trust_remote_code=True, **options).eval().float()


def stored_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("scales", ["blocks", "powers", "rows", "tensors"])
def test_experts_that_are_kept_stay_as_they_are(scales: str, tmp_path: Path) -> None:
    suffix = "_scale_inv" if scales in ("blocks", "powers") else "_scale"
    save_float8("qwen3_moe", tmp_path / "full", scales=scales, suffix=suffix)
    full, source = Checkpoint(tmp_path / "full"), load_file(tmp_path / "full" / "model.safetensors")
    apply(pruning_plan(KEPT), full, tmp_path / "pruned")
    made = load_file(tmp_path / "pruned" / "model.safetensors")
    for layer, experts in KEPT.items():
        for new, old in enumerate(experts):
            for part in ("gate", "up", "down"):
                for end in ("weight", f"weight{suffix}"):
                    names = (f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{end}" for expert in (new, old))
                    after, before = (tensors[name] for tensors, name in zip((made, source), names, strict=True))
                    assert after.dtype == before.dtype and torch.equal(stored_bytes(after), stored_bytes(before))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert made[name].dtype == torch.float8_e4m3fn and torch.equal(stored_bytes(made[name]), stored_bytes(source[name]))
    assert not any(name.endswith("input_scale") for name in made)
    result, entry = Checkpoint(tmp_path / "pruned"), json.loads((tmp_path / "full" / "config.json").read_text())
    assert result.raw_config["quantization_config"] == entry["quantization_config"] | {"activation_scheme": "dynamic"}
    assert result.bytes == sum(tensor.nbytes for tensor in made.values())


@pytest.mark.parametrize("kept", [KEPT, {0: [1, 4, 5], 1: [3], 2: [2, 5]}], ids=["uniform", "others"])
def test_transformers_reads_the_result(kept: dict[int, list[int]], tmp_path: Path) -> None:
    """All other tensors are float32 here, to which both sides then dequantize."""
    save_float8("qwen3_moe", tmp_path / "full")
    path = tmp_path / "full" / "model.safetensors"
    tensors = {name: each.float() if each.dtype == torch.bfloat16 else each for name, each in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    apply(pruning_plan(kept), Checkpoint(tmp_path / "full"), tmp_path / "pruned")
    for directory in ("full", "pruned"):
        theirs = logits_of(dequantized_by_transformers(tmp_path / directory))
        assert worst(own_logits(Checkpoint(tmp_path / directory)), theirs) <= 1e-4


@pytest.mark.parametrize("kind", ["channel", "nvfp4"])
def test_experts_of_compressed_tensors_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    """The scales of activations of NVFP4 are left out, and so the result asks for no rounding of them."""
    if kind == "nvfp4":
        save_nvfp4(tmp_path / "full")
    else:
        save_compressed_float8(tmp_path / "full", kind)
    full, source = Checkpoint(tmp_path / "full"), load_file(tmp_path / "full" / "model.safetensors")
    apply(pruning_plan(KEPT), full, tmp_path / "pruned")
    made, result = load_file(tmp_path / "pruned" / "model.safetensors"), Checkpoint(tmp_path / "pruned")
    parts = ("_packed", "_scale", "_global_scale") if kind == "nvfp4" else ("", "_scale")
    for part in parts:
        names = [f"model.layers.2.mlp.experts.{expert}.down_proj.weight{part}" for expert in (1, 5)]
        assert torch.equal(stored_bytes(made[names[0]]), stored_bytes(source[names[1]]))
    assert not any("input" in name.split(".")[-1] for name in made)
    (before,), (after,) = (each.raw_config["quantization_config"]["config_groups"].values() for each in (full, result))
    assert after == before | ({"input_activations": None} if kind == "nvfp4" else {})
    assert result.bytes == sum(tensor.nbytes for tensor in made.values())
    own, other = "model.layers.0.mlp.experts.1.gate_proj.weight", "model.layers.0.mlp.experts.4.gate_proj.weight"
    assert torch.equal(result.tensor(own), full.tensor(other))
    narrow = PlannedExpert((Part((Source(0),), units=(0, 1, 5)),), (Source(0),))
    plan = Plan(dict.fromkeys(range(3), (narrow, narrow)))
    if kind == "nvfp4":
        with pytest.raises(UnsupportedError, match="packed in groups of hidden units"):
            apply(plan, full, tmp_path / "narrow")
    else:
        apply(plan, full, tmp_path / "narrow")
        assert "quantization_config" not in Checkpoint(tmp_path / "narrow").raw_config


def test_a_model_with_mixed_experts_is_plain(tmp_path: Path) -> None:
    save_float8("qwen3_moe", tmp_path / "full")
    full = Checkpoint(tmp_path / "full")
    mixed = PlannedExpert((Part((Source(0, 0.5), Source(1, 0.5))),), (Source(0),))
    apply(Plan(dict.fromkeys(range(3), (mixed, mixed))), full, tmp_path / "merged")
    assert "quantization_config" not in Checkpoint(tmp_path / "merged").raw_config
    made = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.mlp.experts.3"]
    (tmp_path / "full" / "config.json").write_text(json.dumps(config))
    apply(pruning_plan(KEPT), Checkpoint(tmp_path / "full"), tmp_path / "numbered")
    assert "quantization_config" not in Checkpoint(tmp_path / "numbered").raw_config
