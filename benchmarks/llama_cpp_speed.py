"""Our engine beside llama.cpp: decoding and prefill of a random mixture of 1.5 B parameters in 16, 8 and 4 bits.

pip install llama-cpp-python gguf
python benchmarks/llama_cpp_speed.py [--directory DIR] [--rounds 5] [--threads 2]

In each round every contender starts, warms up and is timed once, in turn; ratios are of medians. llama.cpp gets the same
weights; queries and keys whose rows it would want in another order stay as they are, which costs the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import shape, write_random_model
from results import markdown, save

from engine.bench import BenchSpec, bench, cases_for
from engine.checkpoint import Checkpoint

PROMPT, NEW = 512, 64
LLAMA_TYPES = {"BF16": None, "Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}
"""Names of llama.cpp's file types, and their numbers."""
OURS = {"ours, bf16": "bf16", "ours, 8 bits": "8-bit", "ours, 4 bits": "4-bit"}
PEERS = {"ours, bf16": ("BF16",), "ours, 8 bits": ("Q8_0",), "ours, 4 bits": ("Q4_0", "Q4_K_M")}
EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}


def prepare(directory: Path, layers: int) -> None:
    """Make the mixture, our results of fewer bits and llama.cpp's files, where they are not there yet."""
    model = directory / "bf16"
    if not model.is_dir():
        write_random_model(model, shape(layers=layers))
    for bits in (8, 4):
        if not (directory / f"{bits}-bit").is_dir():
            options = [
                "--bits",
                str(bits),
                "--quantize-head",
                "--evaluation-samples",
                "0",
                "-o",
                str(directory / f"{bits}-bit"),
            ]
            subprocess.run([sys.executable, "-m", "cli", "quantize", str(model), *options], check=True)
    if not (directory / "BF16.gguf").exists():
        write_gguf(Checkpoint(model), directory / "BF16.gguf")
    for name, number in LLAMA_TYPES.items():
        if number is not None and not (directory / f"{name}.gguf").exists():
            quantise_gguf(directory / "BF16.gguf", directory / f"{name}.gguf", number)


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """The checkpoint in llama.cpp's format, bfloat16, norms and routers in float32."""
    import gguf

    config = checkpoint.raw_config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def wide(name: str, source: str) -> None:
        writer.add_tensor(name, checkpoint.tensor(source).float().numpy())

    def half(name: str, *sources: str) -> None:
        tensors = [checkpoint.tensor(source) for source in sources]
        values = (torch.stack(tensors) if len(tensors) > 1 else tensors[0]).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.BF16)

    half("token_embd.weight", "model.embed_tokens.weight")
    half("output.weight", "lm_head.weight")
    wide("output_norm.weight", "model.norm.weight")
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        wide(f"{theirs}.attn_norm.weight", f"{ours}.input_layernorm.weight")
        wide(f"{theirs}.ffn_norm.weight", f"{ours}.post_attention_layernorm.weight")
        wide(f"{theirs}.ffn_gate_inp.weight", f"{ours}.block_sparse_moe.gate.weight")
        for name, projection in ATTENTION.items():
            half(f"{theirs}.{name}.weight", f"{ours}.self_attn.{projection}.weight")
        for name, projection in EXPERTS.items():
            experts = [f"{ours}.block_sparse_moe.experts.{each}" for each in range(config["num_local_experts"])]
            half(f"{theirs}.{name}.weight", *(f"{expert}.{projection}.weight" for expert in experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise_gguf(source: Path, target: Path, number: int) -> None:
    """llama.cpp's own rounding."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = number
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters)
    assert not failed, f"{target}: llama.cpp could not make it"


def time_llama(path: str, threads: int) -> dict[str, float]:
    """Tokens per second of prefill and decoding, after a warm-up of each."""
    import llama_cpp

    batches = {"n_ctx": PROMPT + NEW, "n_batch": PROMPT, "n_ubatch": PROMPT}
    model = llama_cpp.Llama(path, verbose=False, n_threads=threads, n_threads_batch=threads, **batches)
    tokens = np.random.default_rng(0).integers(0, model.n_vocab(), PROMPT).tolist()
    rates = {}
    for _ in range(2):
        model.reset()
        started = time.perf_counter()
        model.eval(tokens)
        rates["prefill"] = PROMPT / (time.perf_counter() - started)
        model.reset()
        started = time.perf_counter()
        for token in tokens[:NEW]:
            model.eval([token])
        rates["decode"] = NEW / (time.perf_counter() - started)
    return rates


def measure(directory: Path, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Medians by contender."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for title, name in OURS.items():
            spec = [BenchSpec(str(directory / name), threads=threads)]
            for test, case in (("prefill", cases_for(PROMPT, 0)), ("decode", cases_for(0, NEW))):
                rate = bench(spec, case, 1)[0]["tokens_per_second_median"]
                found.setdefault(title, {}).setdefault(test, []).append(rate)
        for name in LLAMA_TYPES:
            command = [sys.executable, __file__, "--worker", str(directory / f"{name}.gguf"), "--threads", str(threads)]
            made = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            for test, rate in made.items():
                found.setdefault(f"llama.cpp {name}", {}).setdefault(test, []).append(rate)
    return {title: {test: statistics.median(rates) for test, rates in tests.items()} for title, tests in found.items()}


def rows(rates: dict[str, dict[str, float]], directory: Path) -> list[dict[str, Any]]:
    """With the ratio of ours to each peer of as many bits."""
    made: list[dict[str, Any]] = []
    for ours, peers in PEERS.items():
        stored = sum(path.stat().st_size for path in (directory / OURS[ours]).glob("*.safetensors"))
        made.append({"title": ours, **rates[ours], "bytes": stored})
        for name in peers:
            peer = rates[f"llama.cpp {name}"]
            ratios = {f"{test}_ratio": rates[ours][test] / peer[test] for test in peer}
            stored = (directory / f"{name}.gguf").stat().st_size
            made.append({"title": f"llama.cpp {name}", **peer, **ratios, "bytes": stored})
    return made


def table(made: list[dict[str, Any]]) -> str:
    header = ["batch 1", f"prefill {PROMPT} t/s", "ours by it", f"decode {NEW} t/s", "ours by it", "GB"]

    def ratio(row: dict[str, Any], test: str) -> str:
        return f"{row[f'{test}_ratio']:.2f}×" if f"{test}_ratio" in row else ""

    lines = [
        [
            row["title"],
            f"{row['prefill']:.0f}",
            ratio(row, "prefill"),
            f"{row['decode']:.1f}",
            ratio(row, "decode"),
            f"{row['bytes'] / 1e9:.2f}",
        ]
        for row in made
    ]
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the models are made, and found again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--trial", action="store_true", help="show the table and save nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(time_llama(arguments.worker, arguments.threads)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory, arguments.layers)
        made = rows(measure(directory, arguments.rounds, arguments.threads), directory)
    if arguments.trial:
        print(table(made))
    else:
        save("llama_cpp_speed", made, table(made))


if __name__ == "__main__":
    main()
