"""`compress distill` of classifiers end to end: every recipe and ablation, the artifact by hand, bit-identical
resumption."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from artifacts_for_tests import listing, run
from classifiers_for_tests import CLASSES, SIZE, classifier, sentences, shades
from click.testing import CliRunner
from conftest import save_reference
from pictures_for_tests import drawing
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import cli
from calibrate.labelled import labelled
from calibrate.options import CalibrationOptions
from compress.classifiers.accuracy import examples_for, probe
from compress.classifiers.augmentation import augmented, crop_box, resized_crop, training_examples
from compress.classifiers.distill import distill_classifier
from compress.classifiers.moe_kd import class_probabilities
from compress.classifiers.recipes import ABLATIONS, AUGMENTATIONS
from compress.classifiers.training import ClassifierTrainer
from compress.options.distill_classifier import ClassifierOptions
from compress.options.training import TrainingOptions
from compress.training.training import batch_rows
from engine.transformers_models.classifier import MIXTURE_NAME, ClassifierCheckpoint
from engine.transformers_models.classifier_inputs import image_inputs
from engine.transformers_models.image_frame import Frame

KEYS = "artifact recipe steps loss_first loss_last metric_name metric_before metric_after seconds peak_memory_bytes"
IMAGES = ["--teacher", "teacher", "--student", "student", "--data", "shades.npz", "-o", "out", "--learning-rate", "0.02"]
TEXTS = ["--teacher", "text-teacher", "--student", "text-student", "--data", "rows.jsonl", "-o", "out"]
SMALL = ["--epochs", "2", "--batch-size", "12"]


@pytest.fixture(name="place", scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return pairs of classifiers of images and texts, and data for both."""
    path = tmp_path_factory.mktemp("classifiers")
    classifier("resnet", path / "untrained", hidden_sizes=[8, 16], depths=[1, 2])
    classifier("resnet", path / "student", seed=1)
    classifier("convnext", path / "other", seed=2)
    classifier("bert", path / "text-teacher")
    classifier("bert", path / "text-student", seed=1, num_hidden_layers=1)
    save_reference("llama", path / "decoder")
    data = CalibrationOptions(str(shades(path / "shades.npz")))
    sentences(path / "rows.jsonl")
    untrained, recipe = str(path / "untrained"), {"recipe": "sft", "epochs": 10, "batch_size": 12, "optimiser": "adamw"}
    options = ClassifierOptions(model=untrained, output=path / "teacher", calibration=data, learning_rate=0.01, **recipe)
    with drawing():
        assert distill_classifier(options)["metric_after"] > 0.9
    return path


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def refused(command: str, *arguments: str) -> str:
    result = CliRunner().invoke(cli.main, [command, *arguments], catch_exceptions=False)
    assert result.exit_code == 1 and result.output.startswith("Error: ") and result.output.count("\n") == 1, result.output
    return result.output


