"""Compiles kernels for 64-bit ARM on any processor: what their assembly code has, as JSON.

    python compile_for_arm.py FEATURES [KERNEL …]

FEATURES are LLVM's names, such as +neon,+dotprod. Without names, all kernels are compiled. Nothing is run.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from unittest import mock

from llvmlite import binding

TRIPLE = "aarch64-unknown-linux-gnu"
OF_PAIRS = ("multiply_pairs", "score_pairs", "add_weighted_pairs")
"""Kernels that are loaded only where the processor multiplies pairs of bfloat16."""
OF_QUADRUPLES = ("score_bytes", "add_weighted_bytes")
"""Kernels that are loaded only where the processor multiplies bytes four at a time."""
INSTRUCTIONS = ("usdot", "sdot", "bfdot", "fmla")


def main() -> None:
    features, *names = sys.argv[1:]
    os.environ |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    with mock.patch.object(binding, "get_process_triple", return_value=TRIPLE):
        from engine.kernels import compiled
        from engine.kernels.compiler.compiling import KERNELS
        from engine.kernels.compiler.processor import MULTIPLIES_INTEGERS, MULTIPLIES_QUADRUPLES

        left_out = set() if compiled.MULTIPLIES_BFLOAT16 else set(OF_PAIRS)
        if not MULTIPLIES_QUADRUPLES:
            left_out |= set(OF_QUADRUPLES)
        if not MULTIPLIES_INTEGERS:  # blocks are multiplied with float32 then
            left_out |= {f"multiply_{name.lower()}" for name in compiled.BLOCK_KINDS}
        found = {name: KERNELS[name].assembly() for name in names or KERNELS if name not in left_out}
    counts = {name: Counter(line.split()[0] for line in text.splitlines() if line.split()) for name, text in found.items()}
    print(json.dumps({name: {each: own[each] for each in INSTRUCTIONS} for name, own in counts.items()}))


if __name__ == "__main__":
    main()
