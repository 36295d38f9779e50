"""Commands on families whose experts are in groups and whose attention is latent, and refusals that name the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace, run
from click.testing import CliRunner
from conftest import FURTHER_FAMILIES, SIZES, save_reference

import cli
from compress.plans.apply import apply, planned_decoder
from compress.plans.plan import pruning_plan
from compress.plans.selection import Budget
from engine.checkpoint import remote_code, vllm_plugin
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder, gate_of
from engine.decoder.parameters import parameters_on_disk
from engine.decoder.routing import AllExperts, SampledExperts, SigmoidTopK
from engine.errors import CheckpointError, OptionError, UnsupportedError
from engine.families.block_configs import GROUPS_KEY
from engine.families.resolve import decoder_config

TEXT = [*CALIBRATION, "--evaluation-samples", "2"]


@pytest.fixture(name="place")
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_workplace(tmp_path, "deepseek_v3")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli.main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 1, result.output
    return " ".join(result.stderr.split())


def groups_of(path: Path) -> list[tuple[int, ...]]:
    return [moe.groups for layer in Checkpoint(path).config.layers if (moe := layer.moe) is not None]


@pytest.mark.slow
def test_every_command(place: Path) -> None:
    assert run("inspect", "model")["experts_per_layer"] == [12, 12]
    assert run("calibrate", "model", *CALIBRATION, "-o", "statistics")["tokens"] == 64
    third = ["--sparsity", "0.33", "--statistics", "statistics", *TEXT]
    for method, options in {
        "frequency": ["--uniform"],
        "fisher": ["--recover-steps", "1"],
        "naee": [],
        "diep": ["--epochs", "1", "--merge", "cka"],
    }.items():
        assert run("prune", "model", "--method", method, *third, *options, "-o", method)["experts_after"] == 16
        assert run("inspect", method, "--checksums")["valid"]
    assert groups_of(place / "frequency") == [(0, 0, 1, 1, 2, 2, 3, 3)] * 2
    assert "auto_map" not in Checkpoint(place / "frequency").raw_config
    merged = run("merge", "model", "--experts", "8", *TEXT, "-o", "merged")
    assert merged["experts_per_layer"] == [8, 8]
    dense = run("densify", "model", "--ffns", "2", "--distill-steps", "2", "--batch-size", "2", *TEXT, "-o", "dense")
    assert dense["family_note"] == "a deepseek_v3 whose layers are all dense"
    assert dense["shared_gate_error_per_layer"] is None and Checkpoint(place / "dense").config.moe_layers == ()
    for name in ("model", "fisher", "merged", "dense"):
        assert run("generate", name, "-p", "the quick", "-n", "4")["generated_tokens"] <= 4
        assert run("evaluate", name, *CALIBRATION)["value"] > 1.0
    assert len(run("bench", "model", "-p", "4", "-n", "2", "-r", "1")["rows"]) == 2
    assert run("generate", "fisher", "-p", "the", "-n", "4", "--skip-threshold", "1")["experts_skipped_share"] >= 0.0
    assert run("export", "fisher", "--format", "onnx", "--skip-threshold", "1", "-o", "onnx")["bytes"] > 0
    recipe = ["--recipe", "sar", *CALIBRATION, "--steps", "1", "--batch-size", "2"]
    assert run("distill", "--teacher", "model", "--student", "dense", *recipe, "-o", "distilled")["steps"] == 1


@pytest.mark.slow
def test_every_command_on_single_blocks_and_experts_without_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path, "nemotron_h", n_group=1, topk_group=1)
    monkeypatch.chdir(tmp_path)
    assert run("inspect", "model")["experts_per_layer"] == [12, 12]
    assert run("calibrate", "model", *CALIBRATION, "-o", "statistics")["tokens"] == 64
    third = ["--sparsity", "0.34", *TEXT, "--granularity", "expert"]
    for method, options in {
        "frequency": ["--uniform", "--statistics", "statistics"],
        "fisher": ["--recover-steps", "1"],
        "naee": [],
        "diep": ["--epochs", "1", "--merge", "cka"],
    }.items():
        assert run("prune", "model", "--method", method, *third, *options, "-o", method)["experts_after"] == 16
        assert run("inspect", method, "--checksums")["valid"]
    units = ["--sparsity", "0.5", *TEXT, "--granularity", "unit"]
    for name, options in {
        "halves": ["--uniform", "--correct"],
        "widths": [],
        "common": ["--include", "shared,dense", "--method", "unit-obs"],
    }.items():
        assert run("prune", "model", *units, *options, "-o", name)["experts_after"] == 24
        assert run("inspect", name, "--checksums")["valid"]
    merged = run("merge", "model", "--experts", "8", *TEXT, "-o", "merged")
    assert merged["experts_per_layer"] == [8, 8]
    dense = run("densify", "model", "--ffns", "2", "--distill-steps", "2", "--batch-size", "2", *TEXT, "-o", "dense")
    assert dense["family_note"] == "a nemotron_h whose layers are all dense"
    aware = ["--activation-aware", "--group-size", "-1", *TEXT]
    run("quantize", "model", "--bits", "8", *aware, "-o", "quantized")
    for name in ("model", "fisher", "halves", "widths", "common", "merged", "dense", "quantized"):
        assert run("generate", name, "-p", "the quick", "-n", "4")["generated_tokens"] <= 4
        assert run("evaluate", name, *CALIBRATION)["value"] > 1.0
    assert len(run("bench", "model", "-p", "4", "-n", "2", "-r", "1")["rows"]) == 2
    assert run("generate", "fisher", "-p", "the", "-n", "4", "--skip-threshold", "1")["experts_skipped_share"] >= 0.0
    assert "its Mamba-2 layers keep a state" in refused("export", "model", "--format", "onnx", "-o", "onnx")
    found = refused("export", "model", "--format", "gguf", "-o", "model.gguf")
    assert "layer 3 is an FFN without experts, which llama.cpp does not have beside experts" in found
    recipe = ["--recipe", "sar", *CALIBRATION, "--steps", "1", "--batch-size", "2"]
    assert run("distill", "--teacher", "model", "--student", "dense", *recipe, "-o", "distilled")["steps"] == 1


def test_what_cannot_be_is_refused_before_any_work(place: Path) -> None:
    uniform = ["prune", "model", "--uniform", *TEXT, "-o", "out"]
    found = refused(*uniform, "--sparsity", "0.5", "--granularity", "expert")
    assert "keep 6 experts in layer 1, and its 4 groups need as many each, at least 2" in found
    assert "keep 4 experts in layer 1" in refused(*uniform, "--experts", "4")
    assert "naee does not select experts group by group" in refused(*uniform, "--experts", "8", "--method", "naee")
    assert "caches no keys and values of heads" in refused("export", "model", "--format", "onnx-genai", "-o", "out")
    assert "attention width 40" in refused("export", "model", "--precision", "int8", "-o", "out")
    assert not (place / "out").exists()


def test_uniform_results_keep_the_best_of_each_group() -> None:
    scores = {0: torch.tensor([9.0, 8.0, 7.0, 1.0, 3.0, 2.0])}
    budget = Budget(experts=4, scope="uniform")
    assert budget.select(scores) == {0: [0, 1, 2, 4]}
    assert budget.select(scores, {0: (0, 0, 0, 1, 1, 1)}) == {0: [0, 1, 4, 5]}


def test_groups_are_written_and_read_again(tmp_path: Path) -> None:
    save_reference("deepseek_v2", tmp_path / "full")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    apply(pruning_plan({1: [0, 4, 5, 9], 2: [3]}), Checkpoint(tmp_path / "full"), tmp_path / "one")
    raw = Checkpoint(tmp_path / "one").raw_config
    moes = [block["ffn"]["moe"] for block in raw["block_configs"]]
    assert moes[:2] == [None, {"num_local_experts": 4, GROUPS_KEY: [0, 1, 1, 3]}] and raw["num_experts_per_tok"] == 3
    apply(pruning_plan({1: [1, 2, 3], 2: [0]}), Checkpoint(tmp_path / "one"), tmp_path / "two")
    assert groups_of(tmp_path / "two") == [(1, 1, 3), (1,)]
    again = Checkpoint(tmp_path / "two").raw_config
    remote_code.check_loadable(tmp_path / "two", again)
    assert again["auto_map"] == remote_code.auto_map()
    for wrong, message in (([0, 1, 1], "a list of 4 groups"), ([0, 1, 1, 4], "from 0 to 3"), ("0 1 1 3", "a list of 4")):
        moes[1][GROUPS_KEY] = wrong
        with pytest.raises(CheckpointError, match=message):
            decoder_config(raw)
    del moes[1][GROUPS_KEY], moes[2][GROUPS_KEY]
    with pytest.raises(CheckpointError, match="3 experts of 2 groups that have 1 each"):
        decoder_config(raw)


def test_vllm_is_not_given_groups_of_different_sizes() -> None:
    config = {"block_configs": [{"ffn": {"moe": {"num_local_experts": 1, GROUPS_KEY: [2]}}}]}
    with pytest.raises(UnsupportedError, match="vLLM supports one group size only"):
        vllm_plugin.check_groups(config)


def test_results_of_a_family_under_another_name_have_the_known_one(tmp_path: Path) -> None:
    save_reference("kimi_k2", tmp_path / "full")
    full = Checkpoint(tmp_path / "full")
    with pytest.raises(OptionError, match="transformers has no kimi_k2"):
        remote_code.check_loadable(tmp_path / "full", full.raw_config)
    (tmp_path / "out").mkdir()
    apply(pruning_plan({1: [0, 4, 5, 9], 2: [3]}), full, tmp_path / "out")
    raw = Checkpoint(tmp_path / "out").raw_config
    assert (raw["model_type"], raw["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    remote_code.check_loadable(tmp_path / "out", raw)
    assert raw["auto_map"] == remote_code.auto_map()


# Use of a router's scores elsewhere


def test_a_bias_that_chooses_stays_float32_and_is_not_trained(tmp_path: Path) -> None:
    save_reference("glm4_moe", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    plan = pruning_plan({1: [0, 5, 7], 2: [1, 2, 3]})
    whole = Decoder(checkpoint.config, checkpoint.source(torch.bfloat16))
    for decoder in (whole, planned_decoder(plan, checkpoint, torch.bfloat16)):
        assert decoder.dtype == torch.bfloat16
        rules = [block.routing for block in decoder.moe_blocks]
        assert all(isinstance(rule, SigmoidTopK) and rule.bias_N.dtype == torch.float32 for rule in rules)
    names = parameters_on_disk(Decoder(checkpoint.config, checkpoint.source(torch.float32)))
    assert set(checkpoint.shapes) - set(names) == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "nemotron_h"])
def test_every_tensor_has_its_parameter(family: str, tmp_path: Path) -> None:
    """A bias that selects experts has none."""
    biases = "expert_bias", "correction_bias"
    save_reference(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    found = parameters_on_disk(Decoder(checkpoint.config, checkpoint.source(torch.float32)))
    expected = {name: shape for name, shape in checkpoint.shapes.items() if not name.endswith(biases)}
    assert {name: tuple(each.shape) for name, each in found.items()} == expected


def test_gates_of_sigmoid_scores_are_shares_of_them(tmp_path: Path) -> None:
    """A teacher runs all experts, or all but one."""
    save_reference("deepseek_v3", tmp_path)
    moe = Checkpoint(tmp_path).config.layers[1].moe
    assert moe is not None
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    scores = 1 / (1 + torch.tensor([2.0, -1.0, 0.5]).neg().exp())
    everything = AllExperts(moe.weight_scale, gate_of(moe))(logits)
    assert torch.allclose(everything.weights[0], 1.7 * scores / scores.sum())
    most = SampledExperts(0.0, torch.Generator(), scale=1.7, gate=gate_of(moe))(logits)
    assert most.experts.tolist() == [[0, 2]]
    assert torch.allclose(most.weights[0], 1.7 * scores[[0, 2]] / scores[[0, 2]].sum())


# Refusals


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=true"),
        ("deepseek", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("deepseek", {"head_dim": 4}, "head_dim=4"),
        ("lfm2_moe", {"conv_bias": True}, "conv_bias=True"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias=False"),
        ("lfm2_moe", {"layer_types": ["conv", "full_attention", "linear_attention"]}, "linear_attention"),
        ("lfm2_moe", {"layer_types": ["conv"] * 3}, "layer_types"),
        ("nemotron_h", {"layers_block_type": ["moe", "linear_attention"]}, "layer_types"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ("nemotron_h", {"use_bias": True}, "use_bias=True"),
        ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias=False"),
        ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size=16"),
        ("qwen3_next", {"layer_types": ["conv", "full_attention", "linear_attention"]}, "conv"),
        ("deepseek", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ("qwen3_moe", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        decoder_config({"model_type": family} | SIZES | FURTHER_FAMILIES.get(family, {}) | changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {"n_group": 5}, r"12 experts cannot share 5 groups evenly \(n_group\)"),
        ("deepseek_v3", {"topk_group": 5}, r"cannot use 5 of 4 groups \(topk_group\)"),
        ("deepseek_v3", {"num_experts_per_tok": 7}, "cannot use 7 experts of 2 groups that have 3 each"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "latent attention of 4 heads has num_key_value_heads 2"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v3", {"routed_scaling_factor": -1.0}, "routed_scaling_factor is -1.0"),
        ("glm4_moe", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ("lfm2_moe", {"conv_L_cache": 0}, "conv_L_cache is 0"),
        ("lfm2_moe", {"norm_eps": 2.0}, "norm_eps is 2.0"),
    ],
    ids=str,
)
def test_a_config_that_disagrees_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({"model_type": family} | SIZES | FURTHER_FAMILIES[family] | changes)
