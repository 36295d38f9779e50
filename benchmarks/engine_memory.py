"""What the engine keeps in memory: after loading and 64 tokens, and while it reads long prompts.

python benchmarks/engine_memory.py [--directory DIR]

Each figure is the operating system's for a process that does nothing else, on a random mixture of 1.5 B parameters in
bfloat16 (3 GB), whose weights are mapped. "Extra" is the most that was resident during a prompt, less what was before it and
less the KV cache; before it, one short prompt has made the weights resident.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.generate import Engine
from engine.report import peak_memory_bytes, resident_memory_bytes

LENGTHS = (512, 2048, 8192)
NEW_TOKENS = 64
ALLOWED_BEYOND = 350_000_000
"""Of interpreter and libraries, above 1.05 times the weights and the KV cache."""


def read_long_prompt(model: str, length: int, kv_cache_dtype: str = "auto") -> dict[str, Any]:
    """Extra bytes of one prompt, in this process."""
    engine = Engine.open(model)
    tokens = torch.randint(engine.checkpoint.config.vocabulary_size, (1, length), generator=torch.Generator().manual_seed(0))
    engine.prefill(tokens[:, :512], None, engine.new_cache(1, 512))
    cache = engine.new_cache(1, length)
    before = resident_memory_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    engine.prefill(tokens, None, cache)
    return {"length": length, "kv_cache_bytes": cache.bytes, "extra_bytes": peak_memory_bytes() - before - cache.bytes}


def generate(model: str) -> dict[str, Any]:
    """What is resident after loading and some tokens."""
    engine = Engine.open(model)
    engine.generate("def add(", max_new_tokens=NEW_TOKENS)
    report = engine.report()
    return {name: getattr(report, name) for name in SPLIT}


SPLIT = ("load_seconds", "resident_memory_bytes", "weights_resident_bytes", "kv_cache_bytes", "other_memory_bytes")
