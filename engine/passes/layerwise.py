"""Gradients of the parameters of a decoder's routings, with all weights in memory or with one layer's at a time.

In the layer-by-layer pass, all sequences go through a layer before the next layer is read. The forward pass keeps each
layer's input; the backward pass goes from the last layer to the first and runs each layer again on its input. This is
activation recomputation in another order than autograd's, so the gradients are equal, and no more than one layer's
weights and one batch's activations are in memory. With a directory, an interrupted pass resumes from its last layer.

Shape suffixes: S sequences, B sequences of one batch, L positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.experts import MoeBlock, UnitObserver
from engine.decoder.model import Decoder, DecoderLayer, Outer, routed_by
from engine.decoder.routing import Routing
from engine.families.config import DecoderConfig
from engine.files.safetensors_file import SafetensorsFile
from engine.files.state_file import check_digest, write_state
from engine.passes import heap, processes
from engine.passes.activations import Activations, Shelf, closed_on_error
from engine.passes.memory_budget import UNLIMITED, MemoryBudget
from engine.passes.streaming import embed, layer_positions, one_layer, stream_layers

Route = Callable[[int, Routing, slice], Routing]
"""Function from (number of the MoE layer, its own routing, slice of sequences) to the routing to use instead."""
Observe = Mapping[int, UnitObserver]
"""Observers of hidden units, by decoder layer index."""


class Head(Protocol):
    """The end of a model, behind the hidden states that a loss is given."""

    @property
    def head_VD(self) -> Tensor | None:
        """Its matrix; None where the hidden states are logits already."""

    @property
    def head_bias_V(self) -> Tensor | None:
        """Its bias, or None."""

    @property
    def logit_cap(self) -> float | None:
        """c, if logits l become c · tanh(l / c) after the matrix; None if they stay as they are."""

    @property
    def states_BLD(self) -> Tensor | None:
        """The hidden states before the matrix, where a loss is given logits; None where it is given those states."""


Loss = Callable[[Tensor, Head, slice], Tensor]
"""Function that returns a part of the loss.

Its arguments are the hidden states after the last norm [B, L, D], the model for its head, and the slice of sequences.
"""
SWEEP_TOKENS = 32768
"""Tokens that pass through all layers together where layers are read one by one."""


class BackwardPass(NamedTuple):
    """A pass with gradients over a text; its parts are the arguments of `backward`."""

    tokens_SL: Tensor
    route: Route
    observe: Observe
    loss: Loss
    trained: Mapping[str, Tensor]
    generator: torch.Generator | None
    directory: Path | None
    budget: MemoryBudget


class LayerwiseDecoder:
    """A language model with the weights of only one layer in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, torch.device(device)

    @property
    def config(self) -> DecoderConfig:
        """The model's configuration."""
        return self.checkpoint.config

    @contextmanager
    def outer(self) -> Iterator[Outer]:
        """Hold the modules after the last layer in memory during the body."""
        yield Outer(self.config, self.checkpoint.source(self.dtype, self.device))
        self.checkpoint.release()
        heap.give_back()

    def layer(self, index: int, budget: MemoryBudget = UNLIMITED) -> AbstractContextManager[DecoderLayer]:
        """Hold one layer in memory during the body."""
        return one_layer(self.checkpoint, index, self.dtype, self.device, budget)

    @torch.no_grad()
    def hidden_states(
        self, tokens_SL: Tensor, directory: Path | None = None, budget: MemoryBudget = UNLIMITED
    ) -> Activations:
        """Return the final hidden states after the last norm, [S, L, D]. `directory`: as in `stream_layers`."""
        with stream_layers(
            self.checkpoint,
            tokens_SL,
            lambda index, layer: None,
            dtype=self.dtype,
            device=self.device,
            budget=budget,
            directory=directory,
        ) as states:
            normed = Activations(states.shape, self.dtype, budget=budget)
            with closed_on_error(normed), self.outer() as outer:
                for rows in budget.batches(*tokens_SL.shape):
                    normed[rows] = outer.hidden_states(states[rows].to(self.device))
        return normed

    def sweep_tokens(self, budget: MemoryBudget) -> int:
        """Return the number of tokens that pass through all layers together; each layer is read twice per sweep."""
        return SWEEP_TOKENS

    def backward(self, asked: BackwardPass) -> float:
        """Add the gradient of Σ loss to .grad of the `trained` tensors; return the loss."""
        return _Pass(self, asked).run()


