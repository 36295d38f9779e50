"""Memory of the engine after loading and 64 tokens and while it reads long prompts, and the effect of small KV caches.

python benchmarks/engine_memory.py [--directory DIR] [--layers 16] [--sequences 256]

Each figure is reported by the operating system for a process that does nothing else, on a random mixture of 1.5 B parameters
in bfloat16 (3 GB), whose weights are memory-mapped. "Extra" is the peak of resident memory during a prompt, minus the
resident memory before the prompt and minus the KV cache, in the worst of some processes. A short prompt makes the weights
resident first. Perplexity is the demo model's on the half of the held-out documents that is for reports, read through the
cache, with all else equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from random_model import shape, write_random_model
from results import markdown, save

from calibrate.windows import text_windows
from compress.run.losses import Losses
from engine.decoder.kv_cache import position_bytes
from engine.decoder.model import Decoder
from engine.generation.generate import Engine
from engine.generation.report import peak_memory_bytes
from engine.passes.memory_budget import resident_memory_bytes

LENGTHS = (512, 2048, 8192)
NEW_TOKENS, RUNS = 64, 3
ALLOWED_TIMES, ALLOWED_BEYOND = 1.05, 350_000_000
"""The factor of the weights, and the bytes for interpreter and libraries, that are allowed beside the KV cache."""
KV_CACHE_DTYPES = ("auto", "float16", "int8")
SEQUENCE_LENGTH = 512


def prompt(model: str, length: str) -> dict[str, Any]:
    """Return the extra bytes of one prompt, in this process."""
    engine, size = Engine.open(model), int(length)
    tokens = torch.randint(engine.checkpoint.config.vocabulary_size, (1, size), generator=torch.Generator().manual_seed(0))
    engine.prefill(tokens[:, :512], None, engine.new_cache(1, 512))
    cache = engine.new_cache(1, size)
    before = resident_memory_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    engine.prefill(tokens, None, cache)
    return {"length": size, "kv_cache_bytes": cache.bytes, "extra_bytes": peak_memory_bytes() - before - cache.bytes}


def generate(model: str) -> dict[str, Any]:
    """Return the resident memory after loading and some tokens."""
    engine = Engine.open(model)
    engine.generate("def add(", max_new_tokens=NEW_TOKENS)
    report = engine.report()
    names = ("load_seconds", "weights_bytes", "resident_memory_bytes", "weights_resident_bytes", "kv_cache_bytes")
    return {name: getattr(report, name) for name in (*names, "other_memory_bytes")}


@torch.inference_mode()
def perplexity(model: str, kv_cache_dtype: str, sequences: str) -> dict[str, Any]:
    """Return the losses of windows of text that are read through a cache of this dtype."""
    engine = Engine.open(model, kv_cache_dtype=kv_cache_dtype)
    assert isinstance(engine.decoder, Decoder)
    text = {"samples": int(sequences), "sequence_length": SEQUENCE_LENGTH, "seed": 0, "split": "report"}
    windows, losses = text_windows("stdlib", engine.tokenizer, **text), list[float]()
    for tokens_1L in windows.tokens_SL.split(1):
        cache = engine.new_cache(1, SEQUENCE_LENGTH)
        logits_LV = engine.decoder(tokens_1L, None, cache)[0, :-1].float()
        losses.append(float(F.cross_entropy(logits_LV, tokens_1L[0, 1:], reduction="sum")))
    bytes_each = position_bytes(engine.checkpoint.config, engine.kv_cache_dtype)
    documents = windows.documents_S.tolist()
    return {"dtype": kv_cache_dtype, "position_bytes": bytes_each, "losses": losses, "documents": documents}


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with perplexities, their errors and their ratios to the first, in place of the losses."""
    documents_S = torch.tensor(rows[0]["documents"])
    found = [Losses(torch.tensor(row["losses"], dtype=torch.float64), SEQUENCE_LENGTH - 1) for row in rows]
    return [
        {
            **{name: row[name] for name in ("dtype", "position_bytes")},
            "perplexity": losses.perplexity,
            "stderr": losses.standard_error(documents_S),
            "ratio": list(losses.ratio_to(found[0], documents_S)),
        }
        for row, losses in zip(rows, found, strict=True)
    ]


