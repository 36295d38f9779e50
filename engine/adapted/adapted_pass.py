"""Passes of text through a model of transformers with the weights of one decoder layer in memory at a time.

transformers runs the model as it always does, once for each batch of sequences, and hands from layer to layer whatever its
layers need. Every forward pass has a thread that stops at each decoder layer. When all passes have come to a layer, its
weights are loaded, the layer runs for one batch after the other, and each pass goes on to the next layer. Only one thread
runs at any time, and the layers run in the thread of the caller.

Shape suffixes: S sequences, B sequences of one batch, L positions, V vocabulary.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.adapted.adapted_block import AdaptedBlock
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint
from engine.adapted.expert_layers import move_buffers, replaced_forwards, seen_before_head
from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.model import DecoderLayer, own_routings
from engine.decoder.routing import Routing
from engine.errors import UnsupportedError
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import Visit, chunk_tokens, stream_layers, stream_negative_log_likelihood
from engine.transformers_models.transformers_model import quiet_transformers

MOST_LOGITS = 1 << 26
"""Maximum number of logits of a batch, if it has more than one sequence: 256 MB in float32."""
Progress = Callable[[Iterable[int]], Iterable[int]]


def visit_layers(checkpoint: Checkpoint, tokens_SL: Tensor, visit: Visit, **options: Any) -> None:
    """Run all sequences through all layers of any checkpoint, for the sake of `visit`; options: of `stream_layers`."""
    if isinstance(checkpoint, AdaptedCheckpoint):
        adapted_pass(checkpoint, tokens_SL, visit, None, **options)
    else:
        stream_layers(checkpoint, tokens_SL, visit, **options).close()


def negative_log_likelihood(checkpoint: Checkpoint, tokens_SL: Tensor, **options: Any) -> Tensor:
    """Return what `stream_negative_log_likelihood` returns, [S] in float64, for any checkpoint; options: its own."""
    if not isinstance(checkpoint, AdaptedCheckpoint):
        return stream_negative_log_likelihood(checkpoint, tokens_SL, **options)
    summed_S = torch.zeros(tokens_SL.shape[0], dtype=torch.float64)
    chunk = chunk_tokens(checkpoint.config.vocabulary_size)

    def add(rows: slice, logits_BLV: Tensor) -> None:
        for row, logits_LV in zip(range(*rows.indices(len(tokens_SL))), logits_BLV, strict=True):
            targets_L = tokens_SL[row, 1:].to(logits_LV.device)
            for part_LV, part_L in zip(logits_LV[:-1].split(chunk), targets_L.split(chunk), strict=True):
                summed_S[row] += float(F.cross_entropy(part_LV.float(), part_L, reduction="sum"))

    visit = options.pop("visit", lambda index, layer: None)
    adapted_pass(checkpoint, tokens_SL, visit, add, **options)
    return summed_S


def routings_of(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Sequence[Routing]:
    """Return the own Routing of every MoE layer of any checkpoint. dtype, device: of the tensors that belong to it."""
    if isinstance(checkpoint, AdaptedCheckpoint):
        return checkpoint.routings
    return own_routings(checkpoint.config, checkpoint.source(dtype, device))


class _Layer(NamedTuple):
    """A decoder layer, as a `visit` sees it."""

    feed_forward: nn.Module | None


@torch.no_grad()
def adapted_pass(
    checkpoint: AdaptedCheckpoint,
    tokens_SL: Tensor,
    visit: Visit,
    finish: Callable[[slice, Tensor], None] | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget: MemoryBudget = UNLIMITED,
    directory: Path | None = None,
    before_head: bool = False,
    progress: Progress = iter,
) -> None:
    """Run all sequences through the model. `visit` sees each layer once; `finish` takes the logits [B, L, V] of each batch.

    finish: None if no logits are needed; models that can leave them out then return those of the last position alone.
    before_head: whether `finish` takes the hidden states [B, L, D] that logits are made from, in the place of logits.
    directory: is made, for `visit`; an interrupted pass begins again. The hidden states of all sequences stay in memory.
    """
    if directory is not None:  # `visit` saves its results there
        directory.mkdir(parents=True, exist_ok=True)
    with running(checkpoint, tokens_SL, dtype, device, budget, needs_logits=finish is not None) as (model, passes):
        for index in progress(range(checkpoint.found.count)):
            with held_layer(checkpoint, model, index, dtype, device) as block:
                checkpoint.read_ahead(index + 1)
                after = visit(index, cast(DecoderLayer, _Layer(block)))
                for each in passes:
                    each.run_layer(index)
                    logits_BLV, states_BLD = each.taken()
                    made = states_BLD if before_head else logits_BLV
                    if made is not None and finish is not None:
                        finish(each.rows, made)
                    del logits_BLV, states_BLD, made
                if after is not None:
                    after()
        check_over(checkpoint, passes)


def check_over(checkpoint: AdaptedCheckpoint, passes: Iterable[Pass]) -> None:
    """Raise UnsupportedError if a model has not come to its end after its last layer."""
    if any(not each.is_over for each in passes):
        raise UnsupportedError(
            f"a model of the family {checkpoint.model_type} runs its layers more than once, and they are read once"
        )


@contextmanager
def held_layer(
    checkpoint: AdaptedCheckpoint, model: Any, index: int, dtype: torch.dtype, device: torch.device | str
) -> Iterator[AdaptedBlock | None]:
    """Hold the weights of one decoder layer during the body, and let a block run its experts; None for a layer without."""
    pairs = zip(checkpoint.found.experts, checkpoint.routings, strict=True)
    own = next((pair for pair in pairs if pair[0].index == index), None)
    with checkpoint.loaded(model, index, dtype, device):
        if own is None:
            yield None
            return
        block = AdaptedBlock(model, *own)
        with block.running():
            yield block


@contextmanager
def running(
    checkpoint: AdaptedCheckpoint,
    tokens_SL: Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
    budget: MemoryBudget,
    *,
    needs_logits: bool,
    with_gradients: bool = False,
) -> Iterator[tuple[Any, list[Pass]]]:
    """Yield the model, with what is around its layers in memory, and a pass for each batch, stopped at the first layer."""
    model = checkpoint.build(checkpoint.raw_config, dtype)
    move_buffers(model, device)
    layers = model.get_submodule(checkpoint.found.layers)
    with ExitStack() as held, quiet_transformers():
        held.enter_context(checkpoint.loaded(model, None, dtype, device))
        yield (
            model,
            held.enter_context(
                _passes(model, layers, tokens_SL, budget, device, needs_logits=needs_logits, with_gradients=with_gradients)
            ),
        )


@contextmanager
def _passes(
    model: Any,
    layers: nn.ModuleList,
    tokens_SL: Tensor,
    budget: MemoryBudget,
    device: torch.device | str,
    *,
    needs_logits: bool,
    with_gradients: bool,
) -> Iterator[list[Pass]]:
    """Yield a pass for each batch, all of them stopped at their first layer. Passes that are not over end with the body."""

    can_leave_out = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {} if needs_logits or not can_leave_out else {"logits_to_keep": 1}
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if not options:  # all logits of a batch are in memory together
        budget = replace(budget, tokens_per_batch=min(budget.tokens_per_batch, MOST_LOGITS // vocabulary))

    def forward(rows: slice) -> Tensor:
        return cast(Tensor, model(input_ids=tokens_SL[rows].to(device), use_cache=False, **options).logits)

    passes = [Pass(rows, partial(forward, rows), with_gradients) for rows in budget.batches(*tokens_SL.shape)]
    stops = {layer: partial(_stop_at, index, layer) for index, layer in enumerate(layers)}
    with replaced_forwards(stops), seen_before_head(model, _keep_states):
        try:
            for each in passes:
                each.start()
            yield passes
        finally:
            for each in passes:
                each.stop()


def _keep_states(states_BLD: Tensor) -> None:
    _here.current.states_BLD = states_BLD


class Call(NamedTuple):
    """A decoder layer that is to run, with its arguments."""

    number: int
    layer: nn.Module
    given: tuple[Any, ...]
    options: dict[str, Any]


def run_call(call: Call) -> Any:
    """Return the output of a layer."""
    return type(call.layer).forward(call.layer, *call.given, **call.options)


class _Stopped(BaseException):
    """Ends the thread of a pass that is not wanted any more."""


_here = threading.local()


def _stop_at(index: int, layer: nn.Module, *given: Any, **options: Any) -> Any:
    """Wait until the caller has run this layer; return its output."""
    current: Pass = _here.current
    return current.wait_for(Call(index, layer, given, options))


class Pass:
    """The forward pass of one batch, in a thread that runs only while the caller waits for it."""

    def __init__(self, rows: slice, forward: Callable[[], Tensor], with_gradients: bool = False) -> None:
        """with_gradients: whether what the model computes between its layers is recorded by autograd."""
        self.rows, self._forward, self._with_gradients = rows, forward, with_gradients
        self.logits_BLV: Tensor | None = None
        self.states_BLD: Tensor | None = None
        """The hidden states that logits are made from."""
        self.is_over = False
        self._call: Call | None = None
        self._made: Any = None
        self._error: BaseException | None = None
        self._is_stopped = False
        self._may_run, self._has_halted = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="forward pass", daemon=True)

    def start(self) -> None:
        """Run up to the first layer."""
        self._thread.start()
        self._go_on()

    def run_layer(self, index: int, run: Callable[[Call], Any] = run_call) -> None:
        """Run the layer that the pass waits for, in this thread, and let the pass go on to the next one.

        run: returns the output of a call.
        """
        call = self._call
        if call is None or call.number != index:
            at = "its end" if call is None else f"layer {call.number}"
            raise UnsupportedError(
                f"the model does not run its layers in order: it came to {at} in the place of layer {index}"
            )
        self._call = None
        self._made = run(call)
        del call
        self._go_on()

    def taken(self) -> tuple[Tensor | None, Tensor | None]:
        """Return logits and the hidden states before the head, once the pass is over; None before, and the next time."""
        if not self.is_over:
            return None, None
        made = self.logits_BLV, self.states_BLD
        self.logits_BLV = self.states_BLD = None
        return made

    def stop(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self._is_stopped = True
            self._may_run.release()
            self._thread.join()

    def wait_for(self, call: Call) -> Any:
        """Wait in the thread of the pass for a layer's output."""
        self._call = call
        self._has_halted.release()
        self._may_run.acquire()
        if self._is_stopped:
            raise _Stopped
        made, self._made = self._made, None
        return made

    def _go_on(self) -> None:
        self._may_run.release()
        self._has_halted.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        _here.current = self
        self._may_run.acquire()
        try:
            with torch.set_grad_enabled(self._with_gradients):
                self.logits_BLV = self._forward()
        except _Stopped:
            return
        except BaseException as error:
            self._error = error
        self.is_over = True
        self._has_halted.release()
