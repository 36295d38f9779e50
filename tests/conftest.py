"""Tiny random checkpoints of every family, made by transformers if it has the family, and fixtures that tests share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from naive_deepseek import NaiveDeepseek
from naive_llama_moe import NaiveLlamaMoe
from pictures_for_tests import drawing, hide
from tokenizers_for_tests import VOCABULARY, add_tokenizer
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.stacks import joined, stored_tensors
from engine.families.table import ARCHITECTURES
from engine.generation.generate import Engine

hide()
# Test files use each other's helpers, from any folder.
sys.path.extend(sorted({str(path.parent) for path in Path(__file__).parent.rglob("test_*.py")}))
pytest_plugins = ["allowed_skips"]
os.environ.setdefault("COMPRESS_KERNELS", "compiled")  # tests compare bits, which must not depend on a trial of speed

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
}
MOE_SIZES = {"num_experts_per_tok": 2, "num_experts": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": MOE_SIZES | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": MOE_SIZES | {"moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
    "olmoe": MOE_SIZES,
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2} | MULTIPLIERS,
    "phimoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 7,
        "swiglu_limit": 0.4,
    },
    "mistral": {},
    "llama": {},
    "llama_moe": {"score_scale_factor": [3.0, 2.0, 1.5]},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "granite": MULTIPLIERS,
    "ernie4_5": {"head_dim": 16, "tie_word_embeddings": False},
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
FINE_GRAINED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 4, "topk_group": 2}
INDEXER = {"index_topk": 128, "index_n_heads": 2, "index_head_dim": 8}
DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.5,
}
FURTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek": {},
    "deepseek_v2": LATENT | FINE_GRAINED | GROUPS | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | FINE_GRAINED | GROUPS,
    "kimi_k2": LATENT | FINE_GRAINED | {"n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "tie_word_embeddings": False,
    },
    "minimax_m2": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "minimax": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 5,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 1.1,
        "linear_attn_beta_factor": 0.9,
        "mlp_alpha_factor": 1.2,
        "mlp_beta_factor": 0.7,
    },
    "qwen3_next": DELTA
    | {
        "num_experts_per_tok": 2,
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [2],
    },
    "qwen3_5_moe_text": DELTA
    | {
        "num_experts_per_tok": 2,
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    },
    "qwen3_5_text": DELTA,
    "llama4_text": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 40,
        "num_hidden_layers": 4,
        "attention_chunk_size": 5,
        "no_rope_layer_interval": 3,
    },
    "granitemoeshared": {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40} | MULTIPLIERS,
    "glm4_moe": FINE_GRAINED | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "lfm2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.7,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "gemma4_text": {
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 2.0,
    },
    "nemotron_h": {
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"),
        ],
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 5,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 1.7,
    }
    | GROUPS,
    "deepseek_v32": LATENT | FINE_GRAINED | GROUPS | INDEXER,
    "glm_moe_dsa": LATENT | FINE_GRAINED | INDEXER | {"indexer_types": ["full", "shared", "full"]},
    "glm4_moe_lite": LATENT | {key: value for key, value in FINE_GRAINED.items() if key != "first_k_dense_replace"},
}
"""Sizes of further families. Only the matrix (family_matrix.py) tests everything on them."""
MOE_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "gpt_oss")
EVERY_MOE_FAMILY = (*MOE_FAMILIES, "llama_moe")
"""The families above and those that transformers lacks."""
NAIVE: dict[str, Any] = {"llama_moe": NaiveLlamaMoe, "deepseek": NaiveDeepseek}
"""Our own naive models, in the place of transformers' for families that it lacks."""
NAMES = {"kimi_k2": "deepseek_v3"}
"""Families that transformers has under another name."""
NOT_DENSE = ("phimoe", "llama4_text", "gemma4_text")
"""Families that densify refuses."""
DENSIFIED = tuple(family for family in EVERY_MOE_FAMILY if family not in NOT_DENSE)


