"""LLaMA-MoE v1, which transformers lacks, against the naive model of naive_llama_moe.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace, run
from click.testing import CliRunner
from conftest import FAMILIES, SIZES, save_reference
from naive_llama_moe import Config, NaiveLlamaMoe
from safetensors.torch import load_file, save_file
from torch import Tensor

import cli
from calibrate.collect import collect
from calibrate.instructions import Example
from compress.distillation.recover import trained_parameters
from compress.distillation.response_distillation import Responses
from compress.distillation.student_aware_routing import RouterLoss, router_parameters
from compress.plans.apply import apply
from compress.plans.plan import Part, Plan, PlannedExpert, Source, concatenation_plan, kept_expert, pruning_plan
from compress.run.clock import Clock
from compress.training.training import Batch
from engine.checkpoint import remote_code
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder, routed_by
from engine.decoder.routing import Noisy, TopK
from engine.errors import CheckpointError, CompressError, OptionError, UnsupportedError
from engine.families.router import GATE_WIDTH_KEY
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import expert_tensor, gate_hidden_tensor, router_noise_tensor, router_tensor

FAMILY = "llama_moe"
ROW = ARCHITECTURES[FAMILY]
TOKENS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
UNIFORM = {0: [1, 4, 5], 1: [0, 2, 3], 2: [0, 1, 5]}
NON_UNIFORM = {0: [4], 1: [0, 1, 2, 3, 4, 5], 2: [0, 2, 3]}
TEXT = [*CALIBRATION, "--evaluation-samples", "2"]


def naive(path: Path, **settings: Any) -> NaiveLlamaMoe:
    """Return a tiny random model, written to `path`."""
    model = NaiveLlamaMoe.random(**SIZES | FAMILIES[FAMILY] | settings)
    model.save_pretrained(path)
    return model


def decoder_of(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    checkpoint = Checkpoint(path)
    return Decoder(checkpoint.config, checkpoint.source(dtype))


@torch.no_grad()
def logits(path: Path) -> Tensor:
    return decoder_of(path)(TOKENS)


def worst(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).detach().abs().max())


# Equal functions


@pytest.mark.parametrize(
    "settings",
    [
        {"score_scale_factor": 3.0},
        {"score_scale_factor": [0.5, 2.0, 1.25], "num_selects": 3, "num_key_value_heads": 4},
        {"size_experts": [[8] * 6] * 3, "gate_add_noise": False},
        {"num_experts": 4, "num_selects": 4, "rope_scaling": {"type": "linear", "factor": 2.5}},
        {"num_selects": 1},
    ],
    ids=["plain", "a factor for each layer", "sizes given, no noise", "every expert, positions scaled", "top-1"],
)
@torch.no_grad()
def test_logits_equal_the_naive_model(settings: dict[str, Any], tmp_path: Path) -> None:
    model = naive(tmp_path, **settings)
    decoder = decoder_of(tmp_path)
    expected = model(TOKENS).logits
    assert worst(decoder(TOKENS), expected) <= 1e-5
    cache = KeyValueCache(decoder.config, 2, 12, torch.float32)
    steps = [decoder(TOKENS[:, :5], cache=cache)] + [decoder(TOKENS[:, i : i + 1], cache=cache) for i in range(5, 12)]
    assert worst(torch.cat(steps, 1), expected) <= 1e-5
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, :5] = False
    padded = TOKENS.masked_fill(~real, 0)
    assert worst(decoder(padded, real)[real], model(padded, attention_mask=real.long()).logits[real]) <= 1e-5


def test_what_the_config_resolves_to(tmp_path: Path) -> None:
    naive(tmp_path, num_selects=3)
    config = Checkpoint(tmp_path).config
    assert config.experts_per_layer == (6, 6, 6) and config.experts_per_token == 3
    moes = [layer.moe for layer in config.layers]
    assert [moe.weight_scale for moe in moes] == [3.0, 2.0, 1.5]
    assert {(moe.expert_width, moe.gate_network_width, moe.noise_epsilon) for moe in moes} == {(8, 6, 0.01)}


def test_the_tokenizer_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    make_workplace(tmp_path, FAMILY)
    own, text = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model"), " größer  als €5\n"
    assert load_tokenizer(Checkpoint(tmp_path / "model")).encode(text) == own.encode(text)


# Noise, in training only


def test_noise_changes_nothing_unless_it_is_asked_for(tmp_path: Path) -> None:
    model = naive(tmp_path)
    decoder = decoder_of(tmp_path)
    assert [block.routing for block in decoder.moe_blocks] == [TopK(2, True, scale) for scale in (3.0, 2.0, 1.5)]
    before = logits(tmp_path)
    for name in model.tensors:
        if "weight_noise" in name:
            model.tensors[name].mul_(100.0)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(tmp_path), before)


def test_noise_reaches_the_layers_of_a_decoder_and_trains_what_it_is_made_of(tmp_path: Path) -> None:
    naive(tmp_path)
    decoder = decoder_of(tmp_path)
    before = logits(tmp_path)

    def noisy(seed: int) -> Tensor:
        blocks = zip(decoder.moe_blocks, decoder.config.layers, strict=True)
        rules = [Noisy(block.routing, block.noise_ND, layer.moe.noise_epsilon, seed) for block, layer in blocks]
        with routed_by(decoder, rules):
            return decoder(TOKENS)

    trained = [block.noise_ND.requires_grad_(True) for block in decoder.moe_blocks]
    first = noisy(0)
    assert worst(first, before) > 1e-2 and torch.equal(noisy(0), first) and worst(noisy(1), first) > 1e-2
    first.square().mean().backward()
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in trained)
    with torch.no_grad():
        assert torch.equal(decoder(TOKENS), before)


def test_the_routers_step_trains_the_gate_network_and_its_noise(tmp_path: Path) -> None:
    """Student-aware routing has the gradients of finite differences, with layers kept or recomputed and the same noise."""
    naive(tmp_path / "teacher")
    save_reference("llama", tmp_path / "student")
    both = [Checkpoint(tmp_path / name) for name in ("teacher", "student")]
    teacher, student = (Decoder(each.config, each.source(torch.float64)) for each in both)
    routers = router_parameters(teacher)
    kinds = {name.rsplit("gate.", 1)[1] for name in routers}
    assert kinds == {"gate_network.0.weight", "gate_network.2.weight", "weight_noise.weight"}
    for router in routers.values():
        router.data = router.data.clone()
        router.requires_grad_(True)
    rows, examples = torch.tensor([0, 1]), [Example([5, 6], [7, 8, 9]), Example([10], [11])]
    loss = RouterLoss(teacher, student, Responses(examples, Clock()), balance=0.5)

    def value(seed: int = 3) -> Tensor:
        return torch.stack(list(loss(Batch(0, rows, rows, torch.Generator().manual_seed(seed))).values())).sum()

    gradients = []
    for teacher.checkpoint_activations in (False, True):
        gradients.append(torch.autograd.grad(value(), list(routers.values())))
    assert all(map(torch.equal, *gradients))
    assert float(value().detach()) != float(value(seed=4).detach())
    generator = torch.Generator().manual_seed(0)
    for router, gradient in zip(routers.values(), gradients[0], strict=True):
        direction = torch.randn(router.shape, generator=generator, dtype=torch.float64)
        values, kept = [], router.data.clone()
        for step in (1e-6, -1e-6):
            router.data = kept + step * direction
            values.append(float(value().detach()))
        router.data = kept
        assert float((gradient * direction).sum()) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-7)


# Pruning and merging


@pytest.mark.parametrize("kept", [UNIFORM, NON_UNIFORM], ids=["uniform", "non-uniform"])
def test_removing_experts_equals_masking_their_logits(kept: dict[int, list[int]], tmp_path: Path) -> None:
    model = naive(tmp_path / "full")
    apply(pruning_plan(kept), Checkpoint(tmp_path / "full"), tmp_path / "pruned")
    masked = NaiveLlamaMoe(model.config, model.tensors, kept)
    expected = masked(TOKENS).logits
    assert worst(logits(tmp_path / "pruned"), expected) <= 3e-6
    assert worst(logits(tmp_path / "full"), expected) > 1e-2, "and it is another function than the full model's"
    pruned, full = Checkpoint(tmp_path / "pruned"), Checkpoint(tmp_path / "full")
    for layer, experts in kept.items():
        hidden = gate_hidden_tensor(ROW, layer)
        assert torch.equal(pruned.tensor(hidden), full.tensor(hidden)), "the gate network keeps its hidden units"
        for name in (router_tensor(ROW, layer), router_noise_tensor(ROW, layer)):
            assert torch.equal(pruned.tensor(name), full.tensor(name)[experts])


def test_the_config_of_a_result(tmp_path: Path) -> None:
    """The config has the keys of the family's own class, and one key of ours for a value that the class assumes."""
    model = naive(tmp_path / "full")
    full = Checkpoint(tmp_path / "full")
    apply(pruning_plan(UNIFORM), full, tmp_path / "uniform")
    config = Checkpoint(tmp_path / "uniform").raw_config
    changed = {"num_experts": 3, "num_selects": 2, "intermediate_size": 24, "size_experts": [[8] * 3] * 3}
    assert config == {k: v for k, v in model.config.values.items() if k != "auto_map"} | changed | {GATE_WIDTH_KEY: 6}
    apply(pruning_plan(NON_UNIFORM), full, tmp_path / "uneven")
    config = Checkpoint(tmp_path / "uneven").raw_config
    assert config["size_experts"] == [[8], [8] * 6, [8] * 3] and config["intermediate_size"] == 48
    assert [block["ffn"]["moe"]["num_local_experts"] for block in config["block_configs"]] == [1, 6, 3]
    assert "auto_map" not in config and GATE_WIDTH_KEY not in config
    assert not list((tmp_path / "uneven").glob("*.py"))
    apply(pruning_plan({layer: range(6) for layer in range(3)}), full, tmp_path / "whole")
    assert GATE_WIDTH_KEY not in Checkpoint(tmp_path / "whole").raw_config
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    again = NaiveLlamaMoe(Config(Checkpoint(tmp_path / "whole").raw_config), weights)
    assert worst(again(TOKENS).logits, model(TOKENS).logits) == 0.0


