"""Two processes calibrate, search and measure as one. They train as one with twice the batch, whole or sharded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, make_workplace
from calibration_in_processes import calibrated
from click.testing import CliRunner
from conftest import save_reference
from safetensors import safe_open
from safetensors.torch import load_file
from training_in_processes import OPTIONS, TOKENS, train

import cli
from calibrate.collect import collect
from compress.dense.dense_plan import choose, dense_plan
from compress.methods.relaxations import RELAXATIONS
from compress.options.training import TrainingOptions
from compress.plans.plan import plan_to_json
from compress.run.work_directory import write_value
from compress.training.training import Trainer
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import DataError, OptionError
from engine.files.output_lock import claimed
from engine.passes import processes

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DENSIFY = ["densify", "model", *CALIBRATION, "--evaluation-samples", "2", "-o", "out", "--dtype", "float32", "--json"]
DENSIFY += ["--distill-steps", "4", "--validate-every", "2", "--learning-rate", "0.01", "--validation-samples", "2"]


def torchrun(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run two processes of the command (a script, or `-m` and a module)."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def two_processes(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run two processes of a command that succeeds, without torchrun's supervisor, because loading torch is slow."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "tests"}
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env=ENVIRONMENT | common | {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return subprocess.CompletedProcess(
        command, max(process.returncode for process in started), *("".join(parts) for parts in zip(*said, strict=True))
    )


def history(path: Path) -> dict[str, list[float]]:
    """Return every term of the loss and its sum, step by step, and the validation results."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["training"])
    terms = {name: [step[name] for step in header["history"]] for name in header["history"][0]}
    return terms | {"validation": [value for _, value in header["validations"]]}


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    """Losses and weights agree to 1e-5 in both parts of the training; also sharded, and sharded and resumed."""
    save_reference("qwen2_moe", tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    statistics = collect(checkpoint, TOKENS, dtype=torch.float32)
    plan = dense_plan(choose("usage", statistics, 2), statistics, dict.fromkeys(range(3), 0.5), checkpoint)
    (tmp_path / "dense.json").write_text(json.dumps(plan_to_json(plan)))
    train(tmp_path, "alone", replace(OPTIONS, batch_size=2 * OPTIONS.batch_size))
    done = two_processes(str(ROOT / "tests" / "support" / "training_in_processes.py"), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part, steps in (("distill", 6), ("finetune", 4)):
        expected, tensors = (
            history(tmp_path / "alone" / f"{part}.safetensors"),
            load_file(tmp_path / "alone" / f"{part}.safetensors"),
        )
        assert len(expected["loss"]) == steps and len(expected["validation"]) >= 2
        for run in ("together", "sharded", "resumed"):
            path = tmp_path / run / f"{part}.safetensors"
            for name, values in history(path).items():
                assert values == pytest.approx(expected[name], rel=1e-5), (run, part, name)
            found = load_file(path)
            assert set(found) == set(tensors)
            for name, tensor in tensors.items():
                assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5), (run, part, name)
    assert [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1)] == [{"from": 0}] * 2


