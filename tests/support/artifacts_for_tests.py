"""A tiny model with its tokenizer, calibration text, commands on them, and listings of directories."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from conftest import save_reference
from tokenizers_for_tests import VOCABULARY, add_tokenizer

import cli
from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME as SKIP_TABLES
from engine.decoder.skip_tables import SkipTables

ROOT = Path(__file__).resolve().parents[2]
KEPT = {"0": [0, 1, 2], "1": [0, 1, 2, 3, 5], "2": [4, 5]}
"""A plan whose layers differ, for the models of conftest with 3 layers of 6 experts."""
CALIBRATION = ["--data", "text.txt", "--samples", "4", "--sequence-length", "16"]
PRUNE = ["prune", "model", "--sparsity", "0.5", "--method", "frequency", *CALIBRATION, "--evaluation-samples", "2"]


def make_workplace(path: Path, family: str = "mixtral", **changes: Any) -> None:
    """Write `model`, `text.txt` and `plan.json` to a directory, which PRUNE is run in."""
    save_reference(family, path / "model", vocab_size=VOCABULARY, **changes)
    add_tokenizer(path / "model")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "experts", "look", "away"]
    chosen = random.Random(0)
    lines = [" ".join(chosen.choices(words, k=9)) for _ in range(1500)]
    (path / "text.txt").write_text("\n".join(lines))
    (path / "plan.json").write_text(json.dumps({"schema_version": 1, "kind": "moe", "layers": KEPT}))


def make_pruned(path: Path) -> None:
    """Write `pruned` beside `model`, made non-uniform by KEPT, with tables for skipping."""
    (path / "pruned").mkdir()
    apply(pruning_plan({int(layer): kept for layer, kept in KEPT.items()}), Checkpoint(path / "model"), path / "pruned")
    for file in (path / "model").glob("tokenizer*"):
        shutil.copy(file, path / "pruned")
    counts = [len(kept) for kept in KEPT.values()]
    tables = SkipTables((torch.full((1,), 0.8),) * 3, tuple(torch.ones(count, count) for count in counts))
    tables.save(path / "pruned" / SKIP_TABLES)


def listing(path: Path) -> dict[str, tuple[int, str]]:
    """Return every file and directory under `path` with the time of its last change and its content."""
    return {
        entry.relative_to(path).as_posix(): (
            entry.lstat().st_mtime_ns,
            hashlib.sha256(entry.read_bytes()).hexdigest() if entry.is_file() else "",
        )
        for entry in path.rglob("*")
    }


def run(*arguments: str) -> dict[str, Any]:
    """Return the JSON object that a command prints with --json."""
    result = CliRunner().invoke(cli.main, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def refused(place: Path, arguments: list[str], *fragments: str) -> None:
    """Check that a command fails with one line that has all of the fragments, and leaves the directory unchanged."""
    before = listing(place)
    outcome = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    assert outcome.exit_code == 1 and outcome.stdout == "" and outcome.stderr.count("\n") == 1, outcome.output
    assert all(fragment in outcome.stderr for fragment in fragments), outcome.stderr
    assert listing(place) == before


def kill_while_it_trains(place: Path, command: list[str]) -> None:
    """Run a command that trains into `out`, in a process of its own, and SIGKILL it once it has saved a state."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    state = place / ".out.work" / "distill.safetensors"
    try:
        deadline = time.monotonic() + 120
        while not state.exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not (place / "out").exists(), "it was killed while it trained"
    (place / ".out.lock").unlink()  # the next run would take over and remove it