def test_pruning_again(tmp_path: Path) -> None:
    model = naive(tmp_path / "full")
    apply(pruning_plan(NON_UNIFORM), Checkpoint(tmp_path / "full"), tmp_path / "once")
    once = Checkpoint(tmp_path / "once")
    apply(pruning_plan({0: [0], 1: [5], 2: [2]}), once, tmp_path / "twice")
    expected = NaiveLlamaMoe(model.config, model.tensors, {0: [4], 1: [5], 2: [3]})(TOKENS).logits
    assert worst(logits(tmp_path / "twice"), expected) <= 3e-6
    assert Checkpoint(tmp_path / "twice").raw_config[GATE_WIDTH_KEY] == 6


def test_merging_is_the_weighted_sum(tmp_path: Path) -> None:
    model = naive(tmp_path / "full")
    merged = PlannedExpert((Part((Source(0, 0.75), Source(3, 0.25))),), (Source(0, 0.5), Source(3, 0.5)))
    plan = Plan({layer: (merged, kept_expert(1), kept_expert(4)) for layer in range(3)})
    apply(plan, Checkpoint(tmp_path / "full"), tmp_path / "merged")
    tensors = dict(model.tensors)
    for layer in range(3):
        for projection in range(3):
            zero, three = (tensors[expert_tensor(ROW, layer, expert, projection)] for expert in (0, 3))
            tensors[expert_tensor(ROW, layer, 0, projection)] = 0.75 * zero + 0.25 * three
        rows = tensors[router_tensor(ROW, layer)].clone()
        rows[0] = 0.5 * rows[0] + 0.5 * rows[3]
        tensors[router_tensor(ROW, layer)] = rows
        noise, of = (c.tensor(router_noise_tensor(ROW, layer)) for c in map(Checkpoint, paths(tmp_path)))
        assert torch.allclose(noise, torch.stack([0.5 * of[0] + 0.5 * of[3], of[1], of[4]]))
    expected = NaiveLlamaMoe(model.config, tensors, {layer: [0, 1, 4] for layer in range(3)})(TOKENS).logits
    assert worst(logits(tmp_path / "merged"), expected) <= 3e-6


