"""Mamba-2 (arXiv 2405.21060): a state space whose decay is one number for each head, as linear attention that forgets.

    S_t = exp(Δ_t A) S_{t-1} + Δ_t B_t x_tᵀ        y_t = S_tᵀ C_t + D x_t

    [z; x; B; C; δ] = W_in·u        [x; B; C] ← silu(conv([x; B; C]) + b)
    Δ = max(softplus(δ + b_Δ), Δ_min)        A = -exp(A_log)        out = W_out norm(y ⊙ silu(z))

A, D, b_Δ and Δ are numbers, one for each head; the heads of a group share B and C. The norm divides by the root mean square
of each group's part. There is no rotary embedding. transformers has Δ_min (`time_step_min`) where it reads a text at once,
and none in its steps of single tokens; here both have it, so that steps equal the text read at once.

A prompt is processed in blocks (§6). With c_i = Σ_{j≤i} Δ_j A within a block, and S the state before it:

    Y = exp(c) ⊙ C S + (C Bᵀ ⊙ M) (Δ ⊙ X)        M_ij = exp(c_i - c_j) for j ≤ i
    S ← exp(c_I) S + (exp(c_I - c) ⊙ B)ᵀ (Δ ⊙ X)

The cache holds S and the last inputs of the convolution, whose size does not depend on the number of positions. All of
this is computed in float32 or better, whatever the model's dtype.

Shape suffixes: B batch, L new positions, D hidden, X elements of x, C channels of the convolution, G groups, R heads of a
group, H heads, N state dimensions, P dimensions of a head, I and J positions of a block, K positions of a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.decoder.attention import Cache, Positions
from engine.decoder.convolution import causal_convolution
from engine.decoder.recurrence import Recurrence
from engine.families.config import DecoderConfig
from engine.families.layer_config import Mamba2Config
from engine.families.tensor_names import MAMBA2, attention_prefix
from engine.kernels.linear import linear
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight, frozen, frozen_tensor

BLOCK = Mamba2Config.block
"""Number of positions in one block."""


class Mamba2(Recurrence):
    """The Mamba-2 mixer of one layer."""

    kernel: ClassVar[str] = "mamba2"

    def __init__(self, config: DecoderConfig, layer: int, tensor: Callable[[str], Weight]) -> None:
        super().__init__()
        sizes = config.layers[layer].linear
        assert isinstance(sizes, Mamba2Config)
        self.layer, self.sizes, self.epsilon = layer, sizes, config.norm_epsilon
        prefix = attention_prefix(config, layer)
        inputs, *vectors, norm, output = (tensor(f"{prefix}.{name}") for name in MAMBA2)
        self.inputs, self.output, self.norm_X = frozen(inputs), frozen(output), frozen_tensor(norm)
        self.filter_C1K, self.filter_bias_C, self.step_bias_H, self.log_rate_H, self.through_H = map(frozen_tensor, vectors)

    def forward(self, x_BLD: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        """Map [B, L, D] to [B, L, D]; with a cache, continue from its state and store the new one."""
        assert not positions.one_by_one, "tokens that may be undone cannot be read: the state cannot forget them"
        sizes, real_BL1 = self.sizes, None if positions.real_BL is None else positions.real_BL[..., None]
        if real_BL1 is not None:
            x_BLD = x_BLD * real_BL1  # padding comes first, and leaves the state at zero
        if (compiled_B1D := self.next_position(x_BLD, positions, cache)) is not None:
            return compiled_B1D
        projected_BLX = linear(x_BLD, self.inputs, choice=positions.choice)
        gate_BLX, mixed_BLC, step_BLH = projected_BLX.split((sizes.inner, sizes.channels, sizes.heads), dim=-1)
        wide = torch.promote_types(x_BLD.dtype, torch.float32)
        state, last = (None, None) if cache is None else (part.to(wide) for part in cache.state(self.layer))
        mixed_BLC, last = causal_convolution(mixed_BLC.to(wide), self.filter_C1K[:, 0].to(wide), last)
        mixed_BLC = F.silu(mixed_BLC + self.filter_bias_C.to(wide))
        if real_BL1 is not None:
            mixed_BLC = mixed_BLC * real_BL1
        step_BLH = F.softplus(step_BLH.to(wide) + self.step_bias_H.to(wide)).clamp_min(sizes.least_step)
        mixed_BLX, state = self._mixed(mixed_BLC, step_BLH, state)
        if cache is not None:
            cache.keep_state(self.layer, (state, last))
        gated_BLX = self._normed(mixed_BLX * F.silu(gate_BLX.to(wide))).to(x_BLD.dtype)
        return linear(gated_BLX, self.output, choice=positions.choice)

    @property
    def projections(self) -> tuple[nn.Parameter | LowBitWeight, ...]:
        """The projection of the layer's input."""
        return (self.inputs,)

    @property
    def results(self) -> int:
        """The kernel's results for one position: the inputs of the output projection."""
        return self.sizes.inner

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """The parameters that the kernel reads in bfloat16."""
        return {"filters": self.filter_C1K, "filter_bias": self.filter_bias_C, "norm": self.norm_X}

    @property
    def numbers(self) -> Mapping[str, Tensor]:
        """The parameters that it reads in float32."""
        return {"step_bias": self.step_bias_H, "log_rate": self.log_rate_H, "through": self.through_H}

    @property
    def kernel_sizes(self) -> Mapping[str, float]:
        """The record's further fields."""
        sizes = self.sizes
        heads = {"heads": sizes.heads, "groups": sizes.groups, "filter_size": sizes.kernel}
        each = {"key_size": sizes.key_dimension, "value_size": sizes.value_dimension}
        return {**heads, **each, "least_step": sizes.least_step, "epsilon": self.epsilon}

    def _mixed(self, mixed_BLC: Tensor, step_BLH: Tensor, state_BHNP: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y of all heads [B, L, X], and the state after the last position."""
        sizes, wide = self.sizes, mixed_BLC.dtype
        shared = sizes.groups * sizes.key_dimension
        x_BLX, *shared_BLX = mixed_BLC.split((sizes.inner, shared, shared), dim=-1)
        in_BGLN, out_BGLN = (part_BLX.unflatten(-1, (sizes.groups, -1)).transpose(1, 2) for part_BLX in shared_BLX)
        x_BHLP = x_BLX.unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        step_BHL = step_BLH.transpose(1, 2)
        rate_H1 = -self.log_rate_H.to(wide).exp()[:, None]
        y_BHLP, state_BHNP = scan(x_BHLP * step_BHL[..., None], step_BHL * rate_H1, in_BGLN, out_BGLN, state_BHNP)
        y_BHLP = y_BHLP + x_BHLP * self.through_H.to(wide)[:, None, None]
        return y_BHLP.transpose(1, 2).flatten(2), state_BHNP

    def _normed(self, y_BLX: Tensor) -> Tensor:
        """Divide by the root mean square of each group's part, and multiply by the norm's weights."""
        y_BLGX = y_BLX.unflatten(-1, (self.sizes.groups, -1))
        return F.rms_norm(y_BLGX, y_BLGX.shape[-1:], eps=self.epsilon).flatten(2) * self.norm_X.to(y_BLX.dtype)


def scan(
    value_BHLP: Tensor, decay_BHL: Tensor, in_BGLN: Tensor, out_BGLN: Tensor, state_BHNP: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y without D [B, H, L, P], and the state after the last position [B, H, N, P].

    value: Δx. decay: ΔA. in: B. out: C. The initial state is zero by default. The given state may be overwritten.
    """
    groups = in_BGLN.shape[1]
    value_BGRLP, decay_BGRL = (part.unflatten(1, (groups, -1)) for part in (value_BHLP, decay_BHL))
    in_BG1LN, out_BG1LN = in_BGLN[:, :, None], out_BGLN[:, :, None]
    if state_BHNP is None:
        state_BHNP = torch.zeros_like(in_BG1LN[..., :1, :].mT * value_BGRLP[..., :1, :]).flatten(1, 2)
    state_BGRNP = state_BHNP.unflatten(1, (groups, -1))
    if value_BHLP.shape[2] == 1:
        y_BGRLP, state_BGRNP = next_position(value_BGRLP, decay_BGRL, in_BG1LN, out_BG1LN, state_BGRNP)
        return y_BGRLP.flatten(1, 2), state_BGRNP.flatten(1, 2)
    found = []
    for start in range(0, value_BHLP.shape[2], BLOCK):
        here = slice(start, start + BLOCK)
        y_BGRIP, state_BGRNP = next_block(
            value_BGRLP[..., here, :], decay_BGRL[..., here], in_BG1LN[..., here, :], out_BG1LN[..., here, :], state_BGRNP
        )
        found.append(y_BGRIP)
    return torch.cat(found, dim=3).flatten(1, 2), state_BGRNP.flatten(1, 2)


def next_position(
    value_BGR1P: Tensor, decay_BGR1: Tensor, in_BG11N: Tensor, out_BG11N: Tensor, state_BGRNP: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `scan` for one position, by the recurrence. Without gradients the given state is overwritten."""
    kept_BGR11 = decay_BGR1.exp()[..., None]
    if torch.is_grad_enabled():
        state_BGRNP = state_BGRNP * kept_BGR11 + in_BG11N.mT * value_BGR1P
    else:
        state_BGRNP = state_BGRNP.mul_(kept_BGR11).addcmul_(in_BG11N.mT, value_BGR1P)
    return out_BG11N @ state_BGRNP, state_BGRNP


def next_block(
    value_BGRIP: Tensor, decay_BGRI: Tensor, in_BG1IN: Tensor, out_BG1IN: Tensor, state_BGRNP: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `scan` for one block of positions."""
    sums_BGRI1 = decay_BGRI.cumsum(-1)[..., None]
    later_IJ = torch.ones(2 * value_BGRIP.shape[3:4], dtype=torch.bool, device=value_BGRIP.device).triu(1)
    between_BGRIJ = (sums_BGRI1 - sums_BGRI1.mT).masked_fill(later_IJ, -torch.inf).exp()  # those of later ones may overflow
    within_BGRIP = (out_BG1IN @ in_BG1IN.mT * between_BGRIJ) @ value_BGRIP
    y_BGRIP = within_BGRIP + sums_BGRI1.exp() * (out_BG1IN @ state_BGRNP)
    last_BGR11 = sums_BGRI1[..., -1:, :]
    left_BGRIP = value_BGRIP * (last_BGR11 - sums_BGRI1).exp()
    return y_BGRIP, last_BGR11.exp() * state_BGRNP + in_BG1IN.mT @ left_BGRIP
