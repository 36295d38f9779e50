"""Logits of llama.cpp and of this engine on the GGUF files that `compress export` writes, for a tiny model of each family.

pip install llama-cpp-python gguf
python benchmarks/gguf_agreement.py [--families mixtral,qwen3_moe] [--tokens 64] [--peer-python PYTHON]

The models are random. Both programs read the same file and the same random tokens; this engine computes in float32. NMSE is
the squared difference over all logits, divided by the sum of their squares. A near tie of two experts that the programs
decide differently changes all logits of a token, so the median over tokens is stored too. llama.cpp may be installed for
another Python.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llama_cpp_peer import FLOAT32, NAME, LlamaCpp
from results import ROOT, markdown, require, save
from torch import Tensor

from compress.export.gguf import export_gguf
from compress.options.export import GgufExportOptions
from compress.plans.apply import apply
from compress.plans.plan import Plan, narrowed_expert, pruning_plan
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import UnsupportedError
from engine.families.gguf.table import gguf_model_types

COMMON = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512, "vocab_size": 128}
FINE = {"moe_intermediate_size": 32}
LATENT = FINE | {
    **{"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
}
DELTA = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
SCALED |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": SCALED},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "olmoe": {"num_key_value_heads": 4},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "head_dim": 16, "intermediate_size_mlp": 96}
    | {"rope_parameters": SCALED | {"factor": 16.0, "high_freq_factor": 1.0}},
    "gpt_oss": {"swiglu_limit": 7.0, "head_dim": 32, "sliding_window": 16},
    "mistral": {"sliding_window": None},
    "deepseek_v2": LATENT | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "glm4_moe": FINE,
    "ernie4_5_moe": FINE,
    "qwen3_next": DELTA | {"mlp_only_layers": []},
    "qwen3_5_moe_text": DELTA,
    "glm4_moe_lite": LATENT,
    "deepseek_v32": LATENT | {"index_head_dim": 128},
    "glm_moe_dsa": LATENT | {"index_head_dim": 128},
    "lfm2_moe": FINE | {"routed_scaling_factor": 1.0},
    "gemma4_text": FINE | {"head_dim": 16, "global_head_dim": 32, "sliding_window": 16},
    "nemotron_h": FINE
    | {"moe_shared_expert_intermediate_size": 64, "ssm_state_size": 16, "mamba_head_dim": 16}
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]},
}
"""Sizes that llama.cpp has, where those of the tests' tiny models are others."""


def all_of(checkpoint: Checkpoint) -> Plan | None:
    """Return no plan: the model as it is."""
    return None


def fewer_experts(checkpoint: Checkpoint) -> Plan | None:
    """Return the plan that keeps two thirds of every layer's experts, or None for a dense model."""
    counts = checkpoint.config.experts_by_layer
    return (
        pruning_plan({layer: [e for e in range(count) if e % 3 != 1] for layer, count in counts.items()}) if counts else None
    )


def fewer_units(checkpoint: Checkpoint) -> Plan | None:
    """Return the plan that keeps the second half of every expert's hidden units, or None for a dense model."""
    layers = {layer: moe for layer in checkpoint.config.moe_layers if (moe := checkpoint.config.layers[layer].moe)}
    halves = {layer: range(moe.expert_width // 2, moe.expert_width) for layer, moe in layers.items()}
    plan = {layer: tuple(narrowed_expert(e, halves[layer]) for e in range(moe.experts)) for layer, moe in layers.items()}
    return Plan(plan) if plan else None


COLUMNS: dict[str, tuple[str, Callable[[Checkpoint], Plan | None]]] = {
    "f32": ("f32", all_of),
    "f32, two thirds of the experts": ("f32", fewer_experts),
    "f32, half of the units": ("f32", fewer_units),
    "bf16": ("bf16", all_of),
    "q8_0": ("q8_0", all_of),
}
"""The type of a file, and the plan of the model in it."""


def table(figures: dict[str, Any]) -> str:
    """Return the NMSE by family and file (the median over tokens in parentheses)."""
    rows = [
        [family, *(_shown(own[column]) if column in own else "–" for column in figures["columns"])]
        for family, own in figures["families"].items()
    ]
    return markdown(["family", *figures["columns"]], rows)


def _shown(found: dict[str, float]) -> str:
    return f"{found['nmse']:.0e} ({found['nmse_median']:.0e})"


TABLES = {"gguf_agreement": table}


@torch.inference_mode()
def our_logits(path: Path, tokens: list[int]) -> Tensor:
    """Return this engine's logits [tokens, vocabulary]."""
    checkpoint = Checkpoint(path)
    logits: Tensor = Decoder(checkpoint.config, checkpoint.source(torch.float32))(torch.tensor([tokens]))[0]
    return logits


def logits_of_llama_cpp(python: str, path: Path, tokens: list[int]) -> Tensor:
    """Return the logits of llama.cpp [tokens, vocabulary]."""
    cache = {"type_k": FLOAT32, "type_v": FLOAT32}
    with LlamaCpp(python, path, 1, len(tokens), logits_all=True, **cache) as peer:
        return torch.from_numpy(peer.logits(tokens, path.with_suffix(".npy")))


def difference(python: str, path: Path, tokens: int) -> dict[str, float]:
    """Return the NMSE over all tokens and the median over tokens."""
    vocabulary = Checkpoint(path).config.vocabulary_size
    given = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    ours_TV = our_logits(path, given)
    squares_T = (logits_of_llama_cpp(python, path, given) - ours_TV).square().sum(1)
    return {
        "nmse": float(squares_T.sum() / ours_TV.square().sum()),
        "nmse_median": float((squares_T / ours_TV.square().sum(1)).median()),
    }


def measured(python: str, family: str, place: Path, tokens: int) -> dict[str, dict[str, float]]:
    """Return the differences of a family's files by the column of the table."""
    from conftest import save_reference

    save_reference(family, place / "full", **COMMON | SIZES.get(family, {}))
    full, found = Checkpoint(place / "full"), {}
    for number, (column, (kind, planned)) in enumerate(COLUMNS.items()):
        model, plan = place / "full", planned(full)
        if plan is None and planned is not all_of:
            continue
        if plan is not None:
            model = place / f"made-{number}"
            model.mkdir()
            apply(plan, full, model)
        try:
            export_gguf(GgufExportOptions(model=str(model), output=place / f"{number}.gguf", type=kind))
        except UnsupportedError:  # a plan that files of this family cannot say
            if plan is None:
                raise
            continue
        found[column] = difference(python, place / f"{number}.gguf", tokens)
    return found


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    sys.path.insert(0, str(ROOT / "tests"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(gguf_model_types()))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has llama-cpp-python")
    arguments = parser.parse_args()
    require("gguf", *(("llama_cpp",) if arguments.peer_python == sys.executable else ()))
    torch.set_num_threads(1)
    found = {}
    for family in arguments.families.split(","):
        with tempfile.TemporaryDirectory() as place:
            found[family] = measured(arguments.peer_python, family, Path(place), arguments.tokens)
            with LlamaCpp(arguments.peer_python, Path(place) / "0.gguf", 1, 1) as peer:
                about = peer.about
    save("gguf_agreement", {"columns": list(COLUMNS), "tokens": arguments.tokens, "families": found}, {NAME: about})


if __name__ == "__main__":
    main()
