"""A writer writes with the weights as they are now: its own, or a copy in bfloat16 that the compiled kernels multiply."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, FURTHER_FAMILIES, MOE_FAMILIES, others_slow, save_reference

from compress.distillation.responses import limits_of, numbers_of, write_responses
from compress.distillation.writer import Writer, copy_in
from engine.batching.together import continue_together
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.generation.options import SamplingOptions
from engine.kernels import kernel_choice

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
FACTORS = ("gemma4_text",)
"""Families whose routers have factors of experts, which are a Routing's and not a parameter, and stay as they are."""
FREE, GREEDY = SamplingOptions(temperature=1.0), SamplingOptions()


def loaded(directory: Path, dtype: torch.dtype) -> Decoder:
    checkpoint = Checkpoint(directory)
    return Decoder(checkpoint.config, checkpoint.source(dtype))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    save_reference("mixtral", tmp_path)
    return tmp_path


def written(writer: Writer, seed: int = 1, sampling: SamplingOptions = FREE) -> list[list[int]]:
    examples = writer(PROMPTS, 12, (), sampling, torch.Generator().manual_seed(seed))
    assert [example.prompt for example in examples] == PROMPTS
    return [example.response for example in examples]


def test_both_ways_of_writing_draw_the_same_tokens_in_float32(mixtral: Path) -> None:
    """In one batch and through the paged cache: prompts of different lengths, and responses that end before others."""
    decoder, prompts, ends = loaded(mixtral, torch.float32), [*PROMPTS, [14] * 20, [15, 16]], {17, 40, 41, 60}
    for seed in range(3):
        limits = limits_of(prompts, 40)
        numbers_BL = numbers_of(torch.Generator().manual_seed(seed), limits)
        plain = write_responses(decoder, prompts, 40, ends, FREE, torch.Generator().manual_seed(seed))
        paged = continue_together(decoder, prompts, limits, ends, FREE, numbers_BL, max_batch_size=3)
        assert paged == [example.response for example in plain]
        assert len({len(response) for response in paged}) > 1
    assert Writer(decoder)(prompts, 40, ends, FREE, torch.Generator().manual_seed(2)) == plain


def test_a_copy_writes_what_the_model_in_bfloat16_writes(mixtral: Path) -> None:
    copied, narrow = (Writer(loaded(mixtral, dtype), torch.bfloat16) for dtype in (torch.float32, torch.bfloat16))
    assert copied.dtype == narrow.dtype == torch.bfloat16
    assert written(copied) == written(narrow) and written(copied, 2) == written(narrow, 2)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_copy_follows_the_training(family: str, tmp_path: Path) -> None:
    """The kernels read the sinks of GPT-OSS from a copy of their own."""
    save_reference(family, tmp_path)
    decoder = loaded(tmp_path, torch.float32)
    writer = Writer(decoder, torch.bfloat16)
    before = written(writer, sampling=GREEDY)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)), alpha=0.3)
    after = written(writer, sampling=GREEDY)
    assert after != before and after == written(Writer(decoder, torch.bfloat16), sampling=GREEDY)


@pytest.mark.parametrize("family", others_slow([*FAMILIES, *FURTHER_FAMILIES], *MOE_FAMILIES))
def test_a_copy_computes_what_a_model_loaded_in_its_dtype_computes(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path)
    wide, tokens_BL = loaded(tmp_path, torch.float32), torch.tensor([[5, 6, 7, 8, 9, 10]])
    copied = copy_in(torch.bfloat16, wide)
    with torch.no_grad():
        own, other = copied(tokens_BL), loaded(tmp_path, torch.bfloat16)(tokens_BL)
    assert own.dtype == other.dtype == torch.bfloat16
    if family in FACTORS:
        assert torch.allclose(own.float(), other.float(), atol=0.05)
    else:
        assert torch.equal(own, other)
    assert {weight.dtype for weight in wide.parameters()} == {torch.float32}, "the model itself stays as it was"
    assert not any(weight.requires_grad for weight in copied.parameters())
    assert copied.config.tied_embeddings is (copied.head is copied.embedding)


def test_without_kernels_a_model_writes_in_its_own_dtype(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_load_kernels", lambda: None)
    decoder = loaded(mixtral, torch.float32)
    writer = Writer(decoder, torch.bfloat16)
    plain = write_responses(decoder, PROMPTS, 12, (), FREE, torch.Generator().manual_seed(1))
    assert writer.dtype == torch.float32 and written(writer) == [example.response for example in plain]
