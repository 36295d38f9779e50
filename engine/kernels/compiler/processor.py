"""Instruction sets of this processor, which the kernels choose between when they are compiled: x86-64 and 64-bit ARM."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numba
from llvmlite import binding

CPUINFO = Path("/proc/cpuinfo")
ARM_FEATURES = {"asimddp": "+dotprod", "i8mm": "+i8mm", "bf16": "+bf16"}
"""Instructions of ARM that the kernels use: names in Linux's /proc/cpuinfo, and LLVM's, which it does not find by itself."""


def features_of_arm(cpuinfo: str) -> list[str]:
    """Return LLVM's names of the instructions that every core of this /proc/cpuinfo has."""
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("Features")]
    return [ours for name, ours in ARM_FEATURES.items() if lines and all(name in line for line in lines)]


def _features() -> str:
    """Return the features that kernels are compiled for, as LLVM's list."""
    if numba.config.CPU_FEATURES:
        return str(numba.config.CPU_FEATURES)
    found = binding.get_host_cpu_features().flatten()
    if IS_ARM and CPUINFO.exists():
        found = ",".join([*filter(None, [found]), *features_of_arm(CPUINFO.read_text(errors="replace"))])
        numba.config.CPU_FEATURES = found  # Numba would ask LLVM alone
    return str(found)


binding.initialize_native_asmparser()  # some instructions are written in assembly language
IS_ARM: bool = binding.get_process_triple().startswith(("aarch64", "arm64"))
HOST: str = binding.get_host_cpu_name()
NAME: str = numba.config.CPU_NAME or HOST
FEATURES = _features()
FIRST_LEVEL, SECOND_LEVEL = 0, 2
"""Caches that memory is prefetched into: the first-level cache alone, for what is read once, or the second-level cache. The
numbers are LLVM's."""


class Prefetching(NamedTuple):
    """The caches that weights are prefetched into; None where that is left to the processor.

    A processor's own prefetching may stop at the end of each 4 kB, and out-of-order execution does not look far ahead where
    each byte is multiplied with several vectors.
    """

    one_vector: int | None = FIRST_LEVEL
    """Weights that are multiplied with one vector."""
    one_long_vector: int | None = SECOND_LEVEL
    """Weights that are multiplied with one vector of more than `LONG_VECTOR` bytes."""
    several: int | None = FIRST_LEVEL
    """Weights that are multiplied with several vectors at once, and perhaps read once more for further ones."""


PREFETCHING = {"znver4": Prefetching(None, SECOND_LEVEL, SECOND_LEVEL)}.get(HOST, Prefetching())
"""That of this processor, whatever instructions the kernels are compiled for. docs/LOG.md has the measurements: those of one
short vector and of several are of Zen 4 and Zen 5, and those of a long one of Zen 4 alone."""
LONG_VECTOR = 12 * 1024
"""Bytes of a vector that leaves too little of a first-level cache of 32 kB to the weights that it is multiplied with."""
_features_list = FEATURES.split(",")
ADDS_DOT_PRODUCTS = IS_ARM and "+dotprod" in _features_list
"""Whether an ARM processor adds up products of four signed bytes."""
MIXES_SIGNS = IS_ARM and "+i8mm" in _features_list
"""Whether an ARM processor adds up products of four unsigned and four signed bytes."""
MULTIPLIES_QUADRUPLES = ("+avx512vnni" in _features_list and "+avx512vl" in _features_list) or ADDS_DOT_PRODUCTS
"""Whether the processor multiplies 8-bit integers four at a time, as low-bit matrices, GGUF's blocks and caches of 8 bits
are multiplied."""
MULTIPLIES_INTEGERS = MULTIPLIES_QUADRUPLES or "+avx2" in _features_list
"""Whether the processor multiplies low-bit matrices as integers: four bytes at a time, or pairs of 16 bits."""
MULTIPLIES_BFLOAT16 = "+avx512bf16" in _features_list or (IS_ARM and "+bf16" in _features_list)
"""Whether the processor multiplies pairs of bfloat16. Vectors that bfloat16 matrices are multiplied with are then bfloat16
too, and otherwise float32."""
HAS_WIDE_REGISTERS = "+avx512f" in _features_list
"""Whether the processor has registers of 512 bits, and 32 of them. Others have 16 of 256 bits, or ARM's 32 of 128."""
SHIFTS_BYTES = "+avx512vbmi" in _features_list and "+avx512vl" in _features_list
"""Whether the processor takes bytes from any bit of 64 bits, as weights of 3 bits are unpacked."""
WIDENS_HALVES = IS_ARM or "+f16c" in _features_list
"""Whether the processor converts float16 to float32."""
