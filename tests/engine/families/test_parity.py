"""Logits equal transformers' for every family: prefill, step-by-step decoding, padded batches and each config variant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, save_reference

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.stacks import stored_tensors
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}
MSCALES = ROPES["longrope"] | {"short_mscale": 1.2, "long_mscale": 1.4, "rope_theta": 10000.0}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    *((family, "plain", {}) for family in FAMILIES),
    ("mixtral", "rope dynamic, long", {"head_dim": 8, "max_position_embeddings": 16, "rope_parameters": ROPES["dynamic"]}),
    *(
        ("mixtral", f"rope {name}", {"head_dim": 8, "rope_parameters": rope | {"rope_theta": 10000.0}})
        for name, rope in ROPES.items()
    ),
    ("qwen3_moe", "rope yarn", {"rope_parameters": ROPES["yarn"] | {"rope_theta": 10000.0}}),
    ("llama", "rope llama3", {"rope_parameters": ROPES["llama3"] | {"rope_theta": 10000.0}}),
    ("mixtral", "sliding window", {"sliding_window": 7}),
    ("mistral", "sliding window", {"sliding_window": 7}),
    ("qwen2_moe", "sliding window", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}),
    ("qwen2", "sliding window", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3_moe", "sliding window", {"sliding_window": 7, "use_sliding_window": True}),
    ("qwen3", "sliding window", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}),
    *((family, "tied embeddings", {"tie_word_embeddings": True}) for family in ("mixtral", "qwen3_moe", "olmoe")),
    ("olmoe", "biases and clipping", {"attention_bias": True, "clip_qkv": 0.3}),
    ("qwen3_moe", "biases", {"attention_bias": True}),
    ("llama", "biases", {"attention_bias": True}),
    ("olmoe", "top-k renormalized", {"norm_topk_prob": True}),
    ("qwen2_moe", "top-k renormalized", {"norm_topk_prob": True}),
    ("qwen2_moe", "some layers dense", {"mlp_only_layers": [1]}),
    ("qwen3_moe", "every second layer sparse", {"decoder_sparse_step": 2}),
    ("mixtral", "head dimension", {"head_dim": 12}),
    ("phimoe", "rope longrope", {"head_dim": 8, "rope_parameters": MSCALES | {"original_max_position_embeddings": 16}}),
    (
        "phimoe",
        "rope of a short text",
        {"head_dim": 8, "rope_parameters": MSCALES | {"original_max_position_embeddings": 64}},
    ),
    ("phimoe", "sliding window", {"sliding_window": 7}),
    ("granitemoe", "biases", {"attention_bias": True}),
]


@pytest.mark.parametrize(
    ("family", "variant", "changes"), VARIANTS, ids=[f"{f}-{v}".replace(" ", "-") for f, v, _ in VARIANTS]
)
def test_logits_equal_transformers(family: str, variant: str, changes: dict[str, Any], tmp_path: Path, parity: Any) -> None:
    reference = save_reference(family, tmp_path, **changes)
    checkpoint = Checkpoint(tmp_path)
    shapes = {name: entry.shape for file in checkpoint.files for name, entry in file.entries.items()}
    assert {name: stored.shape for name, stored in stored_tensors(checkpoint.config).items()} == shapes
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    if checkpoint.config.rope_mscales:
        read_with_long_frequencies(reference)
    compare(partial(parity, family, variant), variant, reference, decoder)


def read_with_long_frequencies(reference: Any) -> None:
    """Choose frequencies by the text's length, as older versions and the authors' code do and transformers 5 does not."""
    rotary = reference.model.rotary_emb
    initialise = rotary.rope_init_fn
    rotary.rope_init_fn = lambda config: initialise(config, seq_len=24)


@torch.no_grad()
def compare(record: Callable[[str, float], None], variant: str, reference: Any, decoder: Decoder) -> None:
    """Compare a prefill, step-by-step decoding after a prefill, and a left-padded batch of different lengths."""
    tokens = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = reference(tokens).logits
    record("prefill", float((decoder(tokens) - expected).abs().max()))
    if "dynamic" not in variant and "longrope" not in variant:  # those two depend on the length of the whole call
        cache = KeyValueCache(decoder.config, 2, 24, torch.float32)
        steps = [decoder(tokens[:, :9], cache=cache)] + [decoder(tokens[:, i : i + 1], cache=cache) for i in range(9, 24)]
        record("decode", float((torch.cat(steps, 1) - expected).abs().max()))
    real = torch.ones(2, 24, dtype=torch.bool)
    real[1, :11] = False
    padded = tokens.masked_fill(~real, 0)
    reference_logits = reference(
        padded, attention_mask=real.long(), position_ids=(real.long().cumsum(-1) - 1).clamp_min(0)
    ).logits
    got = decoder(padded, real_BP=real)
    record("padded batch", float((got - reference_logits)[real].abs().max()))


def test_padded_decode_equals_each_sequence_alone(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path, sliding_window=7)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    tokens = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(2))
    real = torch.ones(2, 20, dtype=torch.bool)
    real[0, :6] = False
    with torch.no_grad():
        cache = KeyValueCache(decoder.config, 2, 20, torch.float32)
        steps = [decoder(tokens[:, :10], real[:, :10], cache)]
        steps += [decoder(tokens[:, i : i + 1], real[:, : i + 1], cache) for i in range(10, 20)]
        together = torch.cat(steps, 1)
        assert torch.allclose(together[0, 6:], decoder(tokens[:1, 6:])[0], atol=1e-5)
        assert torch.allclose(together[1], decoder(tokens[1:])[0], atol=1e-5)


def test_chunked_prefill_equals_whole(tmp_path: Path) -> None:
    save_reference("qwen3_moe", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    tokens = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        cache = KeyValueCache(decoder.config, 1, 20, torch.float32)
        pieces = [decoder(piece, cache=cache) for piece in tokens.split(6, dim=1)]
        assert torch.allclose(torch.cat(pieces, 1), decoder(tokens), atol=1e-5)