AnyDecoder = Decoder | LayerwiseDecoder


def backward(
    model: AnyDecoder,
    tokens_SL: Tensor,
    route: Route,
    loss: Loss,
    *,
    trained: Mapping[str, Tensor],
    observe: Observe = MappingProxyType({}),
    generator: torch.Generator | None = None,
    directory: Path | None = None,
    budget: MemoryBudget = UNLIMITED,
) -> float:
    """Add the gradient of Σ loss over batches of sequences to .grad of the `trained` tensors; return the loss.

    `trained` are leaves of the Routings from `route`, or of the observers from `observe`. For a LayerwiseDecoder they must
    not have gradients yet. A pass resumes from the content that `directory` holds of the same pass; the caller removes it.
    `generator` is the random generator of `loss`.
    """
    if isinstance(model, LayerwiseDecoder):
        return model.backward(BackwardPass(tokens_SL, route, observe, loss, trained, generator, directory, budget))
    total = 0.0
    for rows in budget.batches(*tokens_SL.shape):
        routings = [route(number, block.routing, rows) for number, block in enumerate(model.moe_blocks)]
        with (
            routed_by(model, routings),
            _observed(model, observe),
        ):  # checkpointed layers run again in the backward pass
            value = loss(model.hidden_states(tokens_SL[rows].to(model.device)), model, rows)
            value.backward()
        total += float(value.detach())
        del value
        heap.give_back()
    return total


@contextmanager
def _observed(model: Decoder, observe: Observe) -> Iterator[None]:
    """Give the feed-forward block of each observed layer its observer of hidden units during the body."""
    blocks: dict[int, Any] = {index: layer.feed_forward for index, layer in enumerate(model.layers)}
    for index, observer in observe.items():
        blocks[index].unit_observer = observer
    try:
        yield
    finally:
        for index in observe:
            blocks[index].unit_observer = None


@contextmanager
def in_company(
    model: AnyDecoder, passes: int, tokens_1L: Tensor, route: Route, trained: Mapping[str, Tensor]
) -> Iterator[None]:
    """Keep this process in step with processes that make more `backward` passes. `passes`: the passes in the body.

    All processes take part in gathering each layer of a sharded model. If another process makes more passes because it
    has more sequences, this process makes further passes over one sequence, which add nothing to the gradients.
    """
    missing = int(processes.largest(passes)) - passes if processes.is_spread(model) else 0
    yield
    for _ in range(missing):
        backward(model, tokens_1L, route, lambda hidden_BLD, outer, rows: 0.0 * hidden_BLD.sum(), trained=trained)


