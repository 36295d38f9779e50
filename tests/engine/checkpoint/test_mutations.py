"""1,000 random byte changes and truncations of an artifact's files: refused by name, without a crash or a write."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import chdir, suppress
from pathlib import Path

import pytest
from artifacts_for_tests import CALIBRATION, listing, make_workplace
from click.testing import CliRunner

import cli
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.skip_tables import load_skip_tables
from engine.errors import CompressError
from engine.inspect import inspect

MUTATIONS = 1_000
PARTS = 4
"""The mutations are cut into parts for parallel test workers."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pruned model whose layers keep different numbers of experts, small enough to be read thousands of times."""
    path = tmp_path_factory.mktemp("mutations")
    make_workplace(path, num_hidden_layers=2, hidden_size=16, intermediate_size=16)
    (path / "plan.json").write_text('{"schema_version": 1, "kind": "moe", "layers": {"0": [0, 2, 4], "1": [1, 5]}}')
    arguments = ["prune", "model", "--plan", "plan.json", *CALIBRATION, "--evaluation-samples", "0", "-o", "artifact"]
    with chdir(path):
        result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    return path / "artifact"


def mutations(directory: Path, part: int) -> Iterator[tuple[Path, bytes]]:
    """Yield files in turn, each with a content that differs from the original by one byte or by its end."""
    files = sorted(directory.iterdir())
    assert len(files) >= 8
    for number in range(part, MUTATIONS, PARTS):
        chosen = random.Random(number)
        path = files[number % len(files)]
        data = path.read_bytes()
        # Half of the changes hit the first part of a file, where the headers are.
        place = chosen.randrange(len(data) if number % 2 else min(len(data), 2_000))
        if chosen.random() < 0.25:
            yield path, data[:place]
        else:
            yield path, data[:place] + bytes([data[place] ^ chosen.randrange(1, 256)]) + data[place + 1 :]


def read_everything(directory: Path) -> dict[str, bytes]:
    """Return everything that the engine reads from a directory: every tensor, and the tables for skipping."""
    checkpoint = Checkpoint(directory)
    load_skip_tables(directory, checkpoint.config)
    return {name: checkpoint.tensor(name).numpy().tobytes() for name in checkpoint.shapes}


@pytest.mark.parametrize("part", range(PARTS))
def test_mutations(artifact: Path, tmp_path: Path, part: int) -> None:
    directory = tmp_path / "artifact"
    shutil.copytree(artifact, directory)
    right = read_everything(directory)
    assert inspect(str(directory), checksums=True, progress=lambda items, _: items)["valid"]
    refused = 0
    for path, content in mutations(directory, part):
        original = path.read_bytes()
        path.write_bytes(content)
        before = listing(tmp_path)
        try:
            inspect(str(directory), checksums=True, progress=lambda items, _: items)
        except CompressError:
            refused += 1
        else:
            # compression.json cannot hold its own checksum, so a figure or a word may differ there, but no tensor.
            assert path.name == "compression.json"
            assert read_everything(directory) == right
        with suppress(CompressError):
            read_everything(directory)
        assert listing(tmp_path) == before
        path.write_bytes(original)
    assert refused > MUTATIONS / PARTS * 0.88  # all others were changes of compression.json
    assert read_everything(directory) == right


def test_every_file_of_an_artifact_is_covered(artifact: Path, tmp_path: Path) -> None:
    directory = tmp_path / "artifact"
    for name in sorted(path.name for path in artifact.iterdir()):
        for change in ("last byte", "removed", "empty"):
            shutil.copytree(artifact, directory)
            data = (directory / name).read_bytes()
            if change == "removed":
                (directory / name).unlink()
            else:
                (directory / name).write_bytes(b"" if change == "empty" else data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(CompressError):
                inspect(str(directory), checksums=True, progress=lambda items, _: items)
            shutil.rmtree(directory)


def test_weights_that_were_added_are_refused(artifact: Path, tmp_path: Path) -> None:
    """An index decides which weights are loaded, so an index that was not written with the artifact is not followed."""
    shutil.copytree(artifact, tmp_path / "artifact")
    provenance = json.loads((tmp_path / "artifact" / "compression.json").read_text())
    del provenance["files"]["model.safetensors.index.json"]
    (tmp_path / "artifact" / "compression.json").write_text(json.dumps(provenance))
    with pytest.raises(CompressError, match=r"index\.json: is not part of this artifact"):
        Checkpoint(tmp_path / "artifact")
