"""Functions that a compiled step calls back: attention and choices that the kernels do not know, and requests for experts.

An exception cannot pass through compiled code. Each object keeps the first one, and computes nothing more in that step.

Shape suffixes: B batch, L new positions, D hidden, T tokens, S slots, N experts, K·M predicted experts, U most slots.
"""

from __future__ import annotations

import weakref
from ctypes import c_char
from typing import Any

import numpy as np
from torch import Tensor

from engine.decoder.attention import Positions
from engine.decoder.experts import MoeBlock
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.paged_cache import PagedBatch
from engine.decoder.routing import select
from engine.kernels.expert_places import DISTANCES
from engine.kernels.kernel_choice import DECODING
from engine.kernels.linear import as_bfloat16


class Outside:
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

    def begin(self, x_BLD: Tensor, positions: Positions | None, cache: KeyValueCache | PagedBatch, calls: int) -> None:
        """Begin a step, in which the hidden states x are overwritten.

        calls: number of calls that it will make; positions may be None for none.
        """
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


class BeforeExperts:
    """Asks residencies for experts from within a compiled step, and tells them which experts the step used."""

    def __init__(self, kernels: Any, table: Any, blocks: dict[int, MoeBlock], x_TD: Tensor) -> None:
        """table: records of all layers, which are completed. blocks: those with experts, by layer. x_TD: the hidden states,
        which a step overwrites.
        """
        self._blocks, self._x_TD = blocks, x_TD
        self._residencies = {layer: block.residency for layer, block in blocks.items() if block.residency is not None}
        self._used_LTS: Any = None
        self._asked: set[int] = set()
        self._came = 0
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
        self._error, self._came = None, 0
        next(iter(self._residencies.values())).begin_step()
        return self._used_LTS

    def end(self, calls: int) -> BaseException | None:
        """Return the first error of the step, which could not pass through compiled code; the result is then worthless.

        Otherwise note the choices of the layers that did not ask. calls: how many calls the step made; as in `Outside.end`.
        """
        error = self._error or (KeyboardInterrupt() if self._came < calls else None)
        self._error = None
        if error is None:
            for layer, residency in self._residencies.items():
                if layer not in self._asked:
                    residency.note(self._used_LTS[layer])
        return error

    def _require(self, layer: int, chosen: int, weights: int, x: int, tokens: int, slots: int, predicted: int) -> None:
        self._came += 1
        if self._error is not None:
            return
        try:
            self._asked.add(layer)
            x_TD = as_bfloat16(_array(x, np.uint16, tokens, self._x_TD.shape[1]))
            chosen_TS, weights_TS = _array(chosen, np.int64, tokens, slots), _array(weights, np.float32, tokens, slots)
            predicted_KM = _array(predicted, np.int64, DISTANCES, self._used_LTS[layer].size)
            block = self._blocks[layer]
            self._residencies[layer].require(
                chosen_TS, weights_TS, predicted_KM, lambda: block.logits(x_TD, DECODING, self._x_TD[:tokens])
            )
        except BaseException as error:
            self._error = error


def _array(address: int, dtype: Any, rows: int, columns: int) -> Any:
    """Return the array at an address, without a copy."""
    size = rows * columns * np.dtype(dtype).itemsize
    return np.frombuffer((c_char * size).from_address(address), dtype).reshape(rows, columns)
