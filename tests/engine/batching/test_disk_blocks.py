"""Blocks of the KV cache on disk: the same tokens and bits after a restart, and nothing that a disk does stops a request."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import save_reference
from serving_for_tests import Served, assert_all_free, run_to_end, scheduler_for
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from engine.batching import disk_blocks, disk_cache
from engine.batching.disk_blocks import settings_digest
from engine.batching.disk_cache import DiskCache
from engine.batching.loop import EngineLoop
from engine.batching.request import Request
from engine.batching.scheduler import Scheduler
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.skip_table_file import FILE_NAME
from engine.decoder.kv_cache import position_bytes
from engine.decoder.paged_cache import PagedCache
from engine.decoder.skip_tables import SkipTables
from engine.errors import OptionError
from engine.files import kept_files
from engine.files.kept_files import KeptFiles
from engine.generation.generate import Engine

LIMIT = 100 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_reference("mixtral", path, vocab_size=VOCABULARY)
    add_tokenizer(path)
    SkipTables((torch.ones(1),) * 3, (torch.ones(6, 6),) * 3, (torch.tensor([26.0]),) * 3).save(path / FILE_NAME)
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine.open(directory, device="cpu")


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Callable[..., DiskCache]]:
    """Yield a function that opens the cache on disk as a new server does, after the one before has ended."""
    opened: list[DiskCache] = []

    def reopen(limit: int = LIMIT) -> DiskCache:
        while opened:
            opened.pop().close()
        opened.append(DiskCache(tmp_path / "kept", limit))
        return opened[0]

    yield reopen
    while opened:
        opened.pop().close()


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 259), k=count))


def ask(scheduler: Scheduler, engine: Engine, request: Request) -> tuple[tuple[int, ...], list[Any], int]:
    """Return the tokens of a request, its logprobs, which have all bits of the logits, and how many tokens were cached."""
    served = Served(scheduler, engine, request)
    run_to_end(scheduler)
    assert served.finish_reason == "length"
    timings = served.updates[-1].timings
    assert timings is not None
    return served.tokens, [each for update in served.updates for each in update.logprobs], timings.cached_tokens


def wait_until(is_met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def files(disk: DiskCache) -> list[Path]:
    return sorted(disk._files.directory.glob("*.safetensors"))


def restarted(scheduler: Scheduler, disks: Callable[..., DiskCache]) -> DiskCache:
    """End a scheduler as a server does, and open the disk anew."""
    scheduler.close()
    return disks()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "bfloat16"])
@pytest.mark.parametrize("length", [21, 22])
def test_tokens_and_bits_are_those_of_memory_after_a_restart(
    directory: Path, disks: Callable[..., DiskCache], kv_cache_dtype: str, length: int
) -> None:
    """21 tokens are five blocks and the one token that is always read; 22 are read as a piece of a prompt."""
    engine = Engine.open(directory, device="cpu", kv_cache_dtype=kv_cache_dtype)
    request = Request(prompt(length), 6, top_logprobs=3, ignore_end_tokens=True)
    scheduler = scheduler_for(engine, disk=disks())
    first = ask(scheduler, engine, request)
    in_memory = ask(scheduler, engine, request)
    assert (in_memory[0], in_memory[2]) == (first[0], 20)
    disk = restarted(scheduler, disks)
    again = scheduler_for(engine, disk=disk)
    assert ask(again, engine, request) == in_memory
    assert again.on_disk is not None and (again.on_disk.counts.hits, again.on_disk.counts.read) == (1, 5)
    assert again.cached_tokens == 20 and again.prompt_tokens == length
    assert_all_free(again)
    assert ask(again, engine, request) == in_memory and again.on_disk.counts.read == 5, "now it is in memory"
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in disk._files.directory.iterdir())


def test_what_leaves_the_memory_is_found_on_disk(engine: Engine, disks: Callable[..., DiskCache]) -> None:
    disk = disks()
    cache_bytes = 12 * 4 * position_bytes(engine.checkpoint.config, engine.dtype)
    scheduler = scheduler_for(engine, disk=disk, kv_cache_bytes=cache_bytes, max_model_length=40)
    requests = [Request(prompt(33, seed), 3, ignore_end_tokens=True) for seed in range(3)]
    first = [ask(scheduler, engine, request) for request in requests]
    assert [cached for *_, cached in first] == [0, 0, 0]
    wait_until(lambda: not disk._jobs)
    assert scheduler.on_disk is not None and scheduler.on_disk.counts.written >= 8
    assert ask(scheduler, engine, requests[0]) == (*first[0][:2], 32)
    assert scheduler.on_disk.counts.hits == 1 and scheduler.on_disk.counts.failed == 0


def test_a_block_that_waits_to_be_written_is_found(
    engine: Engine, disks: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written as long as the disk does not answer, and no request waits for it."""
    goes_on, write = threading.Event(), KeptFiles.write
    monkeypatch.setattr(KeptFiles, "write", lambda *given: goes_on.wait(30) and write(*given))
    disk = disks()
    cache_bytes = 12 * 4 * position_bytes(engine.checkpoint.config, engine.dtype)
    scheduler = scheduler_for(engine, disk=disk, kv_cache_bytes=cache_bytes, max_model_length=40)
    requests = [Request(prompt(33, seed), 3, ignore_end_tokens=True) for seed in range(2)]
    first, _ = (ask(scheduler, engine, request) for request in requests)
    assert ask(scheduler, engine, requests[0]) == (*first[:2], 32) and disk.bytes == 0
    goes_on.set()
    wait_until(lambda: not disk._jobs)
    assert disk.bytes > 0


