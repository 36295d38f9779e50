"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1): one vector per position serves all heads.

    c^KV = norm(W^DKV·h)    k^R = RoPE(W^KR·h)    k_i = [W^UK_i·c^KV; k^R]    v_i = W^UV_i·c^KV        (eq. 9-16)

The cache holds c^KV and k^R, which all heads share. For many new positions, keys and values of each head are computed
from them. For one new position they are not (§2.1.2, "absorbed"): q·(W^UK c) = (W^UKᵀ q)·c, so its queries are compared
with the latent vectors, and the weighted sum of latent vectors is mapped to values afterwards. A test holds the two
equal.

Shape suffixes: B batch, L new positions, P all positions so far, H heads, D hidden, C the latent vector's dimensions, R
rotated dimensions, N the other dimensions of a query and key, E both, V a value's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.decoder.attention import Cache, Positions, attend, half_by_half, rotate
from engine.decoder.kv_cache import COMPILED_DTYPES, Kept, Scaled
from engine.decoder.norms import rms_norm
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.text_attention import attend_texts
from engine.families.config import DecoderConfig
from engine.families.tensor_names import LATENT_UP
from engine.kernels.kernel_choice import TORCH
from engine.kernels.linear import as_bfloat16, linear, linears
from engine.kernels.stored.quantized_weight import LowBitWeight, Weight, frozen, frozen_tensor
from engine.kernels.torch_products import is_emulated

LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, independent of the config."""


class Queries(NamedTuple):
    """Queries of the new positions."""

    plain_BHLN: Tensor
    rotated_BHLR: Tensor


class LatentAttention(nn.Module):
    """Latent self-attention of one layer."""

    def __init__(self, config: DecoderConfig, layer: int, tensor: Callable[[str], Weight]) -> None:
        super().__init__()
        assert config.latent is not None
        prefix = f"model.layers.{layer}.self_attn"
        self.layer, self.heads, self.sizes = layer, config.attention_heads, config.latent
        self.pairs, self.scale = config.rotary_pairs, softmax_scale(config)

        def parameter(name: str, present: bool = True) -> nn.Parameter | None:
            return frozen_tensor(tensor(f"{prefix}.{name}")) if present else None

        def weight(name: str) -> nn.Parameter | LowBitWeight:
            return frozen(tensor(f"{prefix}.{name}"))

        has_rank = config.latent.query_rank > 0
        self.query_down = weight("q_a_proj.weight") if has_rank else None
        self.query_down_bias = parameter("q_a_proj.bias", has_rank and config.qkv_bias)
        self.query_norm = parameter("q_a_layernorm.weight", has_rank)
        self.query_up = weight("q_b_proj.weight" if has_rank else "q_proj.weight")
        self.latent_down = weight("kv_a_proj_with_mqa.weight")
        self.latent_down_bias = parameter("kv_a_proj_with_mqa.bias", config.qkv_bias)
        self.latent_norm = _present(parameter("kv_a_layernorm.weight"))
        self.latent_up = _present(parameter(LATENT_UP))
        self.output = weight("o_proj.weight")
        self.output_bias = parameter("o_proj.bias", config.output_bias)

    def forward(self, x_BLD: Tensor, positions: Positions, cache: Cache | None = None) -> Tensor:
        """Map [B, L, D] to [B, L, D]; with a cache, attend to its content and append the new positions."""
        batch, length, _ = x_BLD.shape
        query_BLHE, latent_BLC, key_BLR = self._projected(x_BLD, positions)
        choice = positions.choice
        if (kernels := self._kernels(query_BLHE, positions, cache)) is not None:
            assert cache is not None
            mixed_BLX = self._attend_compiled(kernels, (query_BLHE, latent_BLC, key_BLR), positions, cache)
            return linear(mixed_BLX, self.output, self.output_bias, choice)
        queries, latent_B1LC, key_B1LR = self._placed(query_BLHE, latent_BLC, key_BLR, positions)
        if isinstance(cache, PagedBatch):
            cache.append(self.layer, latent_B1LC, key_B1LR)
            parts = zip(*(cache.split(each, 2) for each in queries), strict=True)
            mixed = []
            for row, own in enumerate(parts):
                kept = _whole(cache.of_sequence(self.layer, row), x_BLD.dtype)
                mixed.append(self.attend(Queries(*own), *kept, positions.mask_of(row, None), positions))
            mixed_BHLV = cache.joined(mixed, 2)
        else:
            if cache is not None:
                latent_B1LC, key_B1LR = _whole(cache.append(self.layer, latent_B1LC, key_B1LR), x_BLD.dtype)
            way = self._attend_next_ones if positions.one_by_one else self.attend
            mixed_BHLV = way(queries, latent_B1LC, key_B1LR, positions.masks[None], positions)
        return linear(mixed_BHLV.transpose(1, 2).reshape(batch, length, -1), self.output, self.output_bias, choice)

    def _projected(self, x_BLD: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, L, H, E], latent vectors [B, L, C] and keys [B, L, R], which are not yet rotated."""
        sizes, down, biases, choice = self.sizes, [self.latent_down], [self.latent_down_bias], positions.choice
        if self.query_down is not None:
            down, biases = [*down, self.query_down], [*biases, self.query_down_bias]
        latent_BLE, *query = linears(x_BLD, down, biases, choice)
        query_BLD = rms_norm(query[0], _present(self.query_norm), LATENT_NORM_EPSILON, choice) if query else x_BLD
        query_BLHE = linear(query_BLD, self.query_up, choice=choice).unflatten(-1, (self.heads, -1))
        latent_BLC, key_BLR = latent_BLE.split((sizes.key_value_rank, sizes.rotary_dimension), dim=-1)
        return query_BLHE, rms_norm(latent_BLC.contiguous(), self.latent_norm, LATENT_NORM_EPSILON, choice), key_BLR

    def _placed(
        self, query_BLHE: Tensor, latent_BLC: Tensor, key_BLR: Tensor, positions: Positions
    ) -> tuple[Queries, Tensor, Tensor]:
        """Return queries, latent vectors and rotated keys of the new positions."""
        sizes = self.sizes
        split = query_BLHE.transpose(1, 2).split((sizes.plain_dimension, sizes.rotary_dimension), dim=-1)
        queries = Queries(split[0], self._rotate(split[1], positions))
        return queries, latent_BLC[:, None], self._rotate(key_BLR[:, None], positions)

    def _kernels(self, query_BLHE: Tensor, positions: Positions, cache: Cache | None) -> Any:
        """Return the compiled kernels if they can attend for the next few positions of a few sequences, otherwise None."""
        if cache is None or positions.is_padded or cache.dtype not in COMPILED_DTYPES:
            return None
        rows = query_BLHE.shape[0] * query_BLHE.shape[1]
        return positions.choice.for_few(rows, query_BLHE, positions.cosine, self.latent_up)

    def _attend_compiled(
        self, kernels: Any, parts: tuple[Tensor, Tensor, Tensor], positions: Positions, cache: Cache
    ) -> Tensor:
        """Attend position by position: each attends to the previous ones, with the result of reading it alone. [B, L, X].

        parts: queries, latent vectors and keys.
        """
        (batch, length, heads, _), sizes = parts[0].shape, self.sizes
        shape = (heads, sizes.plain_dimension, sizes.rotary_dimension, sizes.key_value_rank, sizes.value_dimension)
        angles = [angle.expand(batch, 1, length, -1)[:, 0] for angle in (positions.cosine, positions.sine)]
        blocks, past, block_size, repeats = cache.places(self.layer)
        mixed = []
        for done in range(length):
            inputs = [part[:, done].contiguous() for part in (*parts, *angles)]
            made = kernels.attend_latent(
                [each.data_ptr() for each in inputs],
                [each.stride(0) for each in inputs[:3]],
                cache.addresses(self.layer),
                self.latent_up.data_ptr(),
                (batch, *shape),
                (blocks, past + done, block_size, repeats),
                self.scale,
                pairs=self.pairs,
            )
            mixed.append(as_bfloat16(made).view(batch, 1, -1))
        return mixed[0] if length == 1 else torch.cat(mixed, dim=1)

    def _rotate(self, x_BHLR: Tensor, positions: Positions) -> Tensor:
        if self.pairs:
            x_BHLR = half_by_half(x_BHLR, x_BHLR.shape[-1])
        return rotate(x_BHLR, positions.cosine, positions.sine)

    def attend(
        self, queries: Queries, latent_B1PC: Tensor, key_B1PR: Tensor, mask: Tensor | None, positions: Positions
    ) -> Tensor:
        """Return the attention output before the output projection, [B, H, L, V]."""
        if queries.plain_BHLN.shape[2] == 1:
            return self.absorbed(queries, latent_B1PC, key_B1PR, mask)
        return self.expanded(queries, latent_B1PC, key_B1PR, mask, positions)

    def _attend_next_ones(
        self, queries: Queries, latent_B1PC: Tensor, key_B1PR: Tensor, mask: Tensor | None, _: Positions
    ) -> Tensor:
        """Attend position by position, so that no keys and values are computed for all earlier positions."""
        length, total = queries.plain_BHLN.shape[2], latent_B1PC.shape[2]
        mixed = []
        for place in range(length):
            own, seen = slice(place, place + 1), total - length + place + 1
            query = Queries(*(each[:, :, own] for each in queries))
            own_mask = None if mask is None else mask[:, :, own, :seen]
            mixed.append(self.absorbed(query, latent_B1PC[:, :, :seen], key_B1PR[:, :, :seen], own_mask))
        return torch.cat(mixed, dim=2)

    def expanded(
        self,
        queries: Queries,
        latent_B1PC: Tensor,
        key_B1PR: Tensor,
        mask: Tensor | None,
        positions: Positions | None = None,
    ) -> Tensor:
        """Attend with keys and values of each head; by torch if no Positions are given."""
        sizes, choice = self.sizes, TORCH if positions is None else positions.choice
        made_BPHE = linear(latent_B1PC[:, 0], self.latent_up, choice=choice).unflatten(-1, (self.heads, -1))
        plain_BHPN, value_BHPV = made_BPHE.transpose(1, 2).split((sizes.plain_dimension, sizes.value_dimension), dim=-1)
        key_BHPE = torch.cat((plain_BHPN, key_B1PR.expand(-1, self.heads, -1, -1)), dim=-1)
        query_BHLE = torch.cat(queries, dim=-1)
        kernels = None if positions is None else positions.text_kernels(query_BHLE, key_BHPE, value_BHPV)
        if kernels is not None:
            return attend_texts(kernels, query_BHLE, key_BHPE, value_BHPV, self.scale)
        return attend(query_BHLE, key_BHPE, value_BHPV, mask, self.scale)

    def absorbed(self, queries: Queries, latent_B1PC: Tensor, key_B1PR: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from one position to the latent vectors directly: all heads' queries become positions of one head."""
        if is_emulated(latent_B1PC) and latent_B1PC.dtype != torch.float16:
            wide = Queries(*(each.float() for each in queries))
            return self.absorbed(wide, latent_B1PC.float(), key_B1PR.float(), mask).to(latent_B1PC.dtype)
        sizes, dtype = self.sizes, latent_B1PC.dtype
        up_HEC = self.latent_up.to(dtype).view(self.heads, -1, sizes.key_value_rank)
        up_key_HNC, up_value_HVC = up_HEC.split((sizes.plain_dimension, sizes.value_dimension), dim=1)
        query_B1HC = (queries.plain_BHLN @ up_key_HNC).transpose(1, 2)
        scores_B1HP = query_B1HC @ latent_B1PC.mT + queries.rotated_BHLR.transpose(1, 2) @ key_B1PR.mT
        scores_B1HP = scores_B1HP.to(torch.promote_types(dtype, torch.float32)) * self.scale
        if mask is not None:
            scores_B1HP = scores_B1HP.masked_fill(~mask, -torch.inf)
        mixed_B1HC = scores_B1HP.softmax(-1).to(dtype) @ latent_B1PC
        mixed_BHLV: Tensor = mixed_B1HC.transpose(1, 2) @ up_value_HVC.mT
        return mixed_BHLV


def softmax_scale(config: DecoderConfig) -> float:
    """Return 1/√E, under YaRN with the factor from `mscale_all_dim` (Peng et al. 2023, §3.4)."""
    rope = config.transformers_config.rope_parameters
    factor, share = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    stretched = rope.get("rope_type", "default") != "default" and factor > 1
    mscale = 0.1 * share * math.log(factor) + 1.0 if stretched else 1.0
    return float(config.head_dimension**-0.5 * mscale**2)


def _present(parameter: nn.Parameter | None) -> nn.Parameter:
    assert parameter is not None
    return parameter


def _whole(kept: tuple[Kept, Kept], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return latent vectors and keys in this dtype, whichever they are stored in."""
    latent, key = (part.dequantized() if isinstance(part, Scaled) else part for part in kept)
    return latent.to(dtype), key.to(dtype)
