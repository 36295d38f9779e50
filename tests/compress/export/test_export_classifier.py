"""Classifiers in ONNX: logits within 1e-4 of the engine's, int8 by one flag, and the commands that take such a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from artifacts_for_tests import run
from classifiers_for_tests import CLASSES, SIZE, classifier, sentences, shades
from click.testing import CliRunner

import cli
from calibrate.labelled import labelled
from calibrate.options import CalibrationOptions
from compress.classifiers.distill import distill_classifier
from compress.export.classifier import _Ranges
from compress.options.distill_classifier import ClassifierOptions
from engine.errors import CheckpointError
from engine.onnx.classifier import OnnxClassifier
from engine.transformers_models.classifier import ClassifierCheckpoint, ClassifierDirectory


@pytest.fixture(name="place", scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two mixtures, of images and of texts, and the data that they were trained on."""
    path = tmp_path_factory.mktemp("exports")
    classifier("resnet", path / "untrained")
    classifier("bert", path / "untrained-texts", num_hidden_layers=1)
    given = {"epochs": 15, "batch_size": 12, "optimiser": "adamw", "learning_rate": 0.01}
    for suffix, data in (("", shades(path / "shades.npz")), ("-texts", sentences(path / "rows.jsonl"))):
        calibration = CalibrationOptions(str(data))
        for name, model, recipe in (
            ("teacher", "untrained", {}),
            ("mixture", "untrained", {"teacher": str(path / f"teacher{suffix}")}),
        ):
            distill_classifier(
                ClassifierOptions(
                    model=str(path / f"{model}{suffix}"),
                    output=path / f"{name}{suffix}",
                    recipe="moe-kd" if recipe else "sft",
                    calibration=calibration,
                    **recipe,
                    **given,
                )
            )
    return path


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def refused(command: str, *arguments: str) -> str:
    result = CliRunner().invoke(cli.main, [command, *arguments], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    return result.output


def difference(name: str, exported: str, given: dict[str, torch.Tensor]) -> float:
    own = ClassifierCheckpoint(Path(name)).load()(**given)
    other = OnnxClassifier(ClassifierDirectory(Path(exported)))(**given)
    assert torch.equal(own.argmax(dim=-1), other.argmax(dim=-1))
    return float((own - other).abs().max())


@pytest.mark.slow
def test_an_export_of_images_gives_the_mixtures_logits_and_predictions(place: Path) -> None:
    figures = run("export", "mixture", "-o", "onnx")
    assert figures["format"] == "onnx" and figures["experts"] == CLASSES and figures["bytes"] > figures["weights_bytes"]
    assert figures["max_abs_logit_difference"] <= 1e-4 and figures["predictions_equal_share"] == 1.0
    assert figures["compared_examples"] > 10  # the data it was distilled on, and noise
    inputs, data = ClassifierCheckpoint(Path("mixture")).inputs(), labelled("shades.npz")
    for rows in ([0], range(5), range(60)):
        assert difference("mixture", "onnx", inputs(data.read(rows))) <= 1e-4
    value = run("evaluate", "mixture", "--data", "shades.npz", "--split", "all")["value"]
    found = run("evaluate", "onnx", "--data", "shades.npz", "--split", "all", "--backend", "onnx")
    assert found["value"] == value and found["examples"] == 60
    assert run("evaluate", "onnx", "--split", "all")["data"] == str(place / "shades.npz")
    described = run("inspect", "onnx", "--checksums")
    assert (
        described["kind"] == "onnx" and described["classes"] == CLASSES and described["parameters"] == figures["parameters"]
    )
    assert "backend 'onnx' runs exported models only" in refused(
        "evaluate", "mixture", "--data", "shades.npz", "--backend", "onnx"
    )
    assert "an export gives no features" in refused("evaluate", "onnx", "--data", "shades.npz", "--probe")
    (row,) = run("bench", "onnx", "-r", "1")["rows"]
    assert row["backend"] == "onnx" and row["test"] == f"images {SIZE}×{SIZE}, batch 1"
    text = (Path("onnx") / "model.onnx").read_bytes()
    assert b"site-packages" not in text and b".py" not in text  # the graph does not reveal paths of the exporter's code
    import onnx

    graph = onnx.load(Path("onnx") / "model.onnx")
    assert [each.domain for each in graph.opset_import if each.domain not in ("", "ai.onnx")] == []
    assert graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    config = json.loads((Path("onnx") / "config.json").read_text())
    (Path("onnx") / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a"}}))
    described_wrongly = ClassifierDirectory.__new__(ClassifierDirectory)
    described_wrongly.directory, described_wrongly.what, described_wrongly.config = Path("onnx"), "texts", None
    with pytest.raises(CheckpointError, match="its inputs and outputs are not those"):
        OnnxClassifier(described_wrongly)


@pytest.mark.slow
def test_int8_is_one_flag(place: Path) -> None:
    """Quantization is static for convolutions, dynamic for texts. The graph has int8 weights. Predictions are reported."""
    import onnx

    for name, operator in (("mixture", "QuantizeLinear"), ("mixture-texts", "DynamicQuantizeLinear")):
        figures = run("export", name, "--precision", "int8", "-o", f"int8-{name}")
        graph = onnx.load(place / f"int8-{name}" / "model.onnx").graph
        assert operator in {node.op_type for node in graph.node}
        assert any(each.data_type == onnx.TensorProto.INT8 for each in graph.initializer)
        assert figures["predictions_equal_share"] >= 0.9 and figures["typical_relative_difference"] <= 0.1
        assert figures["max_abs_logit_difference"] > 1e-4
        data = "rows.jsonl" if "texts" in name else "shades.npz"
        assert run("evaluate", f"int8-{name}", "--data", data, "--split", "all")["value"] >= 0.9
    assert "int8 of convolutions needs the ranges of activations" in refused("export", "untrained", "--precision", "int8")
    assert not (place / "untrained-onnx").exists()


@pytest.mark.slow
def test_an_export_of_texts_takes_any_length_and_padding() -> None:
    figures = run("export", "mixture-texts", "-o", "onnx-texts")
    assert figures["max_abs_logit_difference"] <= 1e-4
    inputs = ClassifierCheckpoint(Path("mixture-texts")).inputs()
    for texts in (["a"], ["1 alpha", "gamma and a longer text of more words"], ["beta", "7 gamma"] * 9):
        assert difference("mixture-texts", "onnx-texts", inputs(texts)) <= 1e-4


def test_an_export_that_differs_is_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = OnnxClassifier.__call__
    monkeypatch.setattr(OnnxClassifier, "__call__", lambda own, **given: plain(own, **given) * 1.01)
    assert "differs from the engine" in refused("export", "untrained", "-o", "wrong")
    assert not (place / "wrong").exists()
    for arguments, said in (
        (["--format", "onnx-genai"], "its format is onnx"),
        (["--precision", "int4"], "for classifiers it must be float32 or int8"),
        (["--experts", "portable"], "--experts is not for classifiers"),
        (["--data", "none.npz"], "no examples with classes"),
    ):
        assert said in refused("export", "untrained", "-o", "wrong", *arguments)


def test_ranges_are_given_batch_by_batch() -> None:
    ranges = _Ranges([{"a": torch.ones(2)}, {"a": torch.zeros(1)}])
    assert ranges.get_next()["a"].tolist() == [1, 1] and ranges.get_next()["a"].tolist() == [0] and ranges.get_next() is None
