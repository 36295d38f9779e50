"""`compress densify` end to end: exact if experts are alike, bit-identical when resumed, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, kill_while_it_trains, listing, make_workplace, refused, run
from click.testing import CliRunner
from conftest import DENSIFIED, others_slow, save_tensors
from packages_for_tests import needs_matplotlib
from safetensors.torch import load_file, save_file
from torch import Tensor

import cli
import compress.dense.dense_training
import compress.run.result
from compress.options.densify import SELECTIONS
from compress.training.layer_distillation import DistillationLoss
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import expert_parts, expert_tensor, router_tensor, shared_gate_tensor

ROOT = Path(__file__).resolve().parents[3]
TEXT = [*CALIBRATION, "--evaluation-samples", "2"]
DENSIFY = ["densify", "model", *TEXT, "-o", "out"]
TRAIN = [*DENSIFY, "--distill-steps", "6", "--finetune-steps", "4", "--batch-size", "4", "--validation-samples", "2"]
TRAIN += ["--validate-every", "3", "--save-every", "2", "--learning-rate", "0.01"]
TOKENS = torch.randint(3, 200, (2, 17), generator=torch.Generator().manual_seed(1))
KEYS = (
    "artifact method sparsity experts_before experts_after experts_per_layer parameters_before parameters_after "
    "bytes_before bytes_after perplexity_before perplexity_after seconds peak_memory_bytes ffns selected_experts"
)


@pytest.fixture(name="place")
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_experts_alike(path: Path) -> None:
    """Make every expert equal to the first of its layer, and a shared expert's gate always one half."""
    checkpoint = Checkpoint(path)
    row = checkpoint.config.architecture
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.shapes}
    for layer, experts in checkpoint.config.experts_by_layer.items():
        for expert in range(experts):
            for projection in expert_parts(row):
                first = tensors[expert_tensor(row, layer, 0, projection)]
                tensors[expert_tensor(row, layer, expert, projection)] = first.clone()
        if row.shared:
            tensors[shared_gate_tensor(row, layer)].zero_()
    save_tensors(tensors, checkpoint, path)


@torch.no_grad()
def logits(path: Path) -> Tensor:
    checkpoint = Checkpoint(path)
    return Decoder(checkpoint.config, checkpoint.source(torch.float32))(TOKENS)


