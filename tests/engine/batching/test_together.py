"""Prompts that are continued together get the tokens of prompts that are continued alone, and blocks are given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import MOE_FAMILIES, save_reference
from torch import Tensor

from engine.batching import together
from engine.batching.together import continue_together
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.block_pool import BlockPool
from engine.decoder.model import Decoder
from engine.generation.options import SamplingOptions
from engine.generation.sampling import probabilities, sample

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [7, 7, 9, 4]]
LIMITS = [6, 1, 9, 3, 5]
GREEDY, FREE = SamplingOptions(), SamplingOptions(temperature=1.0)


def loaded(directory: Path, family: str, dtype: torch.dtype = torch.float32) -> Decoder:
    save_reference(family, directory)
    checkpoint = Checkpoint(directory)
    return Decoder(checkpoint.config, checkpoint.source(dtype))


def numbers(seed: int = 0) -> Tensor:
    return torch.rand(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def alone(decoder: Decoder, prompt: list[int], limit: int, end: int = -1) -> list[int]:
    """Continue greedily, reading the whole sequence again for each token."""
    written: list[int] = []
    while len(written) < limit and end not in written:
        written.append(int(decoder(torch.tensor([prompt + written]))[0, -1].argmax()))
    return written


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("batch", [2, 64])
def test_greedy_tokens_equal_those_written_alone(family: str, batch: int, tmp_path: Path) -> None:
    """In float32; with a batch of two, prompts wait for a place."""
    decoder = loaded(tmp_path, family)
    expected = [alone(decoder, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert continue_together(decoder, PROMPTS, LIMITS, (), GREEDY, numbers(), batch) == expected
    end = expected[2][1]
    ended = [alone(decoder, prompt, limit, end) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert continue_together(decoder, PROMPTS, LIMITS, {end}, GREEDY, numbers(), batch) == ended


def test_prompts_are_read_in_groups_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = loaded(tmp_path, "mixtral")
    sizes: list[tuple[int, ...]] = []
    decoder.watch = lambda x_BLD: sizes.append(tuple(x_BLD.shape[:2]))
    whole = continue_together(decoder, PROMPTS, LIMITS, (), GREEDY, numbers())
    assert sizes[0] == (1, sum(map(len, PROMPTS)))
    monkeypatch.setattr(together, "MOST_TOKENS", 6)
    sizes.clear()
    assert continue_together(decoder, PROMPTS, LIMITS, (), GREEDY, numbers()) == whole
    assert sizes[:3] == [(1, 4), (1, 5), (1, 6)]


def test_blocks_of_ended_sequences_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[BlockPool] = []
    made = BlockPool.__init__

    def noted(self: BlockPool, count: int, block_size: int, shares: bool = True) -> None:
        pools.append(self)
        made(self, count, block_size, shares)

    monkeypatch.setattr(BlockPool, "__init__", noted)
    continue_together(loaded(tmp_path, "mixtral"), PROMPTS, LIMITS, (), GREEDY, numbers(), 2)
    (pool,) = pools
    assert pool.unused == pool.count == 2, "a block of 32 positions for each of two sequences"


def test_compiled_kernels_continue_as_the_same_weights_do_alone(tmp_path: Path) -> None:
    """In bfloat16, where near ties may round the other way: most tokens are equal, and every run gives the same."""
    decoder = loaded(tmp_path, "mixtral", torch.bfloat16)
    expected = [alone(decoder, prompt, 8) for prompt in PROMPTS]
    found = continue_together(decoder, PROMPTS, [8] * 5, (), GREEDY, numbers())
    assert found == continue_together(decoder, PROMPTS, [8] * 5, (), GREEDY, numbers())
    first = [own[0] == other[0] for own, other in zip(found, expected, strict=True)]
    assert sum(first) >= 4


def test_sampled_tokens_depend_on_the_sequence_and_its_numbers_alone(tmp_path: Path) -> None:
    decoder = loaded(tmp_path, "mixtral")

    def written(seed: int, batch: int = 64, limits: list[int] | None = None) -> list[list[int]]:
        return continue_together(decoder, PROMPTS, limits or [9] * 5, (), FREE, numbers(seed), batch)

    whole = written(1)
    assert whole == written(1) == written(1, batch=2) != written(2)
    assert written(1, limits=LIMITS) == [own[:limit] for own, limit in zip(whole, LIMITS, strict=True)]


@pytest.mark.parametrize("options", [FREE, SamplingOptions(temperature=0.7, top_p=0.8), SamplingOptions(0.5, 1.0, 3)])
def test_one_number_for_a_row_draws_from_the_distribution(options: SamplingOptions) -> None:
    """20,000 draws, each token within four standard deviations of its share; what has no probability is never drawn."""
    logits_V = torch.tensor([0.0, 2.0, -1.0, 1.0, 0.5, -torch.tensor(80.0)])
    count = 20_000
    drawn = sample(logits_V.expand(count, -1), options, torch.Generator().manual_seed(0))
    share_V = probabilities(logits_V[None], options)[0].double()
    found_V = torch.bincount(drawn, minlength=6).double() / count
    assert bool(((found_V - share_V).abs() <= 4 * (share_V * (1 - share_V) / count).sqrt()).all())
    assert bool((found_V[share_V == 0] == 0).all())


def test_the_largest_number_draws_a_token_that_has_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, **named: torch.ones(*shape))
    logits_BV = torch.tensor([[3.0, 0.0, -1e30, -1e30]])
    assert sample(logits_BV, FREE, torch.Generator()).tolist() == [1]
    assert sample(logits_BV, GREEDY, torch.Generator()).tolist() == [0]