def paths(path: Path) -> tuple[Path, Path]:
    return path / "merged", path / "full"


def test_what_recovery_trains_is_what_the_logits_are_made_of(tmp_path: Path) -> None:
    naive(tmp_path)
    trained = trained_parameters(decoder_of(tmp_path))
    gates = sorted(name for name in trained if "norm" not in name)
    assert gates == sorted(f"model.layers.{i}.mlp.gate.gate_network.{j}.weight" for i in range(3) for j in (0, 2))


# Dense


def test_concatenated_experts_are_a_llama(tmp_path: Path) -> None:
    model = naive(tmp_path / "full")
    chosen = {layer: [(expert, 1.0) for expert in range(6)] for layer in range(3)}
    apply(concatenation_plan(chosen), Checkpoint(tmp_path / "full"), tmp_path / "dense")
    dense = Checkpoint(tmp_path / "dense")
    assert dense.config.architecture.model_type == "llama" and dense.raw_config["intermediate_size"] == 48
    own = ROW.reads.union(ROW.settings) - {"intermediate_size", "head_dim", "attention_bias", "rope_parameters"}
    assert "num_selects" in own and not own & set(dense.raw_config)
    assert worst(logits(tmp_path / "dense"), transformers_logits(tmp_path / "dense")) <= 1e-5
    ffn = decoder_of(tmp_path / "dense").layers[1].feed_forward
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    whole = sum(model.expert(1, expert, x[0].double()) for expert in range(6))
    assert torch.allclose(ffn(x)[0].double(), whole, atol=1e-6)


