"""Classifiers on disk: split as transformers computes them, inputs and data by hand, and damaged files refused."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from classifiers_for_tests import CLASSES, FAMILIES, IMAGES, SIZE, classifier, sentences, shades
from conftest import save_reference
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from calibrate.labelled import labelled
from compress.classifiers.accuracy import accuracy, probe
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.kinds import is_classifier
from engine.errors import CheckpointError, DataError, UnsupportedError
from engine.transformers_models.classifier import MIXTURE_KEY, MIXTURE_NAME, Classifier, ClassifierCheckpoint
from engine.transformers_models.classifier_inputs import ImageInputs, TextInputs, image_inputs
from engine.transformers_models.image_frame import Frame


def inputs_of(checkpoint: ClassifierCheckpoint) -> dict[str, torch.Tensor]:
    if checkpoint.what == "images":
        return checkpoint.inputs()(torch.randint(256, (4, 1, SIZE, SIZE), dtype=torch.uint8))
    return checkpoint.inputs()(["alpha beta", "g", "delta epsilon zeta", "eta"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_split_into_features_and_head_without_changing_its_logits(family: str, tmp_path: Path) -> None:
    model = classifier(family, tmp_path)
    checkpoint = ClassifierCheckpoint(tmp_path)
    assert is_classifier(tmp_path) and checkpoint.what == ("images" if family in IMAGES else "texts")
    own, given = checkpoint.load(), inputs_of(checkpoint)
    with torch.no_grad():
        wanted_BC, split = model(**given).logits, own.split(**given)
    assert torch.allclose(own(**given), wanted_BC, atol=1e-5) and wanted_BC.std() > 0.05
    assert torch.equal(own.head(split.features_BD), split.logits_BC)
    is_map = family in ("resnet", "mobilenet_v2", "convnext")
    assert (split.map is not None) == is_map
    if family in ("resnet", "mobilenet_v2"):
        assert torch.allclose(split.map.mean(dim=(2, 3)), split.features_BD, atol=1e-6)
    assert checkpoint.parameters >= sum(parameter.numel() for parameter in model.parameters())
    assert checkpoint.load(torch.bfloat16)(**given).dtype == torch.float32


def test_a_model_whose_logits_are_not_its_last_linear_layers_is_refused(tmp_path: Path) -> None:
    model = classifier("resnet", tmp_path)
    model.forward = lambda pixel_values: type(
        "Output", (), {"logits": model.classifier(model.resnet(pixel_values).pooler_output) + 1}
    )
    with pytest.raises(UnsupportedError, match=r"not the output of its last linear layer \(classifier.1\)"):
        Classifier(model, "it").check_head({"pixel_values": torch.zeros(1, 1, SIZE, SIZE)})
    model.classifier[1] = nn.Identity()
    with pytest.raises(UnsupportedError, match="no linear layer of 3 outputs"):
        Classifier(model, "it")


def config_with(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    classifier("resnet", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "classifier.1.weight"
    for changed, said in (
        ({other: tensor for other, tensor in weights.items() if other != name}, "classifier.1.weight is missing"),
        (weights | {"more": torch.ones(1)}, "more is not part of this resnet"),
        (weights | {name: torch.ones(CLASSES, 5)}, "has another shape"),
    ):
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=said):
            ClassifierCheckpoint(tmp_path).load()
    save_file(weights | {name: torch.full((CLASSES, 12), torch.nan)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"classifier\.1\.weight holds NaN"):
        ClassifierCheckpoint(tmp_path).check_finite()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config_with(tmp_path, **{MIXTURE_KEY: CLASSES})
    with pytest.raises(CheckpointError, match=r"mixture.safetensors.* is missing"):
        ClassifierCheckpoint(tmp_path)
    for tensors, said in (
        ({"prototypes": torch.ones(CLASSES, 11)}, r"prototypes has shape \[3, 11\]"),
        (
            {"prototypes": torch.ones(CLASSES, 12), "projector.0.weight": torch.ones(2, 3)},
            "does not hold a gate of 3 experts",
        ),
    ):
        save_file(tensors, tmp_path / MIXTURE_NAME)
        with pytest.raises(CheckpointError, match=said):
            ClassifierCheckpoint(tmp_path).load()
    save_file({"prototypes": torch.ones(CLASSES, 12)}, tmp_path / MIXTURE_NAME)
    assert ClassifierCheckpoint(tmp_path).load().mixture is not None  # no gate: the uniform one
    for changes, error, said in (
        ({MIXTURE_KEY: -1}, CheckpointError, "it must be a number of experts"),
        ({MIXTURE_KEY: 0, "auto_map": {"AutoModel": "x.Y"}}, UnsupportedError, "auto_map, code of its own"),
        ({"architectures": ["ResNetModel"]}, UnsupportedError, "names no classifier|no classifier"),
    ):
        config_with(tmp_path, **changes)
        with pytest.raises(error, match=said):
            ClassifierCheckpoint(tmp_path)


def test_classifiers_and_language_models_are_told_apart(tmp_path: Path) -> None:
    classifier("bert", tmp_path / "classifier")
    save_reference("llama", tmp_path / "decoder")
    assert not is_classifier(tmp_path / "decoder")
    with pytest.raises(UnsupportedError, match="is a classifier of texts, which this command does not take"):
        Checkpoint(tmp_path / "classifier")
    with pytest.raises(UnsupportedError, match="give a model of image or sequence classification"):
        ClassifierCheckpoint(tmp_path / "decoder")


def test_images_become_pixels_by_hand(tmp_path: Path) -> None:
    own = ImageInputs(3, None, (0.5, 0.25, 0.0), (0.5, 0.5, 2.0))
    grey = torch.tensor([[[[0, 255], [51, 102]]]], dtype=torch.uint8)
    pixels = own(grey)["pixel_values"]
    assert pixels[0, :, 1, 0].tolist() == pytest.approx([(0.2 - 0.5) / 0.5, (0.2 - 0.25) / 0.5, 0.2 / 2])
    coloured = torch.tensor([0, 30, 60], dtype=torch.uint8).view(1, 3, 1, 1)
    assert ImageInputs(1, Frame((2, 3)))(coloured)["pixel_values"].tolist() == [
        [[[pytest.approx((30 / 255 - 0.5) / 0.5)] * 3] * 2]
    ]
    config = type("Config", (), {"num_channels": 3, "image_size": 24})()
    assert image_inputs(tmp_path, config) == ImageInputs(3, Frame((24, 24)))
    said = {
        "size": {"shortest_edge": 30},
        "crop_size": {"height": 20, "width": 28},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": 0.5,
    }
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(said))
    assert image_inputs(tmp_path, config) == ImageInputs(3, Frame((20, 28), 30), (0.1, 0.2, 0.3), (0.5,))
    path.write_text(json.dumps({"do_normalize": False, "size": 9}))
    assert image_inputs(tmp_path, config) == ImageInputs(3, Frame((9, 9), (9, 9)), (0.0,), (1.0,))
    for frame in (Frame((8, 9), (8, 9)), Frame((8, 9), 12, 3), Frame((8, 9), (11, 12), 0)):
        path.write_text(json.dumps(own.described(frame)))
        assert image_inputs(tmp_path, config) == ImageInputs(3, frame, own.mean, own.deviation)
    for wrong in (
        {"image_mean": [0.1, 0.2]},
        {"image_std": 0.0},
        {"size": {"height": "x"}},
        {"size": 0},
        {"size": 9, "crop_size": "x"},
        {"size": 9, "crop_pct": 0},
        {"resample": 4},
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match="must be"):
            image_inputs(tmp_path, config)


PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("mobilenet_v2.image_processing_pil_mobilenet_v2:MobileNetV2ImageProcessorPil", {"size": {"shortest_edge": 20}}),
    ("convnext.image_processing_pil_convnext:ConvNextImageProcessorPil", {"size": {"shortest_edge": 16}, "crop_pct": 0.7}),
    ("convnext.image_processing_pil_convnext:ConvNextImageProcessorPil", {"size": {"shortest_edge": 400}, "crop_pct": 0.7}),
    ("deit.image_processing_pil_deit:DeiTImageProcessorPil", {"size": {"height": 21, "width": 18}}),
    ("vit.image_processing_pil_vit:ViTImageProcessorPil", {"size": {"height": 17, "width": 13}}),
]


@pytest.mark.parametrize(("name", "said"), PROCESSORS)
@pytest.mark.parametrize("shape", [(31, 50), (45, 30)])
def test_files_are_preprocessed_as_by_the_models_own_processor(
    name: str, said: dict[str, Any], shape: tuple[int, int], tmp_path: Path
) -> None:
    """The size, crop, filter and normalization of transformers' processors, for images that are not square."""
    module, kind = name.split(":")
    crop = {"crop_size": {"height": 15, "width": 12}} if "crop_pct" not in said and "vit." not in name else {}
    own = getattr(import_module(f"transformers.models.{module}"), kind)(**said, **crop)
    own.save_pretrained(tmp_path)
    folder = tmp_path / "images" / "a"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (*shape, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "1.png")
    inputs = image_inputs(tmp_path, None)
    found = inputs(labelled(str(folder.parent), inputs.frame).read([0]))["pixel_values"]
    wanted = own(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)
    arrays = inputs(torch.from_numpy(pixels).permute(2, 0, 1)[None])["pixel_values"]
    assert (arrays - wanted).abs().mean() < 1 / 255 / 0.2, "Pillow rounds and clips after each of its passes"


