"""Sparse attention in GGUF files (DeepSeek V3.2, GLM-5): the sizes of indexers, and the places of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.families.config import DecoderConfig
from engine.families.gguf.forms import Places
from engine.families.gguf.metadata import Facts
from engine.families.gguf.parts import Part
from engine.families.tensor_names import INDEXER

_SIZES = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
_FULL = "attention.indexer.types"
_OWN, _SHARED = "full", "shared"
_STORED = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
"""Names within an indexer of a file, in the order of INDEXER."""


def _read_indexers(facts: Facts) -> dict[str, Any]:
    return {entry: facts.size(key) for entry, key in _SIZES.items()}


def _write_indexers(config: DecoderConfig) -> dict[str, Any]:
    """Return the sizes, and the model's own number of positions, which may be more than the engine computes."""
    family = config.transformers_config
    sizes: dict[str, Any] = {key: getattr(family, entry) for entry, key in _SIZES.items()}
    return sizes | {"context_length": family.max_position_embeddings}


def _read_some(facts: Facts) -> dict[str, Any]:
    """Return the sizes, and the layers that take the selection of the layer before."""
    kinds = [_OWN if full else _SHARED for full in facts.flags(_FULL)] if facts.has(_FULL) else None
    return _read_indexers(facts) | ({} if kinds is None else {"indexer_types": kinds})


def _write_some(config: DecoderConfig) -> Mapping[str, Any]:
    return _write_indexers(config) | {_FULL: [layer.indexer is not None for layer in config.layers]}


def indexer_places(config: DecoderConfig, layer: int, has: Callable[[str], bool]) -> Places:
    """Return the places of a layer's indexer."""
    if config.layers[layer].indexer is None:
        return {}
    return {f"self_attn.{ours}": ((f"indexer.{theirs}",), None) for ours, theirs in zip(INDEXER, _STORED, strict=True)}


INDEXERS = Part(_read_indexers, _write_indexers)
SOME_INDEXERS = Part(_read_some, _write_some)