@torch.no_grad()
def transformers_logits(path: Path) -> Tensor:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert type(loaded) is LlamaForCausalLM
    return loaded(TOKENS).logits


# Calibration


def test_statistics_equal_a_naive_count(tmp_path: Path) -> None:
    model = naive(tmp_path)
    statistics = collect(Checkpoint(tmp_path), TOKENS, dtype=torch.float32)
    model(TOKENS)
    for index, layer in statistics.layers.items():
        seen = [entry[1:] for entry in model.routed if entry[0] == index]
        counts, probability, routed, weight, normed, norm = (torch.zeros(6, dtype=torch.float64) for _ in range(6))
        gram, ratios = torch.zeros(6, 6, dtype=torch.float64), []
        for z, experts, weights, outputs in seen:
            p = z.softmax(0)
            probability += p
            gram += torch.outer(z, z)
            ratios.append(weights[1] / weights[0])
            for expert, w, output in zip(experts, weights, outputs, strict=True):
                counts[expert] += 1
                routed[expert] += p[expert]
                weight[expert] += w
                normed[expert] += w * output.norm()
                norm[expert] += output.norm()
        assert layer.tokens_routed.tolist() == counts.tolist() and int(layer.tokens) == 24
        for got, expected in (
            (layer.probability_sum, probability),
            (layer.routed_probability_sum, routed),
            (layer.weight_sum, weight),
            (layer.weighted_norm_sum, normed),
            (layer.norm_sum, norm),
            (layer.router_gram, gram),
            (layer.weight_ratio_median.double(), torch.tensor(sorted(ratios)[11:12], dtype=torch.float64)),
        ):
            assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
        assert float(layer.weight_sum.sum()) == pytest.approx(24 * FAMILIES[FAMILY]["score_scale_factor"][index], rel=1e-5)


# Every command


