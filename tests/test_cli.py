"""The commands end to end on a tiny model: the promised JSON keys, nothing else on stdout, and artifacts that load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import save_reference
from safetensors.torch import load_file
from tokenizers_for_tests import add_tokenizer

import cli
from compress.methods import methods_of

FIGURES = (
    "artifact method sparsity experts_before experts_after experts_per_layer parameters_before parameters_after "
    "bytes_before bytes_after perplexity_before perplexity_after seconds peak_memory_bytes"
)
KEYS = {
    "prune": FIGURES,
    "merge": FIGURES,
    "densify": f"{FIGURES} ffns selected_experts",
    "calibrate": "statistics tokens seconds peak_memory_bytes",
    "inspect": "kind architecture experts_per_layer experts_per_token parameters active_parameters bytes valid provenance",
    "evaluate": "metric value tokens seconds",
    "generate": "text prompt_tokens generated_tokens time_to_first_token_seconds tokens_per_second peak_memory_bytes "
    "experts_skipped_share experts_skipped_share_per_layer",
    "bench": "model backend test tokens_per_second_mean tokens_per_second_sd peak_memory_bytes weights_bytes "
    "kv_cache_bytes experts_skipped_share",
}
TEXT = ["--data", "{text}", "--samples", "4", "--sequence-length", "32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model with a tokenizer, and text."""
    directory = tmp_path_factory.mktemp("cli")
    save_reference("mixtral", directory / "model", vocab_size=264)
    add_tokenizer(directory / "model")
    lines = [f"line {number} says that {number * 7 % 13} follows {number * 5 % 11}" for number in range(4000)]
    (directory / "text.txt").write_text("\n".join(lines))
    return directory


def run(place: Path, *arguments: str) -> dict[str, Any]:
    """Run a command with --json, and check that stdout is exactly one JSON object."""
    filled = [argument.format(text=place / "text.txt", model=place / "model", here=place) for argument in arguments]
    result = CliRunner().invoke(cli.main, [*filled, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    return values


@pytest.mark.parametrize("uniform", [False, True], ids=["global", "uniform"])
def test_prune_then_everything_else_on_its_result(place: Path, tmp_path: Path, uniform: bool) -> None:
    pruned = str(tmp_path / "pruned")
    options = ["--uniform"] if uniform else []
    figures = run(place, "prune", "{model}", "--sparsity", "0.5", "--method", "reap", "-o", pruned, *TEXT, *options)
    assert set(KEYS["prune"].split()) <= set(figures)
    assert figures["experts_before"] == 18 and figures["experts_after"] == 9 == sum(figures["experts_per_layer"])
    assert figures["sparsity"] == 0.5 and figures["bytes_after"] < figures["bytes_before"]
    assert (Path(pruned) / "modeling_compressed.py").exists() == (len(set(figures["experts_per_layer"])) > 1)
    if uniform:
        assert figures["experts_per_layer"] == [3, 3, 3]
    inspected = run(place, "inspect", pruned, "--checksums")
    assert set(KEYS["inspect"].split()) <= set(inspected)
    assert inspected["kind"] == "artifact" and inspected["valid"] and inspected["checksums_compared"]
    evaluated = run(place, "evaluate", pruned, *TEXT)
    assert set(KEYS["evaluate"].split()) <= set(evaluated)
    generated = run(place, "generate", pruned, "-p", "line", "-n", "8", "--skip-threshold", "1")
    assert set(KEYS["generate"].split()) <= set(generated)
    assert len(generated["experts_skipped_share_per_layer"]) == 3


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (["--sparsity", "0.5"], "unit-fisher"),
        (["--sparsity", "0.5", "--granularity", "expert"], "fisher"),
        (["--experts", "3"], "fisher"),
        (["--sparsity", "0.5", "--epochs", "1"], "diep"),
    ],
)
def test_the_default_is_the_best_method_that_uses_the_options(
    place: Path, tmp_path: Path, options: list[str], method: str
) -> None:
    figures = run(place, "prune", "{model}", *options, *TEXT, "-o", str(tmp_path / "made"))
    assert figures["method"] == method and figures["granularity"] == ("unit" if method == "unit-fisher" else "expert")
    assert (figures["units_after"] == figures["units_before"] / 2) and figures["experts_after"] == (
        figures["experts_before"] if method == "unit-fisher" else figures["experts_before"] / 2
    )


