"""Gradients of the parameters of routings and observers through a model of transformers, one decoder layer at a time.

All batches go forward through a layer before the next layer is loaded, and backward in the opposite order. The tensors that
a layer was called with stay in memory, and the layer runs again on them in the backward pass (engine/passes/layerwise.py).
Autograd records what the model computes between its layers, so that gradients find their way whatever the layers hand to
each other: tensors, tuples of them, or dictionaries that a layer writes into and later ones read.

Shape suffixes: S sequences, B sequences of one batch, L positions, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.adapted.adapted_block import AdaptedBlock
from engine.adapted.adapted_checkpoint import AdaptedCheckpoint, sweep_tokens
from engine.adapted.adapted_pass import Call, Pass, adapted_pass, check_over, held_layer, run_call, running
from engine.checkpoint.checkpoint import Checkpoint
from engine.passes import heap
from engine.passes.activations import Activations, closed_on_error
from engine.passes.layerwise import BackwardPass, LayerwiseDecoder, Loss
from engine.passes.memory_budget import UNLIMITED, MemoryBudget


class _Logits(NamedTuple):
    """The head of a model whose own code has made logits."""

    states_BLD: Tensor | None
    head_VD: None = None
    head_bias_V: None = None
    logit_cap: None = None


def layerwise_decoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> LayerwiseDecoder:
    """Return a model of any checkpoint that has the weights of one layer in memory at a time."""
    if isinstance(checkpoint, AdaptedCheckpoint):
        return AdaptedLayerwiseDecoder(checkpoint, dtype, device)
    return LayerwiseDecoder(checkpoint, dtype, device)


class AdaptedLayerwiseDecoder(LayerwiseDecoder):
    """A model of transformers with the weights of only one layer in memory at a time. Losses are given its logits."""

    checkpoint: AdaptedCheckpoint

    def hidden_states(
        self, tokens_SL: Tensor, directory: Path | None = None, budget: MemoryBudget = UNLIMITED
    ) -> Activations:
        """Return the hidden states that logits are made from, [S, L, D]. `directory` is not used."""
        size = self.config.transformers_config.hidden_size  # experts may take inputs of another size
        states = Activations((*tokens_SL.shape, size), self.dtype, budget=budget)
        with closed_on_error(states):
            adapted_pass(
                *(self.checkpoint, tokens_SL, lambda index, layer: None, states.__setitem__),
                dtype=self.dtype,
                device=self.device,
                budget=budget,
                before_head=True,
            )
        return states

    def sweep_tokens(self, budget: MemoryBudget) -> int:
        """Return the number of tokens whose states before every layer stay in memory together."""
        return sweep_tokens(self.config, self.dtype, is_limited=budget.limit is not None)

    def backward(self, asked: BackwardPass) -> float:
        """Add the gradient of Σ loss to .grad of the `trained` tensors; return the loss. `directory` is not used.

        As many sequences as `sweep_tokens` allows go through all layers together.
        """
        count, length = asked.tokens_SL.shape
        each = max(1, self.sweep_tokens(asked.budget) // length)
        return sum(self._sweep(_some(asked, slice(start, start + each))) for start in range(0, count, each))

    def _sweep(self, asked: BackwardPass) -> float:
        """Go forward and back through all layers once."""
        total, steps = 0.0, [list[_Step]() for _ in range(self.checkpoint.found.count)]
        given = self.checkpoint, asked.tokens_SL, self.dtype, self.device, asked.budget
        with running(*given, needs_logits=True, with_gradients=True) as (model, passes):
            for index, own in enumerate(steps):
                with held_layer(self.checkpoint, model, index, self.dtype, self.device) as block:
                    self.checkpoint.read_ahead(index + 1)
                    for each in passes:
                        self._set(block, index, asked, each.rows)
                        each.run_layer(index, partial(_forward, own, each.rows))
                        total += _through_head(each, asked.loss)
            check_over(self.checkpoint, passes)
            for index in reversed(range(min(self.config.moe_layers), len(steps))):
                with held_layer(self.checkpoint, model, index, self.dtype, self.device) as block:
                    self.checkpoint.read_ahead(index - 1)
                    for step in steps[index]:
                        self._set(block, index, asked, step.rows)
                        _back_through(step)
                    steps[index].clear()
                heap.give_back()
        return total

    def _set(self, block: AdaptedBlock | None, index: int, asked: BackwardPass, rows: slice) -> None:
        """Give a block the routing for some sequences, and its observer."""
        if block is not None:
            block.routing = asked.route(self.config.moe_layers.index(index), block.own, rows)
            block.unit_observer = asked.observe.get(index)


def _some(asked: BackwardPass, own: slice) -> BackwardPass:
    """Return the pass over some of its sequences."""

    def moved(rows: slice) -> slice:
        return slice(own.start + rows.start, own.start + rows.stop)

    return asked._replace(
        tokens_SL=asked.tokens_SL[own],
        route=lambda number, routing, rows: asked.route(number, routing, moved(rows)),
        loss=lambda logits_BLV, head, rows: asked.loss(logits_BLV, head, moved(rows)),
    )


def _through_head(own: Pass, loss: Loss) -> float:
    """Take the gradient of the loss of a batch that has come to its end; return the loss, or 0 for other batches."""
    logits_BLV, states_BLD = own.taken()
    if logits_BLV is None:
        return 0.0
    value = loss(logits_BLV, _Logits(states_BLD), own.rows)
    if value.requires_grad:
        value.backward(retain_graph=True)  # parts of the graph may lead to several layers
    return float(value.detach())


class _Step(NamedTuple):
    """The inputs of one layer for one batch, and what it has handed on."""

    rows: slice
    call: Call
    """The layer; its arguments are in `given`."""
    given: list[Any]
    """The arguments, flattened."""
    form: Any
    """How the arguments were nested."""
    made: list[Tensor | None]
    """Leaves in the place of the layer's results, whose .grad the layers after it fill; None for what has no gradient."""


