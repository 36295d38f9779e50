"""Weights that are read into huge pages in the place of their mapping stay what and where they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from conftest import save_reference
from safetensors.torch import save_file
from tokenizers_for_tests import VOCABULARY, add_tokenizer

from engine import Engine
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.errors import CheckpointError, OptionError
from engine.files.huge_pages import huge_page_bytes
from engine.files.safetensors_file import SafetensorsFile
from engine.generation.options import MAPPED, MEMORY
from engine.passes import held_weights
from engine.passes.held_weights import hold_weights

PAGE = huge_page_bytes()
pytestmark = pytest.mark.skipif(not PAGE, reason="the system gives no huge pages")
ANY = 1 << 40
"""More bytes than any weights here have."""


@pytest.fixture(autouse=True)
def even_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_weights, "LEAST_BYTES", 1)


def written(directory: Path) -> Path:
    """Return a file of three tensors, of which the second is not held."""
    torch.manual_seed(0)
    tensors = {name: torch.randint(256, (5, PAGE), dtype=torch.uint8) for name in ("a", "b", "c")}
    save_file(tensors, directory / "weights.safetensors")
    return directory / "weights.safetensors"


def test_values_stay_and_releasing_the_file_leaves_them(tmp_path: Path) -> None:
    file = SafetensorsFile(written(tmp_path))
    whole = {name: file.tensor(name).clone() for name in "abc"}
    weights = {"a": file.tensor("a"), "part of c": file.tensor("c")[1:4, 100:].t(), "elsewhere": whole["b"]}
    places = {name: weight.data_ptr() for name, weight in weights.items()}
    assert hold_weights([file], weights.values(), ANY)
    mapped = Path("/proc/self/smaps").read_text()
    for turn in range(2):
        assert torch.equal(weights["a"], whole["a"]) and torch.equal(weights["part of c"], whole["c"][1:4, 100:].t())
        for name in "abc":
            assert torch.equal(file.tensor(name), whole[name]), (turn, name)
        file.release()
    assert {name: weight.data_ptr() for name, weight in weights.items()} == places
    names = [line for line in mapped.splitlines() if line.endswith("weights.safetensors")]
    assert names, "what is not held stays mapped"
    begin = places["a"] // PAGE * PAGE
    assert not any(int(line.split("-")[0], 16) <= begin + PAGE < int(line.split("-")[1].split()[0], 16) for line in names)


def test_the_memory_has_huge_pages(tmp_path: Path) -> None:
    file = SafetensorsFile(written(tmp_path))
    weight = file.tensor("a")
    hold_weights([file], [weight], ANY)
    assert _huge_bytes_at(weight.data_ptr() + 2 * PAGE) >= 4 * PAGE


def test_copies_get_huge_pages_where_they_are() -> None:
    whole = torch.ones(16, 2 * PAGE, dtype=torch.uint8)
    before = _huge_bytes_at(whole.data_ptr() + 2 * PAGE)
    assert hold_weights([], [whole[:, :5], whole[:1].expand(9, -1)], ANY)
    assert bool((whole == 1).all())
    assert before >= 14 * PAGE or _huge_bytes_at(whole.data_ptr() + 2 * PAGE) > before or not _collapses()


def _collapses() -> bool:
    """Return whether this Linux moves memory to huge pages where it is."""
    return tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 1)


def _huge_bytes_at(address: int) -> int:
    """Return the bytes of huge pages in the mapping that holds an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0


def test_too_little_and_too_much_stay_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SafetensorsFile(written(tmp_path))
    weight = file.tensor("a")
    assert not hold_weights([file], [weight], weight.nbytes - 1)
    assert not hold_weights([file], [weight[:1], weight[2:3]], 2 * PAGE + PAGE // 2), "the gap between them is read too"
    monkeypatch.setattr(held_weights, "LEAST_BYTES", weight.nbytes + 1)
    assert not hold_weights([file], [weight], ANY)
    monkeypatch.setattr(held_weights, "huge_page_bytes", lambda: 0)
    assert not hold_weights([file], [weight] * 9, ANY)


@pytest.mark.parametrize("change", ["shorter", "rewritten"])
def test_a_file_that_changed_is_refused(tmp_path: Path, change: str) -> None:
    file = SafetensorsFile(written(tmp_path))
    weight = file.tensor("c")
    if change == "shorter":
        os.truncate(file.path, file.size - PAGE)
    else:
        os.utime(file.path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while in use"):
        hold_weights([file], [weight], ANY)


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SafetensorsFile(written(tmp_path))
    weight = file.tensor("c")
    monkeypatch.setattr(file, "check_unchanged", lambda opened: os.truncate(file.path, file.size - PAGE))
    with pytest.raises(CheckpointError, match="became shorter while in use"):
        hold_weights([file], [weight], ANY)


def test_a_model_writes_the_same_text(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path, vocab_size=VOCABULARY)
    add_tokenizer(tmp_path)
    mapped, held = (Engine.open(tmp_path, load_mode=load_mode) for load_mode in (MAPPED, MEMORY))
    texts = [engine.generate(["once upon"], max_new_tokens=12)[0].text for engine in (mapped, held)]
    assert texts[0] == texts[1] and (mapped.load_mode, held.load_mode) == (MAPPED, MEMORY)
    for engine, is_mapped in ((mapped, True), (held, False)):
        assert isinstance(engine.checkpoint, Checkpoint) and isinstance(engine.decoder, Decoder)
        names = [_name_at(weight.data_ptr()) for weight in engine.decoder.weights if weight.numel()]
        assert any(name.endswith(".safetensors") for name in names) == is_mapped
        engine.checkpoint.release()
    assert held.generate(["once upon"], max_new_tokens=12)[0].text == texts[0]
    assert held.weights_resident_bytes >= held.weights_bytes


def _name_at(address: int) -> str:
    """Return the name of the file that is mapped at an address; empty for none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return [*line.split(maxsplit=5), ""][5]
    return ""


def test_memory_that_is_reserved_is_not_free(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path, vocab_size=VOCABULARY)
    engine = Engine.open(tmp_path, load_mode=MEMORY)
    engine.prepare(reserved_bytes=ANY)
    assert engine.load_mode == MAPPED


def test_a_load_mode_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="load mode is 'Memory'; it must be one of mapped, memory"):
        Engine.open(tmp_path, load_mode="Memory")
