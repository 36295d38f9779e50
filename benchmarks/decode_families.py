"""Decoding and prefill of newer families at 1 B random parameters: ours beside transformers and llama.cpp.

python benchmarks/decode_families.py [--families qwen3_next,…] [--repetitions 5] [--layers N] [--peer-python PYTHON]

One model at a time: its contenders stay loaded and are timed in turn. transformers computes experts with each of its
implementations, and with the best of them in layers that torch.compile compiled; `batched_mm` reads no prompts, because it
copies every token's experts. A ratio is of medians, to the fastest of transformers in that test. With a Python that has
llama-cpp-python, llama.cpp is timed in the same rounds, on the file that `compress export --format gguf --type bf16` writes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_speed import transformers_version
from llama_cpp_peer import NAME, LlamaCpp
from random_model import write_random_model
from results import markdown, save, times

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from engine.bench.backends import COMPILED, BenchCase, BenchSpec
from engine.bench.side_by_side import bench
from engine.checkpoint.checkpoint import Checkpoint
from engine.families.gguf.table import gguf_model_types

PROMPT, NEW = 512, 64
DECODING = ("eager", "batched_mm", "grouped_mm", f"{COMPILED}batched_mm")
READING = ("eager", "grouped_mm", f"{COMPILED}grouped_mm")
OURS = "ours"
COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "moe_intermediate_size": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


class Family(NamedTuple):
    """One model: the name of its row, its number of layers, and what its config.json has beside COMMON.

    kinds: the config key that lists the kinds of layers, and the kinds, which repeat.
    """

    title: str
    layers: int
    config: dict[str, Any]
    kinds: tuple[str, Sequence[str]] | None = None


FAMILIES = {
    "qwen3_next": Family(
        "Qwen3-Next: 10 of 128 experts, one shared",
        12,
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "num_experts": 128,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "intermediate_size": 2048,
            "shared_expert_intermediate_size": 256,
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        },
    ),
    "nemotron_h": Family(
        "Nemotron-H: 6 of 128 experts without a gate, one shared",
        18,
        {
            "architectures": ["NemotronHForCausalLM"],
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 512,
            "moe_shared_expert_intermediate_size": 1024,
            "intermediate_size": 2048,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
        },
        ("layers_block_type", ("mamba", "moe", "mamba", "moe", "attention", "moe")),
    ),
    "gemma4_text": Family(
        "Gemma 4: 8 of 128 experts, a dense FFN beside them",
        12,
        {
            "architectures": ["Gemma4ForCausalLM"],
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "intermediate_size": 1024,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "global_head_dim": 256,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "tie_word_embeddings": True,
        },
        ("layer_types", ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention")),
    ),
}
"""Models of more than a billion parameters, whose parts have the proportions of the released ones."""


class InTurn:
    """Rounds of a bench in which llama.cpp is timed too, after the others. The first round warms up."""

    def __init__(self, peer: LlamaCpp, case: BenchCase) -> None:
        self.peer, self.case, self.rates = peer, case, list[float]()

    def __call__(self, rounds: Sequence[int]) -> Iterator[int]:
        for number in rounds:
            yield number
            rate = self.peer.rate(self.case.kind, self.case.tokens)
            if number:
                self.rates.append(rate)

    @property
    def measured(self) -> dict[str, Any]:
        """The rates, as of the others."""
        return {"median": statistics.median(self.rates), "rounds": self.rates}


def started_peer(python: str | None, name: str, directory: Path, stack: ExitStack) -> LlamaCpp | None:
    """Return llama.cpp with a family's model, or None if there is none, or no such file of the family."""
    if python is None or name not in gguf_model_types():
        return None
    path = directory / f"{name}.gguf"
    export_gguf(GgufExportOptions(model=str(directory / name), output=path, type="bf16"))
    return stack.enter_context(LlamaCpp(python, path, torch.get_num_threads(), PROMPT))