def test_diep_writes_a_plan_that_can_be_carried_out_again(place: Path, tmp_path: Path) -> None:
    first, again, plan = tmp_path / "first", tmp_path / "again", tmp_path / "plan.json"
    run(place, "prune", "{model}", "--experts", "4", "--epochs", "1", "-o", str(first), "--plan-output", str(plan), *TEXT)
    run(place, "prune", "{model}", "--plan", str(plan), "-o", str(again), *TEXT)
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert json.loads((first / "compression.json").read_text())["plan"] == json.loads(plan.read_text())
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


def test_recovery_changes_routers_and_norms_only(place: Path, tmp_path: Path) -> None:
    plain, recovered = tmp_path / "plain", tmp_path / "recovered"
    options = ["--sparsity", "0.5", "--method", "reap", *TEXT]
    run(place, "prune", "{model}", *options, "-o", str(plain))
    figures = run(place, "prune", "{model}", *options, "-o", str(recovered), "--recover-steps", "3")
    assert figures["recover_steps"] == 3
    before, after = (load_file(path / "model.safetensors") for path in (plain, recovered))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("gate.weight" in name or "norm" in name for name in changed)


def test_calibrate_once_use_often(place: Path, tmp_path: Path) -> None:
    statistics = str(tmp_path / "statistics.safetensors")
    figures = run(place, "calibrate", "{model}", "-o", statistics, *TEXT)
    assert set(KEYS["calibrate"].split()) <= set(figures)
    shares = figures["unselected_share_per_layer"]
    assert len(shares) == 3 and all(0.0 < share < 1.0 for share in shares)
    for method in ("frequency", "man", "mc-moe"):
        options = ["--sparsity", "0.25", "--method", method, "--statistics", statistics, "-o", str(tmp_path / method)]
        assert run(place, "prune", "{model}", *options, *TEXT)["method"] == method


