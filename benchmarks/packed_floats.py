"""Memory and speed of models that are multiplied as stored: FP8 of a DeepSeek shape, and MXFP4 of a GPT-OSS shape.

python benchmarks/packed_floats.py [--layers 3] [--rounds 40] [--peer-python PYTHON]

Weights are random, and each model has more than 1 B parameters with 3 layers. Resident memory is that of a process which
reads a prompt of 512 random tokens, and then some more one by one, after all weights were read once, so that none is missing
from memory because no token used it. The speed is that of single tokens, in turns with the same weights dequantized to
bfloat16, in one process. With --peer-python, a Python that has llama-cpp-python, llama.cpp decodes the GGUF file of the same
MXFP4 weights (`compress export --type stored`), in turns with us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from llama_cpp_peer import NAME, LlamaCpp
from random_model import random_tensor, write_tokenizer
from results import markdown, save, times

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.stacks import expert_stacks, packed_shapes, stored_tensors
from engine.decoder.model import Decoder
from engine.families.resolve import decoder_config
from engine.files.json_file import write_json
from engine.files.safetensors_writer import ShardWriter
from engine.generation.generate import Engine
from engine.generation.options import MEMORY
from engine.kernels.kernel_choice import DECODING
from engine.passes.memory_budget import resident_memory_bytes

ALLOWED_TIMES, ALLOWED_BEYOND = 1.05, 350_000_000
"""The factor of the stored bytes, and the bytes for interpreter and libraries, that are aimed at beside the KV cache."""
PROMPT_TOKENS, NEW_TOKENS = 512, 64
PEER_ROUNDS = 41
"""Texts that both decode in turns, after one that is not counted. Each begins every other turn."""
BLOCK = 128
COMMON = {
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "FP8, a DeepSeek shape": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    },
    "MXFP4, a GPT-OSS shape": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}


def parts_of(config: dict[str, Any]) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Yield name, dtype and shape of each tensor on disk."""
    own = decoder_config(config)
    stacks: dict[str, dict[str, tuple[int, ...]]] = {}
    for layer in own.moe_layers:
        matrices = (stack for stack in expert_stacks(own, layer) if stack.name.endswith("_proj"))
        stacks |= {stack.name: packed_shapes(own, layer, stack) for stack in matrices}
    is_packed = config["quantization_config"]["quant_method"] == "mxfp4"
    for name, stored in stored_tensors(own).items():
        if is_packed and name in stacks:
            yield from ((part, torch.uint8, shape) for part, shape in stacks[name].items())
        elif not is_packed and name.endswith("_proj.weight") and len(stored.shape) == 2:
            yield name, torch.float8_e4m3fn, stored.shape
            yield f"{name}_scale_inv", torch.float32, tuple(-(-size // BLOCK) for size in stored.shape)
        else:
            yield name, torch.bfloat16, stored.shape


def write_packed_model(directory: Path, config: dict[str, Any]) -> None:
    """Write config and random weights. Numbers of FP8 are below 2, and scales make matrices of usual size."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    layout = {name: (dtype, shape) for name, dtype, shape in parts_of(config)}
    with ShardWriter(directory, layout) as writer:
        for name, (dtype, shape) in layout.items():
            if dtype == torch.float32:
                made = torch.rand(shape, generator=generator) * 0.02
            elif dtype == torch.bfloat16:
                made = random_tensor(shape, generator)
            elif name.endswith("_scales"):
                made = torch.randint(119, 122, shape, generator=generator, dtype=torch.uint8)
            else:
                made = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
                made = made.bitwise_and_(0xBF).view(dtype) if dtype == torch.float8_e4m3fn else made
            writer.add(name, made)
    write_json(directory / "config.json", config)


def tokens_of(engine: Engine, count: int) -> torch.Tensor:
    return torch.randint(engine.checkpoint.config.vocabulary_size, (1, count), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def memory(model: str, rounds: str) -> dict[str, Any]:
    """Return the memory of one process that reads a prompt and then single tokens."""
    engine = Engine.open(model)
    engine.prepare()
    before, cache = resident_memory_bytes(), engine.new_cache(1, PROMPT_TOKENS + NEW_TOKENS)
    tokens, choice = tokens_of(engine, PROMPT_TOKENS + NEW_TOKENS), engine.decoding_kernels
    engine.prefill(tokens[:, :PROMPT_TOKENS], None, cache)
    assert isinstance(engine.decoder, Decoder)
    for weight in engine.decoder.weights:
        weight.view(torch.uint8).max()
    for token in tokens[0, PROMPT_TOKENS:]:
        engine.decoder.last_logits(token.view(1, 1), None, cache, choice)
    return {
        "parameters": engine.checkpoint.parameters,
        "stored_bytes": engine.checkpoint.bytes,
        "kv_cache_bytes": cache.bytes,
        "opened_bytes": before,
        "resident_memory_bytes": resident_memory_bytes(),
    }


@torch.inference_mode()
def speed(model: str, rounds: str) -> dict[str, Any]:
    """Return the seconds of single tokens, in turns with the same weights in bfloat16."""
    engine = Engine.open(model)
    engine.prepare()
    assert isinstance(engine.checkpoint, Checkpoint) and isinstance(engine.decoder, Decoder)
    wide = Decoder(engine.checkpoint.config, engine.checkpoint.weights(torch.bfloat16)).eval()
    decoders = {"seconds": engine.decoder, "bfloat16_seconds": wide}
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    caches = {name: engine.new_cache(1, int(rounds) + 1) for name in decoders}
    for token in tokens_of(engine, int(rounds) + 1)[0]:
        for name, decoder in decoders.items():
            started = time.perf_counter()
            decoder.last_logits(token.view(1, 1), None, caches[name], DECODING)
            seconds[name].append(time.perf_counter() - started)
    return {name: every[1:] for name, every in seconds.items()}


def beside_peer(model: Path, rounds: int, python: str) -> dict[str, Any]:
    """Return the rates of ours and of llama.cpp with the same weights."""
    write_tokenizer(model, COMMON["vocab_size"])
    gguf = model.parent / "model.gguf"
    export_gguf(GgufExportOptions(model=str(model), output=gguf, format="gguf", type="stored"))
    return rates_in_turns(model, gguf, rounds, python)


@torch.inference_mode()
def rates_in_turns(model: Path, gguf: Path, rounds: int, python: str) -> dict[str, Any]:
    """Return tokens per second of ours and of llama.cpp with a GGUF file, one text of so many tokens after the other, in
    turns.
    """
    os.sync()  # files that were just written would be on their way to the disk meanwhile
    engine = Engine.open(model, load_mode=MEMORY)  # as `serve` loads it
    engine.prepare()
    tokens, rates = tokens_of(engine, rounds)[0], {"own_rates": list[float](), "peer_rates": list[float]()}
    with LlamaCpp(python, gguf, torch.get_num_threads(), 2 * rounds) as peer:

        def own_rate() -> float:
            cache, started = engine.new_cache(1, rounds), time.perf_counter()
            for token in tokens:
                engine.step(token[None], None, cache)
            return rounds / (time.perf_counter() - started)

        turn = [("own_rates", own_rate), ("peer_rates", lambda: peer.rate("tg", rounds))]
        for _ in range(PEER_ROUNDS + 1):
            for name, rate in turn:
                rates[name].append(rate())
            turn.reverse()
        about = peer.about
    return {"peer": about} | {name: every[1:] for name, every in rates.items()}


PARTS = {part.__name__: part for part in (speed, memory)}
"""The first process compiles the kernels, which takes memory that a later one does not need."""


def measured(part: str, model: Path, rounds: int) -> dict[str, Any]:
    """Run one of the functions above in a process of its own."""
    command = [sys.executable, __file__, "--part", part, str(model), str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(figures: dict[str, Any]) -> str:
    """Return the memory of each model, what is aimed at, and the speed beside bfloat16."""
    rows = []
    for row in figures["rows"]:
        aim = figures["allowed_times"] * row["stored_bytes"] + row["kv_cache_bytes"] + figures["allowed_beyond"]
        ratios = [wide / own for own, wide in zip(row["seconds"], row["bfloat16_seconds"], strict=True)]
        sizes = (row["stored_bytes"], row["opened_bytes"], row["resident_memory_bytes"], aim)
        size = (f"{each / 1e6:,.0f}" for each in sizes)
        beside = beside_text(row["own_rates"], row["peer_rates"]) if "peer" in row else ""
        rows.append([row["model"], f"{row['parameters'] / 1e9:.2f}", *size, f"{statistics.median(ratios):.2f}", beside])
    aimed = f"{figures['allowed_times']} × stored + KV cache + {figures['allowed_beyond'] / 1e6:.0f}"
    header = [
        "model",
        "parameters, B",
        "stored, MB",
        "after loading, MB",
        "resident, MB",
        aimed,
        "speed / bfloat16",
        f"speed / {NAME}",
    ]
    return markdown(header, rows)


def beside_text(own: list[float], others: list[float]) -> str:
    """Return the median of the ratios of paired rounds, with their range."""
    return times(statistics.median(mine / other for mine, other in zip(own, others, strict=True)), own, others)


TABLES = {"packed_floats": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40, help="tokens of which the speed is measured")
    parser.add_argument("--peer-python", help="Python that has llama-cpp-python; without it, llama.cpp is left out")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part, *words = arguments.part
        print(json.dumps(PARTS[part](*words)))
        return
    rows = []
    for name, own in SHAPES.items():
        with tempfile.TemporaryDirectory() as temporary:
            model = Path(temporary) / "model"
            write_packed_model(model, COMMON | own | {"num_hidden_layers": arguments.layers})
            figures = {key: value for part in PARTS for key, value in measured(part, model, arguments.rounds).items()}
            if arguments.peer_python and own["quantization_config"]["quant_method"] == "mxfp4":
                figures |= beside_peer(model, arguments.rounds, arguments.peer_python)
            rows.append({"model": name} | figures)
    save("packed_floats", {"allowed_times": ALLOWED_TIMES, "allowed_beyond": ALLOWED_BEYOND, "rows": rows})


if __name__ == "__main__":
    main()
