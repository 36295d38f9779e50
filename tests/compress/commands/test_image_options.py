"""`compress generate --image` and `compress serve --images`: what they print, and what they refuse before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_images import encoded, picture, save_images

import cli
from engine.generation.generate import Engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_vl_moe")
    save_images("qwen3_vl_moe", path)
    for name, seed in (("a.png", 0), ("b.png", 1)):
        (path / name).write_bytes(encoded(picture(seed)))
    return path


def test_answers_a_question_about_images(directory: Path) -> None:
    files = [directory / "a.png", directory / "b.png"]
    (expected,) = Engine.open(directory, images=True).generate("what?", max_new_tokens=6, images=files)
    arguments = ["generate", str(directory), "-p", "what?", "-n", "6", "--image", str(files[0]), "--image", str(files[1])]
    shown = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    assert shown.exit_code == 0 and shown.stdout.startswith(f"what?\n{expected.text}\n")
    figures = json.loads(CliRunner().invoke(cli.main, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert (figures["text"], figures["prompt_tokens"]) == (expected.text, expected.prompt_tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "{model}", "-p", "x", "--image", "{model}/config.json"], "config.json: is no image in PNG"),
        (["generate", "{model}", "-p", "x", "--image", "{model}/none.png"], "none.png: is not a file"),
        (["generate", "demo", "-p", "x", "--image", "{model}/a.png"], "reads text only; leave out the images"),
        (["generate", "demo", "-p", "x", "--image", "{model}/config.json"], "config.json: is no image in PNG"),
        (["serve", "demo", "--images", "--port", "0"], "reads text only; leave out the images"),
    ],
)
def test_bad_input_is_refused_in_one_line(directory: Path, arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(cli.main, [each.replace("{model}", str(directory)) for each in arguments])
    assert ended.exit_code == 1 and not ended.stdout
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1