class _Pass:
    """One forward and one backward pass of all sequences, layer by layer.

    `input-K` is the input of layer K, and `gradient-K` is the gradient of that input. The last layer's output counts as
    one more input.
    """

    def __init__(self, model: LayerwiseDecoder, asked: BackwardPass) -> None:
        self.model = model
        self.tokens_SL, self.route, self.observe, self.loss, self.trained, self.generator, directory, self.budget = asked
        self.layers, self.total = len(model.config.layers), 0.0
        self.first = min([model.config.moe_layers[0], *self.observe])
        """The first layer with anything trained."""
        shape = (*self.tokens_SL.shape, model.config.hidden_size)
        self.shelf = Shelf(directory, shape, model.dtype, together=self.layers + 2, budget=self.budget)
        self.positions = layer_positions(model.checkpoint, self.tokens_SL, model.dtype, model.device)
        self.kept: dict[str, Activations] = {}

    def run(self) -> float:
        """Run the pass, or the rest of an interrupted one, and return the loss."""
        try:
            lowest = next((index for index in range(self.layers + 1) if self._is_there(f"gradient-{index}")), None)
            if lowest is None:
                self._forward()
                lowest = self.layers
                self._through_head()
            else:
                self._restore(lowest)
            for index in reversed(range(self.first, lowest)):
                self._back_through(index)
        finally:
            for activations in self.kept.values():
                activations.close()
        return self.total

    def _forward(self) -> None:
        last = next((index for index in reversed(range(self.layers + 1)) if self._is_there(f"input-{index}")), None)
        if last is None:
            last = 0
            with self._made("input-0") as states:
                embed(self.model.checkpoint, self.tokens_SL, states, self.model.device, self.budget)
        for index in range(last, self.layers):
            states = self._get(f"input-{index}")
            with self.model.layer(index, self.budget) as layer, self._made(f"input-{index + 1}") as after:
                self.model.checkpoint.read_ahead(index + 1)
                for rows in self._batches():
                    # With gradients, as in the backward pass: without them some operations round differently.
                    x_BLD = states[rows].detach().requires_grad_(index > self.first)
                    after[rows] = self._run(layer, index, x_BLD, rows).detach()
                    del x_BLD
                del layer

    def _through_head(self) -> None:
        states = self._get(f"input-{self.layers}")
        with self.model.outer() as outer, self._made(f"gradient-{self.layers}") as gradients:
            for rows in self._batches():
                x_BLD = states[rows].detach().to(self.model.device).requires_grad_()
                value = self.loss(outer.hidden_states(x_BLD), outer, rows)
                value.backward()
                assert x_BLD.grad is not None
                gradients[rows] = x_BLD.grad
                self.total += float(value.detach())
            del outer
            self._save(self.layers)
        self._drop(f"input-{self.layers}")

    def _back_through(self, index: int) -> None:
        states, above = self._get(f"input-{index}"), self._get(f"gradient-{index + 1}")
        with self.model.layer(index, self.budget) as layer, self._made(f"gradient-{index}") as gradients:
            self.model.checkpoint.read_ahead(index - 1)
            for rows in self._batches():
                x_BLD = states[rows].detach().to(self.model.device).requires_grad_()
                y_BLD = self._run(layer, index, x_BLD, rows)
                y_BLD.backward(above[rows].to(self.model.device))
                assert x_BLD.grad is not None
                gradients[rows] = x_BLD.grad
                del x_BLD, y_BLD
            del layer
            self._save(index)
        self._drop(f"gradient-{index + 1}")
        self._drop(f"input-{index}")

    def _run(self, layer: DecoderLayer, index: int, x_BLD: Tensor, rows: slice) -> Tensor:
        block = layer.feed_forward
        if block is not None:
            block.unit_observer = self.observe.get(index)
        if not isinstance(block, MoeBlock):
            y_BLD: Tensor = layer(x_BLD.to(self.model.device), self.positions)
            return y_BLD
        own, number = block.routing, self.model.config.moe_layers.index(index)
        block.routing = self.route(number, own, rows)
        y_BLD = layer(x_BLD.to(self.model.device), self.positions)
        block.routing = own
        return y_BLD

    def _batches(self) -> Iterator[slice]:
        return self.budget.batches(*self.tokens_SL.shape)

    # Activations that are kept between layers

    def _is_there(self, name: str) -> bool:
        found = self.shelf.find(name)
        if found is not None:
            self.kept[name] = found
        return found is not None

    def _get(self, name: str) -> Activations:
        if name not in self.kept:
            assert self._is_there(name)
        return self.kept[name]

    @contextmanager
    def _made(self, name: str) -> Iterator[Activations]:
        made = self.kept[name] = self.shelf.begin(name)
        yield made
        self.shelf.finish(name)

    def _drop(self, name: str) -> None:
        self.shelf.drop(name, self._get(name))
        del self.kept[name]

    def _save(self, index: int) -> None:
        """Save the gradients accumulated down to this layer, before the gradient of its input counts as complete."""
        if self.shelf.directory is None:
            return
        tensors = {name: tensor.grad for name, tensor in self.trained.items() if tensor.grad is not None}
        if self.generator is not None:
            tensors["random"] = self.generator.get_state()
        path = self.shelf.directory / f"sums-{index}.safetensors"
        write_state(path, tensors, {"loss": self.total.hex()}, "the state of a backward pass")

    def _restore(self, index: int) -> None:
        assert self.shelf.directory is not None
        with SafetensorsFile(self.shelf.directory / f"sums-{index}.safetensors") as file:
            check_digest(file)
            self.total = float.fromhex(file.metadata["loss"])
            for name, tensor in self.trained.items():
                if name in file.entries:
                    tensor.grad = file.tensor(name).clone().to(tensor.device)
            if self.generator is not None:
                self.generator.set_state(file.tensor("random").clone())
