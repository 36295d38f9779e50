"""Gate gradients (methods.md §3.7): a factor g_i = 1 on each expert's contribution, differentiated and never trained.

Fisher: Σ over sequences of (∂L/∂g_i)², L the negative log-likelihood of the model's own samples. Taylor: |Σ ∂L/∂g_i|,
L that of the text itself. One backward pass per sequence, gradients of the gates alone.

Shape suffixes: S sequences, L positions, N experts of a layer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from compress.losses import CHUNK_TOKENS, next_token_loss
from engine.linear import linear
from engine.model import Decoder, routed_by
from engine.routing import Gated


def gate_gradients(
    decoder: Decoder,
    tokens_SL: Tensor,
    *,
    own_samples: bool,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """(Σ_s ∂L_s/∂g, Σ_s (∂L_s/∂g)²), each [N] float64 by decoder layer index.

    own_samples: L is of tokens sampled from the model's own predictions (true Fisher), not of the text's next tokens.
    """
    config, device = decoder.config, decoder.embedding_VD.device
    gates = [torch.ones(count, device=device, requires_grad=True) for count in config.experts_per_layer]
    routings = [Gated(block.routing, gate) for block, gate in zip(decoder.moe_blocks, gates, strict=True)]
    sums = [torch.zeros(len(gate), dtype=torch.float64) for gate in gates]
    squares = [torch.zeros(len(gate), dtype=torch.float64) for gate in gates]
    generator = torch.Generator(device=device).manual_seed(seed)
    with routed_by(decoder, routings):
        for row in progress(range(tokens_SL.shape[0])):
            tokens_1L = tokens_SL[row : row + 1].to(device)
            hidden = decoder.hidden_states(tokens_1L)
            targets = _sample_next(hidden.detach(), decoder.head_VD, tokens_1L, generator) if own_samples else tokens_1L
            gradients = torch.autograd.grad(next_token_loss(hidden, decoder.head_VD, targets), gates)
            for total, square, gradient in zip(sums, squares, gradients, strict=True):
                total += gradient.double().cpu()
                square += gradient.double().cpu().square()
    layers = config.moe_layers
    return dict(zip(layers, sums, strict=True)), dict(zip(layers, squares, strict=True))


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
