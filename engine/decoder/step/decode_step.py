"""One step of decoding in one compiled call, for decoders whose parts the kernels support.

For a small model, running the layers one by one in Python takes a fifth of the time of reading its weights. The kernels
compute the same products with the same rounding as `model.DecoderLayer`. Attention that they do not know is computed by its
module, which the step calls back: lightning attention, heads with clipped values or normed after rotation.
So are choices of experts other than the top-k of a softmax or of sigmoids. A decoder with any other unsupported part runs
layer by layer instead. Such parts are norms with biases, factors of residuals, scaled inputs of experts, and observers of
experts.

Embeddings in a form that the kernels do not widen are read by torch before the call. A head with a bias is multiplied after
it.

Shape suffixes: B batch, L new positions, T tokens, D hidden, V vocabulary, S slots, N experts.
"""

from __future__ import annotations

import threading
import weakref
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decoder.experts import MoeBlock
from engine.decoder.kv_cache import COMPILED_DTYPES, KeyValueCache
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.routing import Routing, Selection, Skipping, rule_of
from engine.decoder.step.callbacks import BeforeExperts
from engine.decoder.step.records import Records, records_of
from engine.decoder.step.rules import fill_bias, fill_factors, fill_groups, has_known_router, is_known, may_be_called
from engine.decoder.step.tables import serves_layer
from engine.kernels.kernel_choice import COMPILED_MAX_ROWS, KernelChoice
from engine.kernels.linear import as_bfloat16


