"""Comparisons: rows equal direct computations, the report is complete or absent, and impossible comparisons are named."""

from __future__ import annotations

import csv
import inspect as inspect_module
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_for_tests import make_workplace
from click.testing import CliRunner
from conftest import save_reference
from packages_for_tests import needs_lm_eval, needs_matplotlib
from pictures_for_tests import drawing
from tokenizers_for_tests import VOCABULARY, add_tokenizer

import cli
import compress.report.pictures
import compress.run.result
from calibrate.collect import collect
from calibrate.options import CalibrationOptions
from calibrate.windows import Windows, text_windows
from compress import compare as module
from compress.compare import compare
from compress.comparison import pages, quality
from compress.comparison.pages import heading
from compress.comparison.quality import task_figures
from compress.comparison.subject import labels
from compress.options.compare import CompareOptions
from compress.report import canvas, expert_record
from compress.report.diep_scores import FILE_NAME, load_scores
from compress.report.expert_record import ExpertRecord, Experts, load_record, save_record
from compress.report.pictures import Pictured
from compress.run.perplexity import losses, perplexity
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.model import Decoder
from engine.errors import CheckpointError, DataError, OptionError, OutputError
from engine.generation.generate import Engine
from engine.inspect import inspect
from engine.progress import no_progress

SIZES = ["--samples", "3", "--sequence-length", "32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `model`, `text.txt`, `pruned` by DiEP, `dense`, `other` (another tokenizer) and `bare` (no tokenizer)."""
    path = tmp_path_factory.mktemp("compare")
    make_workplace(path)
    pruned = ["prune", str(path / "model"), "-o", str(path / "pruned"), "--sparsity", "0.5", "--epochs", "1", *SIZES]
    with drawing():
        result = CliRunner().invoke(
            cli.main, [*pruned, "--data", str(path / "text.txt"), "--evaluation-samples", "2", "--json"]
        )
    assert result.exit_code == 0, result.output
    save_reference("llama", path / "dense", vocab_size=VOCABULARY)
    add_tokenizer(path / "dense")
    shutil.copytree(path / "model", path / "other")
    tokenizer = json.loads((path / "other" / "tokenizer.json").read_text())
    letters = tokenizer["model"]["vocab"]
    letters["a"], letters["e"] = letters["e"], letters["a"]
    (path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copytree(path / "model", path / "bare", ignore=shutil.ignore_patterns("*token*"))
    return path


def options(place: Path, *names: str, **changes: Any) -> CompareOptions:
    text = CalibrationOptions(str(place / "text.txt"), 2, 32, 3)
    asked = CompareOptions(tuple(str(place / name) for name in names), text=text, speed=False)
    return replace(asked, **changes)


def directly(place: Path, name: str) -> float:
    checkpoint = Checkpoint(place / name)
    return perplexity(checkpoint, held_out_windows(place, checkpoint).tokens_SL, dtype=torch.float32)


def held_out_windows(place: Path, checkpoint: Checkpoint) -> Windows:
    return text_windows(str(place / "text.txt"), load_tokenizer(checkpoint), samples=3, sequence_length=32, seed=0)


def test_rows_hold_what_each_part_computes(place: Path) -> None:
    result = compare(options(place, "model", "pruned", "dense"))
    assert result["notes"] == [] and result["output"] is None
    for name, row in zip(("model", "pruned", "dense"), result["rows"], strict=True):
        inspected = inspect(str(place / name), checksums=False, progress=no_progress)
        for key in ("bytes", "parameters", "active_parameters", "experts_per_layer", "kind", "architecture"):
            assert row[key] == inspected[key], key
        assert row["label"] == name and row["perplexity"] == pytest.approx(directly(place, name), rel=1e-6)
        assert row["perplexity_group"] == 1 and row["perplexity_tokens"] == 3 * 31
        assert row["decode_tokens_per_second_mean"] is None
    model, pruned, dense = result["rows"]
    assert (model["method"], pruned["method"], dense["experts_per_token"]) == (None, "diep", None)
    assert model["experts_skipped_share"] == 0.0 and dense["experts_skipped_share"] is None


def test_perplexities_have_errors_over_documents_and_paired_ratios(place: Path) -> None:
    rows = compare(options(place, "model", "pruned", "other"))["rows"]
    for name, row in zip(("model", "pruned"), rows, strict=False):
        checkpoint = Checkpoint(place / name)
        windows = held_out_windows(place, checkpoint)
        found = losses(checkpoint, windows.tokens_SL, dtype=torch.float32)
        assert row["perplexity_stderr"] == pytest.approx(found.standard_error(windows.documents_S), rel=1e-5)
        assert row["perplexity_documents"] == windows.documents > 1
    model, pruned, other = rows
    assert (model["perplexity_ratio"], model["perplexity_ratio_low"], model["perplexity_ratio_high"]) == (1, 1, 1)
    assert pruned["perplexity_ratio"] == pytest.approx(pruned["perplexity"] / model["perplexity"])
    assert pruned["perplexity_ratio_low"] < pruned["perplexity_ratio"] < pruned["perplexity_ratio_high"]
    assert other["perplexity_group"] == 2 and other["perplexity_ratio"] == 1, "the first model of its group"


def test_skipping_is_compared_on_the_same_documents(place: Path) -> None:
    (row,) = compare(options(place, "pruned", skip_threshold=1e9))["rows"]
    assert 0 < row["perplexity_without_skipping_stderr"] != row["perplexity_stderr"]


@pytest.mark.slow
def test_speed_comes_from_processes_of_their_own(place: Path) -> None:
    asked = options(place, "model", "dense", speed=True, prompt_tokens=16, generated_tokens=4, repetitions=1, threads=1)
    rows = compare(replace(asked, text=replace(asked.text, evaluation_samples=0)))["rows"]
    for row in rows:
        assert row["perplexity"] is None and row["peak_memory_bytes"] > 50e6
        assert row["decode_tokens_per_second_mean"] > 0
        assert row["time_to_first_token_seconds"] == pytest.approx(16 / row["prefill_tokens_per_second_mean"])
    assert [row["decode_experts_skipped_share"] for row in rows] == [0.0, None]


def test_skipping_counts_in_perplexity_too(place: Path) -> None:
    result = compare(options(place, "pruned", "model", "dense", skip_threshold=1e9))
    pruned, model, dense = result["rows"]
    assert pruned["skip_threshold"] == 1e9 and 0.3 < pruned["experts_skipped_share"] <= 0.5
    assert pruned["perplexity"] != pytest.approx(directly(place, "pruned"), rel=1e-6)
    assert model["skip_threshold"] == dense["skip_threshold"] == 0.0
    assert result["notes"] == ["Without tables for skipping, so with threshold 0: model, dense."]
    with pytest.raises(OptionError, match="none of these models"):
        compare(options(place, "model", "dense", skip_threshold=1.0))
    with pytest.raises(OptionError, match="skip threshold is -1"):
        compare(options(place, "pruned", skip_threshold=-1.0))


def test_other_tokenizers_are_flagged(place: Path) -> None:
    result = compare(options(place, "model", "other", "pruned"))
    assert [row["perplexity_group"] for row in result["rows"]] == [1, 2, 1]
    assert result["notes"] == [
        "Tokenizers differ, so perplexities compare only inside a group: [1] model, pruned; [2] other."
    ]


@pytest.fixture(scope="module")
def report(place: Path) -> Path:
    output = place / "report"
    with drawing():
        compare(options(place, "model", "pruned", "dense", output=output))
    return output


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_the_report_is_complete(report: Path) -> None:
    assert sorted(path.name for path in report.iterdir()) == [
        "comparison.csv",
        "comparison.json",
        "diep_scores.png",
        "expert_similarity_1.png",
        "expert_similarity_2.png",
        "expert_usage.png",
        "experts_per_layer.png",
        "index.html",
        "layer_similarity_1.png",
        "layer_similarity_2.png",
        "quality_and_size.png",
    ]
    rows = json.loads((report / "comparison.json").read_text())["rows"]
    with (report / "comparison.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [float(line["perplexity"]) for line in read] == [row["perplexity"] for row in rows]
    html = (report / "index.html").read_text()
    assert (
        html.count("data:image/png;base64,") == 8
        and html.count("<details open>") == 2
        and all(f"{row['perplexity']:.2f}" in html for row in rows)
    )


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_an_existing_report_is_replaced_only_when_asked(place: Path, report: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists already"):
        compare(options(place, "model", output=report))
    copy = Path(shutil.copytree(report, tmp_path / "copy"))
    compare(options(place, "dense", output=copy, overwrite=True))
    assert sorted(path.suffix for path in copy.iterdir()) == [".csv", ".html", ".json", ".png"]
    with pytest.raises(OutputError, match=r"something else \(no comparison.json\)"):
        compare(options(place, "model", output=place / "dense", overwrite=True))


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_a_failure_leaves_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pages, "page", fail)
    with pytest.raises(OutputError, match="No space left"):
        compare(options(place, "model", output=tmp_path / "new"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("nothing",), CheckpointError, "no such directory"),
        (("model", "bare"), CheckpointError, "no tokenizer"),
        ((), OptionError, "at least one model"),
    ],
)
def test_bad_models_are_refused(place: Path, names: tuple[str, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compare(options(place, *names))


def test_bad_options_are_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="default texts differ"):
        compare(
            replace(options(place, "model"), models=("demo", str(place / "model")), text=CalibrationOptions(None, 2, 32))
        )
    with pytest.raises(OptionError, match="turned off"):
        compare(options(place, "model", speed=True, prompt_tokens=0, generated_tokens=0))
    with pytest.raises(DataError, match="no text"):
        compare(options(place, "model", text=CalibrationOptions(str(place / "plan.json"), 1, 128, 99)))
    monkeypatch.setattr(canvas, "available", lambda: False)
    with pytest.raises(OptionError, match="plots need matplotlib"):
        compare(options(place, "model", output=tmp_path / "new"))
    assert not list(tmp_path.iterdir())


def test_a_model_without_tokenizer_can_be_sized(place: Path) -> None:
    asked = options(place, "bare")
    assert compare(replace(asked, text=replace(asked.text, evaluation_samples=0)))["rows"][0]["bytes"] > 0


def test_tasks_are_one_figure_each(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"arc": {"alias": "arc", "sample_len": 40, "acc,none": 0.5, "acc_stderr,none": "N/A", "f1,strict": float("nan")}}
    assert task_figures(found) == {"arc": {"acc": 0.5}}
    asked: list[Any] = []

    def noted(engine: Engine, names: list[str], *, limit: int, progress: Any) -> dict[str, Any]:
        asked.append((names, limit))
        return found

    monkeypatch.setattr(quality, "run_tasks", noted)
    rows = compare(options(place, "model", tasks=("arc",), limit=7))["rows"]
    assert rows[0]["tasks"] == {"arc": {"acc": 0.5}} and asked == [(["arc"], 7)]


CHOICES = ["o", "e", "i", "y"]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Return a multiple-choice task of lm-evaluation-harness over a local file, so that nothing is downloaded."""
    lines = [{"question": f"the {letter}", "answer": index % 4} for index, letter in enumerate("abcdefghijklmnopqrst")]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = f"""
        task: which_comes_next
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {tmp_path / "questions.jsonl"}}}, cache_dir: {tmp_path / "cache"}}}
        test_split: test
        output_type: multiple_choice
        doc_to_text: question
        doc_to_target: answer
        doc_to_choice: {CHOICES}
        target_delimiter: ""
        metric_list: [{{metric: acc}}]
        """
    (tmp_path / "which_comes_next.yaml").write_text(inspect_module.cleandoc(text))
    return tmp_path / "which_comes_next.yaml"


@torch.no_grad()
def accuracy(directory: Path, task: Path) -> float:
    """Return the fraction of questions whose right answer is the likeliest for our own decoder."""
    checkpoint = Checkpoint(directory)
    decoder, tokenizer = Decoder(checkpoint.config, checkpoint.source(torch.float32)), load_tokenizer(checkpoint)

    def likelihood(question: str, choice: str) -> float:
        start, answer = tokenizer.encode(question), tokenizer.encode(choice)
        logs = decoder(torch.tensor([start + answer]))[0].log_softmax(-1)
        return sum(float(logs[len(start) + place - 1, token]) for place, token in enumerate(answer))

    right = []
    for line in map(json.loads, (task.parent / "questions.jsonl").read_text().splitlines()):
        found = [likelihood(line["question"], choice) for choice in CHOICES]
        right.append(found.index(max(found)) == line["answer"])
    return sum(right) / len(right)


@needs_lm_eval
@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_a_real_task_reaches_table_files_and_page(place: Path, task: Path, tmp_path: Path) -> None:
    names, output = [str(place / "model"), str(place / "pruned")], tmp_path / "report"
    common = ["--no-speed", "--samples", "0", "--calibration-samples", "0", "--data", str(place / "text.txt")]
    result = CliRunner().invoke(cli.main, ["compare", *names, *common, "--tasks", str(task), "-o", str(output)])
    assert result.exit_code == 0, result.output
    expected = [accuracy(place / "model", task), accuracy(place / "pruned", task)]
    assert min(expected) > 0 and max(expected) < 1 and expected[0] != expected[1]
    rows = json.loads((output / "comparison.json").read_text())["rows"]
    assert [row["tasks"]["which_comes_next"]["acc"] for row in rows] == pytest.approx(expected)
    with (output / "comparison.csv").open() as file:
        assert [float(line["tasks.which_comes_next.acc"]) for line in csv.DictReader(file)] == pytest.approx(expected)
    html, lines = (output / "index.html").read_text(), result.stdout.splitlines()
    assert "which_comes_next" in lines[0] and ">which_comes_next</button>" in html
    for line, value in zip(lines[1:], expected, strict=False):
        assert f" {value:.4f} " in line and f">{value:.4f}<" in html


def test_labels_are_short_and_unlike() -> None:
    assert labels(["a/x", "b/y"]) == ["x", "y"]
    assert labels(["a/x", "b/x", "demo", "demo"]) == ["a/x", "b/x", "demo", "demo (2)"]


def test_the_heading_stays_short() -> None:
    assert heading(["a", "b"]) == "a · b" and heading(list("abcdefg")) == "a and 6 others"


def test_one_object_or_one_table(place: Path) -> None:
    arguments = [
        "compare",
        str(place / "model"),
        str(place / "pruned"),
        "--data",
        str(place / "text.txt"),
        "--no-speed",
        *SIZES,
    ]
    result = CliRunner().invoke(cli.main, [*arguments, "--json"])
    assert result.exit_code == 0 and result.stdout.count("\n") == 1
    rows = json.loads(result.stdout)["rows"]
    shown = CliRunner().invoke(cli.main, arguments)
    lines = shown.stdout.splitlines()
    assert (
        len(lines) == 3
        and lines[0].startswith("model ")
        and lines[2].split()[:4] == ["pruned", f"{rows[1]['perplexity']:.2f}", "±", f"{rows[1]['perplexity_stderr']:.2f}"]
        and f"{rows[1]['perplexity_ratio']:.3f} ({rows[1]['perplexity_ratio_low']:.3f} to " in lines[2]
    )
    assert CliRunner().invoke(cli.main, ["compare"]).exit_code == 2


# Files that `prune` writes beside the model card


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_an_artifact_carries_its_plots_and_scores(place: Path) -> None:
    pruned = place / "pruned"
    inspected = inspect(str(pruned), checksums=True, progress=no_progress)
    names = ["experts_per_layer.png", "expert_usage.png", "expert_similarity.png", "layer_similarity.png", "diep_scores.png"]
    assert inspected["provenance"]["figures"]["plots"] == names
    card = (pruned / "README.md").read_text()
    assert all(name in inspected["provenance"]["files"] and f"]({name})" in card for name in [*names])
    scores = load_scores(pruned)
    assert scores is not None and FILE_NAME in inspected["provenance"]["files"]
    assert {layer: len(own) for layer, own in scores.alpha.items()} == {0: 6, 1: 6, 2: 6} and set(scores.beta) == {0, 1, 2}
    plan = inspected["provenance"]["plan"]["layers"]
    ranked = sorted((a * scores.beta[layer], layer, n) for layer, own in scores.alpha.items() for n, a in enumerate(own))
    least = ranked[0]
    assert least[2] not in plan[str(least[1])], "the scores are those by which experts were removed"
    assert Engine.open(str(pruned), device="cpu").generate(["fox"], max_new_tokens=2)


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("method", ["taylor", "frequency"])
def test_usage_before_and_after_is_of_the_held_out_text(
    method: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Pictured] = []
    monkeypatch.setattr(compress.run.result, "draw", lambda directory, models: drawn.extend(models) or [])
    arguments = ["prune", str(place / "model"), "-o", str(tmp_path / "out"), "--sparsity", "0.5", "--method", method, *SIZES]
    result = CliRunner().invoke(cli.main, [*arguments, "--data", str(place / "text.txt"), "--evaluation-samples", "3"])
    assert result.exit_code == 0, result.output
    for pictured, path in zip(drawn, (place / "model", tmp_path / "out"), strict=True):
        checkpoint = Checkpoint(path)
        statistics = collect(checkpoint, held_out_windows(place, checkpoint).tokens_SL, dtype=torch.float32)
        counts = {layer: own.tokens_routed.tolist() for layer, own in statistics.layers.items()}
        assert pictured.tokens_routed == counts and sum(counts[0]) == 3 * 32 * 2
    assert (drawn[0].statistics is None) == (method == "taylor"), "no calibration only for a picture"


def test_without_matplotlib_pruning_goes_on_and_says_so(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canvas, "available", lambda: False)
    arguments = ["prune", str(place / "model"), "-o", str(tmp_path / "out"), "--sparsity", "0.5", "--method", "frequency"]
    result = CliRunner().invoke(
        cli.main, [*arguments, "--data", str(place / "text.txt"), *SIZES, "--evaluation-samples", "0"]
    )
    assert result.exit_code == 0 and "no plots: matplotlib is not installed" in result.stdout
    assert not list((tmp_path / "out").glob("*.png")) and not (tmp_path / "out" / FILE_NAME).exists()


@needs_matplotlib
@pytest.mark.usefixtures("pictures")
def test_pictures_are_drawn_from_what_a_run_has_recorded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without samples nothing is calibrated; usage and similarity of source and result are those of the run's pictures."""
    made: list[Pictured] = []
    draw = compress.run.result.draw
    monkeypatch.setattr(
        compress.run.result, "draw", lambda directory, models: made.extend(models) or draw(directory, models)
    )
    arguments = ["prune", str(place / "model"), "-o", str(tmp_path / "out"), "--sparsity", "0.5", "--method", "frequency"]
    result = CliRunner().invoke(
        cli.main, [*arguments, *SIZES, "--data", str(place / "text.txt"), "--evaluation-samples", "3"]
    )
    assert result.exit_code == 0, result.output
    drawn: list[Pictured] = []
    monkeypatch.setattr(
        pages,
        "draw_experts",
        lambda directory, models: drawn.extend(models) or compress.report.pictures.draw(directory, models),
    )
    monkeypatch.setattr(module, "collect", None)
    asked = options(tmp_path, "out", output=tmp_path / "report")
    compare(replace(asked, text=replace(asked.text, data=str(place / "text.txt"), samples=0)))
    assert [model.label for model in drawn] == ["out (before)", "out"] and len(made) == 2
    for found, expected in zip(drawn, made, strict=True):
        assert found.tokens_routed == expected.tokens_routed and sum(found.tokens_routed[0]) == 3 * 32 * 2
        for kind in ("within", "between"):
            own, other = getattr(found.seen, kind), getattr(expected.seen, kind)
            assert own.keys() == other.keys() and own
            for layer, matrix in own.items():
                assert torch.allclose(torch.tensor(matrix), torch.tensor(other[layer]).float(), atol=1e-4, equal_nan=True)
    names = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert {f"{kind}_similarity_{place}.png" for kind in ("expert", "layer") for place in (1, 2)} < names
    assert "expert_usage.png" in names