@pytest.fixture(name="place")
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_workplace(tmp_path, FAMILY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_command(place: Path) -> None:
    inspected = run("inspect", "model")
    assert (inspected["architecture"], inspected["experts_per_layer"]) == (FAMILY, [6, 6, 6])
    assert run("calibrate", "model", *CALIBRATION, "-o", "statistics")["tokens"] == 64
    half = ["--sparsity", "0.5", "--statistics", "statistics", *TEXT]
    for method, options in {
        "frequency": ["--uniform"],
        "reap": ["--recover-steps", "2"],
        "fisher": [],
        "naee": [],
        "diep": ["--epochs", "1", "--merge", "cka"],
    }.items():
        figures = run("prune", "model", "--method", method, *half, *options, "-o", method)
        assert figures["experts_after"] == 9 and "only moe-compress loads it" in figures["loading_note"]
        assert run("inspect", method, "--checksums")["valid"]
    assert Checkpoint(place / "frequency").config.experts_per_layer == (3, 3, 3)
    card = (place / "frequency" / "README.md").read_text()
    assert "Only moe-compress loads it" in card and "AutoModel" not in card and "library_name" not in card
    assert run("merge", "model", "--experts", "3", *TEXT, "-o", "merged")["experts_per_layer"] == [3, 3, 3]
    dense = run("densify", "model", "--ffns", "2", "--distill-steps", "2", "--batch-size", "2", *TEXT, "-o", "dense")
    assert dense["family"] == "llama" and dense["loading_note"] is None
    assert "AutoModel" in (place / "dense" / "README.md").read_text()
    for name in ("model", "fisher", "merged", "dense"):
        assert run("generate", name, "-p", "the quick", "-n", "4")["generated_tokens"] <= 4
        assert run("evaluate", name, *CALIBRATION)["value"] > 1.0
    assert len(run("bench", "model", "fisher", "-p", "4", "-n", "2", "-r", "1")["rows"]) == 4
    assert run("generate", "fisher", "-p", "the", "-n", "4", "--skip-threshold", "1")["experts_skipped_share"] >= 0.0


def test_people_are_told_who_loads_it(place: Path) -> None:
    said = CliRunner().invoke(
        cli.main, ["prune", "model", "--plan", "plan.json", *TEXT, "-o", "out"], catch_exceptions=False
    )
    assert said.exit_code == 0 and "note: only moe-compress loads it: transformers has no llama_moe" in said.stdout
    for name in ("model", "out"):
        with pytest.raises(OptionError, match="transformers has no llama_moe; use our own engine"):
            remote_code.check_loadable(place / name, Checkpoint(place / name).raw_config)


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate_type": "SwitchBalancedGate"}, "gate_type='SwitchBalancedGate'"),
        ({"gate_network": "linear"}, "gate_network='linear'"),
        ({"gate_use_softmax": False}, "gate_use_softmax=False"),
        ({"gate_add_noise": "some"}, "gate_add_noise='some'"),
        ({"calculator_type": "SwitchDropTokenCalculator"}, "calculator_type="),
        ({"multiply_gate_scores": False}, "multiply_gate_scores=False"),
        ({"add_weight_norm": True}, "add_weight_norm=True"),
        ({"rope_theta": 5e5}, "rope_theta=500000.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters="),
        ({"head_dim": 16}, "head_dim=16"),
        ({"num_experts_residual": 2}, "num_experts_residual=2"),
        ({"size_experts": [[8] * 6, [4, 12, 8, 8, 8, 8], [8] * 6]}, r"size_experts\[1\] is .*experts of one width"),
        ({"size_experts": [[8] * 6, [8] * 5, [8] * 6]}, r"size_experts\[1\]"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_config(tmp_path, settings)
    with pytest.raises(UnsupportedError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 7}, "7 experts cannot share intermediate_size 48 evenly"),
        ({"num_selects": 7}, r"cannot use 7 of 6 experts \(num_selects\)"),
        ({"size_experts": [[8] * 6] * 2}, "size_experts must be a list for each layer"),
        ({"size_experts": 8}, "size_experts must be a list for each layer"),
        ({"score_scale_factor": [1.0]}, "score_scale_factor is"),
        ({"score_scale_factor": "4"}, "score_scale_factor is"),
        ({"gate_noise_epsilon": -1.0}, "gate_noise_epsilon is"),
        ({"gate_noise_epsilon": None}, "gate_noise_epsilon is"),
        ({GATE_WIDTH_KEY: 0}, "gate_network_width is 0"),
        ({GATE_WIDTH_KEY: 5}, "gate_network"),
        ({"gate_add_noise": False}, "weight_noise.weight is not part"),
    ],
    ids=str,
)
def test_a_config_that_disagrees_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_config(tmp_path, settings)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def write_config(path: Path, settings: dict[str, Any]) -> None:
    """Write a good checkpoint with another config.json."""
    model = naive(path)
    Config(model.config.values | settings).save_pretrained(path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = naive(tmp_path)
    name = "model.layers.1.mlp.calculator.experts.weight_down.2"
    save_file(model.tensors | {name: model.tensors[name].T.contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CompressError, match=r"weight_down\.2 has shape \[8, 32\]"):
        Checkpoint(tmp_path)
