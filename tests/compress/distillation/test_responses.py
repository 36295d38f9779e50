"""Responses written in a batch equal those written alone, and weights give means over responses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import MOE_FAMILIES, save_reference

from calibrate.instructions import Example
from compress.distillation.responses import batch_of, write_responses
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import Decoder
from engine.generation.options import SamplingOptions

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def test_weights_are_the_mean_over_response_tokens_by_hand() -> None:
    batch = batch_of([Example([1, 2], [3, 4, 5]), Example([6], [7])])
    assert batch.tokens_BL.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    third = pytest.approx(1 / 3)
    assert batch.weights_BL.tolist() == [[0, third, third, third, 0], [1, 0, 0, 0, 0]]


@torch.no_grad()
def alone(decoder: Decoder, prompt: list[int], max_length: int, end: int) -> list[int]:
    """Decode greedily, reading the whole sequence again for each token."""
    tokens = list(prompt)
    while len(tokens) < max(max_length, len(prompt) + 1):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] == end:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_greedy_responses_equal_those_written_alone(family: str, tmp_path: Path) -> None:
    """The prompts have different lengths, one longer than the limit, and some sequences end early."""
    save_reference(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))
    free = [alone(decoder, prompt, 12, -1) for prompt in PROMPTS]
    end = free[1][2]
    greedy, generator = SamplingOptions(), torch.Generator()
    for limit, ends in ((12, -1), (12, end), (4, end)):
        written = write_responses(decoder, PROMPTS, limit, {ends}, greedy, generator)
        assert [example.prompt for example in written] == PROMPTS
        assert [example.response for example in written] == [alone(decoder, prompt, limit, ends) for prompt in PROMPTS]


def test_sampled_responses_depend_on_the_generator_alone(tmp_path: Path) -> None:
    save_reference("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    decoder = Decoder(checkpoint.config, checkpoint.source(torch.float32))

    def written(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        examples = write_responses(decoder, PROMPTS, 12, (), SamplingOptions(temperature=1.0), generator)
        return [example.response for example in examples]

    torch.manual_seed(0)
    first = written(1)
    torch.manual_seed(7)
    assert written(1) == first and written(2) != first
    assert [len(response) for response in first] == [12 - len(prompt) for prompt in PROMPTS]
