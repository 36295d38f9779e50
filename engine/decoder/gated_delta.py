"""The gated delta rule (arXiv 2412.06464): linear attention whose memory forgets, and corrects what it returns for a key.

    S_t = α_t S_{t-1} + k_t u_tᵀ        u_t = β_t (v_t - α_t S_{t-1}ᵀ k_t)        o_t = S_tᵀ q_t

    [q; k; v] = silu(conv(W_qkv·x))    q ← q / (‖q‖ √E)    k ← k / ‖k‖    β = σ(W_b·x)
    ln α = -exp(A) softplus(W_a·x + b)        y = W_o (norm(o) ⊙ silu(W_z·x))

α and β are numbers, one for each head. There is no rotary embedding. A prompt is processed in blocks (2412.06464, §3.3).
With c_i = Σ_{j≤i} ln α_j within a block, and S the state before it, the corrections U solve a triangular system:

    (I + β ⊙ tril(K Kᵀ ⊙ M, -1)) U = β ⊙ (V - Γ K S)        M_ij = exp(c_i - c_j) for j ≤ i        Γ = diag(exp(c))
    O = Γ Q S + (Q Kᵀ ⊙ M) U        S ← exp(c_B) S + (exp(c_B - c) ⊙ K)ᵀ U

The cache holds S and the last inputs of the convolution, whose size does not depend on the number of positions. All of
this is computed in float32 or better, whatever the model's dtype.

Shape suffixes: B batch, L new positions, D hidden, C channels of the convolution, G heads of queries and keys, H heads of
values, E dimensions of a query and key, V of a value, I and J positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.decoder.attention import Cache, Positions
from engine.decoder.convolution import causal_convolution
from engine.decoder.recurrence import Recurrence
from engine.families.config import DecoderConfig
from engine.families.layer_config import GatedDeltaConfig
from engine.families.tensor_names import GATED_DELTA, SPLIT_GATED_DELTA, attention_prefix
from engine.kernels.linear import linear, linears
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight, frozen, frozen_tensor

BLOCK = GatedDeltaConfig.block
"""Number of positions in one block."""
NORM_EPSILON = 1e-6
"""Epsilon under the root of the norms of queries and keys, independent of the config."""


class Projected(NamedTuple):
    """The projections of the new positions."""

    mixed_BLC: Tensor
    """Queries, keys and values of all heads, before the convolution."""
    gate_BLHV: Tensor
    """Logits of the output's gate, before silu."""
    strength_BLH: Tensor
    """Logits of β."""
    decay_BLH: Tensor
    """Logits of the decay, before their bias."""


