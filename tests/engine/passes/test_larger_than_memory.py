"""A checkpoint larger than its process's memory limit still generates, and the tokens are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from memory_limit import NoControlGroupError, forget_files, memory_limit, peak_bytes, run_in
from random_model import shape, write_random_weights

LIMIT = 450 << 20
GENERATE = """
import json, sys
import torch
from engine.generation.generate import Engine
from engine.decoder.kv_cache import KeyValueCache
engine, tokens = Engine.open(sys.argv[1], threads=1), [list(range(48))]
cache, made = KeyValueCache(engine.checkpoint.config, 1, 50, engine.dtype), []
logits = engine.prefill(torch.tensor(tokens), None, cache)
for _ in range(2):
    made.append(int(logits.argmax()))
    logits = engine.step(logits.argmax(-1), None, cache)
print(json.dumps(made))
"""


@pytest.mark.slow
def test_a_checkpoint_of_one_and_a_half_times_the_memory_generates(tmp_path: Path) -> None:
    config = shape(hidden=512, layers=4, experts=8, width=7424) | {"vocab_size": 4096}
    assert write_random_weights(tmp_path / "model", config, alike=True) >= 1.5 * LIMIT
    # Compiling kernels takes more memory than the limit; what is on trial is a checkpoint, so they are compiled before.
    subprocess.run([sys.executable, "-c", GENERATE, str(tmp_path / "model")], check=True, capture_output=True)
    forget_files(tmp_path / "model")
    said = []
    for limit in (LIMIT, 4 * LIMIT):
        try:
            with memory_limit(limit) as group:
                command = [sys.executable, "-c", GENERATE, str(tmp_path / "model")]
                done, peak = run_in(group, command), peak_bytes(group)
        except NoControlGroupError as error:
            pytest.skip(f"no control group to limit memory with: {error}")
        assert done.returncode == 0, done.stderr[-2000:]
        assert peak is None or peak <= limit
        said.append(json.loads(done.stdout))
    assert said[0] == said[1] and len(said[0]) == 2
