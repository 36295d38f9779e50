"""Presets: rows that the options accept, values that win, and what is printed of both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_origin

import pytest
from click.testing import CliRunner, Result

import cli
from compress.commands.click_options import default_of
from compress.commands.command import Common, Given
from compress.commands.preset import with_preset
from compress.options.densify import DensifyOptions
from compress.options.distill import DistillOptions
from compress.options.distill_classifier import ClassifierOptions
from compress.options.presets import PRESETS, preset_of
from compress.options.prune import DiepOptions, PruneOptions
from engine.errors import OptionError
from engine.options import check_value, leaves

OPTIONS: dict[str, type] = {
    "prune": PruneOptions,
    "densify": DensifyOptions,
    "distill": DistillOptions,
    "classifier": ClassifierOptions,
}
ROWS = [(name, *job) for name, rows in PRESETS.items() for job in rows]
PAPERS = (Path(__file__).resolve().parents[3] / "docs" / "papers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "command", "kind"), ROWS, ids=" ".join)
def test_every_value_is_one_that_its_option_takes(name: str, command: str, kind: str) -> None:
    found = {leaf.name: leaf for leaf in leaves(OPTIONS[command])}
    preset = preset_of(name, command, kind)
    assert f"| {preset.paper}" in PAPERS
    for option, (value, place) in preset.values.items():
        leaf = found[option]
        for each in value if isinstance(value, tuple) else (value,):
            check_value(option, each, leaf.option)
        assert isinstance(value, get_origin(leaf.type) or leaf.type) and re.search(
            r"§|eq\.|appendix|setting|not stated", place
        ), option


def test_rows_are_there_for_every_recipe() -> None:
    recipes: dict[str, Any] = {leaf.name: leaf.option.choices for leaf in leaves(DistillOptions)}
    classifiers: dict[str, Any] = {leaf.name: leaf.option.choices for leaf in leaves(ClassifierOptions)}
    for command, choices in (("distill", recipes["recipe"]), ("classifier", classifiers["recipe"])):
        assert {kind for of, kind in PRESETS["paper"] if of == command} == set(choices)


def given(of: type, **values: Any) -> Given:
    """Return a command line with these options."""
    defaults = {leaf.name: default_of(leaf) for leaf in leaves(of)}
    return Given(Common(), {**defaults, "preset": "paper", **values}, frozenset(values))


def test_values_of_the_paper_of_diep(capsys: pytest.CaptureFixture[str]) -> None:
    made = with_preset(given(PruneOptions), (PruneOptions,), "prune", "diep").make_named(DiepOptions)
    assert made == DiepOptions("paper", 10, 16, 5e-3, reconstruction_weight=0.01, start="zero", score="raw", recenter=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["preset", "paper:", "DiEP"], ["--relaxation", "paper", "eq.", "6"]]
    assert ["--no-recenter", "eq.", "8"] in lines and lines[-1][:3] == ["note:", "three", "α-steps"]


def test_options_on_the_command_line_win_and_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    line = given(PruneOptions, epochs=2, recenter=True)
    made = with_preset(line, (PruneOptions,), "prune", "diep").make_named(DiepOptions)
    assert made.epochs == 2 and made.recenter and made.score == "raw"
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "--epochs 2 yours, in place of --epochs 10 (setting)" in lines
    assert "--recenter yours, in place of --no-recenter (eq. 8)" in lines and "--batch-size 16 setting" in lines


def test_without_a_preset_nothing_changes() -> None:
    line = given(PruneOptions, preset=None)
    assert with_preset(line, (PruneOptions,), "prune", "diep") is line


def test_a_method_without_settings_is_refused() -> None:
    with pytest.raises(OptionError, match="preset paper has no settings of reap, but of diep"):
        with_preset(given(PruneOptions), (PruneOptions,), "prune", "reap")


def test_values_of_the_paper_of_dense_models() -> None:
    made = with_preset(given(DensifyOptions), (DensifyOptions,), "densify").make(DensifyOptions, output=Path("o"))
    training = made.training
    part = training.part(training.parts["distill"], 16, 64)
    assert (made.ffns, made.select, part.steps, part.learning_rate) == (1, "usage", 30_000, 1.252e-3)
    assert (part.schedule, part.warm_up_steps) == ("linear", 31_000)
    assert (training.lambda_supervised, training.lambda_layer, training.lambda_prediction) == (1.0, 1.0, 0.0)


def test_values_of_the_paper_of_recipes() -> None:
    line = given(DistillOptions, recipe="sar", model="a", teacher="b")
    made = with_preset(line, (DistillOptions,), "distill", "sar").make(DistillOptions, model="a", output=Path("o"))
    training, router = made.training(10, 16, 64), made.router_training(10, 16, 64)
    assert (training.learning_rate, training.batch_size, router.learning_rate) == (1e-5, 16, 1e-5)
    assert (made.epochs, made.limits.length, made.limits.prompt, made.select_by) == (10, 512, 256, "rouge-l")


def test_values_of_the_paper_of_augmentation_routers_and_layers() -> None:
    """M = 2 and λ = 0.05 of KA, the weight 0.01 of SAR's load balance, and the 30,000 steps of layers."""

    def made(recipe: str) -> DistillOptions:
        line = given(DistillOptions, recipe=recipe, model="a", teacher="b")
        named = with_preset(line, (DistillOptions,), "distill", recipe)
        return named.make(DistillOptions, model="a", output=Path("o"))

    augmentation, router, layers = made("ka").augmentation, made("sar"), made("layer-mse")
    assert (augmentation.samples, augmentation.probability) == (2, 0.05)
    assert router.load_balance_weight == 0.01
    assert (layers.steps, layers.learning_rate, layers.schedule, layers.warm_up_steps) == (
        30_000,
        1.252e-3,
        "linear",
        31_000,
    )


def test_values_of_the_paper_of_classifiers() -> None:
    line = given(ClassifierOptions, recipe="moe-kd", learning_rate=0.01)
    made = with_preset(line, (ClassifierOptions,), "classifier", "moe-kd").make_named(
        ClassifierOptions, model="a", output=Path("o")
    )
    assert (made.epochs, made.batch_size, made.temperature, made.augment) == (240, 64, 4.0, "crop-flip")
    assert made.learning_rate == 0.01
    line = given(ClassifierOptions, recipe="moe-kd", preset="imagenet")
    made = with_preset(line, (ClassifierOptions,), "classifier", "moe-kd")
    made = made.make_named(ClassifierOptions, model="a", output=Path("o"))
    assert (made.epochs, made.batch_size, made.temperature, made.milestones) == (100, 256, 1.0, (30, 60, 90))
    assert (made.learning_rate, made.weight_decay, made.augment) == (0.1, 1e-4, "resized-crop-flip")


# At the command line


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, [*arguments])


def test_prune_takes_the_preset_of_diep_with_the_shortest_search(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def function_{n}(value):\n    return value + {n}\n\n" for n in range(400)))
    common = ["--data", str(text), "--samples", "2", "--sequence-length", "16", "--evaluation-samples", "0"]
    done = run("prune", "--preset", "paper", "--sparsity", "0.5", "--epochs", "1", *common, "-o", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "yours, in place of --epochs 10 (setting)" in done.output
    recorded = (tmp_path / "out" / "compression.json").read_text()
    assert '"method": "diep"' in recorded and '"relaxation": "paper"' in recorded and '"recenter": false' in recorded
    refused = run("prune", "--preset", "paper", "--method", "reap", "--sparsity", "0.5", "-o", str(tmp_path / "no"))
    assert refused.exit_code == 1 and "preset paper has no settings of reap" in refused.output
