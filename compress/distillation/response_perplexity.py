"""Perplexity of a model on the responses of examples.

Shape suffixes: S examples, B batch, L positions, T response tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.instructions import Example
from compress.distillation.responses import batch_of
from compress.run.losses import Losses, summed_by_owner
from compress.training.losses import head_loss
from engine.decoder.model import Decoder


@torch.no_grad()
def response_losses(decoder: Decoder, examples: Sequence[Example], group_size: int) -> Losses:
    """Return the losses on the response of each example; they are NaN where the model's outputs are."""
    device, found = decoder.embedding_VD.device, []
    for start in range(0, len(examples), group_size):
        side = batch_of([examples[place] for place in range(start, min(start + group_size, len(examples)))])
        targets_T = side.targets_T.to(device)
        hidden_TD = decoder.hidden_states(side.tokens_BL.to(device))[side.asked_BL.to(device)]
        losses_T = torch.empty(len(targets_T), dtype=torch.float64)

        def measure(logits_TV: Tensor, part: slice, targets_T: Tensor = targets_T, losses_T: Tensor = losses_T) -> Tensor:
            own_T = F.cross_entropy(logits_TV, targets_T[part], reduction="none")
            losses_T[part] = own_T.cpu()
            return own_T.sum()

        head_loss(hidden_TD, decoder.head_VD, measure, decoder.head_bias_V, decoder.logit_cap)
        owners_T, parts = side.asked_BL.nonzero()[:, 0], (losses_T, torch.ones_like(losses_T))
        found.append([summed_by_owner(part_T, owners_T, len(side.tokens_BL)) for part_T in parts])
    summed_S, tokens_S = (torch.cat(each) for each in zip(*found, strict=True))
    return Losses(summed_S, tokens_S)


def response_perplexity(decoder: Decoder, examples: Sequence[Example], group_size: int) -> float:
    """Return exp of the mean negative log-likelihood of all response tokens; NaN where the model's outputs are."""
    return response_losses(decoder, examples, group_size).perplexity