@pytest.mark.parametrize("method", methods_of("merge"))
def test_merge_is_one_more_way_to_an_artifact(place: Path, tmp_path: Path, method: str) -> None:
    merged, again, plan = tmp_path / "merged", tmp_path / "again", tmp_path / "plan.json"
    options = ["--experts", "4", "--method", method, "--plan-output", str(plan)]
    figures = run(place, "merge", "{model}", *options, "-o", str(merged), *TEXT)
    assert set(KEYS["merge"].split()) <= set(figures) == set(run(place, "inspect", str(merged))["provenance"]["figures"])
    assert figures["method"] == method and figures["experts_per_layer"] == [4, 4, 4]
    assert figures["bytes_after"] < figures["bytes_before"] and figures["perplexity_after"] > 1
    assert run(place, "inspect", str(merged), "--checksums")["valid"]
    run(place, "prune", "{model}", "--plan", str(plan), "-o", str(again), *TEXT)
    assert (merged / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_densify_is_one_more_way_to_an_artifact(place: Path, tmp_path: Path) -> None:
    figures = run(place, "densify", "{model}", "--ffns", "2", "--distill-steps", "2", "-o", str(tmp_path / "dense"), *TEXT)
    assert set(KEYS["densify"].split()) <= set(figures)
    assert run(place, "inspect", str(tmp_path / "dense"), "--checksums")["architecture"] == "mistral"


def test_pruned_experts_are_merged_into_those_that_stay(place: Path, tmp_path: Path) -> None:
    statistics, dropped, merged = (str(tmp_path / name) for name in ("statistics", "dropped", "merged"))
    run(place, "calibrate", "{model}", "-o", statistics, *TEXT)
    options = ["--sparsity", "0.5", "--method", "reap", "--statistics", statistics, *TEXT]
    run(place, "prune", "{model}", *options, "-o", dropped)
    figures = run(place, "prune", "{model}", *options, "--merge", "cka", "-o", merged)
    plain, joined = (json.loads((Path(path) / "compression.json").read_text()) for path in (dropped, merged))
    assert joined["options"]["merge"] == "cka" and plain["options"]["merge"] == "none"
    assert figures["experts_per_layer"] == plain["experts_per_layer"] == joined["experts_per_layer"]
    for layer, kept in plain["plan"]["layers"].items():
        rows = [e if isinstance(e, int) else e["router"][0]["expert"] for e in joined["plan"]["layers"][layer]]
        assert rows == kept, "the same experts stay, and their router rows"
    assert run(place, "generate", merged, "-p", "line", "-n", "4")["generated_tokens"] == 4


def test_merging_goes_on_where_it_was_interrupted(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.methods import merging
    from compress.run import job, result

    arguments = ["merge", "{model}", "--experts", "2", *TEXT]
    with monkeypatch.context() as patch:
        patch.setattr(result, "write_artifact", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        filled = [part.format(text=place / "text.txt", model=place / "model") for part in arguments]
        assert CliRunner().invoke(cli.main, [*filled, "-o", str(tmp_path / "out")]).exit_code == 130
    monkeypatch.setattr(merging, "merging_plan", lambda *_, **__: pytest.fail("aligned again"))
    monkeypatch.setattr(job, "collect", lambda *_, **__: pytest.fail("calibrated again"))
    assert run(place, *arguments, "-o", str(tmp_path / "out"), "--resume")["experts_per_layer"] == [2, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bench_rows(place: Path) -> None:
    rows = run(place, "bench", "{model}", "-p", "8", "-n", "4", "-r", "1")["rows"]
    assert [row["test"] for row in rows] == ["pp8", "tg4"]
    assert all(set(KEYS["bench"].split()) <= set(row) for row in rows)


def test_people_get_a_table(place: Path, tmp_path: Path) -> None:
    arguments = ["prune", str(place / "model"), "--sparsity", "0.5", "--method", "random", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.main, [*arguments, *(part.format(text=place / "text.txt") for part in TEXT)])
    assert result.exit_code == 0
    assert re.search(r"^experts +18 +9$", result.stdout, re.MULTILINE)


def test_perplexity_has_its_error_over_documents(place: Path) -> None:
    arguments = ["evaluate", "{model}", *TEXT, "--samples", "5"]
    spread, packed = (run(place, *arguments, "--windows", windows) for windows in ("spread", "packed"))
    assert spread["documents"] == 2 and spread["windows"] == "spread", "all held-out documents of the text"
    assert packed["documents"] == 1 and packed["value_stderr"] is None
    assert spread["tokens"] == packed["tokens"] == 5 * 31 and spread["value"] != packed["value"]
    assert 0 < spread["value_stderr"] < spread["value"]
    filled = [argument.format(text=place / "text.txt", model=place / "model") for argument in arguments]
    shown = CliRunner().invoke(cli.main, filled).stdout
    assert f"perplexity {spread['value']:.4f} ± {spread['value_stderr']:.4f} on 155 tokens of 2 documents" in shown


def test_a_smaller_model_is_compared_with_its_source_document_by_document(place: Path, tmp_path: Path) -> None:
    options = ["--sparsity", "0.5", "--method", "random", "--evaluation-samples", "5", *TEXT]
    figures = run(place, "prune", "{model}", *options, "-o", str(tmp_path / "out"))
    for when, model in (("before", "{model}"), ("after", str(tmp_path / "out"))):
        evaluated = run(place, "evaluate", model, *TEXT, "--samples", "5")
        assert evaluated["value"] == pytest.approx(figures[f"perplexity_{when}"], rel=1e-6)
        assert evaluated["value_stderr"] == pytest.approx(figures[f"perplexity_{when}_stderr"], rel=1e-5)
        assert evaluated["documents"] == figures["evaluation_documents"] == 2
    ratio = figures["perplexity_after"] / figures["perplexity_before"]
    assert figures["perplexity_ratio"] == pytest.approx(ratio)
    assert figures["perplexity_ratio_low"] < ratio < figures["perplexity_ratio_high"]
    assert "perplexity ratio, 95 %" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("metric", [["--metric", "rouge-l"], ["--tasks", "arc_easy"]])
def test_windows_are_for_perplexity(place: Path, metric: list[str]) -> None:
    result = CliRunner().invoke(cli.main, ["evaluate", str(place / "model"), *metric, "--windows", "packed"])
    assert result.exit_code == 1 and "--windows is for perplexity; leave it out" in result.output


def test_what_is_made_of_the_built_in_model_is_measured_on_the_same_text(tmp_path: Path) -> None:
    output = str(tmp_path / "half")
    options = ["--sparsity", "0.5", "--method", "random", "--samples", "2", "--evaluation-samples", "2"]
    figures = json.loads(CliRunner().invoke(cli.main, ["prune", *options, "-o", output, "--json"]).stdout)
    evaluated = json.loads(CliRunner().invoke(cli.main, ["evaluate", output, "--samples", "2", "--json"]).stdout)
    assert evaluated["data"] == "stdlib" and evaluated["value"] == pytest.approx(figures["perplexity_after"])


def test_the_built_in_model_is_whole_and_speaks() -> None:
    runner = CliRunner()
    inspected = json.loads(runner.invoke(cli.main, ["inspect", "--json"]).stdout)
    assert inspected["valid"] and inspected["experts_per_layer"] == [8] * 6
    torch.set_num_threads(1)
    generated = json.loads(runner.invoke(cli.main, ["generate", "-p", "import ", "-n", "8", "--json"]).stdout)
    assert generated["generated_tokens"] == 8 and generated["text"] and generated["finish_reason"] == "length"
