"""One step of decoding in one compiled call, for decoders whose parts the kernels support.

For a small model, running the layers one by one in Python takes a fifth of the time of reading its weights. The kernels
compute the same products with the same rounding as `model.DecoderLayer`. Unsupported parts run through the layers:
latent attention, routers other than the top-k of a softmax, partly rotated heads, observers of experts.

Shape suffixes: T tokens, D hidden, L layers, S slots, N experts, A addresses of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decoder.attention import Attention, Positions
from engine.decoder.experts import Expert, MoeBlock
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.routing import Routing, Selection, Skipping, TopK
from engine.families.config import DecoderConfig
from engine.families.layer_config import Chunk
from engine.kernels.linear import addresses, as_bfloat16, compiled_kernels, kernel_form
from engine.kernels.quantized_weight import Weight


@dataclass
class _Tables:
    """Tables from which the kernels read all layers; see `gemv.decode`."""

    addresses_LA: Any
    numbers: Any
    factors: Any
    experts: Any
    shared: Any
    sinks: list[Tensor]
    """Sinks converted to float32; the tables hold their addresses."""


class DecodeStep:
    """Compiled step through the layers of one decoder."""

    def __init__(self, config: DecoderConfig, layers: Any) -> None:
        self._config, self._layers = config, layers
        self._blocks: list[MoeBlock] = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoeBlock)]
        self._tables: _Tables | None = None
        self._first: list[int] = []
        self._routings: list[Routing] = []
        self._is_served = False

    def __call__(self, x_BLD: Tensor, positions: Positions, cache: KeyValueCache | PagedBatch | None) -> Tensor | None:
        """Return the hidden states before the last norm, [B, L, D], written over x; None if the layers must run.

        The step reads the next position of several sequences, or the next few positions of one sequence.
        """
        batch, length, hidden = x_BLD.shape
        if cache is None or positions.is_padded or positions.temperature is not None or (batch > 1 and length > 1):
            return None
        kernels = compiled_kernels(batch * length, x_BLD, positions.cosine)
        if kernels is None or cache.dtype != torch.bfloat16 or not self._knows(kernels):
            return None
        if positions.cosine.shape[-1] != self._config.head_dimension:
            return None
        tokens, attention = batch * length, self._layers[0].attention
        size = attention.head_dimension
        angles = [angle.expand(batch, 1, length, size).contiguous() for angle in (positions.cosine, positions.sine)]
        caches_L2 = np.array([cache.addresses(layer) for layer in range(len(self._layers))], np.uint64)
        kinds = {"none": 0, "head": kernels.HEAD_NORM, "full": kernels.WHOLE_NORM}
        seen = self._seen(tokens, hidden) if any(block.observer is not None for block in self._blocks) else None
        tables = self._tables
        assert tables is not None
        kernels.decode(
            x_BLD.data_ptr(),
            (tables.addresses_LA, tables.numbers, tables.factors, tables.experts, tables.shared),
            caches_L2,
            (angles[0].data_ptr(), angles[1].data_ptr()),
            cache.places,
            (attention.query_heads, attention.key_heads, size, cache.group_stride, kinds[attention.qk_norm]),
            (attention.epsilon, attention.scale, self._config.multipliers.residual),
            (tokens, hidden),
            self._thresholds(tokens),
            seen,
        )
        if seen is not None:
            self._tell(*seen)
        return x_BLD

    def _knows(self, kernels: Any) -> bool:
        """Return whether the kernels support the model; update the tables if weights or routings have changed."""
        routings = [block.routing for block in self._blocks]
        first = [layer.attention_norm.data_ptr() for layer in (self._layers[0], self._layers[-1])]
        if first != self._first:  # weights are moved all together or not at all
            self._first, self._routings = first, []
            self._is_served = all(_serves(kernels, layer) for layer in self._layers)
            self._tables = _tables(kernels, self._layers) if self._is_served else None
        if self._tables is None or any(block.expert_observer is not None for block in self._blocks):
            return False
        if len(routings) != len(self._routings) or any(a is not b for a, b in zip(routings, self._routings, strict=True)):
            self._routings = routings
            self._is_served = all(map(_is_known, routings))
            if self._is_served:
                self._route(kernels)
        return self._is_served

    def _route(self, kernels: Any) -> None:
        """Write the routings into the tables."""
        assert self._tables is not None
        for layer, block in self._moe_layers():
            routing, rule = block.routing, _rule(block.routing)
            number, at = self._tables.numbers[layer], self._tables.addresses_LA[layer]
            number[kernels.SLOTS] = min(rule.experts_per_token, len(block.experts))
            number[kernels.NORMALISES], at[kernels.GAMMAS] = int(rule.normalise), 0
            self._tables.factors[layer, 0] = rule.scale
            if isinstance(routing, Skipping):
                at[kernels.GAMMAS], at[kernels.GAMMAS + 1] = routing.gamma1_K.data_ptr(), routing.gamma2_NN.data_ptr()
                number[kernels.KEEP] = routing.keep
                number[kernels.NORMALISES] |= 2 * int(routing.normalise)

    def _moe_layers(self) -> list[tuple[int, MoeBlock]]:
        blocks = ((index, layer.feed_forward) for index, layer in enumerate(self._layers))
        return [(index, block) for index, block in blocks if isinstance(block, MoeBlock)]

    def _thresholds(self, tokens: int) -> Any:
        """Return the thresholds of adaptive skipping, one for each token."""
        skipping = next((routing for routing in self._routings if isinstance(routing, Skipping)), None)
        threshold = 0.0 if skipping is None else skipping.threshold
        if isinstance(threshold, Tensor):
            return threshold.float().numpy()
        return np.full(tokens, threshold, np.float32)

    def _seen(self, tokens: int, hidden: int) -> tuple[Any, Any, Any, Any]:
        """Allocate arrays for observers: chosen experts and weights, and the experts' inputs and logits."""
        layers, experts = len(self._layers), max(len(block.experts) for block in self._blocks)
        slots = max(_rule(routing).experts_per_token for routing in self._routings)
        inputs, logits = (np.empty((layers, tokens, width), np.uint16) for width in (hidden, experts))
        return np.empty((layers, tokens, slots), np.int64), np.empty((layers, tokens, slots), np.float32), inputs, logits

    def _tell(self, chosen: Any, weights: Any, inputs: Any, logits: Any) -> None:
        for layer, block in self._moe_layers():
            if block.observer is not None:
                experts, slots = len(block.experts), min(_rule(block.routing).experts_per_token, len(block.experts))
                selection = Selection(*(torch.from_numpy(part[layer, :, :slots].copy()) for part in (chosen, weights)))
                own_logits = np.ascontiguousarray(logits[layer, :, :experts])
                block.observer(as_bfloat16(inputs[layer]), as_bfloat16(own_logits), selection)


