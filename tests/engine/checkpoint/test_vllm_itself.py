"""The plugin in vLLM itself: greedy tokens of a result whose layers keep different numbers of experts.

VLLM_PYTHON names the interpreter of an environment with vLLM and, without its dependencies, this package.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from compress.plans.apply import apply
from compress.plans.plan import pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_directory import DEMO_DIRECTORY
from engine.generation.generate import Engine

PROMPT, TOKENS = [5, 17, 99, 260], 24
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
model = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
            gpu_memory_utilization=0.1)
sampling = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True, detokenize=False)
(made,) = model.generate([{"prompt_token_ids": json.loads(sys.argv[3])}], sampling)
print("written:", json.dumps(list(made.outputs[0].token_ids)), flush=True)
"""


@pytest.fixture
def python() -> str:
    found = os.environ.get("VLLM_PYTHON", "")
    if not found:
        pytest.skip("VLLM_PYTHON names no Python with vLLM")
    return found


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Return the demo model with another number of experts in each layer."""
    whole = Checkpoint(DEMO_DIRECTORY)
    counts = {layer: experts - number % 3 for number, (layer, experts) in enumerate(whole.config.experts_by_layer.items())}
    apply(pruning_plan({layer: list(range(count)) for layer, count in counts.items()}), whole, tmp_path / "uneven")
    return tmp_path / "uneven"


def generated(python: str, model: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-c", PROGRAM, str(model), str(TOKENS), json.dumps(PROMPT)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.slow
def test_greedy_tokens_are_those_of_this_engine(python: str, uneven: Path) -> None:
    done = generated(python, uneven)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("written:"))
    made = json.loads(line.removeprefix("written:"))
    with torch.inference_mode():
        logits_LV = Engine.open(str(uneven), dtype="float32").decoder(torch.tensor([PROMPT + made[:-1]]))[0]
    assert len(made) == TOKENS and logits_LV[len(PROMPT) - 1 :].argmax(-1).tolist() == made


@pytest.mark.slow
def test_vllm_without_the_plugin_refuses_the_weights(python: str, uneven: Path) -> None:
    done = generated(python, uneven, VLLM_PLUGINS="none_of_them")
    assert done.returncode != 0 and "Tried to load weights of size" in done.stdout + done.stderr
