"""Recipes for classifiers: accuracy of students alone, by KD, SRRL, MoE-KD and its ablations (i)–(v); several seeds.

    python benchmarks/moe_kd.py [--seeds 5] [--work build/moe_kd]
        python benchmarks/moe_kd.py --speed      # cost of running a mixture, beside its student

Images: scikit-learn's handwritten digits at 32×32, 1,000 of them held out. The teacher is a small residual network. Students
are a smaller network of its kind and a small network of another kind. "same" is the paper's setting: teacher and student are
trained on the same images, 256 of them. In "fewer" the teacher has seen all 797 that are not held out, the student 128 of
them. Each run is 480 steps of 64 images, at the paper's two rates: 0.05, and 0.01 for the small network of another kind. A
run's features are also probed linearly (table 5) on another task: letters, drawn in the fonts that come with matplotlib.

Texts: functions of the standard library; the class is the package of a function. Both models are small encoders.

Each finished run is a line of results/moe_kd.jsonl and is not repeated. The files of a run are removed.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import statistics
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import BUILD, RESULTS, markdown, mean_and_spread, remember, remembered, save, times
from torch import nn

from calibrate.labelled import labelled
from calibrate.options import CalibrationOptions
from compress.classifiers.distill import distill_classifier
from compress.classifiers.recipes import ABLATIONS
from compress.options.distill_classifier import ClassifierOptions
from engine.bench.classifiers import bench_classifiers
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.files.safetensors_writer import write_tensors
from engine.transformers_models.classifier import MIXTURE_KEY, MIXTURE_NAME, PROTOTYPES, ClassifierCheckpoint
from engine.transformers_models.classifier_inputs import PREPROCESSOR
from engine.transformers_models.mixture_head import Gate, projector
from engine.transformers_models.transformers_model import quiet_transformers

HELD_OUT, BATCH = 1000, 64
WHOLE = "MoE-KD"
METHODS: dict[str, dict[str, str]] = {
    "student alone": {"recipe": "sft"},
    "KD": {"recipe": "kd"},
    "SRRL": {"recipe": "srrl", "feature_weight": 0.0},  # the form of MoE-KD §4.4
    WHOLE: {"recipe": "moe-kd"},
    **{f"({name}) {row.about}": {"recipe": "moe-kd", "ablation": name} for name, row in ABLATIONS.items()},
}
MAIN = ("student alone", "KD", "SRRL", WHOLE)
RESIDUAL = {"model_type": "resnet", "num_channels": 1, "layer_type": "basic"}
MODELS: dict[str, dict[str, Any]] = {
    "teacher": RESIDUAL | {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [2, 2, 2]},
    "ResNet": RESIDUAL | {"embedding_size": 8, "hidden_sizes": [8, 8, 16], "depths": [1, 1, 1]},
    # Large first weights and whole layer scales: such a small network learns nothing with its family's defaults.
    "ConvNeXt": {
        "model_type": "convnext",
        **{"num_channels": 1, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "image_size": 32},
        **{"layer_scale_init_value": 1.0, "initializer_range": 0.2},
    },
    "text teacher": {"model_type": "bert", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    "BERT": {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
}
RATES = {"ConvNeXt": 0.01}
"""Learning rates of students that do not use their setting's: at 0.05 one run of KD in five diverged (docs/LOG.md)."""
LARGE = {"model_type": "resnet", "layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
TEXT_CLASSES, TEXTS_PER_CLASS, TEXT_LENGTH = 8, 300, 48


@dataclass(frozen=True)
class Setting:
    """One table: the data of teacher and students."""

    name: str
    about: str
    teacher: str
    teacher_data: str
    data: str
    students: tuple[str, ...]
    methods: tuple[str, ...]
    epochs: int
    teacher_epochs: int
    optimiser: str = "sgd"
    learning_rate: float = 0.05
    probe: str | None = "letters.npz"
    seeds: int = 5


IMAGES = ("ResNet", "ConvNeXt")
SETTINGS = (
    Setting(
        "same",
        "teacher and student trained on the same 256 digits",
        *("teacher", "256.npz", "256.npz", IMAGES, tuple(METHODS), 120, 120),
    ),
    Setting(
        "fewer",
        "teacher trained on 797 digits, students on 128 of them",
        *("teacher", "797.npz", "128.npz", IMAGES, MAIN, 240, 40),
        seeds=3,
    ),
    Setting(
        "text",
        f"the package that contains a function of the standard library, one of {TEXT_CLASSES}",
        *("text teacher", "functions.jsonl", "functions.jsonl", ("BERT",), MAIN, 24, 8),
        optimiser="adamw",
        learning_rate=0.002,
        probe=None,
    ),
)


# Data


def write_digits(path: Path, count: int) -> None:
    """Write `count` of the digits for training, and HELD_OUT others for measuring."""
    digits = labelled("digits")
    images, labels = digits.read(range(len(digits)))[:, 0].numpy(), np.array(digits.labels)
    order = np.random.default_rng(0).permutation(len(digits))
    held_out, others = order[-HELD_OUT:], order[:-HELD_OUT][:count]
    np.savez(path, x_train=images[others], y_train=labels[others], x_test=images[held_out], y_test=labels[held_out])


def write_letters(path: Path, each: int = 40) -> None:
    """Write capital letters in matplotlib's fonts, moved, rotated and scaled at random, white on black."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    fonts = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("DejaVu*.ttf"))
    fonts = [font for font in fonts if "Display" not in font.name]
    draw_from, images, labels = random.Random(0), [], []
    for number, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
        for _ in range(each):
            image = Image.new("L", (32, 32))
            font = ImageFont.truetype(str(draw_from.choice(fonts)), draw_from.randint(17, 25))
            place = (16 + draw_from.uniform(-3, 3), 16 + draw_from.uniform(-3, 3))
            ImageDraw.Draw(image).text(place, letter, fill=255, font=font, anchor="mm")
            images.append(np.array(image.rotate(draw_from.uniform(-15, 15), Image.Resampling.BILINEAR)))
            labels.append(number)
    np.savez(path, images=np.stack(images), labels=np.array(labels))


def functions() -> Iterator[tuple[str, str]]:
    """Yield (package, source) of the functions of the standard library's packages, without their tests."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if len(parts) < 2 or {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield parts[0], ast.unparse(node)


def write_functions(path: Path) -> None:
    """Write the same number of functions of each of the packages with the most functions."""
    found = sorted({(package, text) for package, text in functions() if len(text) >= 80})
    packages = sorted(name for name, _ in Counter(package for package, _ in found).most_common(TEXT_CLASSES))
    with path.open("w") as file:
        for package in packages:
            own = [text for other, text in found if other == package]
            for text in random.Random(0).sample(own, min(TEXTS_PER_CLASS, len(own))):
                file.write(json.dumps({"text": text, "label": package}) + "\n")


# Runs


class Benchmark:
    """One set of options, and the file of finished runs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seeds, self.work = arguments.seeds, arguments.work
        # A teacher that never says a class has no prototype of it, so teachers get more epochs.
        own = {"epochs": arguments.epochs, "teacher_epochs": 10 * arguments.epochs} if arguments.epochs else {}
        self.settings = [replace(setting, **own) for setting in SETTINGS]
        self.lines = RESULTS / "moe_kd.jsonl"
        self.done = remembered(self.lines)
        self.work.mkdir(parents=True, exist_ok=True)
        for count in (128, 256, 797):
            self._once(f"{count}.npz", lambda path, count=count: write_digits(path, count))
        self._once("letters.npz", write_letters)
        self._once("functions.jsonl", write_functions)

    def _once(self, name: str, write: Any) -> None:
        if not (self.work / name).exists():
            partial = self.work / f"partial-{name}"
            write(partial)
            partial.rename(self.work / name)

    def untrained(self, name: str, seed: int) -> Path:
        """Return a model of that name with random weights."""
        path = self.work / f"{name.replace(' ', '-')}-{seed}"
        if not path.exists():
            write_model(path, MODELS[name], seed)
        return path

    def teacher(self, setting: Setting) -> Path:
        """Return the setting's teacher, which is trained once."""
        path = self.work / f"teacher-{setting.name}"
        if not path.exists():
            student = self.untrained(setting.teacher, 0)
            epochs = setting.teacher_epochs
            given = {"epochs": epochs, "learning_rate": setting.learning_rate}
            figures = self.train(setting, "sft", student, path, 0, setting.teacher_data, **given)
            self._remember(setting, "–", "teacher", 0, figures)
        return path

    def run(self) -> None:
        """Run everything that is not finished."""
        for setting in self.settings:
            teacher = self.teacher(setting)
            for seed, student, method in product(range(min(self.seeds, setting.seeds)), setting.students, setting.methods):
                asked = {"setting": setting.name, "student": student, "method": method, "seed": seed}
                if any(asked.items() <= line.items() for line in self.done):
                    continue
                how = dict(METHODS[method])
                recipe, output = how.pop("recipe"), self.work / "run"
                given: dict[str, Any] = {} if recipe == "sft" else {"teacher": str(teacher)} | how
                model = self.untrained(student, seed)
                rate = RATES.get(student, setting.learning_rate)
                given |= {"epochs": setting.epochs, "learning_rate": rate}
                figures = self.train(setting, recipe, model, output, seed, setting.data, **given)
                shutil.rmtree(output)
                self._remember(setting, student, method, seed, figures)

    def train(
        self, setting: Setting, recipe: str, model: Path, output: Path, seed: int, data: str, **given: Any
    ) -> dict[str, Any]:
        """Run `compress distill`."""
        return distill_classifier(
            ClassifierOptions(
                model=str(model),
                output=output,
                recipe=recipe,
                calibration=CalibrationOptions(str(self.work / data), seed=seed),
                optimiser=setting.optimiser,
                max_length=TEXT_LENGTH,
                batch_size=BATCH,
                probe=None if setting.probe is None else str(self.work / setting.probe),
                save_every=10_000,
                overwrite=True,
                **given,
            )
        )

    def _remember(self, setting: Setting, student: str, method: str, seed: int, figures: dict[str, Any]) -> None:
        kept = (
            "metric_after",
            "accuracy_without_mixture",
            "probe_before",
            "probe_after",
            "parameters_after",
            "loss_last",
            "seconds",
        )
        line = {"setting": setting.name, "student": student, "method": method, "seed": seed}
        self.done.append(line | {name: figures[name] for name in kept})
        remember(self.lines, self.done[-1])
        print(self.done[-1], flush=True)


def write_model(path: Path, config: dict[str, Any], seed: int, classes: int | None = None) -> None:
    """Write a classifier with random weights. Encoders get the demo model's tokenizer."""
    from transformers import CONFIG_MAPPING, AutoModelForImageClassification, AutoModelForSequenceClassification

    own, tokenizer = dict(config), ("tokenizer.json", "tokenizer_config.json")
    family = own.pop("model_type")
    is_text = "num_attention_heads" in own
    if is_text:
        vocabulary = json.loads((DEMO_DIRECTORY / "config.json").read_text())["vocab_size"]
        own |= {"vocab_size": vocabulary, "max_position_embeddings": 64, "intermediate_size": 2 * own["hidden_size"]}
        own |= {"num_labels": TEXT_CLASSES, "initializer_range": 3.0 / own["hidden_size"]}
    else:
        own |= {"num_labels": classes or 10}
    auto = AutoModelForSequenceClassification if is_text else AutoModelForImageClassification
    torch.manual_seed(seed)
    with quiet_transformers():
        auto.from_config(CONFIG_MAPPING[family](**own)).save_pretrained(path)
    for name in tokenizer if is_text else ():
        shutil.copyfile(DEMO_DIRECTORY / name, path / name)


# Tables


def percent(lines: Sequence[dict[str, Any]], name: str) -> str:
    return mean_and_spread([100 * line[name] for line in lines if line.get(name) is not None])


def beside(lines: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """Return how much more accurate runs are than others of the same seeds."""
    own = {line["seed"]: line["metric_after"] for line in others}
    return mean_and_spread([100 * (line["metric_after"] - own[line["seed"]]) for line in lines if line["seed"] in own])


def table(figures: dict[str, Any]) -> str:
    """Return one table for each setting: a row for each method, with each student's accuracy and that of its features."""
    made, done = [], figures["runs"]
    for setting in figures["settings"]:
        own = [line for line in done if line["setting"] == setting["name"]]
        teacher = percent([line for line in own if line["method"] == "teacher"], "metric_after")
        header = ["method"]
        for student in setting["students"]:
            header += [
                student,
                f"above {WHOLE}, points",
                "without experts",
                *(["letters, probed"] if setting["probe"] else []),
            ]
        rows = []
        for method in setting["methods"]:
            row = [method]
            for student in setting["students"]:
                lines, whole = (
                    [line for line in own if line["student"] == student and line["method"] == name]
                    for name in (method, WHOLE)
                )
                row += [percent(lines, "metric_after"), "–" if method == WHOLE else beside(lines, whole)]
                row += [percent(lines, "accuracy_without_mixture")]
                row += [percent(lines, "probe_after")] if setting["probe"] else []
            rows.append(row)
        seeds = len({line["seed"] for line in own if line["method"] != "teacher"})
        made.append(
            f"{setting['about'][0].upper()}{setting['about'][1:]}; teacher {teacher} %; {seeds} seeds.\n\n"
            + markdown(header, rows)
        )
    return "\n".join(made)


def quoted(figures: dict[str, Any]) -> dict[str, str]:
    """Return the differences and probes that the conclusions quote, in percent."""

    def runs(setting: str, student: str, method: str) -> list[dict[str, Any]]:
        asked = {"setting": setting, "student": student, "method": method}
        return [line for line in figures["runs"] if asked.items() <= line.items()]

    def gain(setting: str, student: str, method: str, other: str) -> list[float]:
        others = {line["seed"]: line["metric_after"] for line in runs(setting, student, other)}
        own = runs(setting, student, method)
        return [100 * (line["metric_after"] - others[line["seed"]]) for line in own if line["seed"] in others]

    def mean(setting: str, student: str, method: str, name: str = "metric_after") -> float:
        return statistics.mean(100 * line[name] for line in runs(setting, student, method))

    ablations = {name.split(")")[0].strip("("): name for name in METHODS if name.startswith("(")}
    of = {key: gain("same", "ConvNeXt", name, WHOLE) for key, name in ablations.items()}
    means = {key: statistics.mean(found) for key, found in of.items()}
    texts = [mean("text", "BERT", method) for method in MAIN]
    found = {
        f"kd_{setting}_{student.lower()}": f"{statistics.mean(gain(setting, student, 'KD', WHOLE)):.1f}"
        for setting, student in product(("same", "fewer"), IMAGES)
    }
    for key, method in {"alone": "student alone", "kd": "KD", "moe_kd": WHOLE}.items():
        for student in IMAGES:
            found[f"probe_{key}_{student.lower()}"] = f"{mean('same', student, method, 'probe_after'):.1f}"
    return found | {
        "moe_kd_resnet": f"{mean('same', 'ResNet', WHOLE):.2f}",
        "alone_resnet": f"{mean('same', 'ResNet', MAIN[0]):.2f}",
        "alone_fewer_resnet": f"{statistics.mean(gain('fewer', 'ResNet', MAIN[0], WHOLE)):.1f}",
        "moe_kd_gain_convnext": mean_and_spread(gain("same", "ConvNeXt", WHOLE, MAIN[0])),
        "srrl_gain_convnext": f"{statistics.mean(gain('same', 'ConvNeXt', 'SRRL', MAIN[0])):.2f}",
        "i_loss_convnext": f"{-means['i']:.2f}",
        "iii_loss_convnext": f"{-means['iii']:.2f}",
        "ii_iv_convnext": f"{max(abs(means['ii']), abs(means['iv'])):.2f}",
        "v_gain_convnext": mean_and_spread(of["v"]),
        "probe_teacher": f"{mean('same', '–', 'teacher', 'probe_after'):.1f}",
        "text_low": f"{min(texts):.0f}",
        "text_high": f"{max(texts):.0f}",
        "text_teacher": f"{mean('text', '–', 'teacher'):.1f}",
        "text_experts": f"{mean('text', 'BERT', WHOLE) - mean('text', 'BERT', WHOLE, 'accuracy_without_mixture'):.0f}",
    }


# Speed


SPEED = "examples_per_second_median"
KEPT = (SPEED, "examples_per_second_rounds", "batch", "parameters", "peak_memory_bytes")
CLASSES, SIZE = 1000, 224


def speed(work: Path, threads: int, repetitions: int) -> None:
    """Measure a student of 18 layers and 1,000 classes, alone and as a mixture from a teacher of 512 features."""
    student, mixture = work / "student of 18 layers", work / "the same as a mixture"
    if not mixture.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_model(student, LARGE, 0, classes=CLASSES)
        (student / PREPROCESSOR).write_text(json.dumps({"size": SIZE}))
        write_mixture(student, mixture, 512)
    rows = []
    for batch in (1, 8):
        found = bench_classifiers([str(student), str(mixture)], batch=batch, threads=threads, repetitions=repetitions)
        alone = found[0][SPEED]
        for row in found:
            named = {"title": Path(row["model"]).name, "ratio": row[SPEED] / alone}
            rows.append(named | {key: row[key] for key in KEPT})
    save("moe_kd_speed", {"classes": CLASSES, "size": SIZE, "rows": rows})


def speed_table(figures: dict[str, Any]) -> str:
    """Return images per second and memory, with the ratio to the student alone for the same number of images at once."""
    header = [f"{figures['classes']:,} classes, {figures['size']}×{figures['size']}, float32", "batch", "parameters"]
    rows = []
    for row in figures["rows"]:
        alone = next(other for other in figures["rows"] if other["batch"] == row["batch"])
        rounds = [each.get("examples_per_second_rounds", ()) for each in (row, alone)]
        rows.append(
            [
                row["title"],
                str(row["batch"]),
                f"{row['parameters'] / 1e6:.1f} M",
                f"{row[SPEED]:.1f}",
                "" if row is alone else times(row["ratio"], *rounds),
                f"{row['peak_memory_bytes'] / 1e9:.2f}",
            ]
        )
    return markdown([*header, "images/s", "relative to the student", "peak GB"], rows)


TABLES = {"moe_kd": table, "moe_kd_speed": speed_table}
IN_TEXT = {"moe_kd": quoted}


def write_mixture(student: Path, path: Path, teacher_features: int) -> None:
    """Write a student with random experts behind it."""
    classifier = ClassifierCheckpoint(student).load()
    features, classes = classifier.head.in_features, classifier.head.out_features
    gate = Gate(projector(features, teacher_features, True), nn.Linear(teacher_features, classes), classes)
    shutil.copytree(student, path)
    prototypes = {PROTOTYPES: torch.randn(classes, features)}
    tensors = prototypes | {name: tensor.contiguous() for name, tensor in gate.state_dict().items()}
    write_tensors(path / MIXTURE_NAME, tensors, {"format": "pt"}, "the mixture")
    config = json.loads((path / "config.json").read_text()) | {MIXTURE_KEY: classes}
    (path / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=BUILD / "moe_kd")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--repetitions", type=int, default=25, help="of --speed")
    parser.add_argument(
        "--epochs", type=int, help="epochs of students, and a tenth of the teachers'; by default those of each setting"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.speed:
        speed(arguments.work, arguments.threads, arguments.repetitions)
        return
    benchmark = Benchmark(arguments)
    benchmark.run()
    kept = ("name", "about", "students", "methods", "probe")
    settings = [{name: asdict(setting)[name] for name in kept} for setting in benchmark.settings]
    save("moe_kd", {"settings": settings, "runs": benchmark.done})


if __name__ == "__main__":
    main()