def others_slow(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return these parameters of a test. `make test` runs only those that are `kept`, and `make test-all` every one."""
    every = list(values)
    assert set(kept) <= set(every)
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in every]


def reference_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny random transformers model, with weights large enough that differences show in the logits.

    For a family that transformers lacks, our naive model is returned.
    """
    settings = SIZES | (FAMILIES | FURTHER_FAMILIES)[family] | changes
    if family in NAIVE:
        return NAIVE[family].random(seed, **settings)
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = CONFIG_MAPPING[NAMES.get(family, family)](**settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.5 if name.endswith(("gate.weight", "router.weight")) else 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


def enough(family: str, kept: dict[int, list[int]]) -> dict[int, list[int]]:
    """Return the plan with experts added to layers that have fewer than the family's minimum."""
    least = ARCHITECTURES[family].least_experts
    return {layer: sorted({*experts, *range(least - len(experts))}) for layer, experts in kept.items()}


def save_reference(family: str, path: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a tiny reference checkpoint (no tokenizer) and return the transformers model."""
    model = reference_model(family, seed, **changes)
    model.save_pretrained(path)
    if family in NAMES:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": family}))
    return model


def naive_ffn(parts: Sequence[Tensor], swiglu: Any, x: Tensor) -> Tensor:
    """Return an expert's output for some tokens [T, D] or one [D], straight from the definition."""
    gate, up, down, *biases = parts
    gate_bias, up_bias, down_bias = biases or (0.0, 0.0, 0.0)
    g, u = x @ gate.T + gate_bias, x @ up.T + up_bias
    if swiglu is not None:
        g, u = (
            torch.where(g > swiglu.limit, swiglu.limit, g),
            torch.where(u.abs() > swiglu.limit, u.sign() * swiglu.limit, u),
        )
    alpha, shift = (1.0, 0.0) if swiglu is None else (swiglu.alpha, 1.0)
    return (g / (1.0 + torch.exp(-alpha * g)) * (u + shift)) @ down.T + down_bias


def save_tensors(tensors: dict[str, Any], checkpoint: Checkpoint, path: Path) -> None:
    """Write tensors, named as a checkpoint names them, in their family's layout on disk."""
    from safetensors.torch import save_file

    stored = {
        name: torch.cat([joined(one.stack, [tensors[part] for part in parts])[None] for parts in one.parts])
        if one.stack
        else tensors[name].contiguous()
        for name, one in stored_tensors(checkpoint.config).items()
    }
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


PARITY = "parity"
ONNX_PARITY = "onnx_parity"
MATRIX = "matrix"
TABLES = {
    PARITY: "logits: largest difference to transformers, float32",
    ONNX_PARITY: "logits of exported graphs: largest difference to our engine, float32",
    MATRIX: "what each family can become: largest difference of a logit, float32",
}


@pytest.fixture
def modules_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cache into which transformers copies remote code. It read the path when it was imported."""
    place = tmp_path_factory.getbasetemp() / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(place))


@pytest.fixture
def parity(record_property: Any) -> Any:
    """Record one cell of the parity table, which the run prints at its end. Fails above 1e-4."""
    return _recorder(record_property, PARITY)


@pytest.fixture
def onnx_parity(record_property: Any) -> Any:
    """Record one cell of the parity table of exported graphs. Fails above 1e-4."""
    return _recorder(record_property, ONNX_PARITY)


@pytest.fixture
def matrix(record_property: Any) -> Any:
    """Record one cell of the matrix of families. Fails above 1e-4."""
    return _recorder(record_property, MATRIX)


def _recorder(record_property: Any, table: str) -> Any:
    def record(family: str, variant: str, what: str, difference: float) -> None:
        record_property(table, [family, variant, what, difference])
        assert difference <= 1e-4, f"{family} {variant} {what}: {difference:.2e}"

    return record


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the parity tables: the largest |logit difference| by family and config."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    properties = [each for report in reports if report.when == "call" for each in report.user_properties]
    for table, title in TABLES.items():
        cells: dict[tuple[str, str], dict[str, float]] = {}
        columns: dict[str, None] = {}
        for name, value in properties:
            if name == table:
                family, variant, what, difference = value
                cells.setdefault((family, variant), {})[what] = difference
                columns[what] = None
        if not cells:
            continue
        terminalreporter.section(title)
        terminalreporter.line(f"{'family':<13}{'config':<32}" + "".join(f"{column:>20}" for column in columns))
        for (family, variant), row in cells.items():
            shown = "".join(f"{row[column]:>20.1e}" if column in row else f"{'':>20}" for column in columns)
            terminalreporter.line(f"{family:<13}{variant:<32}{shown}".rstrip())


@pytest.fixture
def pictures() -> Iterator[None]:
    """Let commands draw pictures, which they do in no other test."""
    with drawing():
        yield


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny random mixture with a tokenizer, and return its directory."""
    path = tmp_path_factory.mktemp("model")
    save_reference("mixtral", path, vocab_size=VOCABULARY)
    add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tiny_engine(tiny_model: Path) -> Engine:
    """Open the tiny model, and return its Engine."""
    return Engine.open(tiny_model, device="cpu")


@pytest.fixture(scope="module")
def reading_pool(tiny_engine: Engine) -> Iterator[Any]:
    """Yield the pool that reads bodies for a server of the tiny model. Tests share it, as its processes start slowly."""
    from server_for_tests import reading_for  # here: it needs the packages of servers

    with reading_for(tiny_engine) as made:
        yield made


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: tiny tensors gain nothing from a second one, and parallel test workers lose by it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
