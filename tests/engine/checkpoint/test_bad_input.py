"""Bad input: exit status 1, one line on stderr that names the problem, nothing on stdout, and nothing written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, PRUNE, listing, make_workplace
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import cli
from engine.files.safetensors_file import INDEX_NAME, SINGLE_NAME
from engine.files.safetensors_writer import ShardWriter

Damage = Callable[[Path], object]
SPARSE = ["--sparsity", "0.5"]
WITHOUT_BUDGET = [word for word in PRUNE if word not in SPARSE]
GENERATE = ["generate", "model", "-p", "the", "-n", "2"]
EVALUATE = ["evaluate", "model", *CALIBRATION]
CALIBRATE = ["calibrate", "model", *CALIBRATION, "-o", "statistics"]
MERGE = ["merge", "model", "--experts", "3", *CALIBRATION, "--evaluation-samples", "2", "-o", "out"]
BENCH = ["bench", "model", "-p", "4", "-n", "0", "-r", "1"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model, text, a plan, and `artifact`, with a different number of experts in each layer."""
    path = tmp_path_factory.mktemp("originals")
    make_workplace(path)
    with chdir(path):
        result = CliRunner().invoke(cli.main, [*WITHOUT_BUDGET, "--plan", "plan.json", "-o", "artifact"])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the originals that may be damaged, as the working directory."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_line(error: str, fragments: tuple[str, ...]) -> None:
    assert error.startswith("Error: ")
    assert error.count("\n") == 1, error
    assert error.endswith("\n")
    assert len(error) < 6_000
    missing = [fragment for fragment in fragments if fragment not in error]
    assert not missing, error


def refused(place: Path, arguments: list[str], *fragments: str) -> None:
    """Run a command in this process, and check that it is refused with these fragments."""
    before, started = listing(place), time.monotonic()
    result = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    check_line(result.stderr, fragments)
    assert listing(place) == before
    assert time.monotonic() - started < 60


# Ways to damage the directory of a model


def edit_json(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(model: Path) -> None:
        values = json.loads((model / name).read_text())
        change(values)
        (model / name).write_text(json.dumps(values))

    return damage


def config(**values: Any) -> Damage:
    return edit_json("config.json", lambda config: config.update(values))


def write(name: str, content: bytes) -> Damage:
    return lambda model: (model / name).write_bytes(content)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(model: Path) -> None:
        values = {name: tensor.clone() for name, tensor in load_file(model / SINGLE_NAME).items()}
        change(values)
        save_file(values, model / SINGLE_NAME, metadata={"format": "pt"})

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(model: Path) -> None:
        data = (model / SINGLE_NAME).read_bytes()
        length = int.from_bytes(data[:8], "little")
        values = json.loads(data[8 : 8 + length])
        change(values)
        text = json.dumps(values).encode()
        (model / SINGLE_NAME).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return damage


def overlap(values: dict[str, Any]) -> None:
    earlier, later = sorted((values[NORM], values[NORM.replace("input", "post_attention")]), key=lambda e: e["data_offsets"])
    later["data_offsets"] = earlier["data_offsets"]


def past_the_end(values: dict[str, Any]) -> None:
    last = max((name for name in values if name != "__metadata__"), key=lambda name: values[name]["data_offsets"])
    values[last]["data_offsets"] = [offset + 64 for offset in values[last]["data_offsets"]]


def index(change: Callable[[dict[str, str]], object]) -> Damage:
    """Cut the model into shards and change the weight_map of their index."""

    def damage(model: Path) -> None:
        values = load_file(model / SINGLE_NAME)
        values = {name: tensor.clone() for name, tensor in values.items()}
        (model / SINGLE_NAME).unlink()
        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in values.items()}
        with ShardWriter(model, layout, 100_000) as writer:
            for name, tensor in values.items():
                writer.add(name, tensor)
        content = json.loads((model / INDEX_NAME).read_text())
        change(content["weight_map"])
        (model / INDEX_NAME).write_text(json.dumps(content))

    return damage


def set_value(name: str, value: float) -> Damage:
    def change(values: dict[str, torch.Tensor]) -> None:
        values[name].view(-1)[-1] = value

    return tensors(change)


