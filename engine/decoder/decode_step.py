"""One step of decoding in one compiled call, for decoders whose parts the kernels support.

For a small model, running the layers one by one in Python takes a fifth of the time of reading its weights. The kernels
compute the same products with the same rounding as `model.DecoderLayer`. Attention that they do not know is computed by its
module, which the step calls back: latent and lightning attention, heads with clipped values or normed after rotation.
So are choices of experts other than the top-k of a softmax or of sigmoids. A decoder with any other unsupported part runs
layer by layer instead. Such parts are norms with biases, factors of residuals, scaled inputs of experts, and observers of
experts.

Shape suffixes: T tokens, D hidden, L layers, S slots, N experts, A addresses of a layer.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from ctypes import c_char
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decoder.attention import Attention, Positions
from engine.decoder.experts import Expert, MoeBlock, table_rows
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.recurrence import Recurrence, state_places
from engine.decoder.routing import (
    BiasedTopK,
    GroupedTopK,
    Routing,
    Selection,
    SigmoidTopK,
    Skipping,
    SparseMixer,
    TopK,
    UnweightedTopK,
    select,
)
from engine.families.config import DecoderConfig
from engine.families.layer_config import Chunk
from engine.kernels.expert_places import DISTANCES
from engine.kernels.linear import addresses, as_bfloat16, expert_form, kernel_form
from engine.kernels.stored.quantized_weight import Weight


@dataclass
class _Tables:
    """Tables from which the kernels read all layers; see `compiled.decode`."""

    layers: Any
    """Records of `step.LAYER`, with addresses in the others."""
    experts: Any
    shared: Any
    attention: Any
    """Records of `attention.ATTENTION`, one for each layer; those of layers with another attention are empty."""
    recurrences: dict[int, Any]
    """Records of the layers with a state, by layer; see `compiled.recurrent_record`."""
    kept: list[Any]
    """Further objects whose addresses the tables hold."""


class DecodeStep:
    """Compiled step through the layers of one decoder."""

    def __init__(self, config: DecoderConfig, layers: Any) -> None:
        self._config, self._layers = config, layers
        self._blocks: list[MoeBlock] = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoeBlock)]
        self._tables: _Tables | None = None
        self._first: list[int] = []
        self._routings: list[Routing] = []
        self._is_served = False
        self._before: _BeforeExperts | None = None
        self._outside: _Outside | None = None
        self._attending: list[Any] = []
        """Layers whose attention the kernels compute, as arrays of those for which positions lie in the same places."""
        self._wide: list[tuple[Any, MoeBlock]] = []
        """Records and blocks of layers with logits in float32, which the kernels do not show to observers."""
        self._lock = threading.Lock()
        self._rules: list[Any] = []
        """Arrays of rules whose addresses the tables hold."""

    def __call__(self, x_BLD: Tensor, positions: Positions, cache: KeyValueCache | PagedBatch | None) -> Tensor | None:
        """Return the hidden states before the last norm, [B, L, D], written over x; None if the layers must run.

        The step reads the next position of several sequences, or the next few positions of one sequence.
        """
        if not self._lock.acquire(blocking=False):  # another thread is in a step of this decoder
            return None
        try:
            return self._computed(x_BLD, positions, cache)
        finally:
            self._lock.release()

    def __reduce__(self) -> Any:
        return DecodeStep, (self._config, self._layers)  # a copy makes tables and functions of its own

    def _computed(self, x_BLD: Tensor, positions: Positions, cache: KeyValueCache | PagedBatch | None) -> Tensor | None:
        batch, length, hidden = x_BLD.shape
        if cache is None or positions.is_padded or positions.temperature is not None or (batch > 1 and length > 1):
            return None
        if isinstance(cache, PagedBatch) and not cache.is_step:
            return None
        kernels = positions.choice.for_few(batch * length, x_BLD, positions.cosine)
        if kernels is None or cache.dtype != torch.bfloat16 or not self._knows(kernels):
            return None
        tokens = batch * length
        assert self._tables is not None and self._outside is not None
        kept = [self._place(layers, positions, cache, (batch, length)) for layers in self._attending]
        states = {layer: cache.state(layer) for layer in self._tables.recurrences}
        for layer, record in self._tables.recurrences.items():
            record["state"], record["last"] = state_places(states[layer])
        for row, block in self._wide:
            row["chooses_outside"] = int(block.observer is not None)
        layers = self._tables.layers
        calls = np.count_nonzero(layers["mixes"] == kernels.OUTSIDE) + np.count_nonzero(layers["chooses_outside"])
        self._outside.begin(x_BLD, positions, cache, int(calls))
        seen = self._seen(tokens, hidden) if any(block.observer is not None for block in self._blocks) else None
        before = self._before_experts(kernels, hidden)
        used_LTS = None if before is None else before.begin(len(self._layers), tokens, self._slots)
        try:
            kernels.decode(
                x_BLD.data_ptr(),
                layers,
                (self._config.norm_epsilon, self._config.multipliers.residual),
                (tokens, hidden),
                self._thresholds(tokens),
                seen,
                None if before is None else (before.function, used_LTS),
                self._outside.functions,
                zero_centered=self._config.zero_centered,
            )
        finally:
            errors = [self._outside.end(), None if before is None else before.end()]
            del kept  # what the records of attention point to
        for error in errors:
            if error is not None:
                raise error
        for layer, state in states.items():
            cache.keep_state(layer, state)  # updated in place
        if seen is not None:
            self._tell(*seen)
        return x_BLD

    def _place(
        self, layers: Any, positions: Positions, cache: KeyValueCache | PagedBatch, shape: tuple[int, int]
    ) -> tuple[Any, ...]:
        """Write the new positions' angles, and where they lie, into the records of these layers.

        shape: B and L. Returns what must live until the step ends.
        """
        assert self._tables is not None
        attention, first = self._layers[layers[0]].attention, int(layers[0])
        turns = [angle.expand(shape[0], 1, shape[1], -1).contiguous() for angle in positions.turns(attention.kind)]
        blocks_BM, past_B, block_size, repeats = cache.places(first)
        values = {
            "cosine": turns[0].data_ptr(),
            "sine": turns[1].data_ptr(),
            "rotated": turns[0].shape[-1] if attention.rotates else 0,
            "group_stride": cache.group_stride(first),
            "sequences": shape[0],
            "blocks": blocks_BM.ctypes.data,
            "blocks_of_one": blocks_BM.shape[1],
            "past": past_B.ctypes.data,
            "block_size": block_size,
            "repeats": int(repeats),
        }
        records = self._tables.attention
        for name, value in values.items():
            records[name][layers] = value
        records["keys"][layers], records["values"][layers] = zip(
            *(cache.addresses(int(layer)) for layer in layers), strict=True
        )
        return *turns, blocks_BM, past_B

    def forget(self) -> None:
        """Make the next step read all weights anew: the tables hold copies of some in another dtype."""
        self._first = []

    def serves(self, kernels: Any) -> bool:
        """Return whether the kernels know what these layers do, but for attention and the choice of experts."""
        return all(_serves(kernels, layer) for layer in self._layers)

    def _knows(self, kernels: Any) -> bool:
        """Return whether the kernels support the model; update the tables if weights or routings have changed."""
        routings = [block.routing for block in self._blocks]
        first = [_first_norm(layer).data_ptr() for layer in (self._layers[0], self._layers[-1])]
        if first != self._first:  # weights are moved all together or not at all
            self._first, self._routings = first, []
            self._is_served = self.serves(kernels)
            self._tables = _tables(kernels, self._layers) if self._is_served else None
            self._before = None
            if self._tables is not None:
                self._outside = _Outside(kernels, self._layers)
                self._attending = _placed_alike(self._layers, self._tables.layers["mixes"] == kernels.ATTENDS)
        if self._tables is None or any(block.is_observed for block in self._blocks):
            return False
        if len(routings) != len(self._routings) or any(a is not b for a, b in zip(routings, self._routings, strict=True)):
            self._routings = routings
            self._is_served = all(_is_known(routing) or _may_be_called(routing) for routing in routings)
            if self._is_served:
                self._route(kernels)
        layers = self._tables.layers
        if any(block.residency is not None for block in self._blocks):
            # Absent experts are asked for with choices by a softmax.
            return self._is_served and not (layers["chooses_outside"].any() or layers["by_sigmoid"].any())
        return self._is_served

    def _route(self, kernels: Any) -> None:
        """Write the routings into the tables."""
        assert self._tables is not None
        self._wide, self._rules = [], []
        for layer, block in self._moe_layers():
            routing, rule, row = block.routing, rule_of(block.routing), self._tables.layers[layer]
            row["slots"] = min(rule.experts_per_token, len(block.experts))
            row["chooses_outside"] = int(not (_is_known(routing) and _has_known_router(kernels, block)))
            if row["chooses_outside"]:
                row["gamma1"] = 0
                continue
            row["is_wide"], row["by_sigmoid"] = int(block.router_in_float32), int(isinstance(rule, SigmoidTopK))
            row["router_form"] = kernels.form_address(kernels.WIDE if block.router_in_float32 else kernels.PLAIN)
            row["normalizes"], row["restores"], row["gamma1"] = int(rule.normalise), 0, 0
            row["weight_scale"] = rule.scale
            if isinstance(rule, SigmoidTopK):
                self._rules += _fill_sigmoids(row, rule, len(block.experts))
            if row["is_wide"]:
                self._wide.append((row, block))
            if isinstance(routing, Skipping):
                row["gamma1"], row["gamma2"] = routing.gamma1_K.data_ptr(), routing.gamma2_NN.data_ptr()
                row["keep"], row["restores"] = routing.keep, int(routing.normalise)
                row["importance"] = np.inf if routing.importance_1 is None else float(routing.importance_1)
        kernels.load_parts(self._tables.layers)

    def _moe_layers(self) -> list[tuple[int, MoeBlock]]:
        blocks = ((index, layer.feed_forward) for index, layer in enumerate(self._layers))
        return [(index, block) for index, block in blocks if isinstance(block, MoeBlock)]

    def _before_experts(self, kernels: Any, hidden: int) -> _BeforeExperts | None:
        """Return what the kernels call before the experts of each layer; None if all experts are mapped."""
        if all(block.residency is None for block in self._blocks):
            return None
        if self._before is None:
            assert self._tables is not None
            self._before = _BeforeExperts(kernels, self._tables.layers, dict(self._moe_layers()), hidden)
        return self._before

    def _thresholds(self, tokens: int) -> Any:
        """Return the thresholds of adaptive skipping, one for each token."""
        skipping = next((routing for routing in self._routings if isinstance(routing, Skipping)), None)
        threshold = 0.0 if skipping is None else skipping.threshold
        if isinstance(threshold, Tensor):
            return threshold.float().numpy()
        return np.full(tokens, threshold, np.float32)

    def _seen(self, tokens: int, hidden: int) -> tuple[Any, Any, Any, Any]:
        """Allocate arrays for observers: chosen experts and weights, and the experts' inputs and logits."""
        layers, experts, slots = len(self._layers), max(len(block.experts) for block in self._blocks), self._slots
        inputs, logits = (np.empty((layers, tokens, width), np.uint16) for width in (hidden, experts))
        return np.empty((layers, tokens, slots), np.int64), np.empty((layers, tokens, slots), np.float32), inputs, logits

    @property
    def _slots(self) -> int:
        """The most experts that a layer chooses for a token."""
        return max(int(rule_of(routing).experts_per_token) for routing in self._routings)

    def _tell(self, chosen: Any, weights: Any, inputs: Any, logits: Any) -> None:
        assert self._tables is not None
        for layer, block in self._moe_layers():
            if block.observer is not None and not self._tables.layers[layer]["chooses_outside"]:
                experts, slots = len(block.experts), min(rule_of(block.routing).experts_per_token, len(block.experts))
                selection = Selection(*(torch.from_numpy(part[layer, :, :slots].copy()) for part in (chosen, weights)))
                own_logits = np.ascontiguousarray(logits[layer, :, :experts])
                block.observer(as_bfloat16(inputs[layer]), as_bfloat16(own_logits), selection)