def test_the_aspect_is_kept_where_a_model_does_not_say(tmp_path: Path) -> None:
    """As is usual on ImageNet, the shorter side becomes 8/7 of the crop. A wide image loses its sides, which are black."""
    (tmp_path / "a").mkdir()
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 36:92] = 255
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    found = labelled(str(tmp_path), Frame((56, 56)))
    assert found.frame == Frame((56, 56), 64) and (found.read([0]) == 255).all()
    (whole,) = found.only([0]).whole([0])
    assert torch.equal(whole, torch.from_numpy(pixels).permute(2, 0, 1))
    assert labelled(str(tmp_path)).read([0]).shape == (1, 3, 224, 224)
    assert not (labelled(str(tmp_path), Frame((56, 56), (56, 56))).read([0]) == 255).all(), "stretched, as a model may say"


def test_texts_are_cut_and_padded(tmp_path: Path) -> None:
    classifier("bert", tmp_path)
    inputs = ClassifierCheckpoint(tmp_path).inputs(5)
    assert isinstance(inputs, TextInputs)
    made = inputs(["abcdefg", "a"])
    assert made["input_ids"].shape == (2, 5) and made["attention_mask"].tolist() == [[1] * 5, [1, 0, 0, 0, 0]]
    assert made["input_ids"][1, 1:].tolist() == [0] * 4
    with pytest.raises(DataError, match="these are images"):
        inputs(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(DataError, match="these are texts"):
        ImageInputs(1, None)(["a"])


def test_the_digits_are_those_of_scikit_learn_at_four_times_their_size() -> None:
    from sklearn.datasets import load_digits

    found = labelled("digits")
    images = found.read(range(len(found)))
    assert images.shape == (1797, 1, 32, 32) and images.dtype == torch.uint8
    assert found.labels == load_digits().target.tolist()
    # Bilinear: the pixel at 4·i + 1 lies an eighth of a source pixel before source pixel i.
    near = load_digits().images[3][2:4, 3:5] * 255 / 16
    by_hand = np.array([0.125, 0.875]) @ near @ np.array([0.125, 0.875])
    assert int(images[3, 0, 13, 17]) == round(by_hand) and 0 < by_hand < 255
    parts = [found.part(split) for split in ("calibration", "held-out")]
    assert sum(map(len, parts)) == 1797 and 300 < len(parts[1]) < 420
    assert not set(parts[0].keys) & set(parts[1].keys)


def test_folders_arrays_and_rows_give_the_same_kind_of_thing(tmp_path: Path) -> None:
    for split, name, colour in (("train", "a", 10), ("train", "b", 200), ("val", "a", 10)):
        folder = tmp_path / "images" / split / name
        folder.mkdir(parents=True)
        Image.new("RGB", (6, 4), (colour, 0, 0)).save(folder / "1.png")
        (folder / ".DS_Store").write_bytes(b"no image")
    (tmp_path / "images" / "train" / ".cache").mkdir()
    (tmp_path / "images" / "train" / ".cache" / "2.png").write_bytes(b"no image either")
    folder = labelled(str(tmp_path / "images"), Frame((8, 8)))
    assert folder.labels == ["a", "b", "a"] and folder.part("held-out").labels == ["a"]
    assert folder.read([1]).shape == (1, 3, 8, 8) and folder.read([1])[0, 0, 0, 0] == 200
    assert folder.numbers(["b", "a"]).tolist() == [1, 0, 1]
    assert folder.numbers(["LABEL_0", "LABEL_1"]).tolist() == [0, 1, 0]
    with pytest.raises(DataError, match="has class 'a', and the model knows 2 classes, x, y"):
        folder.numbers(["x", "y"])

    x, y = np.zeros((5, 4, 4, 3), np.uint8), np.arange(5)
    np.savez(tmp_path / "split.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    arrays = labelled(str(tmp_path / "split.npz"))
    assert len(arrays.part("held-out")) == 2 and arrays.part("calibration").labels == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="has class 3, and the model knows 3 classes"):
        arrays.numbers(["LABEL_0", "LABEL_1", "LABEL_2"])

    rows = labelled(str(sentences(tmp_path / "rows.jsonl")))
    assert rows.what == "texts" and rows.read([1]) == ["1 beta and 7"]
    (tmp_path / "lines.jsonl").write_text('{"text": "one\u2028line", "label": 0}\r\n', encoding="utf-8")
    assert labelled(str(tmp_path / "lines.jsonl")).read([0]) == ["one\u2028line"]
    twice = tmp_path / "twice.jsonl"
    twice.write_text((tmp_path / "rows.jsonl").read_text() * 2)
    assert not set(labelled(str(twice)).part("held-out").keys) & set(labelled(str(twice)).part("calibration").keys)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.npz", b"no zip", "cannot be read"),
        ("a.npz", {"images": np.zeros((2, 4, 4)), "labels": np.zeros(2, int)}, "images is float64"),
        ("a.npz", {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, int)}, "one integer for each of 2"),
        ("a.npz", {"images": np.zeros((0, 4, 4), np.uint8), "labels": np.zeros(0, int)}, "is empty"),
        ("a.npz", {"images": np.array([{}]), "labels": np.zeros(1, int)}, "cannot be read .*allow_pickle"),
        ("a.npz", {"other": np.zeros(1)}, "needs arrays `images` and `labels`"),
        ("a.jsonl", b"{", "a.jsonl:1 is not valid JSON"),
        ("a.jsonl", b'{"text": "a"}', "a.jsonl:1 needs `text`"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.csv", b"", "no examples with classes"),
    ],
)
def test_data_that_is_none_is_refused(name: str, content: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        labelled(str(path))


def test_images_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no subfolders with images"):
        labelled(str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(DataError, match=r"x\.png: cannot be read as an image"):
        labelled(str(tmp_path)).read([0])


def test_accuracy_counts_and_a_probe_is_a_linear_classifier_on_the_features(tmp_path: Path) -> None:
    classifier("resnet", tmp_path / "model")
    data = str(shades(tmp_path / "data.npz", 150))  # more than one group
    checkpoint, examples = ClassifierCheckpoint(tmp_path / "model"), labelled(data)
    own, inputs = checkpoint.load(), checkpoint.inputs()
    labels_N = examples.numbers(checkpoint.class_names)
    with torch.no_grad():
        chosen = own(**inputs(examples.read(range(150)))).argmax(dim=-1)
    assert accuracy(own, examples, inputs, labels_N) == (int((chosen == labels_N).sum()) / 150, None)
    # Random features tell the shades apart, which the random head does not.
    assert probe(own, data, inputs, "cpu") > accuracy(own, examples, inputs, labels_N).top_1 + 0.2
    assert probe(own, data, inputs, "cpu") == probe(own, data, inputs, "cpu")


def test_top_5_accuracy_counts_the_five_most_probable_classes(tmp_path: Path) -> None:
    classifier("resnet", tmp_path / "model", classes=7)
    checkpoint, examples = ClassifierCheckpoint(tmp_path / "model"), labelled(str(shades(tmp_path / "data.npz", 70)))
    own, inputs = checkpoint.load(), checkpoint.inputs()
    labels_N = torch.arange(70) % 7
    with torch.no_grad():
        order = own(**inputs(examples.read(range(70)))).argsort(dim=-1, descending=True).tolist()
    places = [row.index(label) for row, label in zip(order, labels_N.tolist(), strict=True)]
    found = accuracy(own, examples, inputs, labels_N)
    assert found == (sum(place < 1 for place in places) / 70, sum(place < 5 for place in places) / 70)
    assert 0 < found.top_1 < found.top_5 < 1
