"""Tests that test_gpu_step.py runs in a process of its own, where Triton interprets its kernels on the CPU.

On a GPU they run as they are, with CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_reference
from interpreted_triton import bfloat16_as_on_cards  # noqa: F401 (a fixture)
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.gpu import layers as gpu_layers
from engine.decoder.gpu import triton_experts
from engine.decoder.gpu.step import GpuStep, can_step, use_gpu_steps
from engine.decoder.gpu.triton_experts import TritonExperts
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import PagedBatch, PagedCache
from engine.decoder.routing import Skipping, TopK
from engine.kernels.kernel_choice import DECODING, PROMPT

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES = [
    *(("mixtral", batch) for batch in (1, 3, 6)),
    *(("qwen2_moe", batch) for batch in (1, 6)),  # biases, a shared expert with a gate, dense layers
    ("qwen3_moe", 1),  # norms of heads
    ("olmoe", 2),  # norms of all heads
    *(("gpt_oss", batch) for batch in (1, 6)),  # sinks, windows, biases and clamped experts
    ("granitemoe", 2),  # factors of residuals, embeddings and logits
]
"""Families with their numbers of sequences."""
STEPS = 3


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each program compute many rows where it is interpreted: the interpreter's time goes by programs."""
    for sizes in (gpu_layers.PRODUCT, triton_experts.GATE_UP, triton_experts.DOWN):
        monkeypatch.setitem(sizes, "ROWS", sizes["ROWS"] if PLACE.type == "cuda" else 16)


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.inference_mode():
        yield


