"""Instruction sets of this processor, which the kernels choose between when they are compiled."""

from __future__ import annotations

import numba
from llvmlite import binding

binding.initialize_native_asmparser()  # some instructions are written in assembly language
NAME: str = numba.config.CPU_NAME or binding.get_host_cpu_name()
FEATURES: str = numba.config.CPU_FEATURES or binding.get_host_cpu_features().flatten()
_features = FEATURES.split(",")
MULTIPLIES_QUADRUPLES = "+avx512vnni" in _features and "+avx512vl" in _features
"""Whether the processor multiplies 8-bit integers four at a time, as low-bit matrices and GGUF's blocks are multiplied."""
MULTIPLIES_INTEGERS = MULTIPLIES_QUADRUPLES or "+avx2" in _features
"""Whether the processor multiplies low-bit matrices as integers: four bytes at a time, or pairs of 16 bits."""
MULTIPLIES_BFLOAT16 = "+avx512bf16" in _features
"""Whether the processor multiplies pairs of bfloat16. Vectors that bfloat16 matrices are multiplied with are then bfloat16
too, and otherwise float32."""
SHIFTS_BYTES = "+avx512vbmi" in _features and "+avx512vl" in _features
"""Whether the processor takes bytes from any bit of 64 bits, as weights of 3 bits are unpacked."""
WIDENS_HALVES = "+f16c" in _features
"""Whether the processor converts float16 to float32."""
