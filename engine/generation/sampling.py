"""Sampling: the logits of one step to the next token of each sequence.

Shape suffixes: B batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.generation.options import SamplingOptions

NOT_FINITE = (
    "the model gives logits that are NaN or infinite: its weights are damaged or its activations overflow; "
    "try --dtype float32, or `compress inspect --checksums`"
)

LEAST_TEMPERATURE = 1e-5
"""Smallest temperature that is divided by: below it only exact ties could be sampled, and the quotient may overflow."""


def sample(
    logits_BV: Tensor, options: SamplingOptions, generator: torch.Generator, allowed_BV: Tensor | None = None
) -> Tensor:
    """Return the next tokens, int64 [B], from `probabilities`; at least one token always stays.

    Raises CheckpointError if a logit is NaN or infinite.
    """
    if options.temperature < LEAST_TEMPERATURE:
        return _only(_finite(logits_BV), allowed_BV).argmax(dim=-1)
    return probabilities(logits_BV, options, allowed_BV).multinomial(1, generator=generator)[:, 0]


def sample_by_inverse(logits_BV: Tensor, options: SamplingOptions, generator: torch.Generator) -> Tensor:
    """Return the next tokens as `sample` does, from one random number for each sequence: the inverse of its distribution.

    `multinomial` draws a number for each token of the vocabulary, which takes as long as all layers of a small model.
    Raises CheckpointError if a logit is NaN or infinite.
    """
    if options.temperature < LEAST_TEMPERATURE:
        return _finite(logits_BV).argmax(dim=-1)
    total_BV = probabilities(logits_BV, options).cumsum(dim=-1)
    drawn_B1 = torch.rand(len(total_BV), 1, generator=generator, device=total_BV.device) * total_BV[:, -1:]
    below_B1 = drawn_B1.minimum(
        total_BV[:, -1:].nextafter(torch.zeros(()))
    )  # rounding up could give a number beyond the last token
    return torch.searchsorted(total_BV, below_B1, right=True)[:, 0]


def probabilities(logits_BV: Tensor, options: SamplingOptions, allowed_BV: Tensor | None = None) -> Tensor:
    """Return the distribution that `sample` draws from, float32 [B, V]; at temperature 0 it is one-hot.

    logits_BV: after `penalised`. allowed_BV: the tokens that may follow, bool [B, V] with at least one in each row; None
    for all. The order is that of SamplingOptions. Raises CheckpointError if a logit is NaN or infinite.
    """
    if options.temperature < LEAST_TEMPERATURE:
        best_B1 = _only(_finite(logits_BV), allowed_BV).argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits_BV, dtype=torch.float32).scatter_(-1, best_B1, 1.0)
    scores_BV = _scaled(_only(_finite(logits_BV).float(), allowed_BV), options.temperature)
    scores_BV = _min_p(_top_n_sigma(scores_BV, options.top_n_sigma), options.min_p)
    return _top_p(_top_k(scores_BV, options.top_k), options.top_p).softmax(dim=-1)


def _scaled(logits_BV: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature; on float32 overflow, each row's maximum is subtracted first, which softmax ignores."""
    scores_BV = logits_BV / temperature
    if temperature >= 1.0 or bool(scores_BV.isfinite().all()):
        return scores_BV
    return (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature


def _finite(logits_BV: Tensor) -> Tensor:
    if not bool(logits_BV.isfinite().all()):
        raise CheckpointError(NOT_FINITE)
    return logits_BV


def _only(logits_BV: Tensor, allowed_BV: Tensor | None) -> Tensor:
    return logits_BV if allowed_BV is None else logits_BV.where(allowed_BV, -torch.inf)


def penalised(logits_V: Tensor, counts: Mapping[int, int], options: SamplingOptions, prompt: Collection[int] = ()) -> Tensor:
    """Return the logits [V] with the bias and the penalties. `counts`: how often each token was generated before.

    prompt: the tokens of the prompt, which the repetition penalty concerns too. Without bias and penalties the logits
    themselves are returned.
    """
    if not options.changes_logits:
        return logits_V
    if options.logit_bias:
        tokens, bias = zip(*options.logit_bias, strict=True)
        logits_V = logits_V.float().index_add(0, _ids(tokens, logits_V), torch.tensor(bias, device=logits_V.device))
    if options.repetition_penalty != 1 and (seen := {*prompt, *counts}):
        tokens_S = _ids(seen, logits_V)
        seen_S = logits_V.float()[tokens_S]
        factor = options.repetition_penalty
        logits_V = logits_V.float().index_copy(0, tokens_S, torch.where(seen_S > 0, seen_S / factor, seen_S * factor))
    if not counts or options.presence_penalty == options.frequency_penalty == 0:
        return logits_V
    times = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits_V.device)
    penalties = -(options.presence_penalty + options.frequency_penalty * times)
    return logits_V.float().index_add(0, _ids(counts, logits_V), penalties)


def _ids(tokens: Iterable[int], logits_V: Tensor) -> Tensor:
    return torch.tensor(list(tokens), device=logits_V.device)


def penalised_rows(
    logits_BV: Tensor,
    written: Sequence[Sequence[int]],
    options: SamplingOptions,
    prompts: Sequence[Collection[int]],
) -> Tensor:
    """Apply `penalised` to each row of logits [B, V], with the tokens that were generated before it, and its prompt's."""
    if not options.changes_logits:
        return logits_BV
    rows = zip(logits_BV.float(), written, prompts, strict=True)
    return torch.stack([penalised(logits_V, Counter(tokens), options, prompt) for logits_V, tokens, prompt in rows])


def _top_n_sigma(scores_BV: Tensor, sigmas: float) -> Tensor:
    """Close the tokens further below the largest score than `sigmas` standard deviations of the scores that are open."""
    if sigmas == 0:
        return scores_BV
    open_BV = scores_BV.isfinite()
    count_B1 = open_BV.sum(dim=-1, keepdim=True)
    mean_B1 = scores_BV.where(open_BV, 0.0).sum(dim=-1, keepdim=True) / count_B1
    deviation_B1 = (((scores_BV - mean_B1).where(open_BV, 0.0) ** 2).sum(dim=-1, keepdim=True) / count_B1).sqrt()
    least_B1 = scores_BV.amax(dim=-1, keepdim=True) - sigmas * deviation_B1
    return scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)


def _min_p(scores_BV: Tensor, fraction: float) -> Tensor:
    """Close the tokens whose probability is below `fraction` of the largest; `probabilities` divides both by one sum."""
    if fraction == 0:
        return scores_BV
    least_B1 = scores_BV.amax(dim=-1, keepdim=True) + math.log(fraction)
    return scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)


def _top_k(scores_BV: Tensor, count: int) -> Tensor:
    if count == 0 or count >= scores_BV.shape[-1]:
        return scores_BV
    # The indices decide, not the k-th value: among equal values no more than k stay.
    kept_BK = scores_BV.topk(count, dim=-1).indices
    closed_BV = torch.ones_like(scores_BV, dtype=torch.bool).scatter(-1, kept_BK, False)
    return scores_BV.masked_fill(closed_BV, -torch.inf)


def _top_p(scores_BV: Tensor, share: float) -> Tensor:
    if share == 1:
        return scores_BV
    sorted_BV, order_BV = scores_BV.sort(dim=-1, descending=True, stable=True)
    probabilities_BV = sorted_BV.softmax(dim=-1)
    # A token is left out if the tokens before it already reach the share; no token is before the first.
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    closed_BV = before_BV >= share
    closed_BV[:, 0] = False
    return scores_BV.masked_fill(closed_BV.scatter(-1, order_BV, closed_BV), -torch.inf)