def by_hand(directory: Path, **inputs: Tensor) -> Tensor:
    """Return log Σ_k P(y|k,x)·P(k|x) of an artifact from its two files, example by example and expert by expert."""
    model = ClassifierCheckpoint(directory).load().model
    tensors = load_file(directory / MIXTURE_NAME)
    seen: dict[str, Tensor] = {}
    is_map = "projector.6.weight" in tensors
    head = model.classifier if isinstance(model.classifier, torch.nn.Linear) else model.classifier[1]
    head.register_forward_pre_hook(lambda layer, given: seen.update(z=given[0]))
    model.base_model.register_forward_hook(lambda layer, given, made: seen.update(map=made.last_hidden_state))
    model(**inputs)
    if is_map:
        norm = lambda x, n: F.batch_norm(  # noqa: E731
            x, *(tensors[f"projector.{n}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        )
        x = F.relu(norm(F.conv2d(seen["map"], tensors["projector.0.weight"]), 1))
        x = F.relu(norm(F.conv2d(x, tensors["projector.3.weight"], padding=1), 4))
        h = F.conv2d(x, tensors["projector.6.weight"], tensors["projector.6.bias"]).mean(dim=(2, 3))
    elif "projector.0.weight" in tensors:
        layers = [[tensors[f"projector.{n}.{part}"] for part in ("weight", "bias")] for n in (0, 2, 4)]
        h = F.linear(F.relu(F.linear(F.relu(F.linear(seen["z"], *layers[0])), *layers[1])), *layers[2])
    gate = torch.full((len(seen["z"]), CLASSES), 1 / CLASSES)
    if "classifier.weight" in tensors:
        gate = F.softmax(F.linear(h, tensors["classifier.weight"], tensors["classifier.bias"]), dim=-1)
    mixed = sum(
        gate[:, k : k + 1] * F.softmax(F.linear(seen["z"] + tensors["prototypes"][k], head.weight, head.bias), dim=-1)
        for k in range(CLASSES)
    )
    return mixed.log()


@pytest.mark.parametrize("ablation", [None, *ABLATIONS])
def test_the_mixture_of_an_artifact_is_what_its_files_say(ablation: str | None) -> None:
    own = ["--ablation", ablation] if ablation else []
    figures = run("distill", *IMAGES, *SMALL, "--recipe", "moe-kd", *own, "--overwrite", "--probe", "shades.npz")
    assert set(KEYS.split()) <= set(figures) and figures["metric_name"] == "accuracy" and figures["experts"] == CLASSES
    assert figures["loss_last"] == pytest.approx(figures["experts_last"] + figures["gate_last"], rel=1e-6)
    out = ClassifierCheckpoint(Path("out"))
    given = out.inputs()(
        torch.randint(256, (5, 1, SIZE, SIZE), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    )
    mixture = out.load()
    found = mixture(**given)
    assert torch.allclose(found, by_hand(Path("out"), **given), atol=1e-5)
    assert found.exp().sum(dim=-1).tolist() == [pytest.approx(1.0)] * 5
    tensors = load_file(Path("out") / MIXTURE_NAME)
    names = {name.split(".")[0] for name in tensors}
    assert names == ({"prototypes"} if ablation == "i" else {"prototypes", "projector", "classifier"})
    if ablation != "i":
        frozen = load_file(Path("teacher") / "model.safetensors")["classifier.1.weight"]
        assert torch.equal(tensors["classifier.weight"], frozen) == (ablation != "ii")
    # The student alone is a checkpoint of its family, and its figures are there.
    plain = ClassifierCheckpoint(Path("out"))
    data, inputs = examples_for(plain, "shades.npz")
    held_out = data.part("held-out")
    with torch.no_grad():
        alone = mixture.split(**inputs(held_out.read(range(len(held_out))))).logits_BC.argmax(dim=-1)
    assert figures["accuracy_without_mixture"] == int((alone == torch.tensor(held_out.labels)).sum()) / len(held_out)
    assert 0 <= figures["probe_before"] <= 1 and figures["probe_after"] == probe(plain.load(), "shades.npz", inputs, "cpu")


def test_class_means_and_bias_of_the_artifact_are_the_papers() -> None:
    """The stored means are e_k − Σ_k π_k e_k, with the teacher's π over the training set; the mean is in the head's bias."""
    run("distill", *IMAGES, *SMALL, "--recipe", "moe-kd", "--overwrite", "--temperature", "2")
    out = ClassifierCheckpoint(Path("out"))
    teacher = ClassifierCheckpoint(Path("teacher")).load()
    data, inputs = examples_for(out, "shades.npz")
    training = data.part("calibration")
    with torch.no_grad():
        logits = teacher.split(**inputs(training.read(range(len(training))))).logits_BC
    shares_K = class_probabilities(logits, 2.0).mean(dim=0)
    prototypes_KD = load_file(Path("out") / MIXTURE_NAME)["prototypes"]
    assert (shares_K @ prototypes_KD).abs().max() < 1e-5 < prototypes_KD.abs().max()


@pytest.mark.parametrize("recipe", ["sft", "kd", "srrl"])
def test_other_recipes_end_in_plain_checkpoints(recipe: str) -> None:
    from transformers import AutoModelForImageClassification

    given = IMAGES[2:] if recipe == "sft" else IMAGES
    figures = run("distill", *given, *SMALL, "--recipe", recipe, "--overwrite", "--augment", "crop-flip")
    assert figures["experts"] == 0 and figures["accuracy_without_mixture"] is None
    assert not (Path("out") / MIXTURE_NAME).exists()
    terms = {"sft": ["labels"], "kd": ["labels", "teacher"], "srrl": ["labels", "gate", "features"]}[recipe]
    assert figures["loss_first"] == pytest.approx(sum(figures[f"{term}_first"] for term in terms), rel=1e-6)
    out = ClassifierCheckpoint(Path("out"))
    pixels = out.inputs()(torch.randint(256, (2, 1, SIZE, SIZE), dtype=torch.uint8))
    loaded = AutoModelForImageClassification.from_pretrained("out").eval()
    assert torch.allclose(loaded(**pixels).logits, out.load()(**pixels), atol=1e-6)
    assert (Path("out") / "preprocessor_config.json").is_file() and out.inputs().size == (SIZE, SIZE)


@pytest.mark.slow
def test_training_teaches_and_commands_take_the_result() -> None:
    """Training works from labels alone and then from that teacher, for texts too. `evaluate` reports the same accuracy."""
    longer = ["--batch-size", "12", "--learning-rate", "0.05", "--overwrite"]
    taught = run(
        "distill", "--student", "other", "--recipe", "sft", "--data", "shades.npz", "--epochs", "15", *longer, "-o", "t"
    )
    assert taught["metric_after"] > max(0.9, taught["metric_before"]) and taught["teacher"] is None
    pair = ["--teacher", "t", "--student", "student", "--data", "shades.npz", "--recipe", "moe-kd", "--epochs", "15"]
    figures = run("distill", *pair, *longer, "-o", "m")
    assert figures["top5_after"] is figures["teacher_top5"] is None, "there are three classes"
    assert figures["metric_after"] > 0.9 and figures["teacher_accuracy"] == taught["metric_after"]
    evaluated = run("evaluate", "m", "--data", "shades.npz")
    assert evaluated["metric"] == "accuracy" and evaluated["value"] == figures["metric_after"]
    assert evaluated["examples"] == figures["held_out_examples"]
    assert run("evaluate", "m") | {"seconds": 0} == evaluated | {"seconds": 0}  # by default its training data
    every = run("evaluate", "m", "--data", "shades.npz", "--metric", "accuracy", "--split", "all", "--samples", "50")
    assert every["examples"] == 50
    assert run("evaluate", "m", "--data", "shades.npz", "--probe")["metric"] == "probe"
    described = run("inspect", "m", "--checksums")
    assert described["kind"] == "artifact" and described["experts_per_layer"] == [CLASSES] and described["valid"]
    assert described["parameters"] == figures["parameters_after"] > figures["parameters_before"]
    assert run("inspect", "student")["kind"] == "checkpoint"
    (row,) = run("bench", "m", "-b", "2", "-r", "2")["rows"]
    assert row["experts"] == CLASSES and row["test"] == f"images {SIZE}×{SIZE}, batch 2" and row["backend"] == "torch"
    assert row["examples_per_second_mean"] > 0 and row["peak_memory_bytes"] > row["weights_bytes"]
    text = ["--epochs", "15", "--batch-size", "12", "--learning-rate", "0.01", "--optimiser", "adamw", "--max-length", "30"]
    figures = run("distill", *TEXTS, *text, "--recipe", "moe-kd", "--overwrite")
    assert figures["metric_after"] >= 0.9 > figures["metric_before"]
    out = ClassifierCheckpoint(Path("out"))
    assert out.class_names == ("alpha", "beta", "gamma")
    given = out.inputs()(["1 alpha", "2 gamma and more"])
    assert torch.allclose(out.load()(**given), by_hand(Path("out"), **given), atol=1e-5)


def test_top_5_accuracy_stands_beside_top_1_for_more_than_five_classes(place: Path) -> None:
    for name, seed in (("seven", 0), ("seven-teacher", 1)):
        classifier("resnet", place / name, seed, classes=7)
    images = np.random.default_rng(0).integers(0, 255, (60, SIZE, SIZE), dtype=np.uint8)
    np.savez(place / "seven.npz", images=images, labels=np.arange(60) % 7)
    pair = ["--student", "seven", "--teacher", "seven-teacher", "--data", "seven.npz", "-o", "seven-out", *SMALL]
    figures = run("distill", *pair, "--milestones", "1")
    assert figures["top5_after"] > figures["metric_after"] and figures["top5_before"] > figures["metric_before"]
    assert figures["top5_after"] == run("evaluate", "seven-out")["top5"]
    assert figures["teacher_top5"] == run("evaluate", "seven-teacher", "--data", "seven.npz")["top5"]
    card = (place / "seven-out" / "README.md").read_text()
    assert "| top-5 accuracy |" in card and f"top-5 {figures['teacher_top5']:.4f}" in card
    said = CliRunner().invoke(cli.main, ["evaluate", "seven-out"]).stdout
    assert f"accuracy {figures['metric_after']:.4f}, top-5 {figures['top5_after']:.4f}, on " in said


class Interrupted(KeyboardInterrupt):
    pass


@pytest.mark.parametrize(
    "arguments",
    [
        [*IMAGES, "--recipe", "moe-kd", "--augment", "crop"],
        [*TEXTS, "--recipe", "moe-kd", "--ablation", "v", "--optimiser", "adamw"],  # with dropout
    ],
)
def test_a_resumed_run_ends_in_the_same_bits(arguments: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [*arguments, *SMALL, "--save-every", "2"]
    run("distill", *own, "--overwrite")
    names = ("model.safetensors", MIXTURE_NAME)
    wanted = [(place / "out" / name).read_bytes() for name in names]
    (place / "out").rename(place / "whole")
    update = ClassifierTrainer.update

    def stop(trainer: ClassifierTrainer, step: int) -> None:
        if step == 5:
            raise Interrupted
        update(trainer, step)

    with monkeypatch.context() as patch:
        patch.setattr(ClassifierTrainer, "update", stop)
        result = CliRunner().invoke(cli.main, ["distill", *own])
    assert result.exit_code == 130 and not (place / "out").exists() and (place / ".out.work").is_dir()
    assert "other options" in refused("distill", *own, "--resume", "--momentum", "0.5")
    run("distill", *own, "--resume")
    assert [(place / "out" / name).read_bytes() for name in names] == wanted
    assert not (place / ".out.work").exists()
    run("distill", *own, "--resume")  # a finished run prints its figures again
    for path in (place / "whole", place / "out"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@pytest.mark.parametrize(("milestones", "falls"), [((), (10, 12, 14)), ((3, 6), (6, 12))])
def test_gradient_descent_is_the_textbooks_with_falls(milestones: tuple[int, ...], falls: tuple[int, ...]) -> None:
    """The optimizer equals momentum, decay and the schedule written out. A state restores its buffers too."""
    target, counter = torch.tensor([1.0, -2.0]), torch.zeros(())
    weight = torch.nn.Parameter(torch.zeros(2))

    def loss(batch: Any) -> dict[str, Tensor]:
        counter.add_(1)
        return {"square": (weight - target * (1 + batch.rows_B.float().mean())).square().sum()}

    options = TrainingOptions(16, 0.05, 2, 2, weight_decay=0.1, save_every=4)
    own = ClassifierOptions(model="s", output=Path("o"), recipe="sft", epochs=8, milestones=milestones)
    own.check()
    ClassifierTrainer({"w": weight}, {"counter": counter}, loss, options, 6, momentum=0.8, falls=own.falls(16)).run()
    w, velocity = torch.zeros(2), torch.zeros(2)
    for step in range(16):
        rate = 0.05 * 0.1 ** sum(step >= fall for fall in falls)
        gradient = 2 * (w - target * (1 + batch_rows(6, 2, step, 0).float().mean())) + 0.1 * w
        velocity = 0.8 * velocity + gradient
        w = w - rate * velocity
    assert torch.allclose(weight.detach(), w, atol=1e-6) and counter == 16


def test_images_are_cropped_out_of_a_frame_and_mirrored() -> None:
    images = torch.arange(1, 1 + 8 * 36, dtype=torch.uint8).view(8, 1, 6, 6)
    assert augmented(images, AUGMENTATIONS["none"], torch.Generator()) is images
    made = augmented(images, AUGMENTATIONS["crop"], torch.Generator().manual_seed(0))
    again = augmented(images, AUGMENTATIONS["crop"], torch.Generator().manual_seed(0))
    assert torch.equal(made, again) and made.shape == images.shape and not torch.equal(made, images)
    for image, cut in zip(images, made, strict=True):
        frame = F.pad(image, (4,) * 4)
        assert any(torch.equal(cut, frame[:, y : y + 6, x : x + 6]) for y in range(9) for x in range(9))
    flipped = augmented(images, AUGMENTATIONS["crop-flip"], torch.Generator().manual_seed(0))
    kinds = {(torch.equal(own, cut), torch.equal(own, cut.flip(-1))) for own, cut in zip(flipped, made, strict=True)}
    assert kinds == {(True, False), (False, True)}


@pytest.mark.parametrize(("height", "width"), [(40, 60), (50, 50), (60, 40)])
def test_parts_of_an_image_are_within_it_and_have_the_usual_areas_and_ratios(height: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    boxes = [crop_box(height, width, generator) for _ in range(2000)]
    assert all(0 <= top <= height - h and 0 <= left <= width - w for top, left, h, w in boxes)
    shares = [h * w / (height * width) for _, _, h, w in boxes]
    ratios = [w / h for _, _, h, w in boxes]
    assert 0.05 < min(shares) < 0.15 and 0.75 < max(shares) <= 1.0, "rounding moves a side by half a pixel"
    assert 0.7 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.43
    assert height != width or abs(sum(map(math.log, ratios))) / len(ratios) < 0.03, "as many are wide as high"
    assert crop_box(4, 100, generator) == (0, 47, 4, 5), "a strip has no such part; this is the largest in its middle"


def test_resized_parts_come_from_the_whole_file_and_are_mirrored(tmp_path: Path) -> None:
    """A center crop would never show the sides of a wide image; some of its parts do."""
    (tmp_path / "a").mkdir()
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, :20] = 255
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    examples, how = labelled(str(tmp_path), Frame((8, 8), 8)), AUGMENTATIONS["resized-crop-flip"]
    assert int(examples.read([0]).max()) < 255
    made = training_examples(examples, [0] * 64, how, None, torch.Generator().manual_seed(0))
    again = training_examples(examples, [0] * 64, how, None, torch.Generator().manual_seed(0))
    assert made.shape == (64, 3, 8, 8) and torch.equal(made, again)
    assert training_examples(examples, [0], how, (5, 6), torch.Generator()).shape == (1, 3, 5, 6)
    assert 5 < sum(bool((image == 255).any()) for image in made) < 64
    rise = torch.arange(100, 180, 2, dtype=torch.uint8).expand(3, 40, 40)
    steps = [resized_crop(rise, (8, 8), True, torch.Generator().manual_seed(seed)).float().diff() for seed in range(64)]
    assert all(bool((one >= 0).all()) or bool((one <= 0).all()) for one in steps)
    assert 16 < sum(bool((one >= 0).all()) for one in steps) < 48


def wide_images(place: Path) -> Path:
    """Write a folder of wide images, whose class is the brightness of their middle; their sides have another class's."""
    for number in range(60):
        shade = 40 + 80 * (number % CLASSES)
        pixels = np.full((32, 96), 40 + 80 * ((number + 1) % CLASSES), np.uint8)
        pixels[:, 32:64] = shade
        pixels += np.random.default_rng(number).integers(0, 30, pixels.shape, dtype=np.uint8)
        path = place / "wide" / ("train" if number % 2 else "val") / "abc"[number % CLASSES] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return place / "wide"


@pytest.mark.parametrize("augmentation", ["none", "crop"])
def test_srrl_pulls_projected_features_towards_the_teachers(augmentation: str, place: Path) -> None:
    """The first step's feature loss by hand for cached features, and a weight that scales it or leaves it out."""
    longer = [*IMAGES, "--epochs", "4", "--batch-size", "48", "--recipe", "srrl", "--overwrite", "--augment", augmentation]
    whole, half, without = (run("distill", *longer, "--feature-weight", weight) for weight in ("1", "0.5", "0"))
    assert whole["features_first"] == pytest.approx(2 * half["features_first"], rel=1e-5)
    assert whole["features_last"] < whole["features_first"] and "features_first" not in without
    terms = sum(whole[f"{name}_first"] for name in ("labels", "gate", "features"))
    assert whole["loss_first"] == pytest.approx(terms, rel=1e-5)
    assert without["loss_first"] == pytest.approx(without["labels_first"] + without["gate_first"], rel=1e-5)


@pytest.mark.parametrize("augmentation", ["none", "resized-crop-flip"])
def test_each_model_sees_an_image_as_its_own_preprocessing_says(augmentation: str, place: Path) -> None:
    """The teacher crops the middle, which tells the class; the student stretches the whole image to another size."""
    wide_images(place)
    for name, size in (("teacher", {"size": {"shortest_edge": SIZE}, "crop_size": SIZE}), ("student", {"size": SIZE + 8})):
        shutil.copytree(place / name, place / f"wide-{name}", dirs_exist_ok=True)
        (place / f"wide-{name}" / "compression.json").unlink(missing_ok=True)
        (place / f"wide-{name}" / "preprocessor_config.json").write_text(json.dumps(size))
    pair = ["--teacher", "wide-teacher", "--student", "wide-student", "--data", "wide", "-o", "wide-out", "--overwrite"]
    figures = run("distill", *pair, *SMALL, "--recipe", "moe-kd", "--ablation", "v", "--augment", augmentation)
    assert figures["teacher_accuracy"] == run("evaluate", "wide-teacher", "--data", "wide")["value"] > 0.9
    stretched = image_inputs(place / "wide-out", ClassifierCheckpoint(place / "wide-out").config)
    assert stretched.frame == Frame((SIZE + 8, SIZE + 8), (SIZE + 8, SIZE + 8))


def test_the_frame_of_a_folder_is_written_with_the_result(place: Path) -> None:
    """A student without preprocessing is trained on center crops that keep the aspect, and is evaluated on such again."""
    wide_images(place)
    figures = run("distill", "--student", "student", "--recipe", "sft", "--data", "wide", "-o", "own", *SMALL)
    assert run("evaluate", "own")["value"] == figures["metric_after"]
    said = json.loads((place / "own" / "preprocessor_config.json").read_text())
    assert said["size"] == {"shortest_edge": 256} and said["crop_size"] == {"height": 224, "width": 224}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "gkd"], "recipe is 'gkd'; for classifiers it must be one of sft, kd, srrl, moe-kd"),
        (["--recipe", "kd", "--ablation", "i"], "ablations are of recipe moe-kd"),
        (["--recipe", "sft"], "recipe sft has no teacher"),
        (["--ka-samples", "3"], "--ka-samples is for language models, and the student is a classifier"),
        (["--temperature", "0"], "temperature must be above 0"),
        (["--batch-size", "1"], "batch-size 2"),
        (["--epochs", "90", "--milestones", "30,60,90"], "milestones are 30, 60, 90; they must ascend and be below the 90"),
        (["--milestones", "60,30"], "they must ascend"),
        (["--teacher", "text-teacher"], "tells 3 classes of texts and student 3 of images"),
        (["--teacher", "decoder"], "no classifier; give a model of image"),
        (["--data", "rows.jsonl"], "has texts, and student classifies images"),
        (["--student", "decoder", "--weight-decay", "0"], "--weight-decay is for classifiers"),
        (["--student", "decoder", "--recipe", "moe-kd"], "recipe is 'moe-kd'"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(arguments: list[str], said: str, place: Path) -> None:
    before = listing(place)
    assert said in refused("distill", *IMAGES[:6], "-o", "new", *arguments)
    assert listing(place) == before


def test_other_commands_refuse_classifiers_and_these_refuse_language_models(place: Path) -> None:
    for command in (
        ["prune", "student", "--experts", "2"],
        ["generate", "student", "-p", "a"],
        ["calibrate", "student", "-o", "s"],
    ):
        assert "is a classifier of images, which this command does not take" in refused(*command)
    assert "is a classifier; its metric is accuracy" in refused("evaluate", "student", "--metric", "perplexity")
    assert "is no classifier, so it has no accuracy" in refused("evaluate", "decoder", "--metric", "accuracy")
    assert "one kind at a time" in refused("bench", "student", "decoder")
    assert "--depth is not for classifiers" in refused("bench", "student", "-d", "4")
    config = json.loads((place / "student" / "config.json").read_text())
    (place / "renamed").mkdir(exist_ok=True)
    names = {str(number): name for number, name in enumerate("xyz")}
    (place / "renamed" / "config.json").write_text(json.dumps(config | {"id2label": names}))
    (place / "renamed" / "model.safetensors").write_bytes((place / "student" / "model.safetensors").read_bytes())
    other = place / "others"
    other.mkdir(exist_ok=True)
    names = {str(number): name for number, name in enumerate("abc")}
    (other / "config.json").write_text(json.dumps(config | {"id2label": names}))
    (other / "model.safetensors").write_bytes((place / "student" / "model.safetensors").read_bytes())
    pair = ["--teacher", "renamed", "--student", "others", "--data", "shades.npz"]
    assert "name their classes differently" in refused("distill", *pair)


def test_figures_are_finite(place: Path) -> None:
    assert all(
        math.isfinite(value) for value in load_file(place / "student" / "model.safetensors")["classifier.1.bias"].tolist()
    )
    assert labelled("shades.npz").fingerprint() != labelled("rows.jsonl").fingerprint()