def measure(name: str, layers: int | None, repetitions: int, directory: Path, python: str | None) -> dict[str, Any]:
    """Return the rates of one family by test and contender, in tokens per second, with every round. python: llama.cpp's."""
    family = FAMILIES[name]
    count = layers or family.layers
    config = COMMON | family.config | {"model_type": name, "num_hidden_layers": count}
    if family.kinds is not None:
        key, kinds = family.kinds
        config[key] = list(islice(cycle(kinds), count))
    write_random_model(directory / name, config)
    with ExitStack() as stack:
        peer = started_peer(python, name, directory, stack)
        tests = tests_of(name, directory, repetitions, peer)
        about = {} if peer is None else {NAME: peer.about}
    return {"title": family.title, "parameters": Checkpoint(directory / name).parameters, "tests": tests, "peers": about}


def tests_of(name: str, directory: Path, repetitions: int, peer: LlamaCpp | None) -> dict[str, dict[str, Any]]:
    """Return the rates by test and contender."""
    tests = {}
    for case, implementations in ((BenchCase("tg", NEW), DECODING), (BenchCase("pp", PROMPT), READING)):
        specs = [BenchSpec(str(directory / name))]
        specs += [BenchSpec(specs[0].model, "transformers", experts_implementation=each) for each in implementations]
        in_turn = None if peer is None else InTurn(peer, case)
        rows = bench(specs, [case], repetitions, in_turn or iter)
        titles = (OURS, *implementations)
        tests[case.kind] = {
            title: {"median": row["tokens_per_second_median"], "rounds": row["tokens_per_second_rounds"]}
            for title, row in zip(titles, rows, strict=True)
        }
        if in_turn is not None:
            tests[case.kind][NAME] = in_turn.measured
    return tests


def best_of_peer(test: dict[str, Any]) -> str:
    """Return the fastest implementation of transformers in one test."""
    return max((title for title in test if title not in (OURS, NAME)), key=lambda title: test[title]["median"])


def table(figures: dict[str, Any]) -> str:
    """Return a row for each family: both tests of ours, the fastest of transformers, and llama.cpp if it was there."""
    rows, has_llama_cpp = [], any(NAME in row["tests"]["tg"] for row in figures["rows"])
    for row in figures["rows"]:
        cells = [f"{row['title']}, {row['parameters'] / 1e9:.1f} B"]
        for kind in ("tg", "pp"):
            test = row["tests"][kind]
            ours, peer = test[OURS], test[best_of_peer(test)]
            ratio = times(ours["median"] / peer["median"], ours["rounds"], peer["rounds"])
            cells += [f"{ours['median']:.1f}", f"{peer['median']:.1f} ({best_of_peer(test)})", ratio]
            if has_llama_cpp:
                cells += of_llama_cpp(ours, test.get(NAME))
        rows.append(cells)
    decoding, reading = f"decode {NEW} t/s", f"prefill {PROMPT} t/s"
    peer = "transformers at its best"
    peers = [peer, "ratio", *([NAME, "ratio"] if has_llama_cpp else [])]
    return markdown(["bf16, one sequence", decoding, *peers, reading, *peers], rows)


def of_llama_cpp(ours: dict[str, Any], theirs: dict[str, Any] | None) -> list[str]:
    """Return the rate and the ratio, or dashes for a family that has no GGUF files here."""
    if theirs is None:
        return ["–", "–"]
    ratio = times(ours["median"] / theirs["median"], ours["rounds"], theirs["rounds"])
    return [f"{theirs['median']:.1f}", ratio]


TABLES = {"decode_families": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, help="of each model, in place of its own number")
    parser.add_argument("--peer-python", help="Python that has llama-cpp-python; without it, llama.cpp is left out")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.families.split(","):
        with tempfile.TemporaryDirectory() as directory:
            python = arguments.peer_python
            rows.append(measure(name, arguments.layers, arguments.repetitions, Path(directory), python))
    peers = {program: about for row in rows for program, about in row.pop("peers").items()}
    save("decode_families", {"rows": rows}, transformers_version() | peers)


if __name__ == "__main__":
    main()
