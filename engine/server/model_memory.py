"""The memory that a model takes in a server: the size of its KV cache, and what it will need before it is loaded."""

from __future__ import annotations

from pathlib import Path

from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, open_image_checkpoint, open_mixture_checkpoint
from engine.checkpoint.model_directory import resolve
from engine.decoder.kv_cache import position_bytes, state_bytes
from engine.decoder.paged_cache import BLOCK_SIZE
from engine.generation.checks import resolve_dtype, resolve_kv_cache_dtype
from engine.onnx.runtime import backend_of
from engine.server.options import ServeOptions

SMALL_CACHE = 1 << 30
"""Size in bytes up to which one sequence's cache is allocated, regardless of free memory."""
SPARE_MEMORY_SHARE = 0.25
"""Share of free memory for the KV cache if no size is given."""
MODEL_BYTES = 200_000_000
"""Allowance for all of a model in memory except weights and cache: its tokenizers, and the processes that read bodies."""


def cache_bytes(sizes: tuple[int, int], positions: int, batch_size: int, free: int) -> int:
    """Return the size of a cache for a full batch of the longest sequences, limited to a share of free memory.

    sizes: bytes of a position and of a sequence's states. positions: of the longest sequence. The size is enough for at
    least one such sequence, if that fits into memory. Otherwise sequences are shorter than the model's limit.
    """
    each, state = sizes
    sequence = each * (positions + BLOCK_SIZE)  # the last block may be almost empty
    states = batch_size * state
    shared = max(0, min(batch_size * sequence, int(SPARE_MEMORY_SHARE * free) - states))
    return states + (max(sequence, shared) if sequence <= max(SMALL_CACHE, free - states) else shared)


def left_for_cache(limit: int, weights: int) -> int:
    """Return the bytes that a limit leaves for the cache of a model that is alone."""
    return max(0, limit - weights - MODEL_BYTES)


def needed_bytes(options: ServeOptions, limit: int) -> int:
    """Return the bytes that the model of `options` will need, by its files. What is loaded is measured afterwards.

    Raises the errors of opening a model.
    """
    directory = resolve(options.model)
    if backend_of(directory, "auto") == "onnx":
        weights = sum(path.stat().st_size for path in Path(directory).iterdir() if path.is_file())
        return weights + MODEL_BYTES + (options.kv_cache_bytes or 0)
    checkpoint = open_image_checkpoint(directory) if options.images else open_mixture_checkpoint(directory)
    computed = resolve_dtype(options.dtype, checkpoint)
    weights = checkpoint.bytes * max(1, computed.itemsize // checkpoint.model_dtype.itemsize)
    if options.kv_cache_bytes is not None or isinstance(checkpoint, AdaptedCheckpoint):
        return weights + MODEL_BYTES + (options.kv_cache_bytes or 0)
    config, kept = checkpoint.config, resolve_kv_cache_dtype(options.kv_cache_dtype, computed, checkpoint)
    sizes = position_bytes(config, kept), state_bytes(config, kept)
    positions = options.max_model_length or config.max_positions
    cache = cache_bytes(sizes, positions, options.max_batch_size, left_for_cache(limit, weights))
    return weights + MODEL_BYTES + cache
