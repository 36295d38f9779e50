"""`compress serve --kv-cache-disk` as processes that follow each other: what is known after a restart, and to whom."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from conftest import save_reference
from server_for_tests import process, served, wait_for
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from engine.errors import OptionError
from engine.expert_cache.cache import ExpertCache
from engine.files.kept_files import KeptFiles
from engine.server.options import ServeOptions
from engine.server.serve import load, models_of, open_disk
from engine.server.server import State

PROMPT = {"prompt": list(range(10, 110)), "max_tokens": 4, "ignore_eos": True, "temperature": 0}
SHARED = 96
"""Tokens of the prompt in full blocks."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, family in (("first", "mixtral"), ("second", "olmoe")):
        save_reference(family, path / name, vocab_size=VOCABULARY)
        add_tokenizer(path / name)
    return path


def ask(url: str, key: str = "", **changes: Any) -> tuple[str, int]:
    """Return the text that follows the prompt, and how many of its tokens were cached."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx2.post(f"{url}/v1/completions", json=PROMPT | changes, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def figures(url: str, key: str = "") -> dict[str, float]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    lines = httpx2.get(f"{url}/metrics", headers=headers).text.splitlines()
    every = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    return {name.removeprefix("compress_kv_cache_disk_"): value for name, value in every.items() if "_cache_disk_" in name}


@contextmanager
def server(options: ServeOptions) -> Iterator[str]:
    """Yield the URL of a server in this process, which is started and ended like one of its own."""
    disk = open_disk(options)
    assert disk is not None
    service = load(options, disk=disk)
    with served(State(options.api_keys, phase="ready", loaded=service, secret=disk.secret)) as url:
        yield url
    service.close()
    disk.close()


def test_keys_find_their_own_prompts_after_a_restart_and_nobody_elses(directory: Path, tmp_path: Path) -> None:
    options = ServeOptions(
        models=(str(directory / "first"),),
        kv_cache_bytes=1 << 20,
        threads=1,
        kv_cache_disk=10 << 20,
        kv_cache_directory=tmp_path,
    )
    with server(replace(options, api_keys=("alpha", "beta"))) as url:
        text, cached = ask(url, "alpha")
        assert cached == 0 and ask(url, "alpha") == (text, SHARED) and ask(url, "beta") == (text, 0)
        assert set(figures(url, "alpha").values()) == {0.0}
    files = list(tmp_path.iterdir())
    assert len(files) == 2 + 2 * 3 and all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    content = b"".join(path.name.encode() + path.read_bytes() for path in files)
    assert b"alpha" not in content and b"beta" not in content
    with server(replace(options, api_keys=("gamma", "beta", "alpha"))) as url:
        assert ask(url, "gamma") == (text, 0)
        assert ask(url, "alpha") == (text, SHARED)
        found = figures(url, "alpha")
        assert (found["hits_total"], found["blocks_read_total"], found["blocks_failed_total"]) == (1, 3, 0)
        assert found["bytes"] == sum(path.stat().st_size for path in files if path.suffix)
    with server(options) as url:
        assert ask(url) == (text, 0), "a server without keys does not find what a key has sent"
    with server(replace(options, api_keys=("gamma",))) as url:
        assert ask(url, "gamma") == (text, SHARED)
    with server(replace(options, api_keys=("delta",))) as url:
        assert ask(url, "delta") == (text, 0), "the only key of a server may be another client's than before"


@pytest.mark.slow
def test_a_process_writes_its_cache_when_a_signal_ends_it(directory: Path, tmp_path: Path) -> None:
    options = ("--kv-cache-disk", "10MB", "--kv-cache-memory", "4MB", "--kv-cache-directory", str(tmp_path))
    for number, status, expected in ((signal.SIGTERM, 0, 0), (signal.SIGINT, 130, SHARED)):
        with process(directory / "first", *options) as (running, ready):
            assert ask(ready["url"])[1] == expected
            ask(ready["url"], prompt=list(range(20 + number, 120 + number)))
            with pytest.raises(OptionError, match="another process uses this cache"):
                KeptFiles(tmp_path, 1000)
            running.send_signal(number)
            assert running.wait(30) == status
    assert len(list(tmp_path.glob("*.safetensors"))) == 9, "SIGINT leaves a moment to write"


def test_several_models_share_the_disk_and_find_their_own(directory: Path, tmp_path: Path) -> None:
    options = ServeOptions(
        models_dir=directory, kv_cache_bytes=1 << 20, threads=1, kv_cache_disk=10 << 20, kv_cache_directory=tmp_path
    )
    for expected in (0, SHARED):
        disk = open_disk(options)
        state = State(phase="ready", models=models_of(options, disk))
        with served(state) as url:
            assert [ask(url, model=name)[1] for name in ("first", "second")] == [expected] * 2
            found = figures(url)
            assert found['hits_total{model="second"}'] == bool(expected) and "bytes" in found
        state.names.close()
        for each in state.services:
            each.close()
        assert disk is not None
        disk.close()


def test_a_disk_that_hangs_holds_up_neither_requests_nor_health(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has room for one prompt, so that each one sends the one before to a disk that does not answer."""
    answers = threading.Event()
    monkeypatch.setattr(KeptFiles, "write", lambda *_: answers.wait(60))
    options = ServeOptions(
        models=(str(directory / "first"),),
        kv_cache_bytes=140 * 3 * 2 * 2 * 8 * 4,
        threads=1,
        kv_cache_disk=10 << 20,
        kv_cache_directory=tmp_path,
    )
    disk = open_disk(options)
    assert disk is not None
    service = load(options, disk=disk)
    with served(State(phase="ready", loaded=service)) as url:
        for first in range(10, 50):
            assert ask(url, prompt=list(range(first, first + 100)))[1] == 0
            assert httpx2.get(f"{url}/health", timeout=5).status_code == 200
        assert disk._jobs and figures(url)["bytes"] == 0
        answers.set()
        wait_for(lambda: not disk._jobs)
    service.close()
    disk.close()


