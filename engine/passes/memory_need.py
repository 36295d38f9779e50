"""What a pass over a model layer by layer takes beside the interpreter, and so whether it fits into a limit.

Estimates from above, of what is resident at the worst moment; measured runs stay below (benchmarks/memory_limit_prune.py).

Shape suffixes: T tokens of a batch, D hidden, F expert width, K experts a token is given to, V vocabulary.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass

import torch

from engine.architectures import LayerConfig, layer_tensors
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.mxfp4 import is_packed
from engine.decoder.lightning_attention import BLOCK
from engine.errors import OptionError
from engine.kernels.linear import has_half_arithmetic
from engine.passes import processes
from engine.passes.memory_budget import KEPT_WITHIN_LIMIT_BYTES, TOKENS_PER_BATCH, MemoryBudget, resident_memory_bytes
from engine.passes.streaming import chunk_tokens

LOADED_LATER_BYTES = 64 << 20
"""Libraries that draw pictures, compiled products and what the allocator keeps."""
ROUNDED_TO = 32 << 20
"""What is resident at the start differs a little from run to run; the size of a batch should not."""
SCORES_BYTES = 32 << 20
"""Scores of attention of a block of queries."""
LOGITS_AT_ONCE = 5
"""Logits of a chunk of tokens in float32, with what their loss and its gradient are made of."""
KEPT_AT_ONCE = 4
"""Activations that are each below what stays in memory."""


@dataclass(frozen=True)
class Work:
    """What a run does with the model, as far as memory is concerned."""

    dtype: torch.dtype
    length: int
    """Tokens of a sequence."""
    gradients: bool = False
    optimises: bool = False
    """With an optimiser of torch's."""
    experts_per_token: int | None = None
    """None for the model's own."""
    other_bytes: int = 0
    """The most that it holds besides layers and batches."""


def budget_for(limit: int | None, checkpoint: Checkpoint, work: Work) -> MemoryBudget | None:
    """How to keep to a limit, None for none. Raises OptionError where a larger one is needed, and says which."""
    if limit is None:
        return None
    if work.optimises:
        importlib.import_module("torch._dynamo")  # as optimisers do in their first step: 150 MB where Triton is installed
    resident = processes.largest(resident_memory_bytes())  # several processes have batches of one size
    interpreter = math.ceil((resident + LOADED_LATER_BYTES) / ROUNDED_TO) * ROUNDED_TO
    piece = _largest_piece(checkpoint, work)
    fixed = interpreter + piece + _logits_bytes(checkpoint) + KEPT_AT_ONCE * KEPT_WITHIN_LIMIT_BYTES + work.other_bytes
    tokens = TOKENS_PER_BATCH
    while tokens > work.length and fixed + batch_bytes(checkpoint, work, tokens) > limit:
        tokens = max(work.length, tokens // 2)
    if (needed := fixed + batch_bytes(checkpoint, work, max(tokens, work.length))) > limit:
        raise OptionError(
            f"memory-limit is {limit / 1e9:.2f}GB, and this needs {math.ceil(needed / 1e7) / 100:.2f}GB at least: "
            f"{interpreter / 1e9:.2f} for the interpreter, {piece / 1e9:.2f} for weights, the rest for "
            f"{work.length} tokens at a time; give that much, or a shorter --sequence-length"
        )
    batch = batch_bytes(checkpoint, work, max(tokens, work.length))
    return MemoryBudget(limit, batch + piece, piece + batch // 4, tokens)


def _logits_bytes(checkpoint: Checkpoint) -> int:
    vocabulary = checkpoint.config.vocabulary_size
    return SCORES_BYTES + LOGITS_AT_ONCE * 4 * chunk_tokens(vocabulary) * vocabulary


def batch_bytes(checkpoint: Checkpoint, work: Work, tokens: int) -> int:
    """Activations of one layer for a batch of so many tokens."""
    return max(_layer_activations(checkpoint, layer, work, tokens) for layer in checkpoint.config.layers)


def _layer_activations(checkpoint: Checkpoint, layer: LayerConfig, work: Work, tokens: int) -> int:
    config, moe = checkpoint.config, layer.moe
    hidden, heads = config.hidden_size, config.attention_heads * config.head_dimension
    slots = 0 if moe is None else work.experts_per_token or moe.experts_per_token
    width = max(layer.dense_width, 0 if moe is None else max(moe.expert_width, moe.shared_width))
    # In float32 are norms and, where products are not in the dtype itself, what goes into them.
    per_token = work.dtype.itemsize * (8 * hidden + 6 * heads) + 4 * 3 * hidden
    if layer.is_lightning:  # queries, keys and values in float32, and a block's scores twice
        per_token += 4 * (5 * heads + 2 * config.attention_heads * BLOCK)
    if not work.gradients:
        # All tokens may go to one expert; their outputs wait in the order of the experts.
        return tokens * (per_token + work.dtype.itemsize * (3 * slots * hidden + 3 * width))
    kept = slots * (5 * hidden + 6 * (0 if moe is None else moe.expert_width)) + 6 * width
    return tokens * (2 * per_token + work.dtype.itemsize * kept)


def _largest_piece(checkpoint: Checkpoint, work: Work) -> int:
    """Bytes of weights that are resident together: an expert of mapped ones, a layer of those that are converted."""
    config, shapes, size = checkpoint.config, checkpoint.shapes, work.dtype.itemsize
    layers = [layer_tensors(config, index) for index in range(len(config.layers))]
    head = math.prod(shapes["model.embed_tokens.weight"])
    experts = [max((math.prod(shape) for shape in layer.values() if len(shape) > 1), default=0) * 4 for layer in layers]
    whole = [sum(math.prod(shape) for shape in layer.values()) for layer in layers]
    converted = checkpoint.model_dtype != work.dtype or checkpoint.float8_block or is_packed(checkpoint.raw_config)
    if work.gradients and size == 2 and not has_half_arithmetic():
        return max(3 * max(whole), head) * size  # widened to float32 for the backward pass
    return max(max(whole if converted else experts), head) * size
