"""The pages of docs/reproduce: every command parses, shows its stored output, and runs at a tiny size."""

from __future__ import annotations

import importlib
import json
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
STAND_INS = {
    "mistralai/Mixtral-8x7B-v0.1": "demo",
    "deepseek-ai/deepseek-moe-16b-base": "demo",
    "Qwen/Qwen2-57B-A14B": "shared-expert/model",
    "llama-moe/LLaMA-MoE-v1-3_5B-4_16": "demo",
    "princeton-nlp/Sheared-LLaMA-1.3B": "materials/student",
    "google/switch-base-32": "materials/switch",
    "google/switch-base-64": "materials/switch",
    "allenai/c4": "stdlib",
    "math/train": "materials/signatures/train.jsonl",
    "pairs.jsonl": "stdlib",
    "self_instruct.jsonl": "materials/signatures/test.jsonl",
    "dolly/train.jsonl": "materials/signatures/train.jsonl",
    "dolly/valid.jsonl": "materials/signatures/validation.jsonl",
    "dolly/test.jsonl": "materials/signatures/test.jsonl",
    "cifar100.npz": "materials/digits.npz",
    "stl10.npz": "materials/letters.npz",
    "tiny-imagenet.npz": "materials/letters.npz",
    "imagenet": "materials/digits.npz",
    "birds": "materials/digits.npz",
    "4,8,12,16": "2,8",
    "path/to/cifar-teacher": "materials/teacher-untrained",
    "path/to/cifar-student": "materials/student-resnet",
    "microsoft/resnet-34": "materials/teacher-untrained",
    "path/to/untrained-resnet-18": "materials/student-resnet",
    "path/to/birds-teacher": "materials/teacher-untrained",
    "path/to/birds-student": "materials/student-resnet",
    "path/to/strong-resnet-50": "materials/teacher-untrained",
    "path/to/untrained-resnet-34": "materials/student-resnet",
}
"""Models, data and numbers of experts of the full size, and the small ones that take their place."""
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


def commands(reproduce: Any, page: str, size: str) -> list[str]:
    text = reproduce.page_path(page).read_text()
    return list(reproduce.demo_commands(text) if size == "demo" else reproduce.full_size_commands(text))


def test_there_is_a_page_for_each_paper() -> None:
    assert {"diep", "every-expert-matters", "speech-recognition", "moe-kd"} <= set(PAGES)


@pytest.mark.parametrize("size", ["demo", "full"])
@pytest.mark.parametrize("page", PAGES)
def test_every_command_parses(page: str, size: str, reproduce: Any) -> None:
    found = commands(reproduce, page, size)
    assert found
    for command in found:
        program, *words = shlex.split(command)
        if program == "python":
            assert (ROOT / words[0]).is_file()
            continue
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, reproduce: Any) -> Path:
    """Return a directory with the materials of the pages."""
    path = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr("sys.argv", ["paper_materials.py", "materials", "--switch-steps", "2"])
        importlib.import_module("paper_materials").main()
    for file in (path / "materials" / "signatures").iterdir():
        file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[: 200 if file.stem == "train" else 4]))
    (path / "shared-expert").mkdir()
    make_workplace(path / "shared-expert", "qwen2_moe", max_position_embeddings=128)
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
    for command in commands(reproduce, page, size):
        words = tiny(shlex.split(command), size)
        outcome = CliRunner().invoke(cli.main, words)
        assert outcome.exit_code == 0, f"{' '.join(words)}\n{outcome.output}"


def tiny(words: list[str], size: str) -> list[str]:
    """Return the arguments of a command with small models and data, and at a small size."""
    if words[0] == "python":
        return ["--version"]
    words = [word if before == "--preset" else STAND_INS.get(word, word) for before, word in pairwise(words)]
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
