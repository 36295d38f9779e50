"""`compress layout`: every tensor stays bit for bit, experts lie whole and in order, and other programs read the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from artifacts_for_tests import CALIBRATION, make_pruned, make_workplace, refused, run
from click.testing import CliRunner
from conftest import save_reference
from float_models_for_tests import save_float8, save_mxfp4, save_nvfp4
from safetensors.torch import load_file
from tiny_families import by_name, save_tiny
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

import cli
from calibrate.chosen import co_use
from calibrate.statistics import load_statistics
from compress import layout as module
from compress.cost.misses import READINGS
from compress.plans.expert_order import chained
from compress.run import job
from engine.checkpoint.artifact import read_provenance
from engine.checkpoint.checkpoint import Checkpoint
from engine.expert_cache import places
from engine.files.safetensors_file import open_shards
from engine.generation.generate import Engine
from engine.inspect import inspect
from engine.progress import no_progress

LAYOUT = ["layout", "model", "-o", "new", *CALIBRATION]
PAGES = {"hidden_size": 128, "intermediate_size": 64}
"""Sizes with which a matrix of an expert has 8 pages in float32, more than what always stays in memory."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layout")
    make_workplace(path, **PAGES)
    with chdir(path):
        run("quantize", "model", "--bits", "4", "--group-size", "32", "--evaluation-samples", "0", "-o", "small")
        run(*LAYOUT)
    make_pruned(path)
    return path


