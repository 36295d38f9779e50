"""Perplexity of a model on the responses of examples.

Shape suffixes: B batch, L positions, T response tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.instructions import Example
from compress.distillation.responses import batch_of
from compress.training.losses import head_loss
from engine.decoder.model import Decoder


@torch.no_grad()
def response_perplexity(decoder: Decoder, examples: Sequence[Example], group_size: int) -> float:
    """Return exp of the mean negative log-likelihood of all response tokens; NaN where the model's outputs are."""
    total, count, device = 0.0, 0, decoder.embedding_VD.device
    for start in range(0, len(examples), group_size):
        side = batch_of([examples[place] for place in range(start, min(start + group_size, len(examples)))])
        targets_T = side.targets_T.to(device)
        hidden_TD = decoder.hidden_states(side.tokens_BL.to(device))[side.asked_BL.to(device)]

        def measure(logits_TV: Tensor, part: slice, targets_T: Tensor = targets_T) -> Tensor:
            return F.cross_entropy(logits_TV, targets_T[part], reduction="sum")

        total += float(head_loss(hidden_TD, decoder.head_VD, measure, decoder.head_bias_V, decoder.logit_cap))
        count += len(targets_T)
    return math.exp(min(total / count, 700.0)) if math.isfinite(total) else math.nan