PARTS = {part.__name__: part for part in (prompt, generate, perplexity)}


def measured(part: str, model: str, *words: str) -> dict[str, Any]:
    """Run one of the functions above in a process of its own."""
    command = [sys.executable, __file__, "--part", part, model, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def worst_prompt(model: str, length: int) -> dict[str, Any]:
    """Return the figures of a prompt of this length in some processes, with the extra bytes of each."""
    runs = [measured("prompt", model, str(length)) for _ in range(RUNS)]
    return runs[0] | {"extra_bytes": [run["extra_bytes"] for run in runs]}


def prompts_table(figures: dict[str, Any]) -> str:
    """Return the KV cache and the extra memory of each length."""
    rows = []
    for row in figures["rows"]:
        extra = max(0, *row["extra_bytes"])
        rows.append([f"{row['length']:,}", *(f"{each / 1e6:.0f}" for each in (row["kv_cache_bytes"], extra))])
    return markdown(["tokens of the prompt", "KV cache, MB", "extra, MB"], rows)


def resident_table(figures: dict[str, Any]) -> str:
    """Return the parts of the resident memory, and the sum that they are allowed to reach."""
    allowed = figures["allowed_times"] * figures["weights_bytes"] + figures["kv_cache_bytes"] + figures["allowed_beyond"]
    titles = {
        "weights_bytes": "weights as stored",
        "weights_resident_bytes": "weights in memory",
        "kv_cache_bytes": "KV cache",
        "other_memory_bytes": "interpreter, libraries, buffers",
        "resident_memory_bytes": "resident, all together",
    }
    rows = [[title, f"{figures[name] / 1e6:,.0f}"] for name, title in titles.items()]
    title = f"{figures['allowed_times']} × weights + KV cache + {figures['allowed_beyond'] / 1e6:.0f} MB"
    rows.append([title, f"{allowed / 1e6:,.0f}"])
    rows.append(["seconds to load", f"{figures['load_seconds']:.2f}"])
    return markdown([f"after {figures['new_tokens']} tokens", "MB"], rows)


def caches_table(figures: dict[str, Any]) -> str:
    """Return bytes per token and perplexity by the dtype of the KV cache."""
    names = {"auto": "bfloat16 (auto)"}
    rows = [
        [
            *(names.get(each["dtype"], each["dtype"]), f"{each['position_bytes']:,}"),
            f"{each['perplexity']:.4f} ± {each['stderr']:.2f}",
            "–" if each is figures["rows"][0] else "{:.5f} ({:.5f} to {:.5f})".format(*each["ratio"]),
        ]
        for each in figures["rows"]
    ]
    about = f"{figures['sequences']} × {figures['length']} tokens of held-out documents; errors are over documents.\n\n"
    return about + markdown(["KV cache", "bytes per token", "perplexity", "ratio to the first (95 %)"], rows)


TABLES = {"long_prompts": prompts_table, "resident_memory": resident_table, "kv_cache": caches_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the model is made, and found again")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=256, help="sequences of 512 tokens for the perplexities")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part, *words = arguments.part
        print(json.dumps(PARTS[part](*words)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        model = arguments.directory or Path(temporary) / "model"
        if not model.is_dir():
            write_random_model(model, shape(layers=arguments.layers) | {"max_position_embeddings": max(LENGTHS)})
        allowed = {"new_tokens": NEW_TOKENS, "allowed_times": ALLOWED_TIMES, "allowed_beyond": ALLOWED_BEYOND}
        measured("generate", str(model))  # compiles the kernels, which takes memory that a later process does not need
        save("resident_memory", measured("generate", str(model)) | allowed)
        save("long_prompts", {"rows": [worst_prompt(str(model), length) for length in LENGTHS]})
    sequences = arguments.sequences
    rows = [measured("perplexity", "demo", dtype, str(sequences)) for dtype in KV_CACHE_DTYPES]
    save("kv_cache", {"sequences": sequences, "length": SEQUENCE_LENGTH, "rows": judged(rows)})


if __name__ == "__main__":
    main()