@pytest.fixture
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def check_same(old: Path, new: Path) -> None:
    """Compare every tensor bit for bit, and read the result with the engine."""
    before, after = tensors_of(old), tensors_of(new)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].shape == tensor.shape
        assert torch.equal(after[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert (old / "config.json").read_bytes() == (new / "config.json").read_bytes()
    assert inspect(str(new), checksums=True, progress=no_progress)["valid"]


def experts_in(directory: Path, least: int = 65) -> list[tuple[str, int, int, list[tuple[str, str]]]]:
    """Return (file, first byte, last byte + 1, tensors) of every run of tensors of one expert, as (expert, tensor)."""
    found: list[Any] = []
    for file in open_shards(directory)[1]:
        for name, entry in sorted(file.entries.items(), key=lambda item: item[1].begin):
            before, _, after = name.partition(".experts.")
            number, _, part = after.partition(".")
            owner = f"{before} {number}" if after and entry.nbytes >= least else None
            if found and owner is not None and found[-1][0] == file.path.name and found[-1][3][-1][0] == owner:
                assert found[-1][2] == entry.begin
                found[-1][2] = entry.end
                found[-1][3].append((owner, part))
            elif owner is not None:
                found.append([file.path.name, entry.begin, entry.end, [(owner, part)]])
    return found


def test_a_result(place: Path) -> None:
    check_same(place / "model", place / "new")
    found = experts_in(place / "new")
    assert len(found) == 3 * 6, "each expert is one run of tensors"
    assert all(begin % 4096 == end % 4096 == 0 and len(own) == 3 for _, begin, end, own in found)
    assert [part for _, part in found[0][3]] == ["w1.weight", "w3.weight", "w2.weight"]
    provenance = read_provenance(place / "new")
    assert provenance is not None
    order = [
        f"model.layers.{layer}.block_sparse_moe {expert}"
        for layer, own in provenance["expert_order"].items()
        for expert in own
    ]
    assert [own[0][0] for *_, own in found] == order
    with safetensors.safe_open(place / "new" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["layout"]) == {"experts": "co-use", "page_bytes": 4096}
    figures = provenance["figures"]
    assert (figures["reads_per_expert_after"], figures["page_aligned_share_after"], figures["note"]) == (1, 1.0, None)
    assert figures["expert_bytes"] == 3 * 128 * 64 * 4 and figures["order"] == "co-use"
    assert 0 < figures["neighbors_share_after"] <= 1


def test_the_order_is_that_of_the_text(place: Path) -> None:
    run("calibrate", "model", "-o", "statistics", *CALIBRATION)
    layers = load_statistics(place / "statistics", Checkpoint(place / "model").config).layers
    expected = {str(index): chained(co_use(layer.chosen, 6)) for index, layer in layers.items()}
    provenance = read_provenance(place / "new")
    assert provenance is not None and provenance["expert_order"] == expected
    run("layout", "model", "-o", "again", "--statistics", "statistics", *CALIBRATION)
    again = read_provenance(place / "again")
    assert again is not None and again["expert_order"] == expected
    assert (place / "again" / "model.safetensors").read_bytes() == (place / "new" / "model.safetensors").read_bytes()


def test_the_cost_of_miss_thresholds_is_measured_and_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provenance = read_provenance(place / "new")
    assert provenance is not None
    costs = provenance["figures"]["miss_costs"]
    assert len(costs) == READINGS - 1 and all(cost["perplexity_ratio"] > 0 for cost in costs)
    saved = [cost["reads_saved"] for cost in costs if cost["memory_share"] == 0.5]
    assert saved == sorted(saved) and saved[-1] > saved[0] >= 0
    monkeypatch.setattr(places, "SMALL_BYTES", 64)
    engine = Engine.open(str(place / "new"), memory_limit=1 << 40, miss_threshold=0.11)
    cache = engine.expert_cache
    assert cache is not None and cache.miss_cost is not None and cache.miss_cost.threshold == 0.1
    cache.close()
    run("layout", "model", "-o", "plain", "--order", "plain")
    run("layout", "model", "-o", "unmeasured", *CALIBRATION, "--evaluation-samples", "0")
    for name in ("plain", "unmeasured"):
        own = read_provenance(place / name)
        assert own is not None and own["figures"]["miss_costs"] == []


def test_transformers_runs_the_result(place: Path) -> None:
    tokens = torch.arange(3, 40)[None]
    old, new = (AutoModelForCausalLM.from_pretrained(place / name).eval() for name in ("model", "new"))
    with torch.no_grad():
        assert torch.equal(old(tokens).logits, new(tokens).logits)


def test_a_run_goes_on(place: Path) -> None:
    figures = run(*LAYOUT, "--resume")
    assert figures == (read_provenance(place / "new") or {})["figures"]
    refused(place, LAYOUT, "exists already")
    assert run(*LAYOUT, "--overwrite", "--order", "plain")["neighbors_share_after"] is None


def test_without_text(place: Path) -> None:
    (place / "text.txt").unlink()
    figures = run("layout", "model", "-o", "plain")
    assert figures["order"] == "plain" and figures["neighbors_share_before"] is None
    check_same(place / "model", place / "plain")
    provenance = read_provenance(place / "plain")
    assert provenance is not None and set(map(tuple, provenance["expert_order"].values())) == {(0, 1, 2, 3, 4, 5)}


def test_low_bit_weights_stay_as_stored(place: Path) -> None:
    run("layout", "small", "-o", "new-small", *CALIBRATION)
    check_same(place / "small", place / "new-small")
    found = experts_in(place / "new-small")
    assert len(found) == 3 * 6
    assert all(len(own) == 6 for *_, own in found), "packed integers and scales of three matrices"
    provenance = read_provenance(place / "new-small")
    assert provenance is not None and provenance["made_from"]["method"] == "quantize"


def test_scales_that_stay_in_memory_do_not_lie_between(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_BYTES", 2000)
    figures = run("layout", "small", "-o", "new-small", *CALIBRATION)
    check_same(place / "small", place / "new-small")
    assert figures["expert_bytes"] == 3 * 64 * 128 // 2 and figures["page_aligned_share_after"] == 1.0
    found = experts_in(place / "new-small", least=2000)
    assert len(found) == 3 * 6
    assert all([part for _, part in own] == [f"w{number}.weight_packed" for number in (1, 3, 2)] for *_, own in found)


def test_small_files_never_cut_an_expert(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEFAULT_SHARD_BYTES", 220_000)
    monkeypatch.setattr(module, "RELEASE_EVERY_BYTES", 1000)
    run(*LAYOUT, "--overwrite")
    check_same(place / "model", place / "new")
    found = experts_in(place / "new")
    assert len(found) == 3 * 6 and len({path for path, *_ in found}) > 6
    assert all(begin % 4096 == 0 for _, begin, *_ in found)


def test_layers_that_differ(place: Path) -> None:
    (place / "pruned" / "foreign.txt").write_text("kept")
    (place / "pruned" / "foreign.py").write_text("print(1)")
    figures = run("layout", "pruned", "-o", "new-pruned")
    assert figures["experts_per_layer"] == [3, 5, 2] and figures["page_aligned_share_after"] == 1.0
    check_same(place / "pruned", place / "new-pruned")
    assert not (place / "new-pruned" / "foreign.py").exists()
    for name in ("skip_tables.safetensors", "modeling_compressed.py", "foreign.txt"):
        assert (place / "new-pruned" / name).read_bytes() == (place / "pruned" / name).read_bytes()


def test_experts_that_fill_no_pages(place: Path) -> None:
    shutil.rmtree(place / "model")
    save_reference("qwen3_moe", place / "model", vocab_size=VOCABULARY, moe_intermediate_size=23, dtype=torch.bfloat16)
    add_tokenizer(place / "model")
    figures = run(*LAYOUT, "--overwrite")
    assert (figures["reads_per_expert_after"], figures["page_aligned_share_after"]) == (1, 0.0)
    assert "do not fill" in figures["note"] or "not all experts" in figures["note"]
    check_same(place / "model", place / "new")


def test_stacked_experts_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_workplace(tmp_path, "granitemoe")
    refused(tmp_path, LAYOUT, "in stacks", "--order plain")
    figures = run("layout", "model", "-o", "new")
    assert figures["reads_per_expert_after"] == 2 and "in stacks" in figures["note"]
    check_same(tmp_path / "model", tmp_path / "new")


@pytest.mark.parametrize(
    ("save", "reads"),
    [
        (partial(save_float8, "qwen3_moe", block=(32, 32)), 1),
        (save_nvfp4, 1),
        (save_mxfp4, 5),  # blocks of two stacks, scales of the first, and two biases; other scales have 64 bytes
    ],
    ids=["fp8", "nvfp4", "mxfp4"],
)
def test_packed_floats_stay_as_stored(
    save: Callable[[Path], None], reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "model")
    figures = run("layout", "model", "-o", "new")
    check_same(tmp_path / "model", tmp_path / "new")
    assert figures["reads_per_expert_after"] == reads
    assert reads == 1 or "in stacks" in figures["note"]


def test_a_family_that_only_transformers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(by_name("exaone_moe"), tmp_path / "model", vocab_size=VOCABULARY)
    add_tokenizer(tmp_path / "model")
    figures = run("layout", "model", "-o", "new", "--data", "stdlib", "--samples", "2", "--sequence-length", "16")
    assert figures["reads_per_expert_after"] == 1
    check_same(tmp_path / "model", tmp_path / "new")
    order = (read_provenance(tmp_path / "new") or {})["expert_order"]
    firsts = [own[0][0].rpartition(" ")[2] for *_, own in experts_in(tmp_path / "new")]
    assert firsts == [str(expert) for own in order.values() for expert in own]


def test_a_language_model_beside_other_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_reference("qwen3_5_moe_text", tmp_path / "text", **PAGES)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    figures = run("layout", "model", "-o", "new")
    assert figures["reads_per_expert_after"] == 1 and figures["expert_bytes"] is not None
    check_same(tmp_path / "model", tmp_path / "new")
    assert any("visual" in name for name in tensors_of(tmp_path / "new"))


def test_refusals(place: Path) -> None:
    refused(place, ["layout", "model", "-o", "x", "--order", "plain", "--statistics", "text.txt"], "--statistics is for")
    refused(place, ["layout", "model", "-o", "x.gguf"], "the result is a directory")
    run("export", "model", "--format", "gguf", "-o", "model.gguf")
    refused(place, ["layout", "model.gguf", "-o", "x"], "is a GGUF file")
    refused(place, ["layout", "nothing", "-o", "x"], "no such directory")
    save_reference("llama", place / "dense")
    refused(place, ["layout", "dense", "-o", "x"], "is not a mixture of experts")


def test_an_interrupted_run_keeps_its_statistics(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (place / "new" / "model.safetensors").read_bytes()
    shutil.rmtree(place / "new")

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "_write", stopped)
        assert CliRunner().invoke(cli.main, LAYOUT).exit_code == 130
    assert not (place / "new").exists() and (place / ".new.work" / "statistics.safetensors").is_file()
    monkeypatch.setattr(job, "collect", stopped)
    run(*LAYOUT, "--resume")
    assert (place / "new" / "model.safetensors").read_bytes() == whole and not (place / ".new.work").exists()