def test_what_a_slow_disk_does_not_take_is_dropped(
    engine: Engine, disks: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(KeptFiles, "write", lambda *_: answers.wait(30))
    monkeypatch.setattr(disk_cache, "MOST_QUEUED_BYTES", 1)
    monkeypatch.setattr(disk_cache, "CLOSE_SECONDS", 0.2)
    disk = disks()
    cache_bytes = 12 * 4 * position_bytes(engine.checkpoint.config, engine.dtype)
    scheduler = scheduler_for(engine, disk=disk, kv_cache_bytes=cache_bytes, max_model_length=40)
    for seed in range(3):
        ask(scheduler, engine, Request(prompt(33, seed), 3, ignore_end_tokens=True))
    assert scheduler.on_disk is not None
    dropped = scheduler.on_disk.counts.failed
    assert dropped >= 8 and disk._queued_bytes == scheduler.runner.cache_bytes / 12
    began = time.monotonic()
    scheduler.close()
    disk.hurry(0.1)
    disk.close()
    assert time.monotonic() - began < 5 and scheduler.on_disk.counts.failed == dropped + 1
    answers.set()


def test_blocks_that_a_slow_disk_does_not_deliver_are_read_by_the_model(
    engine: Engine, disks: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests get a token in each step meanwhile, and with both readers stuck nobody waits again."""
    request = Request(prompt(30), 3, ignore_end_tokens=True)
    scheduler = scheduler_for(engine, disk=disks())
    tokens, *_ = ask(scheduler, engine, request)
    disk = restarted(scheduler, disks)
    scheduler = scheduler_for(engine, disk=disk)
    assert scheduler.on_disk is not None
    answers, read = threading.Event(), KeptFiles.read
    monkeypatch.setattr(disk_cache, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(KeptFiles, "read", lambda *given: answers.wait(30) and read(*given))
    other = Served(scheduler, engine, Request(prompt(5, 9), 120, ignore_end_tokens=True), 2)
    scheduler.step()
    served = Served(scheduler, engine, request)
    for count in range(2, 120):
        scheduler.step()
        assert len(other.tokens) == count, "the other request goes on"
        if served.tokens:
            break
        assert count > 2 or scheduler.on_disk.is_arriving(served.state)
    run_to_end(scheduler)
    assert served.tokens == tokens and scheduler.cached_tokens == 0
    again = scheduler_for(engine, disk=disk)
    assert again.on_disk is not None and ask(again, engine, request)[::2] == (tokens, 0)
    assert len(disk._current) == disk_cache.READERS
    third = scheduler_for(engine, disk=disk)
    assert third.on_disk is not None and ask(third, engine, request)[::2] == (tokens, 0)
    assert (again.on_disk.counts.hits, third.on_disk.counts.hits) == (1, 0)
    answers.set()
    wait_until(lambda: not disk._current)
    assert ask(scheduler_for(engine, disk=disk), engine, request)[::2] == (tokens, 28)


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "gone", "renamed", "foreign", "other sizes", "a directory"])
def test_a_damaged_block_is_a_miss(
    engine: Engine, disks: Callable[..., DiskCache], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The third block of five cannot be used, so only the two before it are; the log says it in one line."""
    request = Request(prompt(21), 4, ignore_end_tokens=True)
    scheduler = scheduler_for(engine, disk=disks())
    first = ask(scheduler, engine, request)
    disk = restarted(scheduler, disks)
    again = scheduler_for(engine, disk=disk)
    assert again.on_disk is not None
    pool = again.runner.pool
    state = Served(again, engine, request).state
    keys = [again.on_disk._key(each) for each in pool.digests(pool.find((), again.runner.kind(state)), request.prompt)]
    assert len(keys) == 5
    path = disk._files._path(keys[2])
    content = path.read_bytes()
    if damage == "changed":
        path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "cut":
        os.truncate(path, len(content) - 7)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "gone":
        path.unlink()
    elif damage == "renamed":
        disk._files._path(keys[3]).rename(path)
    elif damage == "foreign":
        path.write_bytes(b"another program wrote this" * 100)
    elif damage == "other sizes":
        disk._files.write(keys[2], {"keys_values": torch.zeros(3)})
    else:
        path.unlink()
        path.mkdir()
    run_to_end(again)
    updates = state.timings
    assert updates.cached_tokens == 8 and tuple(state.tokens[21:]) == first[0]
    assert again.on_disk.counts.failed == 1 and keys[2] not in disk
    (line,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "on disk" in line.getMessage() and line.exc_info is None
    assert disk.bytes == sum(disk._files._sizes.values())


def test_a_full_disk_is_one_line_and_no_error(
    engine: Engine, disks: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.files.safetensors_writer._write_at", full)
    disk = disks()
    scheduler = scheduler_for(engine, disk=disk)
    ask(scheduler, engine, Request(prompt(30), 3, ignore_end_tokens=True))
    scheduler.close()
    wait_until(lambda: not disk._jobs)
    assert scheduler.on_disk is not None and scheduler.on_disk.counts.failed and not files(disk)
    (line,) = caplog.records
    assert "No space left on device" in line.getMessage()


def test_a_copy_that_fails_is_no_error_of_a_request(
    engine: Engine, disks: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(PagedCache, "content", fails)
    cache_bytes = 12 * 4 * position_bytes(engine.checkpoint.config, engine.dtype)
    scheduler = scheduler_for(engine, disk=disks(), kv_cache_bytes=cache_bytes, max_model_length=40)
    for seed in range(2):
        ask(scheduler, engine, Request(prompt(33, seed), 3, ignore_end_tokens=True))
    assert scheduler.on_disk is not None and scheduler.on_disk.counts.failed >= 4 and "cannot be copied" in caplog.text


def test_the_limit_holds_and_the_beginning_of_a_prompt_stays(engine: Engine, disks: Callable[..., DiskCache]) -> None:
    """With room for about four of seven blocks, the first ones are kept: the others are of no use without them."""
    size = 4 * position_bytes(engine.checkpoint.config, engine.dtype) + kept_files.HEADER_BYTES
    disk = disks(4 * size)
    scheduler = scheduler_for(engine, disk=disk)
    request = Request(prompt(29), 1, ignore_end_tokens=True)
    ask(scheduler, engine, request)
    scheduler.close()
    disk = disks(4 * size)
    assert 0 < disk.bytes == sum(path.stat().st_size for path in files(disk)) <= 4 * size
    again = scheduler_for(engine, disk=disk)
    *_, cached = ask(again, engine, request)
    assert cached == 16
    for seed in range(1, 4):
        ask(again, engine, Request(prompt(29, seed), 1, ignore_end_tokens=True))
    again.close()
    disk = disks(4 * size)
    assert disk.bytes == sum(path.stat().st_size for path in files(disk)) <= 4 * size
    disk = disks(2 * size)
    assert disk.bytes == sum(path.stat().st_size for path in files(disk)) <= 2 * size
    with pytest.raises(OptionError, match="one block of this model has"):
        scheduler_for(engine, disk=disks(100))


def test_other_keys_thresholds_and_settings_find_nothing(
    directory: Path, engine: Engine, disks: Callable[..., DiskCache]
) -> None:
    request = Request(prompt(21), 1, ignore_end_tokens=True, namespace="a")
    scheduler = scheduler_for(engine, disk=disks())
    ask(scheduler, engine, request)
    disk = restarted(scheduler, disks)
    again = scheduler_for(engine, disk=disk)
    for namespace, threshold, expected in (("b", None, 0), ("", None, 0), ("a", 0.5, 0), ("a", None, 20)):
        asked = Request(request.prompt, 1, ignore_end_tokens=True, namespace=namespace, skip_threshold=threshold)
        assert ask(again, engine, asked)[2] == expected
    assert ask(scheduler_for(engine, disk=disk, prefill_chunk=32), engine, request)[2] == 0
    assert ask(scheduler_for(engine, disk=disk, block_size=5), engine, request)[2] == 0
    other = Engine.open(directory, device="cpu", skip_threshold=1.0, skip_min_experts=2)
    assert ask(scheduler_for(other, disk=disk), other, replace(request, skip_threshold=0.0))[2] == 0
    assert ask(scheduler_for(engine, disk=disk), engine, request)[2] == 20


def test_another_model_and_another_secret_have_other_keys(
    directory: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = engine.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    own = settings_digest(engine, checkpoint, b"secret", {})
    assert own == settings_digest(engine, Checkpoint(directory), b"secret", {})
    assert own != settings_digest(engine, checkpoint, b"another", {})
    assert own != settings_digest(engine, checkpoint, b"secret", {"block": 4})
    for options in ({"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"skip_rule": "naee"}):
        assert own != settings_digest(Engine.open(directory, device="cpu", **options), checkpoint, b"secret", {}), options
    with monkeypatch.context() as patched:
        patched.setattr(engine, "expert_cache", SimpleNamespace(miss_threshold=0.1))
        assert own != settings_digest(engine, checkpoint, b"secret", {}), "light experts may have been left out"
    weights = directory / "model.safetensors"
    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert own != settings_digest(engine, Checkpoint(directory), b"secret", {}), "the weights may have changed"

    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_is_in_doubt_leaves_the_disk_too(engine: Engine, disks: Callable[..., DiskCache]) -> None:
    scheduler = scheduler_for(engine, disk=disks())
    request = Request(prompt(21), 1, ignore_end_tokens=True)
    ask(scheduler, engine, request)
    disk = restarted(scheduler, disks)
    again = scheduler_for(engine, disk=disk)
    state = Served(again, engine, request).state
    while state not in again.running or again.on_disk is None or again.on_disk.is_arriving(state):
        again.step()
        if state.finished:
            break
    pool = again.runner.pool
    table = pool.find(request.prompt, again.runner.kind(state))
    pool.forget(table)
    wait_until(lambda: not disk._jobs)
    assert not files(disk) and disk.bytes == 0
    assert ask(again, engine, request)[2] == 0


def test_requests_that_arrive_together_read_the_disk_once(engine: Engine, disks: Callable[..., DiskCache]) -> None:
    scheduler = scheduler_for(engine, disk=disks())
    request = Request(prompt(29), 5, ignore_end_tokens=True)
    tokens, *_ = ask(scheduler, engine, request)
    again = scheduler_for(engine, disk=restarted(scheduler, disks))
    served = [Served(again, engine, request, number) for number in range(3)]
    cancelled = Served(again, engine, Request(prompt(29), 9, namespace="x"), 3)
    again.step()
    again.cancel(cancelled.state)
    run_to_end(again)
    assert [each.tokens for each in served] == [tokens] * 3
    assert again.on_disk is not None and again.on_disk.counts.read == 7
    assert_all_free(again)


@pytest.mark.parametrize("end", ["cancelled", "failed", "preempted"])
def test_a_request_may_end_while_its_blocks_arrive(
    engine: Engine, disks: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Blocks that arrive afterwards are put nowhere: their places may belong to others."""
    request = Request(prompt(30), 3, ignore_end_tokens=True)
    scheduler = scheduler_for(engine, disk=disks())
    tokens, *_ = ask(scheduler, engine, request)
    scheduler = scheduler_for(engine, disk=restarted(scheduler, disks))
    answers, read = threading.Event(), KeptFiles.read
    monkeypatch.setattr(KeptFiles, "read", lambda *given: answers.wait(30) and read(*given))
    served = Served(scheduler, engine, request)
    scheduler.step()
    on_disk = scheduler.on_disk
    assert on_disk is not None and on_disk.is_arriving(served.state)
    (arriving,) = on_disk._arriving
    if end == "cancelled":
        scheduler.cancel(served.state)
    elif end == "failed":
        scheduler.fail("told so")
    else:
        scheduler._preempt(served.state)
    answers.set()
    if end != "preempted":
        wait_until(lambda: arriving.reading.has_news)
        assert served.state.finished
        assert_all_free(scheduler)
    scheduler.step()
    assert arriving not in on_disk._arriving and arriving.reading.is_over
    run_to_end(scheduler)
    assert ask(scheduler, engine, request)[::2] == (tokens, 28)
    if end == "preempted":
        assert served.tokens == tokens and scheduler.cached_tokens == 28, "what it finds after its start does not count"
    assert_all_free(scheduler)


def test_many_requests_in_little_memory_get_what_they_get_alone(engine: Engine, disks: Callable[..., DiskCache]) -> None:
    """Prompts with equal beginnings in a cache that preempts, evicts and reads again all the time."""
    choose = random.Random(1)
    requests = [
        Request((*prompt(24, choose.randrange(2))[: choose.randrange(1, 25)], *prompt(choose.randrange(1, 9), number)), 6,
                ignore_end_tokens=True)
        for number in range(30)
    ]  # fmt: skip
    alone = [ask(scheduler_for(engine), engine, request)[0] for request in requests]
    cache_bytes = 20 * 4 * position_bytes(engine.checkpoint.config, engine.dtype)
    scheduler = scheduler_for(engine, disk=disks(), kv_cache_bytes=cache_bytes, max_model_length=40)
    for _ in range(2):
        served = [Served(scheduler, engine, request, number) for number, request in enumerate(requests)]
        run_to_end(scheduler)
        assert [each.tokens for each in served] == alone
        assert_all_free(scheduler)
    assert scheduler.on_disk is not None and scheduler.on_disk.counts.hits and scheduler.on_disk.counts.failed == 0
    assert scheduler.preemptions


def test_a_loop_keeps_its_cache_when_it_stops(engine: Engine, disks: Callable[..., DiskCache]) -> None:
    for expected in (0, 96):
        disk = disks()
        loop = EngineLoop(engine, kv_cache_bytes=8 << 20, disk=disk, max_model_length=128)
        ended, cached = threading.Event(), list[int]()

        def listener(update: Any, ended: threading.Event = ended, cached: list[int] = cached) -> None:
            if update.finish_reason:
                cached.append(update.timings.cached_tokens)
                ended.set()

        loop.start()
        loop.submit(Request(prompt(110), 3, ignore_end_tokens=True), listener)
        assert ended.wait(20)
        load = loop.load()
        loop.stop()
        assert cached == [expected] and load.kv_cache_disk_hits == bool(expected)
        assert load.kv_cache_disk_blocks_read == expected // 32
        assert bool(load.kv_cache_disk_bytes) == bool(expected)


def test_models_that_share_nothing_are_served_without(
    tmp_path: Path, disks: Callable[..., DiskCache], caplog: pytest.LogCaptureFixture
) -> None:
    """States of recurrent layers are not shared in memory, and are not kept on disk."""
    save_reference("minimax", tmp_path / "model", vocab_size=VOCABULARY)
    add_tokenizer(tmp_path / "model")
    engine = Engine.open(tmp_path / "model", device="cpu")
    assert engine.cache_sizes[1]
    scheduler = scheduler_for(engine, disk=disks())
    assert scheduler.on_disk is None and "are not kept on disk either" in caplog.text
    ask(scheduler, engine, Request(prompt(21), 3, ignore_end_tokens=True))
    scheduler.close()
    assert not files(disks())


def test_a_block_that_leaves_for_others_while_it_is_read_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, counts, read, name = DiskCache(tmp_path, LIMIT), disk_cache.DiskCounts(), KeptFiles.read, "0" * 64

    def removed(files: KeptFiles, key: str) -> Any:
        files.remove(key)
        return read(files, key)

    assert disk.write(name, {"a": torch.zeros(1)}, counts)
    wait_until(lambda: counts.written == 1 and not disk._queued)
    monkeypatch.setattr(KeptFiles, "read", removed)
    assert disk.read(name, counts, lambda _: True) is None
    assert counts.failed == 0 and not caplog.records
    disk.close()


def test_a_disk_has_one_owner_and_an_end(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path, LIMIT)
    with pytest.raises(OptionError, match="another process uses this cache"):
        DiskCache(tmp_path, LIMIT)
    disk.close()
    assert not disk.write("0" * 64, {"a": torch.zeros(1)}, disk_cache.DiskCounts())
    DiskCache(tmp_path, LIMIT).close()


def test_the_code_of_folders_within_rooms_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "batching").mkdir()
    (tmp_path / "kernels" / "stored").mkdir(parents=True)
    source = tmp_path / "kernels" / "stored" / "low_bit.py"
    monkeypatch.setattr(disk_blocks, "__file__", str(tmp_path / "batching" / "disk_blocks.py"))
    source.write_text("one")
    before = disk_blocks._source_digest()
    source.write_text("two")
    assert disk_blocks._source_digest() != before