def _is_known(routing: Routing) -> bool:
    gammas = [routing.gamma1_K, routing.gamma2_NN] if isinstance(routing, Skipping) else []
    plain = (gamma.dtype == torch.float32 and gamma.is_cpu and gamma.is_contiguous() for gamma in gammas)
    return isinstance(_rule(routing), TopK) and all(plain)


def _rule(routing: Routing) -> Any:
    """Return the rule that chooses experts, without skipping."""
    return routing.base if isinstance(routing, Skipping) else routing


def _serves(kernels: Any, layer: Any) -> bool:
    """Return whether the kernels support all parts of this layer."""
    attention, ffn = layer.attention, layer.feed_forward
    if not isinstance(attention, Attention) or layer.attention_norm_bias is not None or layer.residuals is not None:
        return False
    if not attention.rotates or attention.unit_norm or attention.pairs or attention.clip is not None:
        return False
    plain = [layer.attention_norm, layer.feed_forward_norm, *_attention_extras(attention)]
    matrices = [[attention.query, attention.key, attention.value, attention.output]]
    if isinstance(ffn, MoeBlock):
        if ffn.router_in_float32 or ffn.scales_inputs or ffn.gate_hidden_HD is not None:
            return False
        plain += [ffn.router_ND, ffn.logit_bias_N, ffn.shared_gate_1D]
        experts = [expert for expert in ffn.experts if isinstance(expert, Expert)]
        plain += [bias for expert in experts for bias in expert.projections[3:] if isinstance(bias, Tensor)]
        matrices += [[weight for expert in experts for weight in expert.projections[:3]]]
        widths = {expert.gate_FD.shape[0] for expert in experts}
    else:
        widths = {ffn.gate_FD.shape[0]}
    alone = _alone(ffn)
    if len(widths) != 1 or (alone is not None and not alone.is_plain):
        return False
    matrices += [] if alone is None else [list(alone.projections)]
    given = [weight for weight in plain if weight is not None]
    return kernel_form(kernels, given) == kernels.PLAIN and all(kernel_form(kernels, each) for each in matrices)