@torch.no_grad()
def transformers_logits(path: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(TOKENS).logits


@pytest.mark.parametrize("family", others_slow(DENSIFIED, "mixtral", "qwen2_moe", "gpt_oss", "llama_moe"))
@pytest.mark.parametrize("options", [["--ffns", "1"], ["--ffns", "3", "--select", "average"]], ids=["one", "averages"])
def test_experts_that_are_alike_become_dense_without_a_difference(
    family: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {} if ARCHITECTURES[family].router.normalized else {"norm_topk_prob": True}
    make_workplace(tmp_path, family, **changes)
    make_experts_alike(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    figures = run(*DENSIFY, *options)
    row = ARCHITECTURES[family]
    assert figures["family"] == (row.dense_sibling or family)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == figures["family"] and "auto_map" not in config
    full = (transformers_logits if row.in_transformers else logits)(tmp_path / "model")
    assert float((logits(tmp_path / "out") - full).abs().max()) <= 1e-5
    assert float((transformers_logits(tmp_path / "out") - full).abs().max()) <= 1e-5
    assert figures["perplexity_after"] == pytest.approx(figures["perplexity_before"], rel=1e-5)
    assert max(figures["block_error_per_layer"]) < 1e-5
    if row.shared:
        assert max(figures["shared_gate_error_per_layer"]) < 1e-5


def test_weights_that_the_model_does_not_normalise_are_folded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a router that scores all experts equally, top-2 of 6 weigh 1/3 together."""
    make_workplace(tmp_path, "qwen3_moe", norm_topk_prob=False)
    make_experts_alike(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors, row = load_file(path), ARCHITECTURES["qwen3_moe"]
    for layer in range(3):
        tensors[router_tensor(row, layer)].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    run(*DENSIFY)
    assert float((logits(tmp_path / "out") - logits(tmp_path / "model")).abs().max()) <= 1e-5


def test_the_dense_ffns_have_the_dtype_of_the_experts(place: Path) -> None:
    path = place / "model" / "model.safetensors"
    tensors = {name: tensor.bfloat16() if "experts" in name else tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    run(*DENSIFY)
    made = load_file(place / "out" / "model.safetensors")
    assert made["model.embed_tokens.weight"].dtype == torch.float32
    assert {tensor.dtype for name, tensor in made.items() if ".mlp." in name} == {torch.bfloat16}


@pytest.mark.parametrize("select", SELECTIONS)
def test_every_selection_from_one_statistics_file(place: Path, select: str) -> None:
    run("calibrate", "model", *CALIBRATION, "-o", "statistics")
    figures = run(*DENSIFY, "--ffns", "2", "--select", select, "--statistics", "statistics")
    assert set(KEYS.split()) <= set(figures)
    assert figures["ffns"] == 2 and figures["select"] == select and list(figures["selected_experts"]) == ["0", "1", "2"]
    assert {len(experts) for experts in figures["selected_experts"].values()} == {6 if select == "average" else 2}
    assert (figures["experts_after"], figures["experts_per_layer"], figures["sparsity"]) == (0, [], 1.0)
    assert run("inspect", "out", "--checksums")["provenance"]["figures"] == figures
    card = (place / "out" / "README.md").read_text()
    assert "an ordinary mistral" in card and "trust_remote_code" not in card and "2 experts of each layer as one FFN" in card


def test_people_are_told_how_far_it_is_from_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path, "qwen2_moe")
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(cli.main, DENSIFY, catch_exceptions=False).stdout
    assert "an ordinary qwen2" in said and "before any training" in said and "mean gate of the shared expert" in said
    make_workplace(tmp_path, "olmoe")
    said = CliRunner().invoke(cli.main, [*DENSIFY, "--overwrite"], catch_exceptions=False).stdout
    assert "olmoe has no dense sibling" in said and "one expert in each layer" in said
    assert run("inspect", "out")["experts_per_layer"] == [1, 1, 1]


@pytest.mark.parametrize("select", others_slow(SELECTIONS, "usage"))
def test_commands_take_a_dense_model(place: Path, select: str) -> None:
    run(*DENSIFY, "--ffns", "2", "--select", select)
    compared = run(
        "compare", "model", "out", "--data", "text.txt", "--samples", "2", "--sequence-length", "16", "--no-speed"
    )
    assert len(compared["rows"]) == 2
    assert run("generate", "out", "-p", "the", "-n", "4")["generated_tokens"] == 4
    assert run("bench", "out", "-p", "4", "-n", "2", "-r", "1")["rows"]


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_usage_and_training_are_drawn(place: Path) -> None:
    run(*TRAIN)
    card = (place / "out" / "README.md").read_text()
    for name in ("usage_histogram.png", "training_distill.png", "training_finetune.png"):
        assert name in card and (place / "out" / name).is_file()


def test_the_plan_can_be_carried_out_again(place: Path) -> None:
    run(*DENSIFY, "--ffns", "2", "--plan-output", "dense.json")
    run("prune", "model", "--plan", "dense.json", *TEXT, "-o", "again")
    assert (place / "out" / "model.safetensors").read_bytes() == (place / "again" / "model.safetensors").read_bytes()


def test_training_is_recorded_and_what_is_written_is_what_was_trained(place: Path) -> None:
    figures = run(*TRAIN)
    assert [part["steps"] for part in figures["training"].values()] == [6, 4]
    assert figures["perplexity_after"] < 0.85 * run(*DENSIFY[:-1], "plain")["perplexity_after"]
    scales = figures["scales_per_layer"]
    assert len(scales) == 3 and all(len(row) == 2 for row in scales)
    card = (place / "out" / "README.md").read_text()
    assert "Kept is the state of step" in card
    assert float((transformers_logits(place / "out") - logits(place / "out")).abs().max()) <= 1e-4
    assert not list(place.glob(".*")), "nothing temporary is left"


def result(place: Path) -> dict[str, str]:
    """Return the files that determine the model, without those that state the run's duration."""
    told = ("compression.json", "README.md")
    return {name: content for name, (_, content) in listing(place / "out").items() if name not in told}


@pytest.mark.slow
def test_killed_and_resumed_it_ends_in_the_same_weights(place: Path) -> None:
    command = [*TRAIN, "--dtype", "bfloat16", "--threads", "1", "--distill-steps", "40"]
    run(*command)
    expected = result(place)
    (place / "out").rename(place / "whole")
    kill_while_it_trains(place, command)
    resumed = run(*command, "--resume")
    assert result(place) == expected
    assert resumed["training"]["distill"]["steps"] == 40
    assert not list(place.glob(".*")), "nothing temporary is left"
    finished = run(*command, "--resume")
    assert finished == resumed, "what is there already is not made again"


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_state(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(DistillationLoss):
        def __call__(self, batch: Any) -> dict[str, Tensor]:
            terms = super().__call__(batch)
            return {name: term * float("nan") if batch.step == 5 else term for name, term in terms.items()}

    monkeypatch.setattr(compress.dense.dense_training, "DistillationLoss", Breaks)
    outcome = CliRunner().invoke(cli.main, TRAIN)
    assert outcome.exit_code == 1 and outcome.stdout == "" and outcome.stderr.count("\n") == 1
    assert "step 5: the loss is nan; the last good state is in" in outcome.stderr
    assert not (place / "out").exists()
    kept = load_file(place / ".out.work" / "distill.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in kept.values())


# Bad input


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--ffns", "7"], ("layer 0 has 6 experts", "lower --ffns")),
        (["--ffns", "0"], ("ffns is 0",)),
        (["--distill-steps", "3", "--lambda-layer", "nan"], ("lambda-layer",)),
        (["--distill-steps", "3", "--learning-rate", "-1"], ("learning rate",)),
        (["--distill-steps", "3", "--distill-layers", "all"], ("--distill-layers is for encoder-decoders",)),
        (["--distill-steps", "3", "--validation-samples", "100000"], ("text.txt", "validation part", "too short")),
        (["--data", "nowhere.txt"], ("nowhere.txt",)),
        (["-o", "model"], ("model", "exists already")),
        (["--statistics", "plan.json"], ("plan.json",)),
    ],
)
def test_bad_options_are_refused(place: Path, options: list[str], fragments: tuple[str, ...]) -> None:
    refused(place, [*DENSIFY, *options], *fragments)


def test_a_layer_with_too_few_experts_is_named(place: Path) -> None:
    run("prune", "model", "--plan", "plan.json", *TEXT, "-o", "uneven")
    refused(place, ["densify", "uneven", *TEXT, "--ffns", "3", "-o", "out"], "layer 2 has 2 experts")
    assert run("densify", "uneven", *TEXT, "--ffns", "2", "-o", "out")["ffns"] == 2


def test_a_dense_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path, "mistral")
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, DENSIFY, "not a mixture of experts (mistral)")


def test_a_sibling_that_would_lose_a_tensor_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path, "qwen3_moe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ARCHITECTURES, "qwen3_moe", replace(ARCHITECTURES["qwen3_moe"], dense_sibling="llama"))
    refused(tmp_path, DENSIFY, "llama has no place for model.layers.0.self_attn.q_norm.weight")


def test_a_sibling_that_needs_what_is_not_there_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path, "qwen2_moe", qkv_bias=False)
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, DENSIFY, "a qwen2 needs model.layers.0.self_attn.q_proj.bias")


def test_options_of_another_run_are_not_gone_on_with(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress.dense.dense_training.Trainer, "update", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert CliRunner().invoke(cli.main, TRAIN).exit_code == 130
    refused(place, [*TRAIN, "--learning-rate", "0.02", "--resume"], "other options")
