"""One step of decoding in one compiled call, for decoders whose parts the kernels support.

For a small model, running the layers one by one in Python takes a fifth of the time of reading its weights. The kernels
compute the same products with the same rounding as `model.DecoderLayer`. Attention that they do not know is computed by its
module, which the step calls back: lightning attention, heads with clipped values or normed after rotation.
So are choices of experts other than the top-k of a softmax or of sigmoids. A decoder with any other unsupported part runs
layer by layer instead. Such parts are norms with biases, factors of residuals, scaled inputs of experts, and observers of
experts.

Shape suffixes: T tokens, D hidden, L layers, S slots, N experts, A addresses of a layer.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decoder.attention import Attention, Positions
from engine.decoder.experts import MoeBlock
from engine.decoder.kv_cache import COMPILED_DTYPES, KeyValueCache
from engine.decoder.latent_attention import LatentAttention
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.routing import Routing, Selection, SigmoidTopK, Skipping, rule_of
from engine.decoder.step.callbacks import BeforeExperts, Outside
from engine.decoder.step.rules import fill_factors, fill_sigmoids, has_known_router, is_known, may_be_called
from engine.decoder.step.tables import Tables, serves_layer, tables_of
from engine.families.config import DecoderConfig
from engine.kernels.linear import as_bfloat16


class DecodeStep:
    """Compiled step through the layers of one decoder."""

    def __init__(self, config: DecoderConfig, layers: Any) -> None:
        self._config, self._layers = config, layers
        self._blocks: list[MoeBlock] = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoeBlock)]
        self._tables: Tables | None = None
        self._first: list[int] = []
        self._routings: list[Routing] = []
        self._is_served = False
        self._before: BeforeExperts | None = None
        self._outside: Outside | None = None
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
        if kernels is None or cache.dtype not in COMPILED_DTYPES or not self._knows(kernels):
            return None
        tokens = batch * length
        assert self._tables is not None and self._outside is not None
        if length > 1 and self._tables.recurrences:  # a state is of a sequence, not of a position
            return None
        kept = [self._place(layers, positions, cache, (batch, length)) for layers in self._attending]
        states = {layer: cache.state_addresses(layer) for layer in self._tables.recurrences}
        for layer, record in self._tables.recurrences.items():
            kernels.use_states(record, states[layer])
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
            del kept, states  # what the records point to
        for error in errors:
            if error is not None:
                raise error
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
        is_latent = isinstance(attention, LatentAttention)
        angles = (positions.cosine, positions.sine) if is_latent else positions.turns(attention.kind)
        turns = [angle.expand(shape[0], 1, shape[1], -1).contiguous() for angle in angles]
        blocks_BM, past_B, block_size, repeats = cache.places(first)
        values = {
            "cosine": turns[0].data_ptr(),
            "sine": turns[1].data_ptr(),
            "sequences": shape[0],
            "blocks": blocks_BM.ctypes.data,
            "blocks_of_one": blocks_BM.shape[1],
            "past": past_B.ctypes.data,
            "block_size": block_size,
        }
        if not is_latent:
            values["rotated"] = turns[0].shape[-1] if attention.rotates else 0
            values["group_stride"], values["repeats"] = cache.group_stride(first), int(repeats)
        records = self._tables.latent if is_latent else self._tables.attention
        for name, value in values.items():
            records[name][layers] = value
        stored = [cache.addresses(int(layer)) for layer in layers]
        for name, addresses in zip(("keys", "values", "key_scales", "value_scales"), zip(*stored, strict=True), strict=True):
            records[name][layers] = addresses
        return *turns, blocks_BM, past_B

    def forget(self) -> None:
        """Make the next step read all weights anew: the tables hold copies of some in another dtype."""
        self._first = []

    def serves(self, kernels: Any) -> bool:
        """Return whether the kernels know what these layers do, but for attention and the choice of experts."""
        return all(serves_layer(kernels, layer) for layer in self._layers)

    def _knows(self, kernels: Any) -> bool:
        """Return whether the kernels support the model; update the tables if weights or routings have changed."""
        routings = [block.routing for block in self._blocks]
        first = [_first_norm(layer).data_ptr() for layer in (self._layers[0], self._layers[-1])]
        if first != self._first:  # weights are moved all together or not at all
            self._first, self._routings = first, []
            self._is_served = self.serves(kernels)
            self._tables = tables_of(kernels, self._layers) if self._is_served else None
            self._before = None
            if self._tables is not None:
                self._outside = Outside(kernels, self._layers)
                mixes = self._tables.layers["mixes"]
                self._attending = _placed_alike(self._layers, (mixes == kernels.ATTENDS) | (mixes == kernels.LATENT))
        if self._tables is None or any(block.is_observed for block in self._blocks):
            return False
        if len(routings) != len(self._routings) or any(a is not b for a, b in zip(routings, self._routings, strict=True)):
            self._routings = routings
            self._is_served = all(is_known(routing) or may_be_called(routing) for routing in routings)
            if self._is_served:
                self._route(kernels)
        layers = self._tables.layers
        if any(block.residency is not None for block in self._blocks):
            # Absent experts are asked for with choices by a softmax, and predicted from the experts' own inputs.
            others = (layers[name].any() for name in ("chooses_outside", "by_sigmoid", "router_norm"))
            return self._is_served and not any(others)
        return self._is_served

    def _route(self, kernels: Any) -> None:
        """Write the routings into the tables."""
        assert self._tables is not None
        self._wide, self._rules = [], []
        for layer, block in self._moe_layers():
            routing, rule, row = block.routing, rule_of(block.routing), self._tables.layers[layer]
            row["slots"] = min(rule.experts_per_token, len(block.experts))
            row["chooses_outside"] = int(not (is_known(routing) and has_known_router(kernels, block)))
            if row["chooses_outside"]:
                row["gamma1"] = 0
                continue
            row["is_wide"], row["by_sigmoid"] = int(block.router_in_float32), int(isinstance(rule, SigmoidTopK))
            row["router_form"] = kernels.form_address(kernels.WIDE if block.router_in_float32 else kernels.PLAIN)
            row["normalizes"], row["restores"], row["gamma1"] = int(rule.normalise), 0, 0
            row["weight_scale"] = rule.scale
            self._rules += fill_factors(row, rule)
            if isinstance(rule, SigmoidTopK):
                self._rules += fill_sigmoids(row, rule, len(block.experts))
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

    def _before_experts(self, kernels: Any, hidden: int) -> BeforeExperts | None:
        """Return what the kernels call before the experts of each layer; None if all experts are mapped."""
        if all(block.residency is None for block in self._blocks):
            return None
        if self._before is None:
            assert self._tables is not None
            self._before = BeforeExperts(kernels, self._tables.layers, dict(self._moe_layers()), hidden)
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


def _first_norm(layer: Any) -> Tensor:
    norm: Tensor = layer.feed_forward_norm if layer.attention_norm is None else layer.attention_norm
    return norm


def _placed_alike(layers: Any, attends_L: Any) -> list[Any]:
    """Return the layers whose attention the kernels compute, as int64 arrays of those whose positions have the same angles
    and lie in the same places of a cache."""
    alike: dict[Any, list[int]] = {}
    for number in np.flatnonzero(attends_L).tolist():
        attention = layers[number].attention
        kind: Any = None  # latent attention, which is the same in all layers
        if isinstance(attention, Attention):
            kind = attention.rotates, attention.kind, attention.key_heads, attention.head_dimension
        alike.setdefault(kind, []).append(number)
    return [np.array(numbers) for numbers in alike.values()]
