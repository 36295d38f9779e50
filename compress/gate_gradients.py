"""Gate gradients (methods.md §3.7): a factor g_i = 1 on each expert's contribution, differentiated and never trained.

Fisher: Σ over sequences of (∂L/∂g_i)², L the negative log-likelihood of the model's own samples. Taylor: |Σ ∂L/∂g_i|,
L that of the text itself. One forward and one backward pass, gradients of the gates alone: sequences go through together
and each has gates of its own, so its gradient is its own too.

Shape suffixes: S sequences, B sequences of one batch, L positions, N experts of a layer, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from compress.losses import CHUNK_TOKENS, next_token_loss
from engine.linear import linear
from engine.model import Decoder, routed_by
from engine.routing import Gated
from engine.streaming import batches


def gate_gradients(
    decoder: Decoder,
    tokens_SL: Tensor,
    *,
    own_samples: bool,
    seed: int = 0,
    progress: Callable[[Iterable[slice]], Iterable[slice]] = iter,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """(Σ_s ∂L_s/∂g, Σ_s (∂L_s/∂g)²), each [N] float64 by decoder layer index.

    own_samples: L is of tokens sampled from the model's own predictions (true Fisher), not of the text's next tokens.
    """
    layers, device = decoder.config.moe_layers, decoder.embedding_VD.device
    sums = [torch.zeros(count, dtype=torch.float64) for count in decoder.config.experts_per_layer]
    squares = [torch.zeros_like(total) for total in sums]
    generator = torch.Generator(device=device).manual_seed(seed)
    for rows in progress(batches(*tokens_SL.shape)):
        tokens_BL = tokens_SL[rows].to(device)
        for place, gradient_BN in enumerate(_of_batch(decoder, tokens_BL, generator if own_samples else None)):
            sums[place] += gradient_BN.sum(0)
            squares[place] += gradient_BN.square().sum(0)
    return dict(zip(layers, sums, strict=True)), dict(zip(layers, squares, strict=True))


def _of_batch(decoder: Decoder, tokens_BL: Tensor, generator: torch.Generator | None) -> list[Tensor]:
    """∂L_s/∂g of each sequence, [B, N] float64 for each MoE layer; of the model's own samples where a generator is given."""
    gates = [
        torch.ones(len(tokens_BL), count, device=tokens_BL.device, requires_grad=True)
        for count in decoder.config.experts_per_layer
    ]
    with routed_by(decoder, [Gated(block.routing, gate) for block, gate in zip(decoder.moe_blocks, gates, strict=True)]):
        hidden_BLD = decoder.hidden_states(tokens_BL)
        targets_BL = tokens_BL
        if generator is not None:
            drawn = hidden_BLD.detach()
            targets_BL = torch.cat(
                [_sample_next(drawn[s : s + 1], decoder.head_VD, tokens_BL[s : s + 1], generator) for s in range(len(drawn))]
            )
        # Within the routing: checkpointed layers run again in the backward pass.
        gradients = torch.autograd.grad(next_token_loss(hidden_BLD, decoder.head_VD, targets_BL), gates)
    return [gradient_BN.double().cpu() for gradient_BN in gradients]


@torch.no_grad()
def _sample_next(hidden_1LD: Tensor, head_VD: Tensor, tokens_1L: Tensor, generator: torch.Generator) -> Tensor:
    """The text with each next token replaced by one drawn from the model's prediction at its place."""
    drawn = [tokens_1L[0, :1]]
    for hidden in hidden_1LD[0, :-1].split(CHUNK_TOKENS):
        probabilities = linear(hidden, head_VD).float().softmax(-1)
        drawn.append(probabilities.multinomial(1, generator=generator)[:, 0])
    return torch.cat(drawn)[None]


def fisher_scores(decoder: Decoder, tokens_SL: Tensor, seed: int = 0) -> dict[int, Tensor]:
    """Gate Fisher as pruning scores."""
    return gate_gradients(decoder, tokens_SL, own_samples=True, seed=seed)[1]


def taylor_scores(decoder: Decoder, tokens_SL: Tensor, seed: int = 0) -> dict[int, Tensor]:
    """First-order gate Taylor as pruning scores."""
    sums, _ = gate_gradients(decoder, tokens_SL, own_samples=False, seed=seed)
    return {layer: total.abs() for layer, total in sums.items()}