@pytest.mark.parametrize(
    "content",
    [{}, {"schema_version": 1}, {"routed": {"0": [-1]}}, {"similarity": {"0": [[1.0], [1.0, 0.5]]}}, {"routed": []}],
)
def test_a_damaged_record_of_experts_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    assert load_record(tmp_path) is None
    whole = ExpertRecord(Experts({0: [3, 4]}, {0: [[1.0, 0.123456], [math.nan, 1.0]]}), Experts({0: [5]}))
    save_record(whole, tmp_path)
    again = load_record(tmp_path)
    assert again is not None and again.after == whole.after and again.before.routed == whole.before.routed
    assert again.before.within[0][0] == [1.0, 0.1235] and math.isnan(again.before.within[0][1][0])
    path = tmp_path / expert_record.FILE_NAME
    values = json.loads(path.read_text())
    values = values | {"before": values["before"] | content} if "schema_version" not in content and content else content
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="copy the artifact again"):
        load_record(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"schema_version": 1, "layers": {}},
        {"schema_version": 2, "layers": {"0": {"alpha": [1.0], "beta": 1.0}}},
        {"schema_version": 1, "layers": {"x": {"alpha": [1.0], "beta": 1.0}}},
        {"schema_version": 1, "layers": {"0": {"alpha": ["1"], "beta": 1.0}}},
        {"schema_version": 1, "layers": {"0": {"alpha": [1.0]}}},
    ],
)
def test_damaged_scores_are_refused(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="copy the artifact again"):
        load_scores(tmp_path)
