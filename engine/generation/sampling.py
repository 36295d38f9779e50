"""Sampling: the logits of one step to the next token of each sequence.

Shape suffixes: B batch, V vocabulary, K largest scores of a row, C tokens that may follow, N blocks of the vocabulary, T
tokens of a block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import CheckpointError
from engine.generation.options import SamplingOptions
from engine.generation.race import race

NOT_FINITE = (
    "the model gives logits that are NaN or infinite: its weights are damaged or its activations overflow; "
    "try --dtype float32, or `compress inspect`, which reads all weights"
)

FIRST = 256
"""Number of a row's largest scores among which top-p is tried first."""
BLOCK = 128
"""Tokens of the vocabulary whose weights are added up at once where one is drawn."""
LEAST_TEMPERATURE = 1e-5
"""Smallest temperature that is divided by: below it only exact ties could be sampled, and the quotient may overflow."""


def sample(logits_BV: Tensor, options: SamplingOptions, numbers: torch.Generator | Tensor) -> Tensor:
    """Return the next token of each row, int64 [B], drawn from `probabilities` by one random number for each row.

    numbers: a generator of these, or uniform numbers, float64 [B]. Raises CheckpointError if a logit is NaN or infinite.
    """
    if options.temperature < LEAST_TEMPERATURE:
        return largest(_finite(logits_BV))
    shares_BV = probabilities(logits_BV, options)
    if isinstance(numbers, torch.Generator):
        numbers = torch.rand(len(shares_BV), dtype=torch.float64, generator=numbers, device=numbers.device)
    return drawn(shares_BV, numbers.to(shares_BV.device)[:, None])


