"""Estimates of the memory that a layer-by-layer pass needs, and the batch size that fits into a limit.

The estimates are upper bounds on the resident memory at the worst moment; measured runs stay below them
(benchmarks/memory_limit_prune.py).

Shape suffixes: T tokens of a batch, D hidden, F expert width, K experts per token, V vocabulary.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.mxfp4 import is_packed
from engine.errors import OptionError
from engine.families.tensor_shapes import layer_tensors
from engine.kernels.torch_products import emulates
from engine.passes import processes
from engine.passes.memory_budget import UNLIMITED, MemoryBudget, resident_memory_bytes
from engine.passes.streaming import chunk_tokens

LOADED_LATER_BYTES = 64 << 20
"""Allowance for plotting libraries, compiled kernels and the allocator's reserve."""
ROUNDED_TO = 32 << 20
"""Rounding of the resident memory at the start, which varies between runs: the batch size should not vary with it."""
SCORES_BYTES = 32 << 20
"""Bytes of the attention scores of one block of queries."""
LOGITS_AT_ONCE = 5
"""Number of logits tensors of a chunk of tokens in float32, including the tensors of the loss and its gradient."""
KEPT_WITHIN_LIMIT_BYTES = 16 << 20
"""Limit on activations in memory under a memory limit: several are held at a time, and the page cache holds the files."""
KEPT_AT_ONCE = 4
"""Number of activations held at a time, each below the limit for staying in memory."""


@dataclass(frozen=True)
class MemoryDemand:
    """The parts of a run's computation that determine its memory."""

    dtype: torch.dtype
    length: int
    """Tokens of a sequence."""
    gradients: bool = False
    optimises: bool = False
    """Whether the run uses an optimizer of torch."""
    experts_per_token: int | None = None
    """None for the model's own number."""
    other_bytes: int = 0
    """Upper bound of all other memory, besides layers and batches."""
    tokens: int = 0
    """Tokens of the longest text that goes through the model at once: some passes keep all its hidden states."""

    def with_other(self, other_bytes: int) -> MemoryDemand:
        """The demand of a run that at some other time holds so many bytes besides layers and batches."""
        return replace(self, other_bytes=max(self.other_bytes, other_bytes))


def budget_for(limit: int | None, checkpoint: Checkpoint, demand: MemoryDemand) -> MemoryBudget:
    """Return the budget for a limit in bytes; None for no limit.

    Raises OptionError if the run needs a larger limit, and names that limit.
    """
    if limit is None:
        return UNLIMITED
    if demand.optimises:
        importlib.import_module("torch._dynamo")  # optimizers import it in their first step: 150 MB if Triton is installed
    resident = processes.largest(resident_memory_bytes())  # processes must use batches of one size
    interpreter = math.ceil((resident + LOADED_LATER_BYTES) / ROUNDED_TO) * ROUNDED_TO
    piece = _largest_piece(checkpoint, demand)
    fixed = interpreter + piece + _logits_bytes(checkpoint) + KEPT_AT_ONCE * KEPT_WITHIN_LIMIT_BYTES + demand.other_bytes
    fixed += checkpoint.kept_bytes(demand.tokens, demand.dtype, gradients=demand.gradients)
    tokens = UNLIMITED.tokens_per_batch
    while tokens > demand.length and fixed + batch_bytes(checkpoint, demand, tokens) > limit:
        tokens = max(demand.length, tokens // 2)
    if (needed := fixed + batch_bytes(checkpoint, demand, max(tokens, demand.length))) > limit:
        raise OptionError(
            f"memory-limit is {limit / 1e9:.2f}GB, and this needs {math.ceil(needed / 1e7) / 100:.2f}GB at least: "
            f"{interpreter / 1e9:.2f} for the interpreter, {piece / 1e9:.2f} for weights, the rest for "
            f"{demand.length} tokens at a time; give that much, or a shorter --sequence-length"
        )
    batch = batch_bytes(checkpoint, demand, max(tokens, demand.length))
    return MemoryBudget(
        tokens,
        kept_bytes=KEPT_WITHIN_LIMIT_BYTES,
        limit=limit,
        batch_bytes=batch + piece,
        expert_bytes=piece + batch // 4,
    )


def _logits_bytes(checkpoint: Checkpoint) -> int:
    vocabulary = checkpoint.config.vocabulary_size
    return SCORES_BYTES + LOGITS_AT_ONCE * 4 * chunk_tokens(vocabulary) * vocabulary


def batch_bytes(checkpoint: Checkpoint, demand: MemoryDemand, tokens: int) -> int:
    """Return the bytes of the activations of one layer for a batch of this many tokens."""
    return max(_layer_activations(checkpoint, index, demand, tokens) for index in range(len(checkpoint.config.layers)))


def _layer_activations(checkpoint: Checkpoint, index: int, demand: MemoryDemand, tokens: int) -> int:
    config, layer = checkpoint.config, checkpoint.config.layers[index]
    moe, hidden, heads = layer.moe, config.hidden_size, config.attention_heads * config.heads_of(index).size
    slots = 0 if moe is None else demand.experts_per_token or moe.experts_per_token
    width = max(layer.dense_width, 0 if moe is None else max(moe.expert_width, moe.shared_width))
    # float32: norms, and the inputs of products that are not computed in the dtype itself.
    per_token = demand.dtype.itemsize * (8 * hidden + 6 * heads) + 4 * 3 * hidden
    if layer.linear is not None:
        per_token += 4 * layer.linear.held
    if not demand.gradients:
        # All tokens may go to one expert; the outputs wait in the order of the experts.
        return tokens * (per_token + demand.dtype.itemsize * (3 * slots * hidden + 3 * width))
    kept = slots * (5 * hidden + 6 * (0 if moe is None else moe.expert_width)) + 6 * width
    return tokens * (2 * per_token + demand.dtype.itemsize * kept)


def _largest_piece(checkpoint: Checkpoint, demand: MemoryDemand) -> int:
    """Return the bytes of weights that are resident together: one expert if mapped, one layer if converted."""
    if (whole_layers := checkpoint.piece_bytes(demand.dtype)) is not None:
        return whole_layers
    config, shapes, size = checkpoint.config, checkpoint.shapes, demand.dtype.itemsize
    layers = [layer_tensors(config, index) for index in range(len(config.layers))]
    head = math.prod(shapes["model.embed_tokens.weight"])
    experts = [max((math.prod(shape) for shape in layer.values() if len(shape) > 1), default=0) * 4 for layer in layers]
    whole = [sum(math.prod(shape) for shape in layer.values()) for layer in layers]
    is_blocks = checkpoint.float8 or checkpoint.nvfp4 or checkpoint.gguf or is_packed(checkpoint.raw_config)
    converted = checkpoint.model_dtype != demand.dtype or is_blocks
    if demand.gradients and emulates(demand.dtype):
        return max(3 * max(whole), head) * size  # converted to float32 for the backward pass
    return max(max(whole if converted else experts), head) * size