def _called(call: Call, given: list[Any], form: Any) -> tuple[list[Any], list[Any], Any]:
    """Run a layer; return its inputs, leaves where gradients are needed, its results, and how these are nested.

    Results are the outputs and, because a layer may write into a dictionary, the arguments after the call.
    """
    inputs = [own.detach().requires_grad_() if _has_gradient(own) else own for own in given]
    arguments, options = pytree.tree_unflatten(inputs, form)
    with torch.enable_grad():
        made = run_call(call._replace(given=arguments, options=options))
    return inputs, *pytree.tree_flatten((made, arguments, options))


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _forward(steps: list[_Step], rows: slice, call: Call) -> Any:
    """Run a layer in the forward pass, and keep what the backward pass needs. The output has leaves of its own."""
    given, form = pytree.tree_flatten((call.given, call.options))
    inputs, results, form_of_results = _called(call, given, form)
    known = {id(own): value for own, value in zip(inputs, given, strict=True)}
    made = [own.detach().requires_grad_() if _has_gradient(own) and id(own) not in known else None for own in results]
    steps.append(_Step(rows, call._replace(given=(), options={}), given, form, made))
    handed = [known.get(id(own), own) if leaf is None else leaf for own, leaf in zip(results, made, strict=True)]
    output, arguments, options = pytree.tree_unflatten(handed, form_of_results)
    _write_back((*call.given, *call.options.values()), (*arguments, *options.values()))
    return output


def _write_back(given: tuple[Any, ...], used: tuple[Any, ...]) -> None:
    """Copy the entries that a layer has written into its copy of a dictionary back into the original dictionary."""
    for own, other in zip(given, used, strict=True):
        if isinstance(own, dict) and own is not other:
            own |= other


def _back_through(step: _Step) -> None:
    """Run a layer again and take its gradients, down to the leaves of the layers before it."""
    inputs, results, _ = _called(step.call, step.given, step.form)
    pairs = [(own, leaf.grad) for own, leaf in zip(results, step.made, strict=True) if leaf is not None]
    _take([(own, grad) for own, grad in pairs if grad is not None])
    _take([(own, leaf.grad) for own, leaf in zip(step.given, inputs, strict=True) if _has_gradient(own)])


def _take(pairs: list[tuple[Tensor, Tensor | None]]) -> None:
    """Propagate gradients of tensors. Operations between layers run backward once for each layer that they lead to."""
    found = [(own, grad) for own, grad in pairs if grad is not None]
    if found:
        torch.autograd.backward([own for own, _ in found], [grad for _, grad in found], retain_graph=True)
