"""Triton's kernels on machines without a GPU: interpreted in a process of their own, recorded, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}
SHARED_MEMORY = 99 * 1024
"""Maximum shared memory of a program, in bytes, on the smallest GPUs since 2020."""


def check_interpreted(tests: str, *arguments: str, seconds: int) -> None:
    """Run a file of tests where Triton interprets its kernels. It is chosen for a whole process, when Triton is imported."""
    made = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"), tests, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert made.returncode == 0 and " passed" in made.stdout, made.stdout[-6000:] + made.stderr[-2000:]


class Launches:
    """Stands in for the kernels and records the arguments of each launch, by name."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Any:
                return lambda *given, **constants: self.made.update({name: (grid, given, constants)})

        return Kernel()


def compiled(kernel: Any, given: tuple[Any, ...], constants: dict[str, Any], card: int) -> Any:
    """Return a kernel compiled for a GPU with the arguments of a launch, and check that a program fits into its memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {key: value for key, value in constants.items() if key in ("num_stages", "num_warps")}
    constants = {key: value for key, value in constants.items() if key not in options}
    kinds = list(map(_kind, given))
    signature = dict(zip(kernel.arg_names, kinds + ["constexpr"] * len(constants), strict=True))
    assert set(kernel.arg_names[len(given) :]) == set(constants)
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(kinds) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    assert f".target sm_{card}" in made.asm["ptx"] and made.asm["cubin"] and made.metadata.shared <= SHARED_MEMORY
    return made


def _kind(given: Any) -> str:
    """Return the type of a kernel's argument. Integers beyond 32 bits are addresses."""
    if isinstance(given, Tensor):
        return f"*{NAMES[given.dtype]}"
    if isinstance(given, float):
        return "fp32"
    return "i32" if abs(given) < 2**31 else "i64"