def opened(family: str, place: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    save_reference(family, place)
    checkpoint = Checkpoint(place)
    source = checkpoint.source(dtype)
    torch.manual_seed(0)
    decoder = Decoder(checkpoint.config, lambda name: source(name).clone().to(PLACE)).eval()
    assert can_step(decoder)
    return decoder


def some_tokens(decoder: Decoder, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(3, decoder.config.vocabulary_size, (batch, length), generator=generator).to(PLACE)


def logits_of_steps(decoder: Decoder, step: GpuStep | None, tokens_BP: Tensor, real_BP: Tensor | None = None) -> Tensor:
    """Return the logits of the steps after a prompt, [B, steps, V]; every step has to be one of `step`."""
    decoder.gpu_step = None
    length = tokens_BP.shape[1] - STEPS
    cache = KeyValueCache(decoder.config, len(tokens_BP), tokens_BP.shape[1], decoder.dtype, PLACE)
    decoder.hidden_states(tokens_BP[:, :length], None if real_BP is None else real_BP[:, :length], cache)
    decoder.gpu_step = step
    made = []
    for place in range(length, tokens_BP.shape[1]):
        seen_BP = None if real_BP is None else real_BP[:, : place + 1]
        if step is not None:
            hidden_BLD = step(tokens_BP[:, place : place + 1], seen_BP, cache, DECODING)
            assert hidden_BLD is not None
        else:
            hidden_BLD = decoder.hidden_states(tokens_BP[:, place : place + 1], seen_BP, cache, DECODING)
        made.append(decoder.logits(hidden_BLD, DECODING))
        assert cache.length == place + 1
    decoder.gpu_step = None
    return torch.cat(made, dim=1)


@pytest.mark.parametrize(("family", "batch"), FAMILIES)
def test_equals_the_layers(family: str, batch: int, tmp_path: Path) -> None:
    decoder = opened(family, tmp_path)
    tokens_BP = some_tokens(decoder, batch, 9 + STEPS)
    expected = logits_of_steps(decoder, None, tokens_BP)
    assert torch.allclose(logits_of_steps(decoder, GpuStep(decoder), tokens_BP), expected, rtol=1e-4, atol=1e-5)


def test_the_trial_finds_that_it_equals_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with the choices that the kernels note."""
    monkeypatch.setenv("COMPRESS_KERNELS", "compiled")
    decoder = opened("mixtral", tmp_path, torch.bfloat16)
    use_gpu_steps(decoder)
    assert decoder.gpu_step is not None


def test_texts_longer_than_a_block_of_keys(tmp_path: Path) -> None:
    """Several splits have several blocks of keys each, and one graph serves several caches and lengths."""
    decoder = opened("mixtral", tmp_path)
    step = GpuStep(decoder)
    for length in (30, 150, 90):
        tokens_BP = some_tokens(decoder, 2, length + STEPS)
        expected = logits_of_steps(decoder, None, tokens_BP)
        assert torch.allclose(logits_of_steps(decoder, step, tokens_BP), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_left_padding(family: str, tmp_path: Path) -> None:
    decoder = opened(family, tmp_path)
    tokens_BP = some_tokens(decoder, 3, 12 + STEPS)
    real_BP = torch.ones_like(tokens_BP, dtype=torch.bool)
    real_BP[0, :5], real_BP[2, :1] = False, False
    expected = logits_of_steps(decoder, None, tokens_BP, real_BP)
    step = GpuStep(decoder)
    assert torch.allclose(logits_of_steps(decoder, step, tokens_BP, real_BP), expected, rtol=1e-4, atol=1e-5)
    expected = logits_of_steps(decoder, None, tokens_BP)
    assert torch.allclose(logits_of_steps(decoder, step, tokens_BP), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_paged(family: str, tmp_path: Path) -> None:
    """Sequences of different lengths lie in blocks of one cache, in any order."""
    decoder = opened(family, tmp_path)
    lengths, results = (3, 40, 17), []
    texts = some_tokens(decoder, 3, 48)
    for step in (None, GpuStep(decoder)):
        cache = PagedCache(decoder.config, 1 << 20, decoder.dtype, PLACE, block_size=8)
        tables = [cache.pool.find([]) for _ in lengths]
        for positions in range(8, 56, 8):  # the sequences take their blocks in turn
            for table, length in zip(tables, lengths, strict=True):
                cache.pool.extend(table, min(length + STEPS, positions))
        for table, length, text in zip(tables, lengths, texts, strict=True):
            batch = PagedBatch(cache, [table], [length], [length])
            decoder.hidden_states(text[None, :length], None, batch)
            cache.pool.fill(table, text.tolist(), length)
        decoder.gpu_step, made = step, []
        for more in range(STEPS):
            batch = PagedBatch(cache, tables, None, [0, 0, 0])
            tokens_B1 = torch.stack([text[length + more] for text, length in zip(texts, lengths, strict=True)])[:, None]
            hidden_BLD = decoder.hidden_states(tokens_B1, None, batch, DECODING)
            if step is not None:
                again = step(tokens_B1, None, batch, DECODING)
                assert again is not None and torch.equal(again, hidden_BLD)
            made.append(decoder.logits(hidden_BLD, DECODING))
            for table, length, text in zip(tables, lengths, texts, strict=True):
                cache.pool.fill(table, text.tolist(), length + more + 1)
        decoder.gpu_step = None
        results.append(torch.cat(made, dim=1))
    assert torch.allclose(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "threshold", "keep"), [("qwen2_moe", 0.9, 1), ("mixtral", 0.8, 1), ("olmoe", 1.2, 2)])
def test_skipping_and_its_observers(family: str, threshold: float, keep: int, tmp_path: Path) -> None:
    decoder = opened(family, tmp_path)
    for block in decoder.moe_blocks:
        gamma1, gamma2 = (0.5 + torch.rand(size, device=PLACE) for size in ((7,), (len(block.experts),) * 2))
        assert isinstance(block.routing, TopK)
        rule = replace(block.routing, experts_per_token=keep + 1)
        block.routing = Skipping(rule, gamma1, gamma2, threshold, block.routing.normalise, keep)
    tokens_BP, seen = some_tokens(decoder, 2, 8 + STEPS), []
    for step in (None, GpuStep(decoder)):
        chosen: list[Tensor] = []
        for block in decoder.moe_blocks:
            block.observer = lambda x, logits, selection, own=chosen: own.append(selection.experts.clone())
        made = logits_of_steps(decoder, step, tokens_BP)
        seen.append((made, torch.cat(chosen[len(decoder.moe_blocks) :])))
    assert torch.allclose(seen[1][0], seen[0][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(seen[1][1], seen[0][1]) and (seen[0][1] < 0).any()


def test_a_cache_that_grows_and_another_one_between(tmp_path: Path) -> None:
    """The places that a graph has been given are forgotten when they hold no more."""
    decoder = opened("mixtral", tmp_path)
    tokens_BP, step, results = some_tokens(decoder, 1, 12), GpuStep(decoder), []
    for own in (None, step):
        cache = KeyValueCache(decoder.config, 1, 9, decoder.dtype, PLACE)
        paged = PagedCache(decoder.config, 1 << 16, decoder.dtype, PLACE, block_size=16)
        table = paged.pool.find([])
        paged.pool.extend(table, 12)
        decoder.gpu_step = None
        decoder.hidden_states(tokens_BP[:, :6], None, cache)
        decoder.hidden_states(tokens_BP[:, :6], None, PagedBatch(paged, [table], [6], [6]))
        paged.pool.fill(table, tokens_BP[0].tolist(), 6)
        made = []
        for place in range(6, 12):
            if place == 8:
                cache.extend(12)
            if place == 10:
                view = PagedBatch(paged, [table], None, [0])
                decoder.hidden_states(tokens_BP[:, :1], None, view, DECODING) if own is None else own(
                    tokens_BP[:, :1], None, view, DECODING
                )
            given = tokens_BP[:, place : place + 1], None, cache, DECODING
            made.append(decoder.hidden_states(*given) if own is None else own(*given))
        results.append(torch.cat(made, dim=1))
    assert torch.allclose(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_changed_weights_are_read_anew(tmp_path: Path) -> None:
    decoder = opened("qwen2_moe", tmp_path)
    tokens_BP, step = some_tokens(decoder, 1, 6 + STEPS), GpuStep(decoder)
    before = logits_of_steps(decoder, step, tokens_BP)
    for block in decoder.moe_blocks:
        block.router_ND.copy_(-block.router_ND)
    decoder.gpu_step = step
    decoder.weights_changed()
    after, expected = (logits_of_steps(decoder, own, tokens_BP) for own in (step, None))
    assert torch.allclose(after, expected, rtol=1e-4, atol=1e-5) and not torch.allclose(after, before, atol=1e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, with which Triton interprets the kernels
def test_logits_that_are_no_numbers_stay_with_their_sequence(tmp_path: Path) -> None:
    decoder = opened("mixtral", tmp_path)
    tokens_BP = some_tokens(decoder, 6, 6 + STEPS)
    tokens_BP[2, -STEPS:] = 3
    tokens_BP[tokens_BP == 3] = 4
    tokens_BP[2, -STEPS:] = 3
    expected = logits_of_steps(decoder, None, tokens_BP)
    decoder.embedding_VD[3] = torch.nan
    made = logits_of_steps(decoder, GpuStep(decoder), tokens_BP)
    others = [row for row in range(6) if row != 2]
    assert made[2].isnan().all() and torch.allclose(made[others], expected[others], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_paged", [False, True], ids=["own cache", "paged"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_first_piece_of_a_text(family: str, is_paged: bool, tmp_path: Path) -> None:
    """Texts of several lengths are read, and steps follow that read the copied keys and values."""
    decoder = opened(family, tmp_path)
    for block in decoder.moe_blocks:
        block.on_gpu = TritonExperts()  # torch's experts wait for the host, which a graph cannot record
    step = GpuStep(decoder)
    for length in (21, 5):
        tokens_1P, results = some_tokens(decoder, 1, length + 2), []
        text = tokens_1P[0].tolist()
        for own in (None, step):
            decoder.gpu_step = None
            cache = PagedCache(decoder.config, 1 << 20, decoder.dtype, PLACE, block_size=8)
            table = cache.pool.find([])
            cache.pool.extend(table, length + 2)
            kept = KeyValueCache(decoder.config, 1, length + 2, decoder.dtype, PLACE)
            made = []
            for start, end in ((0, length), (length, length + 1), (length + 1, length + 2)):
                view = PagedBatch(cache, [table], [length] if start == 0 else None, [length]) if is_paged else kept
                given = tokens_1P[:, start:end], None, view, DECODING if start else PROMPT
                hidden_1LD = decoder.hidden_states(*given) if own is None else own(*given)
                assert hidden_1LD is not None
                made.append(hidden_1LD)
                cache.pool.fill(table, text, end)
            results.append(torch.cat(made, dim=1))
        assert torch.allclose(results[1], results[0], rtol=1e-4, atol=1e-5)
        assert kept.length == (0 if is_paged else length + 2)


def test_half_precision_is_no_less_exact(tmp_path: Path) -> None:
    decoder = opened("qwen3_moe", tmp_path, torch.bfloat16)
    tokens_BP = some_tokens(decoder, 2, 20 + STEPS)
    made = [logits_of_steps(decoder, step, tokens_BP).double() for step in (None, GpuStep(decoder))]
    wide = decoder.double()
    exact = logits_of_steps(wide, None, tokens_BP)
    errors = [float((each - exact).norm() / exact.norm()) for each in made]
    assert errors[1] <= 1.2 * errors[0], errors
