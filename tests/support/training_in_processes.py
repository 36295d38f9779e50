"""Trainings that test_processes.py runs under torchrun. Each leaves its states in a directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.dense.dense_training import train_dense
from compress.options.training import DenseTrainingOptions
from compress.plans.plan import plan_from_json
from compress.training.training import Trained
from engine.checkpoint.checkpoint import Checkpoint
from engine.passes import processes

TOKENS = torch.randint(3, 96, (12, 12), generator=torch.Generator().manual_seed(1))
OPTIONS = DenseTrainingOptions(
    6, 4, lambda_prediction=1.0, learning_rate=1e-2, batch_size=2, micro_batch_size=1, validate_every=3, save_every=2
)
INTERRUPTED_AFTER = 5


class Interrupted(Exception):
    """Raised in the place of a signal, at a known step."""


def train(place: Path, directory: str, options: DenseTrainingOptions, *, steps: int = 100, resume: bool = False) -> Trained:
    """Train the plan in `place` with float32 weights, for at most `steps` steps of its first part."""

    def until(items: Iterable[int], description: str) -> Iterator[int]:
        for done, item in enumerate(items):
            if done == steps:
                raise Interrupted
            yield item

    checkpoint = Checkpoint(place / "model")
    plan = plan_from_json(json.loads((place / "dense.json").read_text()))
    (place / directory).mkdir(exist_ok=True)
    common: dict[str, Any] = {"dtype": torch.float32, "directory": place / directory, "resume": resume}
    return train_dense(plan, checkpoint, TOKENS, TOKENS[:2], options, progress=until, **common)


def main(place: Path) -> None:
    """Train in all processes, with the model whole and sharded. The sharded training is also interrupted and resumed."""
    processes.join("cpu")
    sharded = replace(OPTIONS, shard=True)
    train(place, "together", OPTIONS)
    train(place, "sharded", sharded)
    try:
        train(place, "resumed", sharded, steps=INTERRUPTED_AFTER)
    except Interrupted:
        train(place, "resumed", sharded, resume=True)
    told = processes.told({"from": processes.rank()})
    (place / f"told-{processes.rank()}.json").write_text(json.dumps(told))
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
