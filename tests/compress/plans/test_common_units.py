"""Removing hidden units of shared experts and of dense FFNs equals multiplying them by zero, in every family with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow
from test_units import IN_TRANSFORMERS, MIXTURES, full_model, in_transformers, logits, prompt_and_steps, worst
from torch import Tensor

from compress.plans.apply import apply, planned_decoder
from compress.plans.plan import Plan, plan_from_json, plan_to_json, same_plan
from compress.plans.unit_selection import units_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.vllm_plugin import _shown
from engine.decoder.model import Decoder
from engine.errors import CheckpointError, PlanError, UnsupportedError
from engine.families.block_configs import DENSE_WIDTH_KEY, SHARED_WIDTH_KEY
from engine.families.experts import DOWN
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import ffn_tensor

COMMON = ["deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite"]
COMMON += [
    "gemma4_text",
    "glm_moe_dsa",
    "granitemoeshared",
    "kimi_k2",
    "llama4_text",
    "nemotron_h",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
]
EACH = pytest.mark.parametrize("family", others_slow(COMMON, "deepseek_v3", "qwen2_moe"))
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "llama4_text": {"moe_layers": [0]},
}
"""Settings with which the tests' checkpoints of these families have dense layers."""


def whole(family: str, path: Path) -> Checkpoint:
    return full_model(family, path, **CHANGES.get(family, {}))


def common_plan(checkpoint: Checkpoint, kind: str) -> Plan:
    """Return a plan that keeps all experts: half of the other FFNs' units, or other numbers in each layer, four or more."""
    generator, common = torch.Generator().manual_seed(3), {}
    for place, (layer, width) in enumerate(checkpoint.config.common_widths.items()):
        kept = width // 2 if kind == "uniform" else width - 4 * (1 + place % 3)
        common[layer] = tuple(sorted(torch.randperm(width, generator=generator)[:kept].tolist()))
    return replace(same_plan(checkpoint.config.experts_by_layer), common=common)


@torch.no_grad()
def with_zeroed_units(checkpoint: Checkpoint, plan: Plan) -> Tensor:
    """Return the full model's logits with the other columns of down at zero."""
    source, counts = checkpoint.source(torch.float32), checkpoint.config.experts_by_layer
    kept = {ffn_tensor(checkpoint.config, layer, counts.get(layer, 0), DOWN): own for layer, own in plan.common.items()}

    def zeroed(name: str) -> Tensor:
        tensor = source(name).clone()
        gone = torch.ones(tensor.shape[-1], dtype=torch.bool)
        gone[list(kept.get(name, range(len(gone))))] = False
        return tensor.masked_fill_(gone, 0.0)

    return prompt_and_steps(Decoder(checkpoint.config, zeroed))


def test_the_list_has_every_family_with_such_ffns(tmp_path: Path) -> None:
    assert set(COMMON) == {family for family in MIXTURES if ARCHITECTURES[family].shared is not None}


