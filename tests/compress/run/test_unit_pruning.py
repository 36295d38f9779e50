"""`compress prune` of hidden units: plain and ragged results, the refit, plans that are repeated, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import make_workplace, refused, run

from engine.checkpoint.checkpoint import Checkpoint

TEXT = ["--data", "text.txt", "--samples", "32", "--sequence-length", "32", "--evaluation-samples", "2"]
UNITS = ["prune", "model", *TEXT, "--method", "unit-magnitude"]


@pytest.fixture(name="place")
def workplace(tmp_path: Path, pictures: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.tensor(name).clone() for name in checkpoint.shapes}


def width_of(place: Path) -> int:
    config: dict[str, Any] = json.loads((place / "model" / "config.json").read_text())
    return int(config["intermediate_size"])


@pytest.mark.parametrize("method", ["unit-magnitude", "unit-fisher", "unit-obs"])
def test_a_uniform_result_is_a_plain_checkpoint_of_half_the_width(place: Path, method: str) -> None:
    figures = run("prune", "model", *TEXT, "--method", method, "--sparsity", "0.5", "--uniform", "-o", "half")
    width, config = width_of(place), json.loads((place / "half" / "config.json").read_text())
    assert config["intermediate_size"] == width // 2 and not {"block_configs", "auto_map"} & set(config)
    assert figures["granularity"] == "unit" and figures["sparsity"] == 0.5
    assert figures["units_before"] == 18 * width and figures["units_after"] == 9 * width
    assert figures["widths_per_layer"] == [[width // 2] * 6] * 3 and figures["experts_after"] == 18
    assert "trust_remote_code" not in (place / "half" / "README.md").read_text()


def test_the_refit_lowers_the_error_and_changes_down_projections_alone(place: Path) -> None:
    figures = run(*UNITS, "--sparsity", "0.5", "--uniform", "-o", "refitted")
    plain = run(*UNITS, "--sparsity", "0.5", "--uniform", "--no-refit", "-o", "plain")
    assert plain["refit"] is None and len(figures["refit"]["ridge_per_layer"]) == 3
    pairs = zip(figures["refit"]["error_per_layer"], figures["refit"]["error_without_per_layer"], strict=True)
    assert all(after < before for after, before in pairs)
    fitted, kept = weights(place / "refitted"), weights(place / "plain")
    changed = {name for name, own in fitted.items() if not torch.equal(own, kept[name])}
    assert changed == {name for name in fitted if name.endswith("w2.weight")}


@pytest.mark.slow
def test_a_plan_repeats_the_result(place: Path) -> None:
    run(*UNITS, "--sparsity", "0.5", "-o", "first", "--plan-output", "units.json")
    plan = json.loads((place / "units.json").read_text())
    assert all(isinstance(part["units"], str) for own in plan["layers"].values() for e in own for part in e["parts"])
    again = run("prune", "model", *TEXT, "--plan", "units.json", "-o", "second")
    assert again["granularity"] == "unit"
    first, second = weights(place / "first"), weights(place / "second")
    assert first.keys() == second.keys() and all(torch.equal(own, second[name]) for name, own in first.items())


def test_widths_differ_with_the_global_scope_and_experts_leave_with_granularity_both(place: Path) -> None:
    ragged = run(*UNITS, "--sparsity", "0.5", "--unit-multiple", "1", "-o", "ragged")
    assert len({width for own in ragged["widths_per_layer"] for width in own}) > 1
    assert ragged["experts_after"] == 18 and (place / "ragged" / "kept_units.png").is_file()
    config = json.loads((place / "ragged" / "config.json").read_text())
    assert [block["ffn"]["moe"]["expert_widths"] for block in config["block_configs"]] == ragged["widths_per_layer"]
    both = run(*UNITS, "--sparsity", "0.5", "--granularity", "both", "--unit-multiple", str(width_of(place)), "-o", "both")
    assert both["experts_after"] < 18 and both["sparsity"] == pytest.approx(0.5)
    assert min(both["experts_per_layer"]) >= 2, "as many as a token chooses"


@pytest.mark.slow
def test_training_afterwards_starts_from_the_refit(place: Path) -> None:
    run(*UNITS, "--sparsity", "0.5", "--uniform", "-o", "refitted")
    figures = run(*UNITS, "--sparsity", "0.5", "--uniform", "--recover-steps", "2", "-o", "recovered")
    assert figures["recover_steps"] == 2
    before, after = weights(place / "refitted"), weights(place / "recovered")
    changed = {name for name, own in after.items() if not torch.equal(own, before[name])}
    assert changed and all("norm" in name or "gate" in name for name in changed), "routers and norms, not the experts"


@pytest.mark.parametrize(
    "method", ["unit-obs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unit-magnitude", "unit-fisher"))]
)
def test_shared_experts_and_dense_ffns_are_offered_too(
    method: str, tmp_path: Path, pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path, "qwen2_moe", num_hidden_layers=3, mlp_only_layers=[1])
    monkeypatch.chdir(tmp_path)
    given = ["prune", "model", *TEXT, "--method", method, "--sparsity", "0.5", "--include", "dense,shared"]
    figures = run(*given, "-o", "first", "--plan-output", "units.json", "--memory-limit", "4GB")
    before, after = (Checkpoint(tmp_path / name).config for name in ("model", "first"))
    assert json.loads((tmp_path / "units.json").read_text())["common"].keys() <= {"0", "1", "2"}
    units = [sum(map(sum, config.ffn_widths(("shared", "dense")).values())) for config in (before, after)]
    assert [figures["units_before"], figures["units_after"]] == units
    assert figures["sparsity"] == pytest.approx(0.5, abs=0.02) and units[1] < units[0]
    assert any(after.common_widths[layer] < width for layer, width in before.common_widths.items())
    pairs = zip(figures["refit"]["error_per_layer"], figures["refit"]["error_without_per_layer"], strict=True)
    assert all(after <= before for after, before in pairs)
    again = run("prune", "model", *TEXT, "--plan", "units.json", "--refit", "-o", "second")
    assert again["perplexity_after"] == pytest.approx(figures["perplexity_after"], rel=1e-3)


@pytest.mark.slow
def test_a_sweep_takes_methods_of_both_kinds(place: Path) -> None:
    values = run("prune", "model", *TEXT, "--method", "reap,unit-magnitude", "--sparsity", "0.5", "-o", "sweep")
    assert [figures["granularity"] for figures in values["runs"]] == ["expert", "unit"]
    assert {figures["sparsity"] for figures in values["runs"]} == {0.5}


@pytest.mark.parametrize(
    "command", [["prune", "model", "--method", "reap", "--sparsity", "0.5"], ["merge", "model", "--experts", "3"]]
)
def test_the_experts_that_stay_are_corrected_where_whole_experts_leave(
    place: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(*command, *TEXT, "-o", "plain")
    corrected = run(*command, *TEXT, "--correct", "-o", "corrected")
    assert plain["refit"] is None and set(corrected["refit"]) == {"drift_before_per_layer", "drift_per_layer"}
    before, after = (weights(place / name) for name in ("plain", "corrected"))
    changed = {name for name, own in before.items() if not torch.equal(own, after[name])}
    assert changed and all(name.endswith("w2.weight") for name in changed)
    monkeypatch.setattr("compress.refit.correction.WIDEST_GRAM", 1)
    refused(place, [*command, *TEXT, "--correct", "-o", "out"], "a correction takes at most 1")


def test_rounded_weights_keep_whole_groups(place: Path) -> None:
    values = run("prune", "model", *TEXT, "--sparsity", "0.5", "--bits", "8", "--group-size", "8", "-o", "low")
    widths = {width for layer in values["widths_per_layer"] for width in (layer if isinstance(layer, list) else [layer])}
    assert len(widths) > 1 and all(width % 8 == 0 for width in widths)
    assert run("generate", "low", "-p", "line", "-n", "4")["generated_tokens"] <= 4


def test_packed_weights_are_refused_before_any_work(place: Path) -> None:
    run("quantize", "model", *TEXT, "--bits", "8", "--group-size", "16", "-o", "low")
    arguments = ["prune", "low", *TEXT, "--granularity", "unit", "--sparsity", "0.5", "-o", "out"]
    refused(place, arguments, "packed", "prune the unquantized model")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--method", "reap", "--granularity", "unit", "--sparsity", "0.5"], ("reap scores whole experts", "unit-obs")),
        (["--method", "unit-obs", "--granularity", "expert", "--sparsity", "0.5"], ("unit-obs scores hidden units",)),
        (["--granularity", "unit", "--experts", "3"], ("--experts counts whole experts",)),
        (["--granularity", "unit", "--sparsity", "1.5"], ("sparsity is 1.5",)),
        (["--granularity", "both", "--uniform", "--sparsity", "0.5"], ("a uniform result keeps every expert",)),
        (["--method", "reap", "--scope", "expert", "--sparsity", "0.5"], ("add --granularity unit",)),
        (["--method", "reap", "--unit-multiple", "8", "--sparsity", "0.5"], ("reap removes whole experts",)),
        (["--granularity", "unit", "--unit-multiple", "4096", "--sparsity", "0.5"], ("unit-multiple is 4096",)),
        (["--granularity", "unit", "--unit-multiple", "8", "--sparsity", "0.99"], ("would keep", "lower the sparsity")),
        (["--sparsity", "0.9", "--bits", "8", "--group-size", "16"], ("lower the sparsity", "a smaller --group-size")),
        (["--sparsity", "0.5", "--unit-multiple", "2", "--bits", "8", "--group-size", "8"], ("take --unit-multiple 8",)),
        (["--granularity", "unit", "--sparsity", "0.5", "--ridge", "0"], ("ridge is 0.0",)),
        (["--granularity", "unit", "--sparsity", "0.5", "--merge", "cka"], ("leave out --merge",)),
        (["--sparsity", "0.5", "--statistics", "some.safetensors", "--no-refit"], ("no moments", "leave out --statistics")),
        (["--sparsity", "0.5", "--include", "shared"], ("include is 'shared'", "no shared experts")),
        (["--sparsity", "0.5", "--include", "dense"], ("include is 'dense'", "no layers without experts")),
        (["--sparsity", "0.5", "--include", "shared", "--method", "reap"], ("leave out --include",)),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(place: Path, arguments: list[str], fragments: tuple[str, ...]) -> None:
    refused(place, ["prune", "model", *TEXT, *arguments, "-o", "out"], *fragments)
