"""Sampling: the logits of one step to the next token of each sequence.

Shape suffixes: B batch, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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


def sample(logits_BV: Tensor, options: SamplingOptions, generator: torch.Generator) -> Tensor:
    """Return the next tokens, int64 [B]. Top-k is applied before top-p, as usual; at least one token always stays.

    Raises CheckpointError if a logit is NaN or infinite.
    """
    if options.temperature < LEAST_TEMPERATURE:
        return _finite(logits_BV).argmax(dim=-1)
    return probabilities(logits_BV, options).multinomial(1, generator=generator)[:, 0]


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


def probabilities(logits_BV: Tensor, options: SamplingOptions) -> Tensor:
    """Return the distribution that `sample` draws from, float32 [B, V]; at temperature 0 it is one-hot.

    Raises CheckpointError if a logit is NaN or infinite.
    """
    if options.temperature < LEAST_TEMPERATURE:
        best_B1 = _finite(logits_BV).argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits_BV, dtype=torch.float32).scatter_(-1, best_B1, 1.0)
    scores_BV = _scaled(_finite(logits_BV).float(), options.temperature)
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


def penalised(logits_V: Tensor, counts: Mapping[int, int], options: SamplingOptions) -> Tensor:
    """Return the logits [V] minus the penalties. `counts`: how often each token was generated before."""
    if not counts or options.presence_penalty == options.frequency_penalty == 0:
        return logits_V
    tokens = torch.tensor(list(counts), device=logits_V.device)
    times = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits_V.device)
    return logits_V.float().index_add(0, tokens, -(options.presence_penalty + options.frequency_penalty * times))


def penalised_rows(logits_BV: Tensor, written: Sequence[Sequence[int]], options: SamplingOptions) -> Tensor:
    """Apply `penalised` to each row of logits [B, V], with the tokens that were generated before it."""
    if options.presence_penalty == options.frequency_penalty == 0:
        return logits_BV
    rows = zip(logits_BV.float(), written, strict=True)
    return torch.stack([penalised(logits_V, Counter(tokens), options) for logits_V, tokens in rows])


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
