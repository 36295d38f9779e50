"""Lightning attention (arXiv 2501.08313, §2.2; 2401.04658): linear attention with one matrix per head as its memory.

    s_t = λ s_{t-1} + k_t v_tᵀ        o_t = s_tᵀ q_t        [q; k; v] = silu(W_qkv·x)        y = W_o (σ(W_g·x) ⊙ norm(o))

λ depends on the head and the layer: exp(-2^(-8h/H) · (1 - l/(n - 1))), with heads h counted from 1 and layers l from 0.
There is no rotary embedding: the decay alone encodes distance. Positions are processed in blocks; each block attends to
itself and to the state s of the positions before it:

    O = ((Q Kᵀ) ⊙ M) V + Λ Q s        M_ij = λ^(i-j) for j ≤ i        s ← λ^B s + (λ^B Λ⁻¹ K)ᵀ V        Λ_i = λ^i

The cache holds s, whose size does not depend on the number of positions. All of this is computed in float32 or better,
whatever the model's dtype.

Shape suffixes: B batch, L new positions, D hidden, H heads, E head dimension, I and J positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.decoder.attention import Cache, Positions
from engine.decoder.norms import rms_norm
from engine.families.config import DecoderConfig
from engine.families.layer_config import LightningConfig
from engine.families.tensor_names import LIGHTNING
from engine.kernels.linear import linear, linears
from engine.kernels.stored.quantized_weight import Weight, frozen, frozen_tensor

BLOCK = LightningConfig.block
"""Number of positions in one block."""
NORM_EPSILON = 1e-6
"""Epsilon of the norm of the heads' outputs, independent of the config."""


class LightningAttention(nn.Module):
    """Lightning self-attention of one layer."""

    def __init__(self, config: DecoderConfig, layer: int, tensor: Callable[[str], Weight]) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.attention_heads
        qkv, gate, norm, output = (f"model.layers.{layer}.self_attn.{name}" for name in LIGHTNING)
        self.qkv, self.gate, self.output = frozen(tensor(qkv)), frozen(tensor(gate)), frozen(tensor(output))
        self.norm = frozen_tensor(tensor(norm))
        self.rates_H = decay_rates(config.attention_heads, layer, len(config.layers)).to(self.norm.device)

    def forward(self, x_BLD: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        """Map [B, L, D] to [B, L, D]; with a cache, continue from its state and store the new one."""
        assert not positions.one_by_one, "tokens that may be undone cannot be read: the state cannot forget them"
        batch, length, _ = x_BLD.shape
        qkv_BLX, gate_BLX = linears(x_BLD, (self.qkv, self.gate), (None, None), positions.choice)
        qkv_BLX = F.silu(qkv_BLX)
        if positions.real_BL is not None:
            qkv_BLX = qkv_BLX * positions.real_BL[..., None]  # padding comes first, and leaves the state at zero
        wide = torch.promote_types(x_BLD.dtype, torch.float32)
        query_BHLE, key_BHLE, value_BHLE = (
            qkv_BLX.to(wide).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        )
        state_BHEE = None if cache is None else cache.state(self.layer)[0].to(wide)
        mixed_BHLE, state_BHEE = attend(query_BHLE, key_BHLE, value_BHLE, self.rates_H, state_BHEE)
        if cache is not None:
            cache.keep_state(self.layer, (state_BHEE,))
        mixed_BLX = mixed_BHLE.transpose(1, 2).reshape(batch, length, -1).to(x_BLD.dtype)
        normed_BLX = rms_norm(mixed_BLX, self.norm, NORM_EPSILON, positions.choice)
        return linear(gate_BLX.sigmoid() * normed_BLX, self.output, choice=positions.choice)


def decay_rates(heads: int, layer: int, layers: int) -> Tensor:
    """Return -ln λ of each head, float32 [H]."""
    slopes_H = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
    # As published, including the terms that keep the quotient and the last layer's rate away from zero.
    return slopes_H * (1.0 - layer / (layers - 1 + 1e-5) + 1e-5)


def attend(
    query_BHLE: Tensor, key_BHLE: Tensor, value_BHLE: Tensor, rates_H: Tensor, state_BHEE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, L, E], and the state after the last position [B, H, E, E]. The initial state is zero by default."""
    if state_BHEE is None:
        state_BHEE = torch.zeros_like(query_BHLE[:, :, :1].mT * value_BHLE[:, :, :1])
    rates_H11, mixed, decays = rates_H.to(query_BHLE)[:, None, None], [], {}
    parts = (x_BHLE.split(BLOCK, dim=2) for x_BHLE in (query_BHLE, key_BHLE, value_BHLE))
    for query_BHIE, key_BHJE, value_BHJE in zip(*parts, strict=True):
        size = query_BHIE.shape[2]
        if size not in decays:  # all blocks but the last have one size
            decays[size] = _decays(rates_H11, size)
        decay_HIJ, begun_HI1, left_HJ1 = decays[size]
        mixed_BHIE = (query_BHIE @ key_BHJE.mT * decay_HIJ) @ value_BHJE
        mixed.append(mixed_BHIE + query_BHIE * begun_HI1 @ state_BHEE)
        state_BHEE = begun_HI1[:, -1:] * state_BHEE + (key_BHJE * left_HJ1).mT @ value_BHJE
    return torch.cat(mixed, dim=2), state_BHEE


def _decays(rates_H11: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decays of a block: M [H, I, J], Λ [H, I, 1], and λ^B Λ⁻¹ [H, J, 1]."""
    place_I1 = torch.arange(1, size + 1, device=rates_H11.device)[:, None]
    distance_IJ = (place_I1 - place_I1.T).clamp_min(0)
    return (
        torch.exp(-rates_H11 * distance_IJ).tril(),
        torch.exp(-rates_H11 * place_I1),
        torch.exp(-rates_H11 * (size - place_I1)),
    )