class _Outside:
    """Computes what the kernels do not know, from within a compiled step: attention, and choices of experts."""

    def __init__(self, kernels: Any, layers: Any) -> None:
        self._layers = layers
        own = weakref.proxy(self)  # functions that held this object would keep all weights until cycles are collected
        self.functions = kernels.MIX(lambda *given: own._mix(*given)), kernels.CHOOSE(lambda *given: own._choose(*given))
        self._positions: Any = None
        self._cache: Any = None
        self._x_BLD: Any = None
        self._missing = 0
        self._error: BaseException | None = None

    def begin(self, x_BLD: Tensor, positions: Positions, cache: KeyValueCache | PagedBatch, calls: int) -> None:
        """Begin a step, in which the hidden states x are overwritten. calls: number of calls that it will make."""
        self._x_BLD, self._positions, self._cache = x_BLD, positions, cache
        self._missing, self._error = calls, None

    def end(self) -> BaseException | None:
        """Return the first error of the step, which could not pass through compiled code; the result is then worthless.

        A call that never came in was interrupted before its first line, where Python drops the interrupt.
        """
        error = self._error or (KeyboardInterrupt() if self._missing else None)
        self._error = self._x_BLD = self._positions = self._cache = None
        return error

    def _states(self, address: int) -> Tensor:
        hidden = self._x_BLD.shape[-1]
        return as_bfloat16(_array(address, np.uint16, self._x_BLD.numel() // hidden, hidden))

    def _mix(self, layer: int, x: int, results: int) -> None:
        if self._error is not None:
            return
        try:
            x_BLD = self._states(x).view(self._x_BLD.shape)
            y_BLD = self._layers[layer].attention(x_BLD, self._positions, self._cache)
            self._states(results).copy_(y_BLD.view(-1, y_BLD.shape[-1]))
            self._missing -= 1
        except BaseException as error:
            self._error = error

    def _choose(self, layer: int, x: int, chosen: int, weights: int, tokens: int, slots: int) -> None:
        if self._error is not None:
            return
        try:
            block, x_TD = self._layers[layer].feed_forward, self._states(x)
            logits_TN = block.logits(x_TD, self._positions.choice, self._x_BLD.view(x_TD.shape))
            selection = select(block.routing, x_TD, logits_TN)
            if block.observer is not None:
                block.observer(x_TD.clone(), logits_TN, selection)
            _array(chosen, np.int64, tokens, slots)[:] = selection.experts.numpy()
            _array(weights, np.float32, tokens, slots)[:] = selection.weights.numpy()
            self._missing -= 1
        except BaseException as error:
            self._error = error


class _BeforeExperts:
    """Asks residencies for experts from within a compiled step, and tells them which experts the step used."""

    def __init__(self, kernels: Any, table: Any, blocks: dict[int, MoeBlock], hidden: int) -> None:
        """table: records of all layers, which are completed. blocks: those with experts, by layer."""
        self._hidden = hidden
        self._residencies = {layer: block.residency for layer, block in blocks.items() if block.residency is not None}
        self._used_LTS: Any = None
        self._asked: set[int] = set()
        self._error: BaseException | None = None
        own = weakref.proxy(self)
        self.function = kernels.BEFORE_EXPERTS(lambda *given: own._require(*given))
        for layer, residency in self._residencies.items():
            arrays = {"places": residency.places_N, "awaits": residency.awaits_1, "following": residency.following_K}
            for name, array in arrays.items():
                table[layer][name] = int(array.ctypes.data)

    def begin(self, layers: int, tokens: int, slots: int) -> Any:
        """Begin a step. Returns the array for the experts that it uses, [layers, T, slots]."""
        self._used_LTS = np.full((layers, tokens, slots), -1, np.int64)
        self._asked.clear()
        self._error = None
        next(iter(self._residencies.values())).begin_step()
        return self._used_LTS

    def end(self) -> BaseException | None:
        """Return the first error of the step, which could not pass through compiled code; the result is then worthless.

        Otherwise note the choices of the layers that did not ask.
        """
        error, self._error = self._error, None
        if error is None:
            for layer, residency in self._residencies.items():
                if layer not in self._asked:
                    residency.note(self._used_LTS[layer])
        return error

    def _require(self, layer: int, chosen: int, weights: int, x: int, tokens: int, slots: int, predicted: int) -> None:
        if self._error is not None:
            return
        try:
            self._asked.add(layer)
            x_TD = as_bfloat16(_array(x, np.uint16, tokens, self._hidden))
            chosen_TS, weights_TS = _array(chosen, np.int64, tokens, slots), _array(weights, np.float32, tokens, slots)
            predicted_KM = _array(predicted, np.int64, DISTANCES, self._used_LTS[layer].size)
            self._residencies[layer].require(x_TD, chosen_TS, weights_TS, predicted_KM)
        except BaseException as error:
            self._error = error


def _array(address: int, dtype: Any, rows: int, columns: int) -> Any:
    """Return the array at an address, without a copy."""
    size = rows * columns * np.dtype(dtype).itemsize
    return np.frombuffer((c_char * size).from_address(address), dtype).reshape(rows, columns)


def _first_norm(layer: Any) -> Tensor:
    norm: Tensor = layer.feed_forward_norm if layer.attention_norm is None else layer.attention_norm
    return norm


def _is_known(routing: Routing) -> bool:
    rule = rule_of(routing)
    arrays = [routing.gamma1_K, routing.gamma2_NN] if isinstance(routing, Skipping) else []
    arrays += [rule.bias_N] if isinstance(rule, SigmoidTopK) else []
    plain = (array.dtype == torch.float32 and array.is_cpu and array.is_contiguous() for array in arrays)
    return type(rule) in (TopK, SigmoidTopK) and all(plain)


def _fill_sigmoids(row: Any, rule: SigmoidTopK, experts: int) -> list[Any]:
    """Write a choice by sigmoids into the record of a layer. Returns arrays that must live as long as it."""
    row["selection_bias"], row["added_to_sum"] = rule.bias_N.data_ptr(), rule.added_to_sum
    row["groups"], row["groups_per_token"] = len(rule.groups), rule.groups_per_token
    group_N = np.zeros(experts, np.int64)
    for number, group in enumerate(rule.groups):
        group_N[list(group)] = number
    row["group_of"] = int(group_N.ctypes.data)
    return [group_N, rule.bias_N]


def _placed_alike(layers: Any, attends_L: Any) -> list[Any]:
    """Return the layers whose attention the kernels compute, as int64 arrays of those whose positions have the same angles
    and lie in the same places of a cache."""
    alike: dict[Any, list[int]] = {}
    for number in np.flatnonzero(attends_L).tolist():
        attention = layers[number].attention
        kind = attention.rotates, attention.kind, attention.key_heads, attention.head_dimension
        alike.setdefault(kind, []).append(number)
    return [np.array(numbers) for numbers in alike.values()]


def _may_be_called(routing: Routing) -> bool:
    """Return whether the step can call a routing outside: it gives every token as many slots as its rule says."""
    return isinstance(rule_of(routing), TopK | GroupedTopK | SigmoidTopK | BiasedTopK | UnweightedTopK | SparseMixer)


def _has_known_router(kernels: Any, block: MoeBlock) -> bool:
    """Return whether the kernels compute the logits of a block's router."""
    if block.gate_hidden_HD is not None or block.own_norms is not None:
        return False
    if block.router_in_float32 and not isinstance(rule_of(block.routing), SigmoidTopK):
        return False
    parts = [part for part in (block.router_ND, block.logit_bias_N) if part is not None]
    return bool(kernel_form(kernels, parts) == kernels.PLAIN)


def rule_of(routing: Routing) -> Any:
    """Return the rule that chooses experts, without skipping."""
    return routing.base if isinstance(routing, Skipping) else routing


def _mixes(kernels: Any, layer: Any) -> int:
    """Return what computes the attention of this layer."""
    if isinstance(layer.attention, Recurrence):
        knows, kind = layer.attention.is_known(kernels), kernels.RECURS
    else:
        knows, kind = _attends(kernels, layer), kernels.ATTENDS
    own: int = kind if knows else kernels.OUTSIDE
    return own


def _attends(kernels: Any, layer: Any) -> bool:
    """Return whether the kernels compute the attention of this layer."""
    attention = layer.attention
    if not isinstance(attention, Attention) or attention.unit_norm or attention.clip is not None:
        return False
    if attention.pairs and attention.qk_norm != "none":  # norms come before pairs are moved apart
        return False
    matrices = [attention.query, attention.key, attention.output, *([] if attention.value is None else [attention.value])]
    extras = [extra for extra in _attention_extras(attention) if extra is not None]
    are_plain = not extras or kernel_form(kernels, extras) == kernels.PLAIN
    return are_plain and kernel_form(kernels, matrices) is not None


def _serves(kernels: Any, layer: Any) -> bool:
    """Return whether the kernels support all parts of this layer, but for attention and the choice of experts."""
    ffn = layer.feed_forward
    if layer.residuals is not None or (layer.output_norms is not None and layer.zero_centered):
        return False
    if layer.attention_norm_bias is not None or layer.feed_forward_norm_bias is not None:
        return False
    plain = [layer.attention_norm, layer.feed_forward_norm, *(layer.output_norms or ()), layer.scalar_1]
    experts: list[list[Weight]] = []
    if isinstance(ffn, MoeBlock):
        if ffn.scales_inputs:
            return False
        plain += [ffn.shared_gate_1D, *(() if ffn.own_norms is None else ffn.own_norms.weights)]
        routed = _routed_experts(ffn)
        plain += [bias for expert in routed for bias in expert.projections[3:] if isinstance(bias, Tensor)]
        experts.append(_matrices(routed))
    alone = _alone(ffn)
    if alone is not None and alone.gate_F is not None:
        return False
    experts += [] if alone is None else [_matrices([alone])]
    given = [weight for weight in plain if weight is not None]
    return kernel_form(kernels, given) == kernels.PLAIN and all(expert_form(kernels, each) for each in experts)


def _attention_extras(attention: Attention) -> list[Tensor | None]:
    """Return the biases of query, key, value and output, and the norms of query and key."""
    biases = [attention.query_bias, attention.key_bias, attention.value_bias, attention.output_bias]
    return [*biases, attention.query_norm, attention.key_norm]


def _alone(ffn: MoeBlock | Expert | None) -> Expert | None:
    """Return the expert for every token: the shared expert, or a dense layer's FFN."""
    return ffn.shared if isinstance(ffn, MoeBlock) else ffn


def _tables(kernels: Any, layers: Any) -> _Tables:
    """Return the tables of supported layers, without the routings."""
    table = np.zeros(len(layers), kernels.LAYER)
    routed = [_routed_experts(layer.feed_forward) for layer in layers]
    alone = [_alone(layer.feed_forward) for layer in layers]
    made = [
        [table_rows(kernels, own, _expert_form(kernels, own)) for own in every if own]
        for every in (routed, [[one] for one in alone if one is not None])
    ]
    experts, shared = (kernels.expert_table(itertools.chain(*(rows for rows, _ in every))) for every in made)
    attention, recurrences = kernels.attention_records(len(layers)), dict[int, Any]()
    kept: list[Any] = [kept for every in made for _, kept in every]
    next_expert, next_shared = int(experts.ctypes.data), int(shared.ctypes.data)
    for number, (row, layer, own, one) in enumerate(zip(table, layers, routed, alone, strict=True)):
        if layer.attention_norm is not None:
            row["attention_norm"] = layer.attention_norm.data_ptr()
            row["mixes"] = _mixes(kernels, layer)
        if layer.feed_forward_norm is not None:
            row["ffn_norm"], row["feeds"] = layer.feed_forward_norm.data_ptr(), 1
        if layer.output_norms is not None:
            row["attention_output_norm"], row["ffn_output_norm"] = (norm.data_ptr() for norm in layer.output_norms)
        row["factor"] = _address(layer.scalar_1)
        if row["mixes"] == kernels.ATTENDS:
            kept.append(_fill_attention(kernels, row, attention[number : number + 1], layer.attention))
        if row["mixes"] == kernels.RECURS:
            recurrences[number], parts = _fill_recurrence(kernels, row, layer.attention)
            kept.append(parts)
        if isinstance(layer.feed_forward, MoeBlock):
            _fill_experts(kernels, row, layer.feed_forward, own)
            row["experts"] = next_expert
            next_expert += len(own) * experts.itemsize
        if one is not None:
            row["shared"], row["shared_form"] = next_shared, kernels.form_address(_expert_form(kernels, [one]))
            row["shared_alpha"], row["shared_limit"] = _activation(kernels, one)
            next_shared += shared.itemsize
    return _Tables(table, experts, shared, attention, recurrences, kept)


def _fill_attention(kernels: Any, row: Any, record: Any, attention: Attention) -> list[Any]:
    """Write the projections of a layer, and what is the same at every position, into its records.

    record: array of one ATTENTION. Returns objects that must live as long as the records.
    """
    parts = ("query", "key", "output") if attention.value is None else ("query", "key", "value", "output")
    matrices: list[Weight] = [getattr(attention, part) for part in parts]
    for part, matrix in zip(parts, matrices, strict=True):
        row[part] = addresses(matrix)
    extras = (*(f"{part}_bias" for part in ("query", "key", "value", "output")), "query_norm", "key_norm")
    for name, extra in zip(extras, _attention_extras(attention), strict=True):
        row[name] = _address(extra)
    form = kernel_form(kernels, matrices)
    assert form is not None, "only layers that the kernels serve have tables"
    row["form"] = kernels.form_address(form)
    row["head_norms"] = {"none": kernels.NO_NORM, "head": kernels.HEAD_NORM, "full": kernels.WHOLE_NORM}[attention.qk_norm]
    sources_P, ones_E = attention.sources_P, torch.ones(attention.head_dimension, dtype=torch.bfloat16)
    row["columns"] = sum(matrix.shape[0] for matrix in matrices[:-1])
    row["parts"] = row["columns"] if sources_P is None else len(sources_P)
    row["sources"], row["is_gated"] = _address(sources_P), int(attention.has_gate)
    row["value_norm"] = ones_E.data_ptr() if attention.value_norm else 0
    sinks_H = None if attention.sinks is None else attention.sinks.detach().float().contiguous()
    record["heads"], record["groups"], record["size"] = attention.query_heads, attention.key_heads, attention.head_dimension
    record["window"] = -attention.window.size if isinstance(attention.window, Chunk) else attention.window or 0
    record["sinks"], record["scale"] = _address(sinks_H), attention.scale
    row["attention"] = record.ctypes.data
    return [sources_P, ones_E, sinks_H]


def _fill_recurrence(kernels: Any, row: Any, layer: Recurrence) -> tuple[Any, list[Any]]:
    """Write a layer with a state into its record. Returns the record of its kernel, and objects that must live as long."""
    record, table, kept = layer.table(kernels)
    form = kernel_form(kernels, [layer.output])
    assert form is not None, "only layers that the kernels know have tables"
    row["recurrent"], row["output"], row["form"] = table.ctypes.data, addresses(layer.output), kernels.form_address(form)
    return record, [table, *kept]


def _fill_experts(kernels: Any, row: Any, block: MoeBlock, experts: list[Expert]) -> None:
    """Write the router, and what the routed experts have in common, into the record of a layer."""
    row["router"], row["router_bias"] = addresses(block.router_ND), _address(block.logit_bias_N)
    row["shared_gate"] = _address(block.shared_gate_1D), 0
    row["expert_count"], row["expert_form"] = len(experts), kernels.form_address(_expert_form(kernels, experts))
    row["alpha"], row["limit"] = _activation(kernels, experts[0])
    if block.own_norms is not None:
        norms = block.own_norms
        row["shared_norm"], row["shared_output_norm"] = norms.shared_D.data_ptr(), norms.after_shared_D.data_ptr()
        row["routed_output_norm"] = norms.after_routed_D.data_ptr()


def _activation(kernels: Any, expert: Expert) -> tuple[float, float]:
    """Return α and limit of an expert, as in `experts.EXPERTS`."""
    if not expert.has_gate:
        return kernels.WITHOUT_GATE[0], kernels.WITHOUT_GATE[1]
    return (1.0, 0.0) if expert.swiglu is None else (expert.swiglu.alpha, expert.swiglu.limit)


def _routed_experts(ffn: MoeBlock | Expert | None) -> list[Expert]:
    return [expert for expert in ffn.experts if isinstance(expert, Expert)] if isinstance(ffn, MoeBlock) else []


def _matrices(experts: Sequence[Expert]) -> list[Weight]:
    return [weight for expert in experts for weight in expert.projections[:3]]


def _expert_form(kernels: Any, experts: Sequence[Expert]) -> tuple[int | str, int]:
    form = expert_form(kernels, _matrices(experts))
    assert form is not None, "only layers that the kernels serve have tables"
    return form


def _address(tensor: Weight | None) -> int:
    return 0 if tensor is None else addresses(tensor)[0]