def truncate(name: str, share: float) -> Damage:
    def damage(model: Path) -> None:
        data = (model / name).read_bytes()
        (model / name).write_bytes(data[: int(len(data) * share)])

    return damage


def remove(*names: str) -> Damage:
    return lambda model: [(model / name).unlink() for name in names]


def outside_link(model: Path) -> None:
    (model / SINGLE_NAME).rename(model.parent / "elsewhere.safetensors")
    (model / SINGLE_NAME).symlink_to("../elsewhere.safetensors")


NORM = "model.layers.0.input_layernorm.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
ROPE = {"rope_theta": 10_000.0}

MODELS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no config": (remove("config.json"), ("config.json", "missing")),
    "config not JSON": (write("config.json", b'{"model_type": '), ("config.json", "not valid JSON")),
    "config not an object": (write("config.json", b"[]"), ("config.json", "not an object")),
    "config deep": (write("config.json", b'{"a":' * 100_000 + b"1" + b"}" * 100_000), ("nested too deeply",)),
    "config not UTF-8": (write("config.json", b'{"a": "\xff"}'), ("config.json", "UTF-8")),
    "config with a long number": (write("config.json", b'{"a": ' + b"1" * 9_000 + b"}"), ("too many digits",)),
    "unknown family": (config(model_type="gpt2"), ("'gpt2'", "supported families")),
    "family not a name": (config(model_type=["mixtral"]), ("model_type",)),
    "family with its own code": (
        config(model_type="nova", auto_map={"AutoModelForCausalLM": "modeling_nova.Nova"}),
        ("'nova'", "trust_remote_code"),
    ),
    "hidden_act": (config(hidden_act="gelu"), ("hidden_act='gelu'",)),
    "attn_logit_softcapping": (config(attn_logit_softcapping=50.0), ("attn_logit_softcapping=50.0",)),
    "rope_type": (config(rope_parameters=ROPE | {"rope_type": "spiral"}), ("rope_type='spiral'",)),
    "rope_type not a name": (config(rope_parameters=ROPE | {"rope_type": ["yarn"]}), ("rope_type",)),
    "rope factor 0": (config(rope_parameters=ROPE | {"rope_type": "linear", "factor": 0}), ("rope_parameters",)),
    "rope factor negative": (config(rope_parameters=ROPE | {"rope_type": "linear", "factor": -1.0}), ("rope_param",)),
    "rope factor a text": (config(rope_parameters=ROPE | {"rope_type": "linear", "factor": "x"}), ("rope_parameters",)),
    "rope_theta a text": (config(rope_parameters={"rope_type": "default", "rope_theta": "x"}), ("rope_parameters",)),
    "longrope factors": (
        config(rope_parameters=ROPE | {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        ("rope",),
    ),
    "rope for each kind of layer": (
        config(rope_parameters={"full_attention": ROPE | {"rope_type": "default"}}),
        ("rope_parameters",),
    ),
    "quantization_config": (config(quantization_config={"quant_method": "gptq"}), ("quantization_config", "gptq")),
    "10**9 layers": (config(num_hidden_layers=10**9), ("num_hidden_layers", "1000000000")),
    "10**400 layers": (config(num_hidden_layers=10**400), ("num_hidden_layers",)),
    "10**9 experts": (config(num_local_experts=10**9), ("num_local_experts", "1000000000")),
    "vocabulary of 10**12": (config(vocab_size=10**12), ("vocab_size", "1000000000000")),
    "10**9 labels": (config(num_labels=10**9), ("num_labels", "1000000000")),
    "heads that do not divide": (config(num_attention_heads=5), ("attention heads",)),
    "key-value heads that do not divide": (config(num_key_value_heads=3), ("4 attention heads", "3 key-value")),
    "10**9 heads": (config(num_attention_heads=10**9, head_dim=None), ("num_attention_heads", "1000000000")),
    "odd head_dim": (config(head_dim=7), ("head_dim",)),
    "more experts per token than experts": (config(num_experts_per_tok=7), ("7 of 6 experts",)),
    "negative hidden size": (config(hidden_size=-32), ("hidden_size",)),
    "hidden size a text": (config(hidden_size="many"), ("hidden_size",)),
    "other expert count": (config(num_local_experts=8), ("8 experts", "block_sparse_moe.gate")),
    "fewer layers": (config(num_hidden_layers=2), ("model.layers.2.", "not part")),
    "more layers": (config(num_hidden_layers=4), ("model.layers.3.", "missing")),
    "other hidden size": (config(hidden_size=64), ("hidden size 64",)),
    "other expert width": (config(intermediate_size=50), ("experts.0.w1.weight", "[48, 32]", "[50, 32]")),
    "block_configs of another length": (config(block_configs=[]), ("block_configs", "3 layers")),
    "block_configs without counts": (config(block_configs=[{"ffn": 1}] * 3), ("block_configs[0]",)),
    "block_configs with too many": (
        config(block_configs=[{"ffn": {"moe": {"num_local_experts": 9}}}] * 3),
        ("block_configs[0]", "9"),
    ),
    "no weights": (remove(SINGLE_NAME), (SINGLE_NAME,)),
    "only pickled weights": (
        lambda model: (model / SINGLE_NAME).rename(model / "pytorch_model.bin"),
        ("pickled", "pytorch_model.bin"),
    ),
    "truncated in the data": (truncate(SINGLE_NAME, 0.9), (SINGLE_NAME, "past the end")),
    "truncated in the header": (truncate(SINGLE_NAME, 0.001), (SINGLE_NAME, "truncated")),
    "empty weights": (truncate(SINGLE_NAME, 0), (SINGLE_NAME, "too short")),
    "overlapping offsets": (header(overlap), (SINGLE_NAME, "overlaps")),
    "hole between offsets": (header(lambda values: values.pop(NORM)), (SINGLE_NAME, "hole")),
    "offsets past the end": (header(past_the_end), (SINGLE_NAME, "past the end")),
    "absurd shape": (header(lambda values: values[NORM].update(shape=[2**62, 2**62])), (NORM, "too large")),
    "unknown dtype": (header(lambda values: values[NORM].update(dtype="F3")), (NORM, "F3")),
    "missing tensor": (tensors(lambda values: values.pop(NORM)), (NORM, "missing")),
    "missing expert": (tensors(lambda values: values.pop(EXPERT)), (EXPERT, "missing")),
    "extra tensor": (tensors(lambda values: values.update(extra=torch.ones(1))), ("extra", "not part")),
    "wrong shape": (tensors(lambda values: values.update({NORM: torch.ones(31)})), (NORM, "[31]", "[32]")),
    "integer tensor": (tensors(lambda values: values.update({NORM: torch.ones(32).int()})), (NORM, "int32")),
    "NaN": (set_value(EXPERT, float("nan")), (EXPERT, "NaN")),
    "infinity": (set_value(NORM, float("-inf")), (NORM, "infinity")),
    "index names a missing shard": (
        index(lambda names: names.update({NORM: "model-00009-of-00009.safetensors"})),
        ("model-00009-of-00009.safetensors", "missing"),
    ),
    "index names another shard": (
        index(lambda names: names.update({NORM: names["lm_head.weight"]})),
        (NORM,),
    ),
    "index lacks a tensor": (index(lambda names: names.pop(NORM)), (NORM, "not listed")),
    "index leaves the directory": (index(lambda names: names.update({NORM: "../x.safetensors"})), ("../x", "plain")),
    "index with an absolute path": (index(lambda names: names.update({NORM: "/x.safetensors"})), ("/x", "plain")),
    "index not JSON": (write(INDEX_NAME, b"{"), (INDEX_NAME, "not valid JSON")),
    "link that leaves the directory": (outside_link, (SINGLE_NAME, "leads out")),
    "newer schema": (write("compression.json", b'{"schema_version": 2}'), ("schema_version is 2", "update")),
    "provenance without a schema": (write("compression.json", b"{}"), ("schema_version",)),
    "provenance without files": (write("compression.json", b'{"schema_version": 1}'), ("compression.json", "files")),
    "manifest leaves the directory": (
        write("compression.json", b'{"schema_version": 1, "files": {"../text.txt": {"bytes": 1, "sha256": ""}}}'),
        ("compression.json", "plain file names"),
    ),
    "manifest with a long name": (
        write("compression.json", b'{"schema_version": 1, "files": {"%s": {"bytes": 1, "sha256": ""}}}' % (b"x" * 5000)),
        ("xxx", "missing"),
    ),
    "weights not in the manifest": (write("compression.json", b'{"schema_version": 1, "files": {}}'), ("not part",)),
}


@pytest.mark.parametrize("name", MODELS)
def test_damaged_model_is_refused(place: Path, name: str) -> None:
    damage, fragments = MODELS[name]
    damage(place / "model")
    refused(place, ["inspect", "model"], *fragments)
    refused(place, [*PRUNE, "-o", "out"], *fragments)


@pytest.mark.parametrize("arguments", [GENERATE, EVALUATE, CALIBRATE, BENCH], ids=lambda words: words[0])
def test_every_command_refuses_a_newer_schema(place: Path, arguments: list[str]) -> None:
    write("compression.json", b'{"schema_version": 99}')(place / "model")
    refused(place, arguments, "schema_version is 99")


def test_damaged_artifact_is_refused(place: Path) -> None:
    with (place / "artifact" / "README.md").open("a") as card:
        card.write("x")
    for arguments in (["inspect", "artifact"], ["generate", "artifact", "-p", "a"], ["inspect", "artifact", "--json"]):
        refused(place, arguments, "README.md", "bytes")


def other_vocabulary(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"] = {token: id for token, id in content["model"]["vocab"].items() if id < 100}
    (model / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("arguments", [[*PRUNE, "-o", "out"], GENERATE, EVALUATE, CALIBRATE], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("damage", "fragment"),
    [
        (remove("tokenizer.json"), "no tokenizer"),
        (other_vocabulary, "it is of another model"),
        (truncate("tokenizer.json", 0.5), "tokenizer"),
        (write("tokenizer.json", b"{}"), "tokenizer"),
    ],
    ids=["missing", "other vocabulary", "truncated", "empty"],
)
def test_tokenizer_is_refused(place: Path, arguments: list[str], damage: Damage, fragment: str) -> None:
    damage(place / "model")
    refused(place, arguments, "model", fragment)


def plan(layers: object, version: int = 1) -> Callable[[Path], object]:
    content = json.dumps({"schema_version": version, "kind": "moe", "layers": layers})
    return lambda place: (place / "bad.json").write_text(content)


def text(content: bytes) -> Callable[[Path], object]:
    return lambda place: (place / "bad.txt").write_bytes(content)


def nothing(place: Path) -> None:
    pass


def dense_model(place: Path) -> None:
    shutil.rmtree(place / "model")
    make_workplace(place, "mistral")


BAD_PLAN = [*WITHOUT_BUDGET, "--plan", "bad.json"]
OPTIONS: dict[str, tuple[Callable[[Path], object], list[str], tuple[str, ...]]] = {
    "no such path": (nothing, ["prune", "nowhere", *SPARSE], ("nowhere", "no such directory")),
    "path with a long name": (nothing, ["prune", "x" * 5000, *SPARSE, "-o", "out"], ("no such directory",)),
    "path is a file": (nothing, ["prune", "text.txt", *SPARSE], ("text.txt", "not a directory")),
    "empty directory": (lambda place: (place / "e").mkdir(), ["prune", "e", *SPARSE], ("e/config.json", "missing")),
    "not a mixture of experts": (dense_model, PRUNE, ("model", "not a mixture of experts")),
    "calibrating a dense model": (dense_model, CALIBRATE, ("model", "not a mixture of experts")),
    "no budget": (nothing, WITHOUT_BUDGET, ("--sparsity or --experts",)),
    "two budgets": (nothing, [*PRUNE, "--experts", "3"], ("--sparsity or --experts",)),
    "sparsity 0": (nothing, [*PRUNE, "--sparsity", "0"], ("sparsity is 0.0",)),
    "sparsity 1": (nothing, [*PRUNE, "--sparsity", "1"], ("sparsity is 1.0",)),
    "sparsity negative": (nothing, [*PRUNE, "--sparsity", "-0.5"], ("sparsity is -0.5",)),
    "sparsity 1.5": (nothing, [*PRUNE, "--sparsity", "1.5"], ("sparsity is 1.5",)),
    "sparsity nan": (nothing, [*PRUNE, "--sparsity", "nan"], ("sparsity is nan",)),
    "under the default minimum": (nothing, [*PRUNE, "--sparsity", "0.9"], ("at least 2 each",)),
    "layer under the minimum": (
        nothing,
        [*PRUNE, "--scope", "layer", "--min-experts", "4"],
        ("layer 0 would keep 3 of 6", "minimum of 4"),
    ),
    "uniform under the minimum": (nothing, [*PRUNE, "--uniform", "--min-experts", "4"], ("layer 0", "minimum of 4")),
    "min-experts negative": (nothing, [*PRUNE, "--min-experts", "-1"], ("min-experts is -1",)),
    "experts 0": (nothing, [*WITHOUT_BUDGET, "--experts", "0"], ("0 experts",)),
    "all experts": (nothing, [*WITHOUT_BUDGET, "--experts", "6"], ("6 experts",)),
    "samples 0": (nothing, [*PRUNE, "--samples", "0"], ("samples",)),
    "evaluation samples negative": (nothing, [*PRUNE, "--evaluation-samples", "-1"], ("evaluation samples",)),
    "sequence length 0": (nothing, [*PRUNE, "--sequence-length", "0"], ("sequence length is 0",)),
    "sequence length 1": (nothing, [*PRUNE, "--sequence-length", "1"], ("sequence length is 1",)),
    "sequence too long": (nothing, [*PRUNE, "--sequence-length", "129"], ("sequence length is 129", "2 to 128")),
    "learning rate nan": (nothing, [*PRUNE, "--method", "diep", "--learning-rate", "nan"], ("learning-rate is nan",)),
    "learning rate negative": (nothing, [*PRUNE, "--learning-rate", "-1"], ("learning-rate is -1",)),
    "lambda infinite": (nothing, [*PRUNE, "--reconstruction-weight", "inf"], ("reconstruction-weight is inf",)),
    "pressure negative": (nothing, [*PRUNE, "--pressure", "-1"], ("pressure is -1",)),
    "no such text": (nothing, [*PRUNE, "--data", "nowhere.txt"], ("nowhere.txt",)),
    "text with a long name": (nothing, [*PRUNE, "--data", "x" * 5000], ("no such file",)),
    "text of an unknown user": (nothing, [*PRUNE, "--data", "~nobody-of-that-name/a.txt"], ("no such file",)),
    "empty text": (text(b""), [*PRUNE, "--data", "bad.txt"], ("bad.txt",)),
    "blank text": (text(b"\n \n" * 100), [*PRUNE, "--data", "bad.txt"], ("bad.txt",)),
    "short text": (text(b"only this\n" * 4), [*PRUNE, "--data", "bad.txt"], ("bad.txt",)),
    "too many samples": (nothing, [*PRUNE, "--samples", "100000"], ("text.txt", "too short", "fewer samples")),
    "text not UTF-8": (text(b"abc \xff\n" * 500), [*PRUNE, "--data", "bad.txt"], ("bad.txt", "0xff", "UTF-8")),
    "no data to evaluate on": (text(b""), [*EVALUATE, "--data", "bad.txt"], ("bad.txt",)),
    "no such plan": (nothing, BAD_PLAN, ("bad.json", "missing")),
    "plan not JSON": (lambda place: (place / "bad.json").write_text("{"), BAD_PLAN, ("bad.json", "not valid JSON")),
    "plan not a plan": (lambda place: (place / "bad.json").write_text("{}"), BAD_PLAN, ("not a plan",)),
    "plan of a newer schema": (plan({}, 2), BAD_PLAN, ("schema_version 2",)),
    "plan for other layers": (plan({"0": [0], "1": [0]}), BAD_PLAN, ("layers [0, 1]", "[0, 1, 2]")),
    "plan for more experts": (plan({"0": [0], "1": [0], "2": [6]}), BAD_PLAN, ("layer 2", "expert 6")),
    "plan without experts": (plan({"0": [0], "1": [], "2": [0]}), BAD_PLAN, ("layer 1", "no expert")),
    "plan of something else": (plan({"0": [0], "1": ["x"], "2": [0]}), BAD_PLAN, ("layer 1", "expert 0")),
    "plan and sparsity": (nothing, [*PRUNE, "--plan", "plan.json"], ("--plan", "--sparsity")),
    "plan and merging": (nothing, [*WITHOUT_BUDGET, "--plan", "plan.json", "--merge", "cka"], ("--plan", "--merge")),
    "merging a dense model": (dense_model, MERGE, ("model", "not a mixture of experts")),
    "merging to 0": (nothing, [*MERGE, "--experts", "0"], ("0 experts",)),
    "merging to as many": (nothing, [*MERGE, "--experts", "6"], ("6 experts",)),
    "merging into what exists": (nothing, [*MERGE, "-o", "model"], ("model", "exists already")),
    "merging without text": (nothing, [*MERGE, "--data", "nowhere.txt"], ("nowhere.txt",)),
    "plan and experts": (nothing, [*WITHOUT_BUDGET, "--plan", "plan.json", "--experts", "3"], ("--plan", "--experts")),
    "no such statistics": (nothing, [*PRUNE, "--statistics", "nowhere"], ("nowhere", "missing")),
    "statistics not a file of them": (
        nothing,
        [*PRUNE, "--statistics", "model/model.safetensors"],
        ("model.safetensors", "not a statistics file"),
    ),
    "output without a name": (nothing, [*PRUNE, "-o", "."], ("names no new directory",)),
    "output above": (nothing, [*PRUNE, "-o", "..", "--overwrite"], ("names no new directory",)),
    "output in a file": (nothing, [*PRUNE, "-o", "text.txt/out"], ("text.txt/out", "cannot be made")),
    "output with a long name": (nothing, [*PRUNE, "-o", "a/b/" + "x" * 300], ("xxx", "name too long")),
    "plan output exists": (nothing, [*PRUNE, "--plan-output", "plan.json"], ("plan.json", "exists already")),
    "plan output nowhere": (nothing, [*PRUNE, "--plan-output", "nowhere/plan"], ("nowhere/plan", "cannot be written")),
    "statistics output exists": (nothing, [*CALIBRATE, "-o", "plan.json"], ("plan.json", "exists already")),
    "statistics output a directory": (nothing, [*CALIBRATE, "-o", "model", "--overwrite"], ("model", "cannot")),
    "checksums of a plain model": (nothing, ["inspect", "model", "--checksums"], ("model", "no checksums")),
    "skipping without tables": (nothing, [*GENERATE, "--skip-threshold", "1"], ("skip_tables.safetensors",)),
    "skip threshold nan": (nothing, [*GENERATE, "--skip-threshold", "nan"], ("skip threshold is nan",)),
    "too many new tokens": (nothing, [*GENERATE, "-n", "200"], ("128 positions",)),
    "temperature negative": (nothing, [*GENERATE, "--temperature", "-1"], ("temperature",)),
    "empty stop string": (nothing, [*GENERATE, "--stop", ""], ("stop string",)),
    "bench of nothing": (nothing, [*BENCH, "-p", "0"], ("both tests",)),
    "bench of no path": (nothing, ["bench", "model", "nowhere"], ("nowhere",)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_refused(place: Path, name: str) -> None:
    prepare, arguments, fragments = OPTIONS[name]
    prepare(place)
    has_output = "-o" in arguments or arguments[0] != "prune"
    refused(place, arguments if has_output else [*arguments, "-o", "out"], *fragments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments", [[*PRUNE, "-o", "out"], GENERATE, EVALUATE, CALIBRATE, BENCH], ids=lambda words: words[0]
)
def test_cuda_where_there_is_none(place: Path, arguments: list[str]) -> None:
    refused(place, [*arguments, "--device", "cuda"], "cuda")


def test_statistics_of_another_model(place: Path) -> None:
    assert CliRunner().invoke(cli.main, CALIBRATE).exit_code == 0
    config(rms_norm_eps=1e-3)(place / "model")  # a model with the same shapes
    refused(place, [*PRUNE, "--statistics", "statistics", "-o", "out"], "statistics", "another model")


@pytest.mark.parametrize("extra", [[], ["--overwrite"]], ids=["as it is", "overwrite"])
def test_existing_output_is_untouched(place: Path, extra: list[str]) -> None:
    (place / "out").mkdir()
    (place / "out" / "diary").write_text("private")
    refused(place, [*PRUNE, "-o", "out", *extra], "out", "not replaced" if extra else "exists already")
    refused(place, [*PRUNE, "-o", "text.txt", *extra], "text.txt", "not replaced" if extra else "exists already")
    (place / "link").symlink_to("model")
    refused(place, [*PRUNE, "-o", "link", *extra], "link")


# Code in a checkpoint


def same_size_but_other(path: Path) -> None:
    path.write_text(path.read_text().replace("Keep the first", "Drop the first"))


@pytest.mark.parametrize("change", ["modeling file", "auto_map", pytest.param("tokenizer", marks=pytest.mark.slow)])
def test_code_that_is_not_ours_is_not_run(place: Path, change: str) -> None:
    if change == "modeling file":
        same_size_but_other(place / "artifact" / "modeling_compressed.py")
    else:
        (place / "artifact" / "compression.json").unlink()
        name, key = ("config.json", "AutoModelForCausalLM") if change == "auto_map" else ("tokenizer_config.json", "A")
        edit_json(name, lambda values: values.update(auto_map={key: "evil.Evil"}))(place / "artifact")
        (place / "artifact" / "evil.py").write_text("raise SystemExit('ran')")
    refused(place, ["bench", "artifact", "--backend", "transformers", "-p", "4", "-n", "0"], "trust_remote_code")


# A full disk


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit files to `size` bytes: the system then refuses writes as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("method", ["frequency", "diep"])
@pytest.mark.parametrize("size", [0, 30, 1_000, 3_000, 5_000, 20_000, 200_000])
def test_full_disk_leaves_nothing(place: Path, size: int, method: str) -> None:
    arguments = [*PRUNE, "--method", method, "--epochs", "1", "-o", "new/out"]
    with file_size_limit(size):
        refused(place, arguments, "cannot" if size else "out", "make space")


def test_full_disk_leaves_the_old_result(place: Path) -> None:
    with file_size_limit(100_000):
        refused(place, [*PRUNE, "-o", "artifact", "--overwrite"], "artifact", "make space")
        refused(place, [*PRUNE, "-o", "artifact", "--overwrite", "--resume"], "artifact", "make space")


def test_full_disk_for_statistics(place: Path) -> None:
    with file_size_limit(1_000):
        refused(place, CALIBRATE, "statistics", "make space")


# The process itself


@pytest.mark.parametrize(
    ("damage", "arguments", "fragment"),
    [
        (nothing, ["inspect", "./nowhere"], "nowhere"),
        (nothing, ["inspect", "nobody/no-such-model"], "nobody/no-such-model"),
        pytest.param(truncate(SINGLE_NAME, 0.5), [*PRUNE, "-o", "out"], SINGLE_NAME, marks=pytest.mark.slow),
        (config(rope_parameters=ROPE | {"rope_type": "linear", "factor": 0}), GENERATE, "rope_parameters"),
        pytest.param(nothing, [*PRUNE, "-o", "model"], "exists already", marks=pytest.mark.slow),
    ],
    ids=["missing path", "unknown hub id", "truncated", "what transformers warns of", "output exists"],
)
def test_command_prints_one_line_and_exits_1(place: Path, damage: Damage, arguments: list[str], fragment: str) -> None:
    damage(place / "model")
    before = listing(place)
    result = run_command(place, arguments)
    assert (result.returncode, result.stdout) == (1, "")
    check_line(result.stderr, (fragment,))
    assert listing(place) == before


def run_command(place: Path, arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cli", *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=100, **options)


def test_full_disk_in_a_process_of_its_own(place: Path) -> None:
    before = listing(place)
    result = run_command(
        place, [*PRUNE, "-o", "out"], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    )
    assert (result.returncode, result.stdout) == (1, "")
    check_line(result.stderr, ("out", "make space"))
    assert listing(place) == before


@pytest.mark.parametrize("arguments", [["prune", "--epochs", "-1"], ["generate"], ["nothing"], ["inspect", "--x"]])
def test_wrong_usage_exits_2(place: Path, arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.main, arguments).exit_code == 2