def _attention_extras(attention: Attention) -> list[Tensor | None]:
    """Return the biases of query, key, value and output, and the norms of query and key."""
    biases = [attention.query_bias, attention.key_bias, attention.value_bias, attention.output_bias]
    return [*biases, attention.query_norm, attention.key_norm]


def _alone(ffn: MoeBlock | Expert) -> Expert | None:
    """Return the expert for every token: the shared expert, or a dense layer's FFN."""
    return ffn.shared if isinstance(ffn, MoeBlock) else ffn


def _tables(kernels: Any, layers: Any) -> _Tables:
    """Return the tables of supported layers, without the routings."""
    addresses_LA = np.zeros((len(layers), kernels.ADDRESSES), np.uint64)
    numbers, factors = np.zeros((len(layers), kernels.NUMBERS), np.int64), np.ones((len(layers), 3), np.float32)
    routed: list[list[tuple[int, int]]] = []
    alone: list[list[tuple[int, int]]] = []
    sinks = []
    for layer, at, number, factor in zip(layers, addresses_LA, numbers, factors, strict=True):
        attention, ffn = layer.attention, layer.feed_forward
        at[kernels.NORM], at[kernels.FFN_NORM] = layer.attention_norm.data_ptr(), layer.feed_forward_norm.data_ptr()
        matrices = [attention.query, attention.key, attention.value, attention.output]
        at[kernels.QUERY : kernels.QUERY + 8] = [part for weight in matrices for part in addresses(weight)]
        at[kernels.BIASES : kernels.BIASES + 6] = [_address(extra) for extra in _attention_extras(attention)]
        number[kernels.FORM : kernels.FORM + 2] = kernel_form(kernels, matrices)
        number[kernels.WINDOW] = -attention.window.size if isinstance(attention.window, Chunk) else attention.window or 0
        if attention.sinks is not None:
            sinks.append(attention.sinks.detach().float().contiguous())
            at[kernels.SINKS] = sinks[-1].data_ptr()
        number[kernels.SHARED], factor[2] = -1, 0.0
        if isinstance(ffn, MoeBlock):
            at[kernels.ROUTER], at[kernels.ROUTER + 1] = ffn.router_ND.data_ptr(), _address(ffn.logit_bias_N)
            at[kernels.SHARED_GATE] = _address(ffn.shared_gate_1D)
            first: Expert = ffn.experts[0]  # type: ignore[assignment]
            number[kernels.FIRST], number[kernels.EXPERTS] = len(routed), len(ffn.experts)
            number[kernels.WIDTH] = first.gate_FD.shape[0]
            number[kernels.EXPERT_FORM : kernels.EXPERT_FORM + 2] = kernel_form(kernels, first.projections[:3])
            experts = [expert for expert in ffn.experts if isinstance(expert, Expert)]
            routed += [[addresses(weight) for weight in expert.projections] for expert in experts]
            if first.swiglu is not None:
                factor[1:] = first.swiglu.alpha, first.swiglu.limit
        if (own := _alone(ffn)) is not None:
            number[kernels.SHARED], number[kernels.SHARED_WIDTH] = len(alone), own.gate_FD.shape[0]
            number[kernels.SHARED_FORM : kernels.SHARED_FORM + 2] = kernel_form(kernels, own.projections)
            alone.append([addresses(weight) for weight in own.projections])
    parts = len(routed[0]) if routed else 3
    experts_NA2 = np.array(routed, np.uint64).reshape(-1, parts, 2)
    return _Tables(addresses_LA, numbers, factors, experts_NA2, np.array(alone, np.uint64).reshape(-1, 3, 2), sinks)


def _address(tensor: Weight | None) -> int:
    return 0 if tensor is None else addresses(tensor)[0]
