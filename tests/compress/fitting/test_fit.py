"""`compress fit` on a tiny model: results within the target, the same bytes after an interruption, refusals in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import CALIBRATION, listing, make_workplace, refused, run
from click.testing import CliRunner
from float_models_for_tests import save_float8
from safetensors.torch import load_file
from tiny_families import by_name, save_tiny
from tokenizers_for_tests import VOCABULARY, add_tokenizer

import cli
from calibrate.options import CalibrationOptions
from compress import fit as module
from compress.fit_sweep import named
from compress.fitting import candidate, measured, rounding_costs
from compress.fitting.measured import weight_file_bytes
from compress.options.fit import FitOptions
from engine.checkpoint.artifact import read_provenance
from engine.checkpoint.checkpoint import Checkpoint
from engine.families.tensor_names import expert_tensor
from engine.files.safetensors_writer import PAGE_BYTES

FIT = ["fit", "model", "--group-size", "32", "--validation-samples", "2", "--evaluation-samples", "2", *CALIBRATION]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit")
    make_workplace(path, intermediate_size=96)
    return path


@pytest.fixture
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measured, "decoding_speed", lambda directory, device: 1.0)  # starts a process each time
    return tmp_path


def weights_of(path: Path) -> dict[str, tuple[int, str]]:
    return {
        name: (0, digest) for name, (_, digest) in listing(path).items() if name.endswith((".safetensors", "config.json"))
    }


def whole_size(place: Path) -> int:
    return weight_file_bytes(place / "model")


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_result_is_just_below_the_target(place: Path, share: float) -> None:
    target = int(share * whole_size(place))
    figures = run(*FIT, "--target-size", str(target), "-o", "out")
    size = weight_file_bytes(place / "out")
    assert size <= target and size == figures["weight_file_bytes"]
    step = 2 * 32 * 32 * 3  # a multiple of units of one expert, and the longest headers
    assert size > target - step - PAGE_BYTES - 0.02 * target
    assert figures["target_bytes"] == target and figures["kl"] >= 0.0
    assert figures["kl"] == min(point["measured_kl"] for point in figures["frontier"] if point["measured_kl"] is not None)
    provenance = read_provenance(place / "out")
    assert provenance is not None and provenance["method"] == "fit"
    opened = Checkpoint(place / "out")
    assert opened.config.experts_by_layer.keys() == Checkpoint(place / "model").config.experts_by_layer.keys()
    assert (place / "out" / "README.md").is_file()
    assert not list(place.glob(".out*"))


def test_a_target_of_the_whole_model_changes_nothing(place: Path) -> None:
    figures = run(*FIT, "--target-size", "1GB", "-o", "out")
    assert figures["kl"] == pytest.approx(0.0, abs=1e-6) and figures["granularity"] == "expert"
    own, other = (load_file(place / each / "model.safetensors") for each in ("out", "model"))
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


def test_bytes_that_a_token_reads_are_limited_too(place: Path) -> None:
    free = run(*FIT, "--target-size", "1GB", "-o", "free")
    figures = run(*FIT, "--target-active", str(int(0.6 * free["active_bytes"])), "-o", "out")
    assert figures["active_bytes"] <= 0.6 * free["active_bytes"] and figures["target_bytes"] is None


@pytest.mark.slow
def test_both_targets_are_kept(place: Path) -> None:
    free = run(*FIT, "--target-size", "1GB", "-o", "free")
    size, read = int(0.6 * whole_size(place)), int(0.4 * free["active_bytes"])
    figures = run(*FIT, "--target-size", str(size), "--target-active", str(read), "-o", "out")
    assert (figures["target_bytes"], figures["target_active_bytes"]) == (size, read)
    assert weight_file_bytes(place / "out") <= size and figures["active_bytes"] <= read


@pytest.mark.slow
def test_experts_that_go_save_no_bytes_that_a_token_reads(place: Path) -> None:
    """Every token reads as many experts as before: with whole experts of one size the engine reads as much."""
    whole_experts = [*FIT, "--bits", "16", "--unit-multiple", "96"]
    figures = run(*whole_experts, "--target-size", str(int(0.7 * whole_size(place))), "-o", "out")
    assert figures["experts_after"] < figures["experts_before"]
    work = ("--prompt-tokens", "0", "--generated-tokens", "2", "--repetitions", "1")
    reads = [run("bench", each, *work) for each in ("model", "out")]
    before, after = (own["rows"][0]["weights_read_bytes_per_token"] for own in reads)
    assert after >= 0.99 * before
    assert figures["active_bytes"] == pytest.approx(after, rel=1e-4)
    less = ["--target-active", str(int(0.7 * after)), "-o", "less"]
    refused(place, [*whole_experts, *less], "bytes read for a token, and the least")


def test_impossible_bytes_that_a_token_reads_are_known_before_any_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepare", lambda *given: pytest.fail("text was read"))
    refused(place, [*FIT, "--target-active", "1KB", "-o", "out"], "1,000 bytes read for a token, and the least")


def test_free_memory_that_holds_no_choice_is_known_before_any_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "unit_costs", lambda *given: pytest.fail("a pass began"))
    monkeypatch.setattr(module, "target_size", lambda run: 5_000)
    refused(place, [*FIT, "--fit-to", "auto", "-o", "out"], "the target is 5,000 bytes, and the least that is possible")


def test_a_result_by_layer_is_written_as_gguf_with_its_bits(place: Path) -> None:
    target = str(int(0.35 * whole_size(place)))
    figures = run(*FIT, "--target-size", target, "--by-layer", "-o", "out")
    assert figures["units_after"] == figures["units_before"] and len(figures["matrices_by_bits"]) > 1
    result = Checkpoint(place / "out")
    for layer, experts in result.config.experts_by_layer.items():
        for part in (0, 1, 2):
            names = [expert_tensor(result.config.architecture, layer, expert, part) for expert in range(experts)]
            assert len({result.scheme(name) for name in names}) == 1
    written = run("export", "out", "--format", "gguf", "--type", "stored", "-o", "out.gguf")
    assert written["max_abs_logit_difference"] <= 1e-4
    refused(place, [*FIT, "--target-size", target, "--by-layer", "--bits", "16", "-o", "x"], "--by-layer leave nothing")


def test_no_units_go_and_no_bits_without_them(place: Path) -> None:
    target = str(int(0.7 * whole_size(place)))
    rounded = run(*FIT, "--target-size", target, "--no-remove", "-o", "rounded")
    assert rounded["units_after"] == rounded["units_before"] and set(rounded["matrices_by_bits"]) - {"16"}
    pruned = run(*FIT, "--target-size", target, "--bits", "16", "-o", "pruned")
    assert pruned["units_after"] < pruned["units_before"] and set(pruned["matrices_by_bits"]) == {"16"}


def test_an_interrupted_run_gives_the_same_bytes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ["--target-size", str(int(0.4 * whole_size(place)))]
    run(*FIT, *target, "-o", "whole")

    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    for owner, name in ((module, "table_of"), (measured, "written"), (module, "_by_bits")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, stop)
            assert CliRunner().invoke(cli.main, [*FIT, *target, "-o", "parts", "--resume"]).exit_code == 130
        assert not (place / "parts").exists() and (place / ".parts.work").is_dir()
    run(*FIT, *target, "-o", "parts", "--resume")
    assert weights_of(place / "parts") == weights_of(place / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_sizes_of_a_sweep_are_those_of_single_runs_from_one_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [int(share * whole_size(place)) for share in (0.7, 0.4)]
    for size in sizes:
        run(*FIT, "--target-size", str(size), "-o", f"single-{size}")
    layers, write = list[Path](), rounding_costs._write

    def counted(path: Path, *rest: Any) -> None:
        layers.append(path)
        write(path, *rest)

    monkeypatch.setattr(rounding_costs, "_write", counted)
    values = run(*FIT, "--target-size", ",".join(map(str, sizes)), "-o", "swept")
    assert len(layers) == len(Checkpoint(place / "model").config.moe_layers)
    assert [figures["target_bytes"] for figures in values["runs"]] == sorted(sizes)
    assert len(values["rows"]) == 3
    for size in sizes:
        assert weights_of(place / "swept" / named(size)) == weights_of(place / f"single-{size}")
    assert (place / "swept" / "comparison" / "index.html").is_file()
    assert not list(place.glob(".*")) and not list((place / "swept").glob(".*"))


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    ("sizes", "fragments"),
    [
        ("60KB,5KB", ["the target is 5,000 bytes", "the least that is possible is"]),
        ("60KB,60000", ["names a size twice"]),
        ("60KB,70KB", ["--memory-limit is for one artifact at a time"]),
    ],
)
def test_refused_sweeps_leave_nothing(place: Path, sizes: str, fragments: list[str]) -> None:
    limit = ["--memory-limit", "1GB"] if "memory" in fragments[0] else []
    refused(place, [*FIT, "--target-size", sizes, *limit, "-o", "out"], *fragments)


def test_an_impossible_size_is_known_before_any_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepare", lambda *given: pytest.fail("text was read"))
    refused(place, [*FIT, "--target-size", "5KB", "-o", "out"], "the least that is possible is")


@pytest.mark.parametrize("remove", [True, False])
def test_the_least_that_is_possible_is_possible(place: Path, remove: bool) -> None:
    options = [*FIT, *(() if remove else ("--no-remove",))]
    said = CliRunner().invoke(cli.main, [*options, "--target-size", "5KB", "-o", "out"]).output
    least = re.search(r"the least that is possible is ([\d,]+)", said)
    assert least is not None
    figures = run(*options, "--target-size", least[1].replace(",", ""), "-o", "out")
    assert figures["weight_file_bytes"] <= int(least[1].replace(",", ""))


def test_candidates_are_measured_on_other_documents_than_those_of_the_costs(place: Path) -> None:
    words = [f"{one}{other}{last}" for one in "bcdfghklmnp" for other in "aeiou" for last in "bcdfghklmnp"]
    rows = [json.dumps({"text": " ".join([word] * 12)}) for word in words]
    (place / "rows.jsonl").write_text("\n".join(rows))
    calibration = CalibrationOptions(data="rows.jsonl", samples=200, sequence_length=16, evaluation_samples=0)
    options = FitOptions(
        model="model", output=place / "out", target_size=10**6, validation_samples=20, calibration=calibration
    )
    prepared = module.prepare_fitting(options)
    grams = [
        {tuple(row[place : place + 6].tolist()) for row in text for place in range(10)}
        for text in (prepared.tokens_SL, prepared.validation_VL)
    ]
    assert len(grams[1]) > 10 and len(grams[0] & grams[1]) <= len(grams[1]) // 10


def test_models_of_measured_candidates_are_removed_and_not_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, written = list[Path](), candidate._written
    monkeypatch.setattr(candidate, "_written", lambda *given: made.append(given[2]) or written(*given))

    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    target = ["--target-size", str(int(0.3 * whole_size(place)))]
    with monkeypatch.context() as patched:
        patched.setattr(module, "_by_bits", stop)
        assert CliRunner().invoke(cli.main, [*FIT, *target, "-o", "out"]).exit_code == 130
    assert made and not any(directory.exists() for directory in made)
    before = len(made)
    run(*FIT, *target, "-o", "out", "--resume")
    assert len(made) == before


def test_names_of_sizes() -> None:
    assert [named(size) for size in (14 * 10**9, 14_250_000_000, 3_514_640, 60_000, 999)] == [
        "14GB", "14.25GB", "3.51464MB", "60KB", "999B",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ([], ["no target is given", "--target-size"]),
        (["--target-size", "5KB"], ["the target is 5,000 bytes", "the least that is possible is"]),
        (["--target-size", "1MB", "--fit-to", "auto"], ["give one of them"]),
        (["--target-size", "1MB", "--bits", "5"], ["bits has 5", "2, 3, 4, 8, 16"]),
        (["--target-size", "1MB", "--bits", "4,4"], ["named twice"]),
        (["--target-size", "1MB", "--group-size", "48"], ["groups of 48 do not fill", "--group-size"]),
        (["--target-size", "1MB", "--unit-multiple", "16"], ["unit-multiple is 16", "--unit-multiple 32"]),
        (["--target-size", "1MB", "--unit-multiple", "128"], ["unit-multiple is 128", "experts have 96 hidden units"]),
        (["--target-size", "1MB", "--min-experts", "99"], ["min-experts is 99", "give a smaller number"]),
        (["--target-size", "1MB", "--bits", "16", "--no-remove"], ["leave nothing to choose"]),
        (["--target-size", "1MB,2MB", "--plan-output", "p.json"], ["--plan-output is for one artifact"]),
    ],
)
def test_refusals(place: Path, options: list[str], fragments: list[str]) -> None:
    refused(place, [*FIT, *options, "-o", "out"], *fragments)


def test_a_family_that_transformers_runs_is_refused_by_name(place: Path) -> None:
    shutil.rmtree(place / "model")
    save_tiny(by_name("exaone_moe"), place / "model", vocab_size=VOCABULARY)
    add_tokenizer(place / "model")
    refused(place, [*FIT, "--target-size", "1MB", "-o", "out"], "a model of the family exaone_moe runs through transformers")


@pytest.mark.slow
def test_packed_floats_that_fit_stay_as_they_are(place: Path) -> None:
    """Every choice that changes the model widens them, so that it would be larger than the model is."""
    save_float8("qwen3_moe", place / "packed", vocab_size=VOCABULARY)
    add_tokenizer(place / "packed")
    packed, least = ["fit", "packed", *FIT[2:]], int(module.stored_bytes(Checkpoint(place / "packed")))
    figures = run(*packed, "--target-size", str(least), "-o", "same")
    own, other = (load_file(place / each / "model.safetensors") for each in ("same", "packed"))
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    assert figures["kl"] == pytest.approx(0.0, abs=1e-6) and figures["matrices_by_bits"].keys() == {"16"}
    figures = run(*packed, "--target-size", str(least - 1), "-o", "less")
    assert weight_file_bytes(place / "less") < least and figures["matrices_by_bits"].keys() != {"16"}


def test_a_run_goes_on_with_a_limit_of_memory_or_without_as_it_began(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a choice are measured without a limit alone, and correct the costs of the next one."""
    target = ["--target-size", str(int(0.4 * whole_size(place))), "-o", "out", "--resume"]

    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "table_of", stop)
        assert CliRunner().invoke(cli.main, [*FIT, *target]).exit_code == 130
    refused(place, [*FIT, *target, "--memory-limit", "4GB"], "was begun with other options")


def test_low_bit_weights_are_refused(place: Path) -> None:
    run("quantize", "model", "--bits", "4", "--evaluation-samples", "0", "-o", "small")
    refused(place, [FIT[0], "small", *FIT[2:], "--target-size", "1MB", "-o", "out"], "has weights of 4 bits")