def drawn(weights_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return a token of each row in proportion to the weights, int64 [B]: the first whose cumulative sum exceeds the row's
    uniform number, float64, times the total.

    Sums of blocks of tokens say in which block it is, and only that block's weights are added up one by one: the cumulative
    sums of whole rows would take longer than the softmax.
    """
    if further := -weights_BV.shape[-1] % BLOCK:
        weights_BV = F.pad(weights_BV, (0, further))
    blocks_BNT = weights_BV.unflatten(-1, (-1, BLOCK))
    ends_BN = blocks_BNT.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal_B1 = _below(uniforms_B1 * ends_BN[:, -1:], ends_BN[:, -1:])
    block_B1 = torch.searchsorted(ends_BN, goal_B1, right=True)
    own_BT = blocks_BNT.take_along_dim(block_B1[..., None], dim=1)[:, 0].cumsum(dim=-1, dtype=torch.float64)
    rest_B1 = goal_B1 - F.pad(ends_BN, (1, 0)).gather(-1, block_B1)
    return (block_B1 * BLOCK + torch.searchsorted(own_BT, _below(rest_B1, own_BT[:, -1:]), right=True))[:, 0]


def _below(values: Tensor, limits: Tensor) -> Tensor:
    """Return values, and where rounding has made them reach a limit, the largest number below it."""
    return values.minimum(limits.nextafter(limits.new_zeros(())))


def sample_at(logits_V: Tensor, options: SamplingOptions, place: int, allowed_V: Tensor | None = None) -> int:
    """Return the next token of one text, drawn from `probabilities` by the numbers of the options' seed and this place.

    place: number of tokens that were generated before. allowed_V: as in `probabilities`, on the CPU. Raises CheckpointError
    if the largest logit of the tokens that may follow is NaN or infinite, as it is if any is NaN.
    """
    scores_C, ids_C = logits_V.float().cpu().numpy(), None
    if allowed_V is not None:  # a grammar often leaves a few tokens, and the others then cost nothing
        ids_C = np.flatnonzero(allowed_V.numpy())
        scores_C = scores_C[ids_C]
    best = int(scores_C.argmax())
    if not math.isfinite(scores_C[best]):
        raise CheckpointError(NOT_FINITE)
    if options.temperature < LEAST_TEMPERATURE:
        return best if ids_C is None else int(ids_C[best])
    if options.closes_tokens:
        weights_C = probabilities(torch.from_numpy(scores_C)[None], options)[0].numpy()
    else:
        weights_C = np.exp((scores_C - scores_C[best]) / np.float32(options.temperature))
    return race(weights_C, options.seed, place, ids_C)


def largest(logits_BV: Tensor) -> Tensor:
    """Return the first token with the largest logit of each row, int64 [B]."""
    if logits_BV.device.type != "cpu":
        return logits_BV.argmax(dim=-1)
    rows_BV = logits_BV.detach().float().numpy()
    return torch.from_numpy(rows_BV.argmax(axis=-1))  # ten times as fast as torch's for rows of this length


def are_finite(logits_BV: Tensor) -> Tensor:
    """Return whether all logits of each row are finite, bool [B]."""
    if logits_BV.device.type == "cpu":
        finite_B = logits_BV.sum(dim=-1, dtype=torch.float32).isfinite()  # NaN and infinities stay in a sum
        if bool(finite_B.all()):
            return finite_B
    return logits_BV.isfinite().all(dim=-1)  # a sum of finite values may overflow


def probabilities(logits_BV: Tensor, options: SamplingOptions, allowed_BV: Tensor | None = None) -> Tensor:
    """Return the distribution that `sample` draws from, float32 [B, V]; at temperature 0 it is one-hot.

    logits_BV: after `penalised`. allowed_BV: the tokens that may follow, bool [B, V] with at least one in each row; None
    for all. The order is that of SamplingOptions. Raises CheckpointError if a logit is NaN or infinite.
    """
    if options.temperature < LEAST_TEMPERATURE:
        best_B1 = largest(_only(_finite(logits_BV), allowed_BV))[:, None]
        return torch.zeros_like(logits_BV, dtype=torch.float32).scatter_(-1, best_B1, 1.0)
    scores_BV = _scaled(_only(_finite(logits_BV.float()), allowed_BV), options.temperature)
    scores_BV = _min_p(_top_n_sigma(scores_BV, options.top_n_sigma), options.min_p)
    return _top_p(_top_k(scores_BV, options.top_k), options.top_p).softmax(dim=-1)


def _scaled(logits_BV: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature; on float32 overflow, each row's maximum is subtracted first, which softmax ignores."""
    scores_BV = logits_BV if temperature == 1.0 else logits_BV / temperature
    if temperature >= 1.0 or bool(are_finite(scores_BV).all()):
        return scores_BV
    return (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature


def _finite(logits_BV: Tensor) -> Tensor:
    if not bool(are_finite(logits_BV).all()):
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
    """Close the tokens whose probability is below `fraction` of the largest. Scores suffice: both have one divisor."""
    if fraction == 0:
        return scores_BV
    least_B1 = scores_BV.amax(dim=-1, keepdim=True) + math.log(fraction)
    return scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)


def _top_k(scores_BV: Tensor, count: int) -> Tensor:
    if count == 0 or count >= scores_BV.shape[-1]:
        return scores_BV
    # The indices decide, not the k-th value: among equal values no more than k stay.
    kept_BK = scores_BV.topk(count, dim=-1).indices
    return _alone(scores_BV, kept_BK, scores_BV.gather(-1, kept_BK))


def _top_p(scores_BV: Tensor, share: float) -> Tensor:
    """Close each token if those before it, in the order of larger scores and then smaller ids, already have the share.

    Sorting a vocabulary takes twenty times as long as finding its largest entries, which are nearly always enough.
    """
    if share == 1:
        return scores_BV
    kept_BV, is_decided_B = _top_p_of_first(scores_BV, share, min(FIRST, scores_BV.shape[-1]))
    if not all(is_decided_B):
        rest_B = [row for row, is_decided in enumerate(is_decided_B) if not is_decided]
        kept_BV[rest_B] = _top_p_of_first(scores_BV[rest_B], share, scores_BV.shape[-1])[0]
    return kept_BV


def _top_p_of_first(scores_BV: Tensor, share: float, count: int) -> tuple[Tensor, list[bool]]:
    """Return the scores after top-p among the `count` largest of each row, and whether these decide about the row."""
    ids_BK = scores_BV.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    sorted_BK, order_BK = scores_BV.gather(-1, ids_BK).sort(dim=-1, descending=True, stable=True)
    shares_BK = (sorted_BK - scores_BV.logsumexp(dim=-1, keepdim=True)).exp()
    # A token is left out if the tokens before it already reach the share; no token is before the first.
    closed_BK = shares_BK.cumsum(dim=-1) - shares_BK >= share
    closed_BK[:, 0] = False
    last_B1 = closed_BK.logical_not().sum(dim=-1, keepdim=True) - 1
    # Tokens beyond the largest ones may be as large as the last that stays, and have a smaller id.
    is_decided_B1 = sorted_BK.gather(-1, last_B1) > sorted_BK[:, -1:]
    is_decided = [True] * len(scores_BV) if count == scores_BV.shape[-1] else is_decided_B1[:, 0].tolist()
    kept_BK = sorted_BK.masked_fill(closed_BK, -torch.inf)
    return _alone(scores_BV, ids_BK.gather(-1, order_BK), kept_BK), is_decided


def _alone(scores_BV: Tensor, ids_BK: Tensor, kept_BK: Tensor) -> Tensor:
    """Return scores [B, V] that are open for the tokens of these ids alone."""
    return torch.full_like(scores_BV, -torch.inf).scatter(-1, ids_BK, kept_BK)