def test_a_memory_limit_covers_the_blocks_on_their_way(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(ExpertCache, "reserve", lambda _, size: reserved.append(size))
    options = ServeOptions(
        models=(str(directory / "first"),),
        kv_cache_bytes=1 << 20,
        threads=1,
        memory_limit=20 << 30,
        kv_cache_disk=10 << 20,
        kv_cache_directory=tmp_path,
    )
    disk = open_disk(options)
    assert disk is not None
    for given in (None, disk):
        load(options, disk=given).close()
    disk.close()
    assert reserved == [1 << 20, (1 << 20) + (256 << 20) + 2 * (64 << 20)]


def test_wrong_options_are_refused_before_any_work(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--kv-cache-directory is for --kv-cache-disk"):
        ServeOptions(kv_cache_directory=tmp_path)
    with pytest.raises(OptionError, match="kv-cache-disk"):
        ServeOptions(kv_cache_disk=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be used as a cache"):
        open_disk(ServeOptions(kv_cache_disk=1000, kv_cache_directory=tmp_path / "file"))
    disk = open_disk(ServeOptions(kv_cache_disk=10, kv_cache_directory=tmp_path / "kept"))
    with pytest.raises(OptionError, match="one block of this model has"):
        load(ServeOptions(models=(str(directory / "first"),), kv_cache_bytes=1 << 20, threads=1), disk=disk)


def test_the_default_directory_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_disk(ServeOptions()) is None
    for name, value, expected in (("XDG_CACHE_HOME", "cache", "cache"), ("HOME", "home", "home/.cache")):
        monkeypatch.setenv(name, str(tmp_path / value))
        disk = open_disk(ServeOptions(kv_cache_disk=1000))
        assert disk is not None
        disk.close()
        assert sorted(os.listdir(tmp_path / expected / "moe-compress" / "kv-cache")) == ["lock", "secret"]
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OptionError, match="give --kv-cache-directory"):
        open_disk(ServeOptions(kv_cache_disk=1000))
