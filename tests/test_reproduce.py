"""The pages of docs/reproduce: each has every table and figure, and its commands parse, show their output, and run tiny."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from artifacts_for_tests import make_workplace
from click.testing import CliRunner
from packages_for_tests import needs_lm_eval

import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.stem for path in (ROOT / "docs" / "reproduce").glob("*.md"))
TABLES_AND_FIGURES = {
    "diep": {"table": range(1, 11), "figure": range(1, 9)},
    "every-expert-matters": {"table": range(1, 4), "figure": range(1, 6)},
    "speech-recognition": {"table": range(1, 4), "figure": range(1, 5)},
    "moe-kd": {"table": range(1, 10), "figure": range(0)},
}
"""The numbers of the tables and figures in each paper, its appendices included."""
NUMBERED = [
    (page, kind, number) for page, own in TABLES_AND_FIGURES.items() for kind, numbers in own.items() for number in numbers
]
NO_COMMAND = re.compile(r"\b(has|have) no command\b")
STAND_INS = {
    "mistralai/Mixtral-8x7B-v0.1": "demo",
    "deepseek-ai/deepseek-moe-16b-base": "demo",
    "llama-moe/LLaMA-MoE-v1-3_5B-4_16": "demo",
    "princeton-nlp/Sheared-LLaMA-1.3B": "materials/student",
    "princeton-nlp/Sheared-LLaMA-2.7B": "materials/student",
    "benchmarks/reference_model": "shared-expert/model",
    "google/switch-base-32": "materials/switch",
    "google/switch-base-64": "materials/switch",
    "path/to/untrained-switch-base-64": "materials/switch",
    "allenai/c4": "stdlib",
    "pairs.jsonl": "stdlib",
    "dolly/train.jsonl": "materials/signatures/train.jsonl",
    "dolly/valid.jsonl": "materials/signatures/validation.jsonl",
    "dolly/test.jsonl": "materials/signatures/test.jsonl",
    "cifar100.npz": "materials/digits.npz",
    "stl10.npz": "materials/letters.npz",
    "tiny-imagenet.npz": "materials/letters.npz",
    "imagenet": "materials/digits.npz",
    "birds": "materials/digits.npz",
    "4,5,6,7,8,9,10,11,12,13,14,15,16": "4,8",
    "56": "7",
    "48": "6",
    "32": "5",
    "path/to/cifar-teacher": "materials/teacher",
    "path/to/cifar-resnet-50": "materials/teacher",
    "path/to/cifar-student": "materials/student-resnet",
    "path/to/cifar-mobilenet-v2": "materials/student-convnext",
    "microsoft/resnet-34": "materials/teacher-untrained",
    "microsoft/resnet-50": "materials/teacher-untrained",
    "path/to/untrained-resnet-18": "materials/student-resnet",
    "path/to/untrained-mobilenet-v1": "materials/student-convnext",
    "path/to/birds-teacher": "materials/teacher-untrained",
    "path/to/birds-student": "materials/student-resnet",
    "path/to/strong-resnet-50": "materials/teacher-untrained",
    "path/to/untrained-resnet-34": "materials/student-resnet",
    "path/to/untrained-efficientnet-b0": "materials/student-convnext",
}
"""Models, data and numbers of experts of the full size, and the small ones that take their place."""
ALIKE = ("model", "teacher", "data", "seed", "weight", "epochs", "samples", "k")
"""Variables of loops whose words differ by name or by a number alone: at a tiny size only the first is run."""
TEXT = "--samples 4 --sequence-length 64 --evaluation-samples 2"
FEW = "--validation-samples 2 --batch-size 2"
CLASSIFIER = "--epochs 4 --milestones 1,2,3 --batch-size 64"
TINY = {
    "prune": f"{TEXT} --epochs 1 --batch-size 4",
    "merge": TEXT,
    "calibrate": "--samples 4 --sequence-length 64",
    "plan-run": "--samples 4",
    "bench": "-p 16 -n 4 -r 1",
    "compare": "--no-speed --data stdlib --samples 2 --sequence-length 64 --calibration-samples 2 --limit 4",
    "generate": "-n 4",
    "densify": f"--samples 8 --evaluation-samples 8 {FEW} --distill-steps 2 --finetune-steps 2",
    "distill": "--steps 1 --batch-size 2 --max-length 128 --max-prompt-length 96",
}
"""Options that each command is given on top of its own."""


@pytest.fixture(scope="module")
def reproduce() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("reproduce")


def commands(reproduce: Any, page: str, size: str, once: tuple[str, ...] = ()) -> list[str]:
    text = reproduce.page_path(page).read_text()
    return list(reproduce.demo_commands(text) if size == "demo" else reproduce.full_size_commands(text, once))


def without_variables(command: str) -> list[str]:
    """Return the words of a command from its program on."""
    words = shlex.split(command)
    while re.match(r"\w+=", words[0]):
        words.pop(0)
    return words


def numbers(heading: str) -> set[tuple[str, int]]:
    """Return the tables and figures that a heading names: of "Table 2 and figure 4", both."""
    found = re.findall(r"\b(table|figure)s? (\d+(?:(?:, | and )\d+)*)", heading.lower())
    return {(kind, int(number)) for kind, listed in found for number in re.findall(r"\d+", listed)}


def sections(page: str, reproduce: Any) -> dict[str, str]:
    """Return the text below each heading of a page."""
    _, *parts = re.split(r"^## ", reproduce.page_path(page).read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def test_there_is_a_page_for_each_paper() -> None:
    assert set(TABLES_AND_FIGURES) == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_headings_name_the_tables_and_figures_of_the_paper_once(page: str, reproduce: Any) -> None:
    named = [each for heading in sections(page, reproduce) for each in numbers(heading)]
    assert sorted(named) == sorted((kind, number) for one, kind, number in NUMBERED if one == page)


@pytest.mark.parametrize(("page", "kind", "number"), NUMBERED)
def test_every_table_and_figure_has_its_commands(page: str, kind: str, number: int, reproduce: Any) -> None:
    """Commands at both sizes, or a sentence that there is none."""
    (text,) = (body for heading, body in sections(page, reproduce).items() if (kind, number) in numbers(heading))
    has_commands = all(list(of(text)) for of in (reproduce.full_size_commands, reproduce.demo_commands))
    assert has_commands != bool(NO_COMMAND.search(text))


def test_headings_are_read() -> None:
    assert numbers("Tables 1, 2, 8 and 9: CIFAR-100") == {("table", number) for number in (1, 2, 8, 9)}
    assert numbers("Table 2 and figure 4: λ and M") == {("table", 2), ("figure", 4)}
    assert not numbers("Time")


@pytest.mark.parametrize("size", ["demo", "full"])
@pytest.mark.parametrize("page", PAGES)
def test_every_command_parses(page: str, size: str, reproduce: Any) -> None:
    found = commands(reproduce, page, size)
    assert found
    for command in found:
        assert size == "demo" or not re.search(r"\$[\w{]", command), "a variable of no loop"
        program, *words = without_variables(command)
        if program == "python":
            assert (ROOT / words[0]).is_file()
            continue
        if program == "tr":
            continue  # shows numbers of a result's compression.json
        assert program == "compress"
        cli.main.commands[words[0]].make_context(words[0], words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_stored_outputs(page: str, reproduce: Any) -> None:
    text = reproduce.page_path(page).read_text()
    stored = json.loads((ROOT / "benchmarks" / "results" / f"reproduce_{page}.json").read_text())["figures"]
    assert [each["command"] for each in stored["commands"]] == commands(reproduce, page, "demo")
    assert reproduce.with_outputs(text, stored) == text, f"run: python benchmarks/reproduce.py {page}"


def test_outputs_are_filled_in_below_their_commands(reproduce: Any) -> None:
    text = "A\n```console\n$ compress inspect a\nold\n$ compress inspect \\\n    b\nold too\n```\nB\n"
    ran = [{"command": "compress inspect a", "output": "new\n"}, {"command": "compress inspect b", "output": "1\n2\n"}]
    wanted = "A\n```console\n$ compress inspect a\nnew\n$ compress inspect \\\n    b\n1\n2\n```\nB\n"
    assert reproduce.with_outputs(text, {"commands": ran}) == wanted
    assert list(reproduce.demo_commands(text)) == [each["command"] for each in ran]


def test_loops_are_written_out(reproduce: Any) -> None:
    loop = "for a in 1 2; do\n    x $a-$b\n    for b in 3 4; do\n        y ${a}0 \\\n            $b $ab\n    done\ndone\nz\n"
    written = ["x 1-$b", "y 10 3 $ab", "y 10 4 $ab", "x 2-$b", "y 20 3 $ab", "y 20 4 $ab", "z"]
    assert list(reproduce.full_size_commands(f"```sh\n{loop}```\n")) == written
    assert list(reproduce.full_size_commands(f"```sh\n{loop}```\n", once=["a"])) == [*written[:3], "z"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, reproduce: Any) -> Path:
    """Return a directory with the materials of the pages."""
    path = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr("sys.argv", ["paper_materials.py", "materials", "--switch-steps", "2"])
        importlib.import_module("paper_materials").main()
        # Ablation iv of MoE-KD needs a teacher that predicts every class.
        what = "--student materials/teacher-untrained --data materials/digits.npz --epochs 8 -o materials/teacher"
        assert CliRunner().invoke(cli.main, ["distill", "--recipe", "sft", *what.split()]).exit_code == 0
    for file in (path / "materials" / "signatures").iterdir():
        file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[: 200 if file.stem == "train" else 4]))
    (path / "shared-expert").mkdir()
    make_workplace(path / "shared-expert", "qwen2_moe", max_position_embeddings=128, num_experts=16)
    return path


@pytest.mark.slow
@needs_lm_eval
@pytest.mark.parametrize("size", ["demo", "full"])
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs_at_a_tiny_size(
    page: str, size: str, place: Path, reproduce: Any, monkeypatch: pytest.MonkeyPatch, pictures: None
) -> None:
    work = place / f"{page}-{size}"
    work.mkdir()
    for name in ("materials", "shared-expert"):
        (work / name).symlink_to(place / name)
    monkeypatch.chdir(work)
    for command in commands(reproduce, page, size, once=ALIKE):
        program, *arguments = without_variables(command)
        if program != "compress":
            continue
        words = tiny(program, arguments, size)
        outcome = CliRunner().invoke(cli.main, words)
        assert outcome.exit_code == 0, f"{' '.join(words)}\n{outcome.output}"


def tiny(program: str, words: list[str], size: str) -> list[str]:
    """Return the arguments of a command with small models and data, and at a small size."""
    words = [word if before == "--preset" else STAND_INS.get(word, word) for before, word in pairwise([program, *words])]
    for place, word in enumerate(words):
        if word == "--tasks":
            words[place + 1] = "materials/next_line.yaml"
    added = TINY.get(words[0], "")
    if words[0] == "distill" and any(word.endswith(".npz") for word in words):
        added = "" if size == "demo" else CLASSIFIER
    if words[0] == "evaluate":
        of_responses = "--seeds 1 --max-length 128 --max-prompt-length 96" if "rouge-l" in words else ""
        added = "--limit 4" if "--tasks" in words else of_responses
    return [*words, *shlex.split(added)]
