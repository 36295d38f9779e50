"""The blocks of one model's key-value cache on disk: what leaves the memory, and what prompts find there again.

The key of a block is a digest of the model, of every setting that changes keys and values, and of the block's digest in the
pool (engine/decoder/block_pool.py), which covers all tokens up to its end and the namespace of the request. A client of
another API key therefore asks for other keys.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.batching.disk_cache import DiskCache, DiskCounts, Reading
from engine.batching.request_state import RequestState
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.block_pool import BlockTable
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import PagedCache
from engine.decoder.routing import Skipping
from engine.errors import OptionError
from engine.files.kept_files import HEADER_BYTES
from engine.generation.generate import Engine

FORMAT = 1
"""Version of the content of a block."""
WAIT_SECONDS = 0.01
"""Time that a step waits for the disk at most, if it has nothing else to do."""
_SOURCES = ("batching", "checkpoint", "decoder", "expert_cache", "families", "generation", "kernels")
"""Rooms of this package whose code determines keys and values."""
_PACKAGES = ("torch", "numba", "triton")


@dataclass
class _Arriving:
    """A request whose prompt is being read from disk."""

    state: RequestState
    table: BlockTable
    """The request's table when reading began; a preempted request gets another one."""
    reading: Reading
    counts: bool
    """Whether the tokens count as found in the cache: only when the request starts for the first time."""


class DiskBlocks:
    """Moves blocks between a paged cache and the disk. For the scheduler's thread only."""

    def __init__(self, cache: PagedCache, disk: DiskCache, settings: bytes) -> None:
        """settings: a digest, as from `settings_digest`. Raises OptionError if the disk's limit is below one block."""
        self._file_bytes = cache.block_bytes + HEADER_BYTES
        if self._file_bytes > disk.limit:
            raise OptionError(
                f"--kv-cache-disk is {disk.limit:,} bytes, and one block of this model has {self._file_bytes:,}; give more"
            )
        self._cache, self._disk, self._settings = cache, disk, settings
        self.counts = DiskCounts()
        self._arriving: list[_Arriving] = []
        cache.pool.keeper = self

    def keep(self, digest: bytes, block: int) -> None:
        """Copy the content of a block that is about to be used for something else, unless it is on disk. Never raises."""
        key = self._key(digest)
        if key in self._disk:
            self._disk.touch([key])
            return
        try:
            if self._disk.takes(self._cache.block_bytes):
                self._disk.write(key, self._cache.content(block), self.counts)
                return
        except Exception:  # such as too little memory for the copy: a request goes on without it
            logging.getLogger(__name__).exception("a block of the key-value cache cannot be copied for the disk")
        self.counts.failed += 1

    def forget(self, digest: bytes) -> None:
        """Remove a block from the disk, because its content may be wrong."""
        if (key := self._key(digest)) in self._disk:
            self._disk.remove(key)

    def begin(self, state: RequestState, counts: bool) -> None:
        """Read what follows a request's table from disk, if it is there. The table has room for all of its tokens.

        counts: whether the tokens count as found in the cache.
        """
        keys = []
        for digest in self._cache.pool.digests(state.table, state.tokens):
            if (key := self._key(digest)) not in self._disk:
                break
            keys.append(key)
        if keys and (reading := self._disk.start(keys, self.counts, self._cache.fits)) is not None:
            self.counts.hits += counts
            self._arriving.append(_Arriving(state, state.table, reading, counts))

    def is_arriving(self, state: RequestState) -> bool:
        """Whether a part of a running request's prompt is being read from disk."""
        return any(each.state is state for each in self._arriving)

    def advance(self, running: Sequence[RequestState]) -> int:
        """Put the blocks that have arrived into the cache; return the number of tokens that count as found there."""
        found, size = 0, self._cache.pool.block_size
        for each in list(self._arriving):
            state, table = each.state, each.table
            is_wanted = state in running and state.table is table
            for content in each.reading.take() if is_wanted else ():
                self._cache.put(table.blocks[table.length // size], content)
                self._cache.pool.fill(table, state.tokens, table.length + size)
                self.counts.read += 1
                state.timings.cached_tokens += size * each.counts
                found += size * each.counts
            if not is_wanted or each.reading.is_over:
                each.reading.cancel()
                self._arriving.remove(each)
        return found

    def wait(self) -> None:
        """Wait a moment for the disk."""
        if self._arriving:
            self._disk.wait([each.reading for each in self._arriving], WAIT_SECONDS)

    def keep_all(self) -> None:
        """Hand all unused blocks that can be found to the disk, within some seconds. The cache is not used afterwards."""
        for each in self._arriving:
            each.reading.cancel()
        self._arriving.clear()
        until, left, kept = self._disk.end(), self._disk.limit, list[str]()
        for digest, block in self._cache.pool.named():
            left -= self._file_bytes
            key = self._key(digest)
            if left < 0 or (
                key not in self._disk and not self._disk.write(key, self._cache.content(block), self.counts, until)
            ):
                break
            kept.append(key)
        self._disk.touch(kept)

    def _key(self, digest: bytes) -> str:
        return hashlib.sha256(self._settings + digest).hexdigest()


def disk_blocks(engine: Engine, cache: PagedCache, disk: DiskCache, prefill_chunk: int) -> DiskBlocks | None:
    """Return the blocks on disk of an engine; None if its prompts share nothing in memory either. Raises OptionError."""
    if not cache.pool.shares or not isinstance(engine.checkpoint, Checkpoint) or not isinstance(engine.decoder, Decoder):
        return None
    routings = [block.routing for block in engine.decoder.moe_blocks]
    sizes = {
        "block": cache.pool.block_size,
        "chunk": prefill_chunk,
        "kept experts": max((each.keep for each in routings if isinstance(each, Skipping)), default=0),
    }
    return DiskBlocks(cache, disk, settings_digest(engine, engine.checkpoint, disk.secret, sizes))


def settings_digest(engine: Engine, checkpoint: Checkpoint, secret: bytes, sizes: Mapping[str, int]) -> bytes:
    """Return a digest of everything besides tokens, thresholds and namespace that determines keys and values.

    secret: without it, nobody can compute the keys of a prompt. sizes: such as those of blocks and of pieces of prompts.
    """
    tables = checkpoint.directory / FILE_NAME
    said = {
        "format": FORMAT,
        "model": checkpoint.identity(),
        "skip tables": hashlib.sha256(tables.read_bytes()).hexdigest() if tables.is_file() else "",
        "skip rule": engine.skip_rule,
        "miss threshold": 0.0 if engine.expert_cache is None else engine.expert_cache.miss_threshold,
        "dtypes": [str(engine.dtype), str(engine.kv_cache_dtype)],
        "device": [engine.device.type, torch.backends.cpu.get_cpu_capability()],
        "source": _source_digest(),
        "versions": {name: _version(name) for name in _PACKAGES},
        **sizes,
    }
    return hmac.digest(secret, json.dumps(said, sort_keys=True).encode(), "sha256")


def _source_digest() -> str:
    """Return a digest of the code: another version of it may store something else, or in another order."""
    made, room = hashlib.sha256(), Path(__file__).resolve().parent.parent
    for path in sorted(path for name in _SOURCES for path in (room / name).rglob("*.py")):
        made.update(str(path.relative_to(room)).encode() + path.read_bytes())
    return made.hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
