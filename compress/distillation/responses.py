"""Batches of prompts with responses, from the data or written by a model that is being trained.

Shape suffixes: B sequences, L positions, P positions so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.instructions import Example
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import Decoder
from engine.generation.batch import left_padded
from engine.generation.options import SamplingOptions
from engine.generation.sampling import sample
from engine.passes import processes

SHRINK_AT = 0.5
"""Share of unfinished sequences at or below which finished ones are removed from the generating batch."""


@dataclass(frozen=True)
class ResponseBatch:
    """Sequences of one batch, padded on the right, which does not affect a causal model."""

    tokens_BL: Tensor
    weights_BL: Tensor
    """Weight of the prediction at each position: 1 / number of response tokens where the next token is of the response,
    else 0.
    """
    real_BL: Tensor
    """False at padding."""

    @property
    def asked_BL(self) -> Tensor:
        """Whether the next token at each position is of a response."""
        return self.weights_BL > 0

    @property
    def targets_T(self) -> Tensor:
        """The next tokens at those positions."""
        return self.tokens_BL.roll(-1, 1)[self.asked_BL]


def batch_of(examples: Sequence[Example]) -> ResponseBatch:
    """Pad the examples into a batch.

    The mean over response tokens and then over sequences is Σ weights · values / B (Every Expert Matters §3).
    """
    longest = max(len(example.prompt) + len(example.response) for example in examples)
    tokens_BL = torch.zeros(len(examples), longest, dtype=torch.long)
    weights_BL = torch.zeros(len(examples), longest)
    real_BL = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        begin, end = len(example.prompt), len(example.prompt) + len(example.response)
        tokens_BL[row, :end] = torch.tensor(example.prompt + example.response)
        weights_BL[row, begin - 1 : end - 1] = 1.0 / len(example.response)
        real_BL[row, :end] = True
    return ResponseBatch(tokens_BL, weights_BL, real_BL)


@torch.no_grad()
def write_responses(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    max_length: int,
    end_tokens: Collection[int],
    sampling: SamplingOptions,
    generator: torch.Generator,
) -> list[Example]:
    """Continue every prompt until an end token, or until prompt and response have `max_length` tokens.

    All prompts are continued together, in one batch with one cache, from which finished sequences are removed as they
    become many. Each has random numbers of its own (`numbers_of`). A response has at least one token, and includes its end
    token.
    """
    device = decoder.embedding_VD.device
    limits = limits_of(prompts, max_length)
    numbers_BL = numbers_of(generator, limits)
    spread = processes.is_spread(decoder)
    # All processes of a sharded model must gather it equally often, so they take the same number of steps.
    steps = int(processes.largest(max(limits))) if spread else max(limits)
    tokens_BL, real_BP = (tensor.to(device) for tensor in left_padded(prompts, steps))
    cache = KeyValueCache(decoder.config, len(prompts), real_BP.shape[1], decoder.embedding_VD.dtype, device)
    responses: list[list[int]] = [[] for _ in prompts]
    rows, step = list(range(len(prompts))), 0
    while True:
        logits_BV = decoder.last_logits(tokens_BL, _if_padded(real_BP[:, : cache.length + tokens_BL.shape[1]]), cache)
        next_B = sample(logits_BV, sampling, numbers_BL[rows, step])
        step = min(step + 1, numbers_BL.shape[1] - 1)
        going = []
        for place, token in enumerate(next_B.tolist()):
            response = responses[row := rows[place]]
            if _has_ended(response, limits[row], end_tokens):
                continue
            response.append(token)
            if not _has_ended(response, limits[row], end_tokens):
                going.append(place)
        if not (processes.added_up([len(going)])[0] if spread else going):
            return [Example(list(prompt), response) for prompt, response in zip(prompts, responses, strict=True)]
        if going and len(going) <= SHRINK_AT * len(rows):
            chosen = torch.tensor(going, device=device)
            rows, next_B, real_BP = [rows[place] for place in going], next_B[chosen], real_BP[chosen]
            cache = cache.of_rows(chosen)
        tokens_BL = next_B[:, None]


def numbers_of(generator: torch.Generator, limits: Sequence[int]) -> Tensor:
    """Return a uniform number for each token of each response, float64 [B, L], by a seed that the generator draws."""
    own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    return torch.rand(max(limits), len(limits), dtype=torch.float64, generator=own).T


def limits_of(prompts: Sequence[list[int]], max_length: int) -> list[int]:
    """Return the most tokens that follow each prompt: those up to `max_length`, at least one."""
    return [max(1, max_length - len(prompt)) for prompt in prompts]


def _has_ended(response: list[int], limit: int, end_tokens: Collection[int]) -> bool:
    return len(response) >= limit or (bool(response) and response[-1] in end_tokens)


def _if_padded(real_BP: Tensor) -> Tensor | None:
    return None if bool(real_BP.all()) else real_BP