class GatedDelta(Recurrence):
    """The gated delta rule of one layer. Two matrices have all projections, head of keys by head of keys."""

    names: ClassVar[tuple[str, ...]] = GATED_DELTA
    """Names of the tensors within the layer's attention: the projections, and five others."""
    kernel: ClassVar[str] = "gated_delta"

    def __init__(self, config: DecoderConfig, layer: int, tensor: Callable[[str], Weight]) -> None:
        super().__init__()
        sizes = config.layers[layer].linear
        assert isinstance(sizes, GatedDeltaConfig)
        self.layer, self.sizes, self.epsilon = layer, sizes, config.norm_epsilon
        prefix = attention_prefix(config, layer)
        *projections, filters, bias, rate, norm, output = (tensor(f"{prefix}.{name}") for name in self.names)
        self._keep(*projections)
        self.filter_C1K, self.decay_bias_H, self.log_rate_H = map(frozen_tensor, (filters, bias, rate))
        self.norm_V, self.output = frozen_tensor(norm), frozen(output)

    def _keep(self, *projections: Weight) -> None:
        self.inputs, self.strength_decay = frozen(projections[0]), frozen_tensor(projections[1])

    @property
    def projections(self) -> tuple[nn.Parameter | LowBitWeight, ...]:
        """The projections of the layer's input, in the order of `names`."""
        return self.inputs, self.strength_decay

    def forward(self, x_BLD: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        """Map [B, L, D] to [B, L, D]; with a cache, continue from its state and store the new one."""
        assert not positions.one_by_one, "tokens that may be undone cannot be read: the state cannot forget them"
        if positions.real_BL is not None:
            x_BLD = x_BLD * positions.real_BL[..., None]  # padding comes first, and leaves the state at zero
        if (compiled_B1D := self.next_position(x_BLD, positions, cache)) is not None:
            return compiled_B1D
        projected = self._projected(x_BLD, positions)
        wide = torch.promote_types(x_BLD.dtype, torch.float32)
        state, last = (None, None) if cache is None else (part.to(wide) for part in cache.state(self.layer))
        mixed_BLC, last = causal_convolution(projected.mixed_BLC.to(wide), self.filter_C1K[:, 0].to(wide), last)
        query_BHLE, key_BHLE, value_BHLV = self._heads(F.silu(mixed_BLC))
        decay_BHL, strength_BHL = self._decays(projected, wide)
        mixed_BHLV, state = attend(query_BHLE, key_BHLE, value_BHLV, decay_BHL, strength_BHL, state)
        if cache is not None:
            cache.keep_state(self.layer, (state, last))
        mixed_BLHV = F.rms_norm(mixed_BHLV.transpose(1, 2), self.norm_V.shape, self.norm_V.to(wide), self.epsilon)
        gated_BLX = (mixed_BLHV * F.silu(projected.gate_BLHV.to(wide))).flatten(2).to(x_BLD.dtype)
        return linear(gated_BLX, self.output, choice=positions.choice)

    @property
    def results(self) -> int:
        """The kernel's results for one position: the inputs of the output projection."""
        return self.sizes.heads * self.sizes.value_dimension

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """The parameters that the kernel reads in bfloat16."""
        return {"filters": self.filter_C1K, "norm": self.norm_V}

    @property
    def numbers(self) -> Mapping[str, Tensor]:
        """The parameters that it reads in float32."""
        return {"decay_bias": self.decay_bias_H, "log_rate": self.log_rate_H}

    @property
    def kernel_sizes(self) -> Mapping[str, float]:
        """The record's further fields."""
        sizes = self.sizes
        heads = {"heads": sizes.heads, "key_heads": sizes.key_heads}
        each = {"key_size": sizes.key_dimension, "value_size": sizes.value_dimension, "filter_size": sizes.kernel}
        return {**heads, **each, "epsilon": self.epsilon, "key_epsilon": NORM_EPSILON}

    @cached_property
    def columns_O(self) -> Tensor | None:
        """The column of the projections that each column of the kernel's inputs is, int64."""
        inputs, numbers = (weight.shape[0] for weight in self.projections)
        parts = self._parts(*(each[None, None] for each in torch.arange(inputs + numbers).split((inputs, numbers))))
        return torch.cat([part.flatten() for part in parts])

    def _projected(self, x_BLD: Tensor, positions: Positions) -> Projected:
        """Return the projections of the layer's input."""
        return self._parts(*linears(x_BLD, self.projections, (None, None), positions.choice))

    def _parts(self, inputs_BLX: Tensor, numbers_BLX: Tensor) -> Projected:
        """Return the parts of the two matrices' products, which are stored head of keys by head of keys."""
        sizes = self.sizes
        own = sizes.heads // sizes.key_heads * sizes.value_dimension
        each_BLGX, numbers_BLGX = (part.unflatten(-1, (sizes.key_heads, -1)) for part in (inputs_BLX, numbers_BLX))
        *mixed, gate_BLGX = each_BLGX.split((sizes.key_dimension, sizes.key_dimension, own, own), dim=-1)
        strength_BLGX, decay_BLGX = numbers_BLGX.chunk(2, dim=-1)
        return Projected(
            torch.cat([part.flatten(2) for part in mixed], dim=-1),
            gate_BLGX.flatten(2).unflatten(-1, (sizes.heads, -1)),
            strength_BLGX.flatten(2),
            decay_BLGX.flatten(2),
        )

    def _heads(self, mixed_BLC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalized queries and keys [B, H, L, E], and values [B, H, L, V]."""
        sizes = self.sizes
        keys, repeats = sizes.key_heads * sizes.key_dimension, sizes.heads // sizes.key_heads
        *both, value_BLX = mixed_BLC.split((keys, keys, sizes.heads * sizes.value_dimension), dim=-1)
        each = (part_BLX.unflatten(-1, (sizes.key_heads, -1)).transpose(1, 2) for part_BLX in both)
        query_BHLE, key_BHLE = (normalized(part_BGLE).repeat_interleave(repeats, dim=1) for part_BGLE in each)
        value_BHLV = value_BLX.unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        return query_BHLE * sizes.key_dimension**-0.5, key_BHLE, value_BHLV

    def _decays(self, projected: Projected, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ln α and β, [B, H, L]."""
        decay_BLH = F.softplus(projected.decay_BLH.to(wide) + self.decay_bias_H.to(wide))
        decay_BLH = -self.log_rate_H.to(wide).exp() * decay_BLH
        return decay_BLH.transpose(1, 2), projected.strength_BLH.to(wide).sigmoid().transpose(1, 2)


class SplitGatedDelta(GatedDelta):
    """The gated delta rule of one layer, with a matrix for each projection."""

    names: ClassVar[tuple[str, ...]] = SPLIT_GATED_DELTA

    def _keep(self, *projections: Weight) -> None:
        self.inputs, self.gate = frozen(projections[0]), frozen(projections[1])
        self.strength_HD, self.decay_HD = frozen_tensor(projections[2]), frozen_tensor(projections[3])

    @property
    def projections(self) -> tuple[nn.Parameter | LowBitWeight, ...]:
        """The projections of the layer's input, in the order of `names`."""
        return self.inputs, self.gate, self.strength_HD, self.decay_HD

    @cached_property
    def columns_O(self) -> Tensor | None:
        """None: the projections side by side are the kernel's inputs."""
        return None

    def _projected(self, x_BLD: Tensor, positions: Positions) -> Projected:
        """Return the projections of the layer's input."""
        mixed_BLC, gate_BLX, strength_BLH, decay_BLH = linears(x_BLD, self.projections, (None,) * 4, positions.choice)
        return Projected(mixed_BLC, gate_BLX.unflatten(-1, (self.sizes.heads, -1)), strength_BLH, decay_BLH)


def normalized(x: Tensor) -> Tensor:
    """Return x / ‖x‖ over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def attend(
    query_BHLE: Tensor,
    key_BHLE: Tensor,
    value_BHLV: Tensor,
    decay_BHL: Tensor,
    strength_BHL: Tensor,
    state_BHEV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, L, V], and the state after the last position [B, H, E, V]. The initial state is zero by default.

    decay: ln α. strength: β. The given state may be overwritten.
    """
    if state_BHEV is None:
        state_BHEV = torch.zeros_like(key_BHLE[:, :, :1].mT * value_BHLV[:, :, :1])
    if query_BHLE.shape[2] == 1:
        return next_position(query_BHLE, key_BHLE, value_BHLV, decay_BHL, strength_BHL, state_BHEV)
    mixed = []
    for start in range(0, query_BHLE.shape[2], BLOCK):
        place = slice(start, start + BLOCK)
        heads = query_BHLE[:, :, place], key_BHLE[:, :, place], value_BHLV[:, :, place]
        mixed_BHIV, state_BHEV = next_block(*heads, decay_BHL[:, :, place], strength_BHL[:, :, place], state_BHEV)
        mixed.append(mixed_BHIV)
    return torch.cat(mixed, dim=2), state_BHEV


def next_position(
    query_BH1E: Tensor,
    key_BH1E: Tensor,
    value_BH1V: Tensor,
    decay_BH1: Tensor,
    strength_BH1: Tensor,
    state_BHEV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return `attend` for one position, by the recurrence.

    Without gradients the given state is overwritten: new memory for it costs several times as much as the products.
    """
    kept_BH11, keeps = decay_BH1.exp()[..., None], torch.is_grad_enabled()
    state_BHEV = state_BHEV * kept_BH11 if keeps else state_BHEV.mul_(kept_BH11)
    correction_BH1V = strength_BH1[..., None] * (value_BH1V - key_BH1E @ state_BHEV)
    add = torch.addcmul if keeps else Tensor.addcmul_
    state_BHEV = add(state_BHEV, key_BH1E.mT, correction_BH1V)
    return query_BH1E @ state_BHEV, state_BHEV


def next_block(
    query_BHIE: Tensor,
    key_BHIE: Tensor,
    value_BHIV: Tensor,
    decay_BHI: Tensor,
    strength_BHI: Tensor,
    state_BHEV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return `attend` for one block of positions."""
    sums_BHI1 = decay_BHI.cumsum(-1)[..., None]
    later_IJ = torch.ones(2 * query_BHIE.shape[2:3], dtype=torch.bool, device=query_BHIE.device).triu(1)
    between_BHIJ = (sums_BHI1 - sums_BHI1.mT).masked_fill(later_IJ, -torch.inf).exp()  # an exp of later ones may overflow
    begun_BHI1, strength_BHI1 = sums_BHI1.exp(), strength_BHI[..., None]
    system_BHIJ = strength_BHI1 * (key_BHIE @ key_BHIE.mT) * between_BHIJ
    wanted_BHIV = strength_BHI1 * (value_BHIV - begun_BHI1 * (key_BHIE @ state_BHEV))
    # The solver takes ones for the diagonal and reads nothing above it.
    solved_BHIV = torch.linalg.solve_triangular(system_BHIJ, wanted_BHIV, upper=False, unitriangular=True)
    mixed_BHIV = begun_BHI1 * (query_BHIE @ state_BHEV) + (query_BHIE @ key_BHIE.mT * between_BHIJ) @ solved_BHIV
    left_BHI1 = (sums_BHI1[:, :, -1:] - sums_BHI1).exp()
    return mixed_BHIV, begun_BHI1[:, :, -1:] * state_BHEV + (key_BHIE * left_BHI1).mT @ solved_BHIV
