"""Decoding after 512, 4,096 and 32,768 positions: what a long context costs beyond the bytes of its cache.

    python benchmarks/long_context.py [--layers 4] [--rounds 9]

The models are random mixtures (8 experts, 2 chosen, hidden 2048, width 1792) in bfloat16: one of 16 heads of 128 dimensions
on 4 of keys and values, and one with 16 heads on latent vectors of 512 and keys of 64 dimensions. The caches hold random
keys and values, in bfloat16 and in 8 bits. In each round all caches and lengths take their turn, and so does a plain read of
memory as large as the longest cache, with as many threads. The time that the additional bytes of a cache take at that speed
is allowed; what remains is compared with the time after the shortest context.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_model import shape, write_random_model
from results import markdown, save, times

from engine.decoder.kv_cache import KeyValueCache, position_bytes
from engine.decoder.model import Decoder
from engine.generation.generate import Engine
from engine.generation.options import MEMORY

LENGTHS = (512, 4096, 32768)
DTYPES = {"": torch.bfloat16, ", 8 bits": torch.int8}
"""Dtypes of the caches, by what the table adds to the kind of attention."""
STEPS = 4


def configs(layers: int) -> dict[str, dict[str, Any]]:
    """Return the config.json of each model, by the kind of its attention."""
    longest = {"max_position_embeddings": 2 * LENGTHS[-1]}
    sizes = {"hidden_size": 2048, "num_hidden_layers": layers, "intermediate_size": 1792, "vocab_size": 32000}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1792, "n_shared_experts": 1}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None}
    each = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 0}
    family = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy"}
    grouped = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return {
        "grouped queries": shape(hidden=2048, layers=layers, width=1792) | grouped | longest,
        "latent vectors": family | sizes | experts | heads | each | longest,
    }


def filled_cache(engine: Engine, length: int, dtype: torch.dtype) -> KeyValueCache:
    """Return a cache whose first positions are random."""
    config, generator = engine.checkpoint.config, torch.Generator().manual_seed(length)
    cache = KeyValueCache(config, 1, length + STEPS, dtype)
    for layer in config.caching_layers:
        groups, *sizes = config.cached_by(layer)
        cache.append(layer, *(torch.randn(1, groups, length, size, generator=generator) for size in sizes))
    return cache


def step_seconds(engine: Engine, cache: KeyValueCache, length: int) -> float:
    """Return the seconds of a step after so many positions."""
    decoder, tokens = engine.decoder, torch.randint(engine.checkpoint.config.vocabulary_size, (1, STEPS))
    assert isinstance(decoder, Decoder)
    cache.length = length
    started = time.perf_counter()
    with torch.inference_mode():
        for step in range(STEPS):
            decoder.last_logits(tokens[:, step : step + 1], None, cache, engine.decoding_kernels)
    return (time.perf_counter() - started) / STEPS


def bytes_per_second(memory: torch.Tensor) -> float:
    """Return the speed at which memory is read."""
    started = time.perf_counter()
    memory.sum()
    return memory.nbytes / (time.perf_counter() - started)


def measure(directory: Path, config: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Return for each dtype of a cache the seconds of a step after each length and the speed of memory, by round."""
    write_random_model(directory, config)
    engine = Engine.open(directory, load_mode=MEMORY)  # as `serve` loads it
    engine.prepare()
    each = {name: position_bytes(engine.checkpoint.config, dtype) for name, dtype in DTYPES.items()}
    caches = {(name, length): filled_cache(engine, length, DTYPES[name]) for name in DTYPES for length in LENGTHS}
    memory = torch.ones(max(each.values()) * LENGTHS[-1] // 8, dtype=torch.int64)
    seconds: dict[str, dict[int, list[float]]] = {name: {length: [] for length in LENGTHS} for name in DTYPES}
    speeds = []
    for number in range(rounds + 1):
        made = {place: step_seconds(engine, cache, place[1]) for place, cache in caches.items()}
        speed = bytes_per_second(memory)
        if number:  # the first round reads the weights from disk
            speeds.append(speed)
            for (name, length), taken in made.items():
                seconds[name][length].append(taken)
    return {
        name: {"bytes_per_position": each[name], "seconds": seconds[name], "bytes_per_second": speeds} for name in DTYPES
    }


def kept(figures: dict[str, Any], length: str) -> list[float]:
    """Return the speed that is kept in each round, beside that after the shortest length, beyond the cache's own bytes."""
    first = str(LENGTHS[0])
    more = (int(length) - LENGTHS[0]) * figures["bytes_per_position"]
    rounds = zip(figures["seconds"][first], figures["seconds"][length], figures["bytes_per_second"], strict=True)
    return [short / (long - more / speed) for short, long, speed in rounds]


def table(figures: dict[str, Any]) -> str:
    """Return the time of a step after each length, the bytes of its cache, and the speed that is kept beyond them."""
    rows, kinds = [], figures["kinds"]
    for kind, made in kinds.items():
        for length, seconds in made["seconds"].items():
            megabytes, own = int(length) * made["bytes_per_position"] / 1e6, kept(made, length)
            shown = times(statistics.median(own), own, [1.0] * len(own)) if int(length) > LENGTHS[0] else ""
            rows.append([kind, f"{int(length):,}", f"{1e3 * statistics.median(seconds):.1f}", f"{megabytes:,.0f}", shown])
    speed = statistics.median(speed for made in kinds.values() for speed in made["bytes_per_second"]) / 1e9
    about = f"Memory is read at {speed:.1f} GB/s, in the median of the rounds."
    header = ["attention to", "positions", "a step, ms", "cache, MB", "speed kept beyond the cache's bytes (range)"]
    return f"{about}\n\n{markdown(header, rows)}"


TABLES = {"long_context": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kinds = {
            f"{kind}{name}": figures
            for kind, config in configs(options.layers).items()
            for name, figures in measure(Path(scratch) / kind, config, options.rounds).items()
        }
        save("long_context", {"layers": options.layers, "kinds": kinds})


if __name__ == "__main__":
    main()