@pytest.mark.parametrize("kind", ["layer", "uniform"])
@EACH
def test_removing_units_equals_multiplying_them_by_zero(family: str, kind: str, tmp_path: Path) -> None:
    full = whole(family, tmp_path / "full")
    plan = common_plan(full, kind)
    apply(plan, full, tmp_path / "narrow")
    narrow, expected = Checkpoint(tmp_path / "narrow"), with_zeroed_units(full, plan)
    assert narrow.config.common_widths == {layer: len(own) for layer, own in plan.common.items()}
    assert worst(logits(narrow), expected) <= 1e-5
    assert worst(expected, logits(full)) > 1e-3, "and it is another function than the full model's"
    assert worst(prompt_and_steps(planned_decoder(plan, full, torch.float32)), expected) <= 1e-5
    if family in IN_TRANSFORMERS:
        loaded = in_transformers(tmp_path / "narrow", trust_remote_code="auto_map" in narrow.raw_config)
        assert worst(loaded, logits(narrow)[0]) <= 1e-4


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_half_of_every_ffn_is_a_plain_checkpoint(family: str, tmp_path: Path) -> None:
    """The shared experts of a DeepSeek stay as many, because the routed experts halve too."""
    full = whole(family, tmp_path / "full")
    widths = full.config.ffn_widths(("shared", "dense"))
    kept = {layer: [range(width // 2) for width in own] for layer, own in widths.items()}
    apply(units_plan(kept, full.config.ffn_widths(), full.config.common_widths), full, tmp_path / "half")
    half = Checkpoint(tmp_path / "half")
    assert half.config.ffn_widths(("shared", "dense")) == {
        layer: tuple(width // 2 for width in own) for layer, own in widths.items()
    }
    assert not {"block_configs", "auto_map"} & half.raw_config.keys()
    assert half.raw_config.get("n_shared_experts") == full.raw_config.get("n_shared_experts")
    assert worst(in_transformers(tmp_path / "half"), logits(half)[0]) <= 1e-4


def test_a_narrowed_model_is_narrowed_again_and_drops_experts(tmp_path: Path) -> None:
    full = whole("qwen2_moe", tmp_path / "full")
    apply(common_plan(full, "layer"), full, tmp_path / "once")
    once = Checkpoint(tmp_path / "once")
    apply(same_plan(once.config.experts_by_layer), once, tmp_path / "same")
    assert worst(logits(Checkpoint(tmp_path / "same")), logits(once)) == 0.0
    again = common_plan(once, "uniform")
    apply(again, once, tmp_path / "twice")
    assert worst(logits(Checkpoint(tmp_path / "twice")), with_zeroed_units(once, again)) <= 1e-5


def test_json_keeps_the_units(tmp_path: Path) -> None:
    plan = common_plan(whole("qwen2_moe", tmp_path / "full"), "layer")
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan
    assert "common" not in plan_to_json(replace(plan, common={}))


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ({"0": ""}, "keeps no hidden unit"),
        ({"0": "0 0"}, "keeps hidden unit 0 twice"),
        ({"0": "1 0"}, "after 1; name units in ascending order"),
        ({"0": "999"}, "keeps hidden unit 999; this FFN has units 0 to"),
        ({"9": "0"}, "neither a shared expert nor a dense FFN"),
        ({"0": "a"}, "common FFN of layer '0'"),
        ({"x": "0"}, "expected a layer number"),
        (["0"], "expected a layer number"),
    ],
)
def test_bad_units_are_one_line_and_nothing_is_written(common: Any, message: str, tmp_path: Path) -> None:
    full = whole("qwen2_moe", tmp_path / "full")
    values = plan_to_json(same_plan(full.config.experts_by_layer)) | {"common": common}
    with pytest.raises(PlanError) as error:
        apply(plan_from_json(values), full, tmp_path / "out")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("width", [0, 999, "8", None])
def test_damaged_widths_are_refused(width: Any, tmp_path: Path) -> None:
    full = whole("qwen2_moe", tmp_path / "full")
    apply(common_plan(full, "layer"), full, tmp_path / "narrow")
    path = tmp_path / "narrow" / "config.json"
    for place, key in ((0, SHARED_WIDTH_KEY), (1, DENSE_WIDTH_KEY)):
        config = json.loads(path.read_text())
        ffn = config["block_configs"][place]["ffn"]
        part = ffn["moe"] or ffn
        part[key], before = width, part[key]
        path.write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=rf"block_configs\[{place}\]\.ffn\S*\.{key} is "):
            Checkpoint(tmp_path / "narrow")
        part[key] = before
        path.write_text(json.dumps(config))


def seen_by_vllm(full: Checkpoint, path: Path, layers: list[int]) -> tuple[Checkpoint, list[dict[str, int]]]:
    """Return a narrowed model, and what vLLM's class of each of these layers reads in its config."""
    apply(common_plan(full, "layer"), full, path)
    narrow = Checkpoint(path)
    own, counts = narrow.config.transformers_config, narrow.config.experts_by_layer
    own.block_configs = narrow.raw_config["block_configs"]
    return narrow, [_shown(narrow.config.architecture, own, layer, counts.get(layer, 0)) for layer in layers]


def test_vllm_sees_each_width(tmp_path: Path) -> None:
    narrow, seen = seen_by_vllm(whole("qwen2_moe", tmp_path / "full"), tmp_path / "narrow", [0, 1])
    assert seen[0]["shared_expert_intermediate_size"] == narrow.config.common_widths[0]
    assert seen[1]["intermediate_size"] == narrow.config.common_widths[1]


def test_vllm_refuses_two_widths_of_one_key(tmp_path: Path) -> None:
    full = whole("llama4_text", tmp_path / "full")
    with pytest.raises(UnsupportedError, match="one key"):
        seen_by_vllm(full, tmp_path / "narrow", [0])
