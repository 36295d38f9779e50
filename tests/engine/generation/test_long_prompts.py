"""A prompt read in pieces gives the logits of one that is read whole, in memory that does not grow with its length."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from rotary_for_tests import DYNAMIC, LONGROPE

import engine.generation.generate
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.generation.generate import Engine
from engine.generation.report import SkipCounter


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-3)])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 6}, LONGROPE, DYNAMIC], ids=["plain", "window", "longrope", "dynamic"]
)
def test_pieces_equal_the_whole(
    changes: dict[str, Any], padding: int, dtype: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference("mixtral", tmp_path, **changes)
    opened = Engine.open(tmp_path, dtype=dtype)
    tokens = torch.randint(3, 96, (2, 33), generator=torch.Generator().manual_seed(4))
    real = torch.ones(2, 36, dtype=torch.bool)
    real[1, :padding] = False

    def run(chunk: int) -> torch.Tensor:
        """Return logits [4, B, V] after the prompt and after each of three more tokens."""
        monkeypatch.setattr(engine.generation.generate, "PREFILL_CHUNK", chunk)
        cache = KeyValueCache(opened.checkpoint.config, 2, 36, opened.dtype)
        logits = [opened.prefill(tokens, real if padding else None, cache)]
        for step in range(3):
            seen = real[:, : cache.length + 1] if padding else None
            logits.append(opened.step(torch.tensor([5 + step, 9]), seen, cache))
        return torch.stack(logits).float()

    whole, pieces = run(1000), run(7)
    assert (pieces - whole).abs().max() <= tolerance * (1 if dtype == "float32" else whole.abs().max())
    assert (whole[0] - whole[1]).abs().max() > 0.1


def test_latent_attention_reads_longer_pieces_behind_a_long_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece computes the keys and values of all earlier positions anew."""
    save_reference("deepseek_v2", tmp_path)
    opened = Engine.open(tmp_path, dtype="float32")
    tokens = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(4))
    assert isinstance(opened.decoder, Decoder)
    sizes, by_layers = [], opened.decoder._by_layers

    def seen(tokens_BL: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(tokens_BL.shape[1])
        return by_layers(tokens_BL, *others)

    monkeypatch.setattr(opened.decoder, "_by_layers", seen)
    whole = opened.prefill(tokens, None, KeyValueCache(opened.checkpoint.config, 1, 40, torch.float32))
    monkeypatch.setattr(engine.generation.generate, "PREFILL_CHUNK", 3)
    monkeypatch.setattr(engine.generation.generate, "LONGEST_CHUNK", 6)
    pieces = opened.prefill(tokens, None, KeyValueCache(opened.checkpoint.config, 1, 40, torch.float32))
    assert sizes == [40, 3, 3, 3, 3, 3, 3, 4, 5, 6, 6, 1]
    assert (pieces - whole).abs().max() <= 2e-6


def test_padding_in_pieces_is_not_counted_as_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference("mixtral", tmp_path)
    opened = Engine.open(tmp_path)
    counter = opened.skip_counter = SkipCounter(opened.decoder.moe_blocks)
    counter.attach()
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1, :9] = False
    monkeypatch.setattr(engine.generation.generate, "PREFILL_CHUNK", 6)
    opened.prefill(torch.full((2, 20), 7), real, KeyValueCache(opened.checkpoint.config, 2, 20, torch.float32))
    assert counter.filled_per_layer == [2 * (20 + 11)] * 3  # two experts of each real token


MEASURE = """
import sys
from pathlib import Path
import torch
from engine.generation.generate import Engine
from engine.decoder.kv_cache import KeyValueCache
from engine.passes.memory_budget import resident_memory_bytes
from engine.generation.report import peak_memory_bytes

engine, length = Engine.open(sys.argv[1], dtype="bfloat16", threads=1), int(sys.argv[2])
cache = KeyValueCache(engine.checkpoint.config, 1, length, engine.dtype)
before = resident_memory_bytes()
Path("/proc/self/clear_refs").write_text("5")
engine.prefill(torch.arange(length)[None] % 90, None, cache)
print(peak_memory_bytes() - before - cache.bytes)
"""
FREES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}
"""Settings of the C library: freed memory is returned to the system, so that the peak is what the prompt needs."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not let a peak begin anew")
def test_memory_does_not_grow_with_the_prompt(tmp_path: Path) -> None:
    """Read whole, the prompt would take 134 MB more: 4,096 tokens · 8,192 hidden units of an expert · 2 bytes, twice."""
    sizes = {"hidden_size": 64, "intermediate_size": 8192, "max_position_embeddings": 8192}
    save_reference("mixtral", tmp_path, num_local_experts=2, num_hidden_layers=2, **sizes)

    def extra(length: int) -> int:
        """Return the bytes that a prompt of this length takes at most."""
        command = [sys.executable, "-c", MEASURE, tmp_path, str(length)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | FREES).stdout)

    assert extra(8192) - extra(4096) < 64 << 20