@pytest.mark.slow
def test_two_processes_calibrate_and_search_as_one(tmp_path: Path) -> None:
    """Counts, medians, similarities, figures and subsets are equal, sums agree to 1e-12 and searched values to 1e-6."""
    save_reference("qwen2_moe", tmp_path / "model", mlp_only_layers=[1])
    done = two_processes(str(ROOT / "tests" / "support" / "calibration_in_processes.py"), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tensors, values = calibrated(tmp_path / "model", tmp_path)
    exact = {
        "tokens",
        "tokens_routed",
        "unit tokens",
        "weight_ratio_median",
        "output_mean",
        "linear_cka",
        "rbf_cka",
        "rbf_cka_before",
    }
    searched = {*RELAXATIONS, *(f"sharded {name}" for name in RELAXATIONS), "sharded gated of one sequence"}
    searched |= {"layerwise", "output_sum", "unit moments", "unit correction"}  # in float32
    for rank in (0, 1):
        found = load_file(tmp_path / f"process-{rank}" / "tensors.safetensors")
        assert set(found) == set(tensors)
        for name, expected in tensors.items():
            kind = name.partition(".")[0]
            off = 0.0 if kind in exact else 1e-6 if kind in searched else 1e-12
            assert torch.allclose(found[name], expected, rtol=off, atol=off * float(expected.double().norm())), (rank, name)
        assert json.loads((tmp_path / f"process-{rank}" / "values.json").read_text()) == values


@pytest.mark.slow
def test_pruning_runs_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: None) -> None:
    """A sweep is compared: the contents of each artifact, its tensors and its figures."""
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["prune", "model", *CALIBRATION, "--samples", "16", "--epochs", "2", "--dtype", "float32", "--json"]
    command += ["--evaluation-samples", "3", "--sparsity", "0.5", "--method", "diep,reap", "--merge", "cka"]
    command += ["--recover-steps", "1"]
    done = two_processes("-m", "cli", *command, "-o", "together", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = CliRunner().invoke(cli.main, [*command, "-o", "alone"])
    figures = json.loads(done.stdout)["runs"], json.loads(result.stdout)["runs"]
    for together, alone in zip(*figures, strict=True):
        for name in ("perplexity_before", "perplexity_after"):
            assert together[name] == pytest.approx(alone[name], rel=1e-5)
        assert together["experts_per_layer"] == alone["experts_per_layer"]
        tensors = [load_file(*(tmp_path / own["artifact"]).glob("model*.safetensors")) for own in (together, alone)]
        assert all(torch.allclose(tensors[0][name], tensor, atol=1e-5) for name, tensor in tensors[1].items())
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


@pytest.mark.parametrize("way", ["gptq", pytest.param("awq", marks=pytest.mark.slow)])
def test_rounding_in_two_processes_gives_the_same_bytes(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["quantize", "model", *CALIBRATION, "--bits", "4", "--group-size", "16", "--rounding", way, "--json"]
    command += ["--evaluation-samples", "3"]
    done = two_processes("-m", "cli", *command, "-o", "together", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = CliRunner().invoke(cli.main, [*command, "-o", "alone"])
    figures = [json.loads(each) for each in (done.stdout, result.stdout)]
    assert figures[0]["perplexity_after"] == pytest.approx(figures[1]["perplexity_after"], rel=1e-5)
    together, alone = (next((tmp_path / each).glob("model*.safetensors")) for each in ("together", "alone"))
    assert together.read_bytes() == alone.read_bytes()
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


@pytest.mark.parametrize("held", [["--memory-limit", "1.5GB"], ["--shard"]], ids=["a layer", "pieces"])
@pytest.mark.slow
def test_each_process_holds_but_a_part(held: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes hold a layer of the model, or shards of all. Artifact, tensors and figures equal those of one process."""
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["prune", "model", *CALIBRATION, "--method", "diep", "--epochs", "1", "--batch-size", "2", "--sparsity", "0.5"]
    command += ["--evaluation-samples", "3", "--dtype", "float32", "--json"]
    done = two_processes("-m", "cli", *command, *held, "-o", "together", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = CliRunner().invoke(cli.main, [*command, "-o", "alone"])
    together, alone = json.loads(done.stdout), json.loads(result.stdout)
    assert together["experts_per_layer"] == alone["experts_per_layer"]
    for name in ("perplexity_before", "perplexity_after"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
    tensors = [load_file(*(tmp_path / own).glob("model*.safetensors")) for own in ("together", "alone")]
    assert all(torch.allclose(tensors[0][name], tensor, atol=1e-5) for name, tensor in tensors[1].items())
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


FAILING = """
import os, sys
import cli, compress.methods.naee
from engine.errors import DataError

own, layers = compress.methods.naee.inner_products, []

def products(*arguments):
    layers.append(1)
    if os.environ["RANK"] == "1" and len(layers) == 2:
        raise DataError("the second process fails alone")
    return own(*arguments)

compress.methods.naee.inner_products = products
cli.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_one_process_fails_and_says_it_for_all_and_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING)
    command = ["prune", "model", *CALIBRATION, "--sparsity", "0.5", "--method", "naee", "--evaluation-samples", "0"]
    failed = torchrun("failing.py", *command, "-o", "out", cwd=tmp_path)
    assert failed.returncode == 1 and failed.stderr.count("Error: the second process fails alone") == 1
    assert "closed" not in failed.stderr and "RuntimeError" not in failed.stderr, "the first ends without a word of its own"
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.work" / "naee_0.json").exists()
    write_value(tmp_path / ".out.work" / "naee_0.json", [0, 1, 2])  # saved results are not computed again
    done = torchrun("-m", "cli", *command, "-o", "out", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "compression.json").read_text())["plan"]["layers"]["0"] == [0, 1, 2]
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


def test_two_processes_are_refused_an_output_that_another_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process detects it and prints the message, and the second ends with it."""
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    with claimed(tmp_path / "out"):
        failed = two_processes("-m", "cli", *DENSIFY, cwd=tmp_path)
    # torch may print its own lines, if the first process has gone before the second has joined it.
    said = [line for line in failed.stderr.splitlines() if line.startswith("Error:")]
    assert failed.returncode == 1 and len(said) == 1
    assert "out: is being written by another run" in failed.stderr and "Traceback" not in failed.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_the_command_runs_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = torchrun("-m", "cli", *DENSIFY, "--batch-size", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    together: dict[str, Any] = json.loads(done.stdout)
    result = CliRunner().invoke(cli.main, [*DENSIFY, "--batch-size", "6", "-o", "alone"])
    alone = json.loads(result.stdout)
    for name in ("loss_first", "loss_last"):
        assert together["training"]["distill"][name] == pytest.approx(alone["training"]["distill"][name], rel=1e-5)
    assert together["perplexity_after"] == pytest.approx(alone["perplexity_after"], rel=1e-5)
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


def test_what_needs_one_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli.main, ["evaluate", "model"])
    assert result.exit_code == 1 and not result.output, "the first process says it for all"
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(cli.main, ["evaluate", "model"])
    assert result.exit_code == 1 and "compress evaluate runs in one process" in result.output
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(OptionError, match="lower --nproc-per-node"):
        processes.join("cuda")


def test_what_needs_several_processes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.main, [*DENSIFY, "--shard"])
    assert result.exit_code == 1 and "torchrun" in result.output
    refusals = {
        ("--method", "diep"): "torchrun",
        ("--method", "naee,diep"): "torchrun",
        ("--method", "naee,reap"): "layer by layer; leave it out",
        ("--method", "fisher", "--memory-limit", "2GB"): "leave out one of them",
        ("--method", "reap"): "layer by layer; leave it out",
        ("--method", "fisher", "--recover-steps", "2"): "two whole models",
    }
    for options, why in refusals.items():
        result = CliRunner().invoke(cli.main, ["prune", "model", *CALIBRATION, "--sparsity", "0.5", "--shard", *options])
        assert result.exit_code == 1 and why in result.output
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(DataError, match="3 sequences to train on are fewer than the 8"):
        Trainer({}, lambda batch: {}, TrainingOptions(1, 1e-3, batch_size=4), 3, 16)
