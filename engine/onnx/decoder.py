"""Our decoder as an ONNX graph for prefill and decoding, with the cache as inputs and outputs.

Inputs: `input_ids` [B, L], `attention_mask` [B, P] (0 at left padding; P includes the past), and for each layer
`past_key_values.N.key` and `.value`. Outputs: `logits`, `present.N.key` and `.value`, and `experts_skipped` if experts
are skipped. The optional input `logits_to_keep` is the number of last positions with logits, by default all.

Shape suffixes: B batch, L new positions, P all positions so far, K positions with logits, T tokens (B·L), M MoE layers,
D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import FINAL_NORM
from engine.decoder.routing import Routing
from engine.families.results import check_onnx
from engine.families.tensor_names import head_tensor
from engine.files.json_file import writing
from engine.onnx.attention import AttentionForm, attention, attention_form
from engine.onnx.experts import feed_forward
from engine.onnx.graph import INT64, Graph
from engine.onnx.layers import Parts
from engine.onnx.quantize import Written
from engine.onnx.runtime import DATA_NAME, SHARES_CACHE, SKIPPED

EVERY_POSITION = 2**31 - 1
EMBEDDING = "model.embed_tokens.weight"


def write_decoder(
    checkpoint: Checkpoint,
    directory: Path,
    routings: Sequence[Routing],
    *,
    dtype: torch.dtype,
    portable: bool,
    bits: int | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Written:
    """Write model.onnx and its weights, layer by layer. `routings`: one for each MoE layer.

    `portable`: use standard operators only, otherwise onnxruntime's own too. `bits`: 8 or 4 for the weights of
    products; embeddings and head then have 8 bits.
    """
    check_onnx(checkpoint.config)
    config, by_layer = checkpoint.config, dict(zip(checkpoint.config.moe_layers, routings, strict=True))
    data_path = directory / DATA_NAME
    with writing(data_path, "ONNX weights"), data_path.open("wb") as data:
        graph = Graph(directory, data, dtype)
        parts = Parts(
            graph=graph,
            source=checkpoint.source(dtype),
            checkpoint=checkpoint.stored,
            norm_epsilon=config.norm_epsilon,
            portable=portable,
            bits=bits,
            config=config,
        )
        tokens_BL = graph.input("input_ids", INT64, ("batch_size", "sequence_length"))
        mask_BP = graph.input("attention_mask", INT64, ("batch_size", "total_sequence_length"))
        form = attention_form(parts, tokens_BL, mask_BP)
        x_BLD = parts.times(parts.embedded(form.arrange(tokens_BL), EMBEDDING), config.multipliers.embedding)
        for layer in progress(range(len(config.layers))):
            with graph.scope(f"layers.{layer}"):
                x_BLD = _layer(parts, form, layer, x_BLD, by_layer.get(layer))
            checkpoint.release()
        _head(parts, form.restore(x_BLD))
        if parts.skipped:
            _skipped(parts, form, tokens_BL)
    graph.save(config.architecture.model_type, {SHARES_CACHE: str(int(form.shares_cache))})
    return Written(graph.weights_bytes, parts.packings)


def _layer(parts: Parts, form: AttentionForm, layer: int, x_BLD: str, routing: Routing | None) -> str:
    """Add one layer: attention and feed-forward block, each after its norm and with a residual connection."""
    graph, prefix = parts.graph, f"model.layers.{layer}"
    with graph.scope("attention"):
        normed = parts.norm(x_BLD, f"{prefix}.input_layernorm")
        x_BLD = _added(parts, x_BLD, attention(parts, form, layer, normed))
    with graph.scope("feed_forward"):
        normed = parts.norm(x_BLD, f"{prefix}.post_attention_layernorm")
        return _added(parts, x_BLD, feed_forward(parts, layer, normed, routing))


def _added(parts: Parts, x_BLD: str, y_BLD: str) -> str:
    return parts.graph.node("Add", x_BLD, parts.times(y_BLD, parts.config.multipliers.residual))


def _skipped(parts: Parts, form: AttentionForm, tokens_BL: str) -> None:
    """Add the output with the number of empty slots for each token and MoE layer, [B, L, M]."""
    graph, layers = parts.graph, parts.config.moe_layers
    counts_TM = graph.node("Concat", *(parts.skipped[layer] for layer in layers), axis=1)
    shape = graph.node("Concat", graph.node("Shape", tokens_BL), graph.integers(len(layers)), axis=0)
    counts_BLM = form.restore(graph.node("Reshape", counts_TM, shape))
    graph.node("Identity", counts_BLM, name=SKIPPED)
    graph.output(SKIPPED, INT64, ("batch_size", "sequence_length", len(layers)))


def _head(parts: Parts, x_BLD: str) -> None:
    """Add the last norm and the logits [B, K, V]."""
    graph, config = parts.graph, parts.config
    keep = graph.optional_input("logits_to_keep", np.array([EVERY_POSITION], dtype=np.int64))
    first = graph.node("Neg", keep)
    kept_BKD = graph.node("Slice", x_BLD, first, graph.integers(EVERY_POSITION), graph.integers(1))
    normed_BKD = parts.times(parts.norm(kept_BKD, FINAL_NORM), 1.0 / config.multipliers.logits)
    head = head_tensor(config)
    bias = "lm_head.bias" if config.head_bias else None
    parts.logits(normed_BKD, head, (config.vocabulary_size, config.hidden_size), bias)
    graph.output("logits", graph.element_type, ("batch_size", "kept_length", config.vocabulary_size))
