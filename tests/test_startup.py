"""Heavy packages that each command imports in a fresh process. Each costs a tenth of a second to several seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# fmt: off
HEAVY = frozenset([
    "accelerate", "datasets", "fastapi", "huggingface_hub", "jinja2", "llvmlite", "lm_eval", "matplotlib",
    "numba", "numpy", "onnx", "onnxruntime", "onnxruntime_genai", "pandas", "PIL", "psutil", "pydantic",
    "scipy", "sklearn", "starlette", "sympy", "tokenizers", "torch", "transformers", "triton", "uvicorn",
])
# fmt: on
RUN = """
import json, sys
from cli import main
for arguments in json.loads(sys.argv[1]) or [[name, "--help"] for name in main.commands]:
    try:
        main(arguments, standalone_mode=False)
    except SystemExit as ended:
        assert not ended.code, arguments
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
"""Program that prints the packages that are imported after these commands. Without commands, it shows each one's help."""
TORCH = frozenset(["numpy", "torch"])
KERNELS = frozenset(["llvmlite", "numba", "scipy"])
"""Packages of the compiled kernels. Numba itself imports a part of scipy."""
TEXT = ("--samples", "1", "--sequence-length", "16")


def imported(*commands: tuple[str, ...]) -> frozenset[str]:
    """Return the heavy packages that a fresh process has imported after these commands."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, json.dumps(commands)]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return HEAVY & set(json.loads(ended.stdout.splitlines()[-1]))


def test_help_of_every_command() -> None:
    assert imported(("--help",), ("--version",)) == frozenset()
    assert imported() == frozenset()


def test_inspect_reads_headers_and_values_without_torch() -> None:
    assert imported(("inspect", "demo")) == {"numpy"}
    assert imported(("inspect", "demo", "--json")) == {"numpy"}


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        (("generate", "demo", "--prompt", "x", "--tokens", "1"), TORCH | KERNELS | {"psutil", "tokenizers"}),
        pytest.param(("evaluate", "demo", *TEXT), TORCH | KERNELS | {"psutil", "tokenizers"}, marks=pytest.mark.slow),
        pytest.param(("plan-run", "demo"), TORCH | KERNELS | {"psutil", "tokenizers"}, marks=pytest.mark.slow),
        pytest.param(
            ("prune", "demo", "--method", "random", "--experts", "6", "--output", "{output}", *TEXT),
            TORCH | KERNELS | {"psutil", "tokenizers", "matplotlib", "PIL", "huggingface_hub"},  # pictures, model card
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands_import_what_they_use(command: tuple[str, ...], allowed: frozenset[str], tmp_path: Path) -> None:
    found = imported(tuple(word.format(output=tmp_path / "result") for word in command))
    assert found <= allowed
    assert "torch" in found


@pytest.mark.parametrize(
    ("module", "lacks"),
    [
        ("engine.inspect", "torch"),
        ("engine.checkpoint.checkpoint", "torch"),
        ("engine.checkpoint.tokenizer", "torch"),
        ("engine.generation.generate", "transformers"),
        pytest.param("engine.server.serve", "transformers", marks=pytest.mark.slow),
        pytest.param("engine.adapted.experts_implementation", "transformers", marks=pytest.mark.slow),
        pytest.param("compress.prune", "scipy", marks=pytest.mark.slow),
        pytest.param("compress.compare", "jinja2", marks=pytest.mark.slow),
    ],
)
def test_modules_import_without(module: str, lacks: str) -> None:
    code = f"import sys, {module}; print({lacks!r} in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