class DecodeStep:
    """Compiled step through one decoder, from tokens to hidden states and logits."""

    def __init__(self, decoder: Any) -> None:
        """decoder: a `model.Decoder`, which is read at the first step. It holds this object."""
        self._decoder = weakref.ref(decoder)
        self._records: Records | None = None
        self._refused: Tensor | None = None
        """The last norm of a decoder that the kernels do not know."""
        self._routings: list[Routing] | None = None
        self._is_served = False
        self._before: BeforeExperts | None = None
        self._calls = 0
        """Number of calls that a step makes outside compiled code."""
        self._skipping: Skipping | None = None
        self._thresholds_T = np.zeros(COMPILED_MAX_ROWS, np.float32)
        self._wide: list[tuple[Any, MoeBlock]] = []
        """Records and blocks of layers with logits in float32, which the kernels do not show to observers."""
        self._lock = threading.Lock()
        self._rules: list[Any] = []
        """Arrays of rules whose addresses the tables hold."""

    def __call__(
        self,
        tokens_BL: Tensor,
        cache: KeyValueCache | PagedBatch | None,
        choice: KernelChoice,
        one_by_one: bool = False,
        with_logits: bool = False,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the hidden states after the last norm, [B, L, D], and the logits [B, L, V]; None if the layers must run.

        The step reads the next position of several sequences, or the next few positions of one sequence. None stands for
        logits that are not asked for, or that the kernels do not compute.
        """
        if not self._lock.acquire(blocking=False):  # another thread is in a step of this decoder
            return None
        try:
            return self._computed(tokens_BL, cache, choice, one_by_one, with_logits)
        finally:
            self._lock.release()

    def __reduce__(self) -> Any:
        decoder = self._decoder()
        assert decoder is not None, "the decoder, which holds this object, is copied with it"
        return DecodeStep, (decoder,)  # a copy makes tables and functions of its own

    def _computed(
        self,
        tokens_BL: Tensor,
        cache: KeyValueCache | PagedBatch | None,
        choice: KernelChoice,
        one_by_one: bool,
        with_logits: bool,
    ) -> tuple[Tensor, Tensor | None] | None:
        decoder, (batch, length) = self._decoder(), tokens_BL.shape
        if decoder is None or cache is None or not _is_step(tokens_BL, cache):
            return None
        norm_D = decoder.norm
        kernels = choice.for_few(batch * length, norm_D)
        own = None if kernels is None else self._known(kernels, decoder, norm_D)
        if own is None or (length > 1 and own.tables.recurrences):  # a state is of a sequence, not of a position
            return None
        is_seen = self._prepare(kernels, own)
        decoder.check_length(max(cache.past) + 1 if isinstance(cache, PagedBatch) else cache.length + length)
        positions = None
        if self._calls or own.places.needs_positions:
            positions = decoder.positions(tokens_BL, None, cache, one_by_one)._replace(choice=choice)
        x_BLD = own.x_TD[: batch * length].view(batch, length, -1)
        if not own.embeds:
            x_BLD.copy_(decoder.embedded(tokens_BL))
        own.places.fill(cache, (batch, length), positions)
        hidden_BLD, logits_BLV = torch.empty_like(x_BLD), None
        if with_logits and own.vocabulary and choice.observer is None:
            logits_BLV = x_BLD.new_empty((batch, length, own.vocabulary))
        own.outside.begin(x_BLD, positions, cache, self._calls)
        is_done = self._run(kernels, own, tokens_BL, cache, (hidden_BLD, logits_BLV), is_seen=is_seen)
        return (hidden_BLD, logits_BLV) if is_done else None

    def _run(
        self,
        kernels: Any,
        own: Records,
        tokens_BL: Tensor,
        cache: KeyValueCache | PagedBatch,
        results: tuple[Tensor, Tensor | None],
        *,
        is_seen: bool,
    ) -> bool:
        """Run the kernels. Returns False if a token has no embedding: torch says which.

        results: hidden states and logits, which are written. is_seen: whether observers see the choices of experts.
        """
        ids_BL, tokens, (hidden_BLD, logits_BLV) = tokens_BL.long().contiguous(), tokens_BL.numel(), results
        states = [(record, cache.state_addresses(layer)) for layer, record in own.tables.recurrences.items()]
        for record, addresses_2B in states:
            kernels.use_states(record, addresses_2B)
        seen = self._seen(own, tokens) if is_seen else None
        before = self._before
        used_LTS = None if before is None else before.begin(len(own.layers), tokens, self._slots)
        try:
            is_done: bool = kernels.decode_tokens(
                own.text,
                own.step,
                ids_BL.data_ptr(),
                tokens,
                (hidden_BLD.data_ptr(), 0 if logits_BLV is None else logits_BLV.data_ptr()),
                self._thresholds(),
                seen,
                None if before is None else (before.function, used_LTS),
                stays=own.is_large and not self._calls and before is None,
            )
        finally:
            errors = own.outside.end(), None if before is None else before.end(int(own.step["asked"][0]))
        if not is_done:
            return False
        for error in errors:
            if error is not None:
                raise error
        if seen is not None:
            self._tell(own, *seen)
        return True

    def forget(self) -> None:
        """Make the next step read all weights anew: the tables hold copies of some in another dtype."""
        self._records = self._refused = None

    def serves(self, kernels: Any) -> bool:
        """Return whether the kernels know what the layers do, but for attention and the choice of experts."""
        decoder = self._decoder()
        if decoder is None or decoder.norm_bias is not None or decoder.config.temperature is not None:
            return False
        return all(serves_layer(kernels, layer) for layer in decoder.layers)

    def _known(self, kernels: Any, decoder: Any, norm_D: Tensor) -> Records | None:
        """Return the records, made anew if weights or routings have changed; None if the kernels do not know the model.

        norm_D: the weight of the last norm.
        """
        own = self._records
        if own is None or not own.are_of(norm_D):
            if norm_D is self._refused:
                return None
            self._records = self._routings = self._before = None
            if not self.serves(kernels):
                self._refused = norm_D
                return None
            own = self._records = records_of(kernels, decoder)
        routings = [block.routing for block in own.blocks.values()]
        if self._routings is None or not all(map(is_, routings, self._routings)):
            self._routings = None
            are_chosen = all(is_known(routing) or may_be_called(routing) for routing in routings)
            self._is_served = are_chosen and _predicts(kernels, own.blocks)
            if self._is_served:
                self._route(kernels, own, routings)
            self._routings = routings
        return own if self._is_served and not any(block.is_observed for block in own.blocks.values()) else None

    def _route(self, kernels: Any, own: Records, routings: list[Routing]) -> None:
        """Write the routings into the tables."""
        self._wide, self._rules, table = [], [], own.tables.layers
        for layer, block in own.blocks.items():
            routing, rule, row = block.routing, rule_of(block.routing), table[layer]
            row["slots"] = min(rule.experts_per_token, len(block.experts))
            row["chooses_outside"] = int(not (is_known(routing) and has_known_router(kernels, block)))
            if row["chooses_outside"]:
                row["gamma1"] = 0
                continue
            row["is_wide"] = int(block.router_in_float32)
            row["router_form"] = kernels.form_address(kernels.WIDE if block.router_in_float32 else kernels.PLAIN)
            row["normalizes"], row["restores"], row["gamma1"] = int(rule.normalise), 0, 0
            row["weight_scale"] = rule.scale
            self._rules += fill_factors(row, rule) + fill_bias(row, rule) + fill_groups(row, rule, len(block.experts))
            if row["is_wide"]:
                self._wide.append((row, block))
            if isinstance(routing, Skipping):
                row["gamma1"], row["gamma2"] = routing.gamma1_K.data_ptr(), routing.gamma2_NN.data_ptr()
                row["keep"], row["restores"] = routing.keep, int(routing.normalise)
                row["importance"] = np.inf if routing.importance_1 is None else float(routing.importance_1)
        kernels.load_parts(table)
        self._skipping = next((routing for routing in routings if isinstance(routing, Skipping)), None)
        self._calls = _calls(kernels, table)

    def _prepare(self, kernels: Any, own: Records) -> bool:
        """Prepare the calls of a step, which may differ from step to step. Returns whether observers see its choices."""
        has_residency = is_seen = False
        for block in own.blocks.values():
            has_residency = has_residency or block.residency is not None
            is_seen = is_seen or block.observer is not None
        if self._wide:
            for row, block in self._wide:
                row["chooses_outside"] = int(block.observer is not None)
            self._calls = _calls(kernels, own.tables.layers)
        if has_residency and self._before is None:
            self._before = BeforeExperts(kernels, own.tables.layers, own.blocks, own.x_TD)
        return is_seen

    def _thresholds(self) -> Any:
        """Return the thresholds of adaptive skipping, one for each token."""
        threshold = 0.0 if self._skipping is None else self._skipping.threshold
        if isinstance(threshold, Tensor):
            return threshold.float().numpy()
        self._thresholds_T[:] = threshold
        return self._thresholds_T

    def _seen(self, own: Records, tokens: int) -> tuple[Any, Any, Any, Any]:
        """Allocate arrays for observers: chosen experts and weights, and the experts' inputs and logits."""
        layers, experts, slots = len(own.layers), max(len(block.experts) for block in own.blocks.values()), self._slots
        inputs, logits = (np.empty((layers, tokens, width), np.uint16) for width in (own.x_TD.shape[1], experts))
        return np.empty((layers, tokens, slots), np.int64), np.empty((layers, tokens, slots), np.float32), inputs, logits

    @property
    def _slots(self) -> int:
        """The most experts that a layer chooses for a token."""
        return max(int(rule_of(routing).experts_per_token) for routing in self._routings or ())

    def _tell(self, own: Records, chosen: Any, weights: Any, inputs: Any, logits: Any) -> None:
        for layer, block in own.blocks.items():
            if block.observer is not None and not own.tables.layers[layer]["chooses_outside"]:
                experts, slots = len(block.experts), min(rule_of(block.routing).experts_per_token, len(block.experts))
                selection = Selection(*(torch.from_numpy(part[layer, :, :slots].copy()) for part in (chosen, weights)))
                own_logits = np.ascontiguousarray(logits[layer, :, :experts])
                block.observer(as_bfloat16(inputs[layer]), as_bfloat16(own_logits), selection)


def _is_step(tokens_BL: Tensor, cache: KeyValueCache | PagedBatch) -> bool:
    """Return whether kernels may read these tokens: the next of several sequences, or the next few of one sequence."""
    batch, length = tokens_BL.shape
    if batch * length > COMPILED_MAX_ROWS or (batch > 1 and length > 1) or cache.dtype not in COMPILED_DTYPES:
        return False
    return cache.is_step if isinstance(cache, PagedBatch) else True


def _predicts(kernels: Any, blocks: dict[int, MoeBlock]) -> bool:
    """Return whether the kernels compute the logits of all routers by which absent experts are read ahead."""
    residencies = [block.residency for block in blocks.values() if block.residency is not None]
    following = {later for each in residencies for later in each.following_K.tolist() if later >= 0}
    return all(has_known_router(kernels, blocks[later]) for later in following)


def _calls(kernels: Any, table: Any) -> int:
    """Return how many calls outside compiled code a step makes."""
    return int(np.count_nonzero(table["mixes"] == kernels.OUTSIDE) + np.count_nonzero(table["chooses_outside"]))
