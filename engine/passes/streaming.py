"""Forward passes over a checkpoint layer by layer: load one layer's weights, run all sequences through it, load the next.

Hidden states between layers are kept in memory up to a limit and in a file beyond it (activations.py), so that neither
the size of the model nor the size of the text decides whether a pass fits.

Shape suffixes: S sequences, B sequences of one batch, L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.decoder.attention import Positions
from engine.decoder.experts import Expert
from engine.decoder.model import DecoderLayer, Outer, TensorSource, embedded, positions_for
from engine.families.rotary_embedding import Rotary
from engine.kernels.stored.quantized_weight import Weight
from engine.passes import heap, processes
from engine.passes.activations import Activations, Shelf, closed_on_error
from engine.passes.memory_budget import UNLIMITED, MemoryBudget

MOST_CHUNK_TOKENS = 512
MOST_CHUNK_LOGITS = 1 << 23
"""Maximum number of logits in one chunk: 32 MB in float32."""

Visit = Callable[[int, DecoderLayer], Callable[[], None] | None]
"""Callback before each layer's forward pass; the function that it returns is called after the forward pass."""


def chunk_tokens(vocabulary: int) -> int:
    """Return the number of tokens whose logits are held at a time."""
    return min(MOST_CHUNK_TOKENS, max(16, MOST_CHUNK_LOGITS // vocabulary))


@torch.no_grad()
def stream_layers(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    visit: Visit,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget: MemoryBudget = UNLIMITED,
    directory: Path | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Activations:
    """Run all sequences through all layers; return the last layer's output, before the final norm.

    With a `directory`, each layer's output stays there until the next layer has run and its `visit` is finished. A
    later pass over the same sequences resumes after the last layer found there, and does not visit the layers before.
    Several processes resume from a common layer, each with its own directory.
    """
    layers = len(checkpoint.config.layers)
    shelf = Shelf(directory, (*tokens_SL.shape, checkpoint.config.hidden_size), dtype, budget=budget)
    first = next((index for index in reversed(range(layers + 1)) if shelf.has(f"layer-{index}")), -1)
    if directory is not None:
        first = int(processes.smallest(first))
    found = shelf.find(f"layer-{first}")
    first, states = (0, shelf.begin("layer-0")) if found is None else (first, found)
    with ExitStack() as unfinished:
        unfinished.callback(lambda: states.close())
        if found is None:
            embed(checkpoint, tokens_SL, states, device, budget)
            shelf.finish("layer-0")
        positions = layer_positions(checkpoint, tokens_SL, dtype, device)
        for index in progress(range(first, layers)):
            after = states if directory is None else shelf.begin(f"layer-{index + 1}")
            with closed_on_error(after), one_layer(checkpoint, index, dtype, device, budget) as layer:
                checkpoint.read_ahead(index + 1)
                finish = visit(index, layer)
                for rows in budget.batches(*tokens_SL.shape):
                    after[rows] = layer(states[rows].to(device), positions)
                if finish is not None:
                    finish()
                del layer, finish  # before the next layer is loaded: the callback may hold this one
            if directory is not None:
                with closed_on_error(after):
                    shelf.finish(f"layer-{index + 1}")
                    processes.wait()  # all processes resume from one layer: none drops an input that another may need
                    shelf.drop(f"layer-{index}", states)
            states = after
        unfinished.pop_all()
    return states


@torch.no_grad()
def embed(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    states: Activations,
    device: torch.device | str,
    budget: MemoryBudget = UNLIMITED,
) -> None:
    """Fill `states` with the first layer's input."""
    embedding_VD = checkpoint.source(states.dtype, device)("model.embed_tokens.weight")
    for rows in budget.batches(*tokens_SL.shape):
        states[rows] = embedded(checkpoint.config, tokens_SL[rows].to(device), embedding_VD)
    del embedding_VD
    checkpoint.release()


@contextmanager
def one_layer(
    checkpoint: Checkpoint,
    index: int,
    dtype: torch.dtype,
    device: torch.device | str,
    budget: MemoryBudget = UNLIMITED,
) -> Iterator[DecoderLayer]:
    """Hold one layer in memory during the body; under a memory limit, not all of its weights at a time."""
    source = checkpoint.weights(dtype, device)

    def relieved(name: str) -> Weight:
        budget.relieve(checkpoint.release)  # converted weights are read here
        return source(name)

    tensors: TensorSource = relieved
    layer = DecoderLayer(checkpoint.config, index, tensors)
    budget.relieve_between_experts(layer, Expert, checkpoint.release)
    yield layer
    del layer
    checkpoint.release()
    heap.give_back()


def layer_positions(checkpoint: Checkpoint, tokens_SL: Tensor, dtype: torch.dtype, device: torch.device | str) -> Positions:
    """Return the positions of sequences that all have one length and start at position 0."""
    return positions_for(checkpoint.config, Rotary(checkpoint.config), tokens_SL[:1].to(device), None, 0, dtype)


@torch.no_grad()
def stream_negative_log_likelihood(
    checkpoint: Checkpoint,
    tokens_SL: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    visit: Visit = lambda index, layer: None,
    budget: MemoryBudget = UNLIMITED,
    directory: Path | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Tensor:
    """Return for each sequence the summed negative log-likelihood, in nats, of its tokens after the first: [S] in float64.

    `visit` may change a layer before it runs, such as its routing. `directory`: as in `stream_layers`.
    """
    summed_S = torch.zeros(tokens_SL.shape[0], dtype=torch.float64)
    states = stream_layers(
        checkpoint, tokens_SL, visit, dtype=dtype, device=device, budget=budget, directory=directory, progress=progress
    )
    with states:
        outer = Outer(checkpoint.config, checkpoint.source(dtype, device))
        chunk = chunk_tokens(checkpoint.config.vocabulary_size)
        for row in range(tokens_SL.shape[0]):
            hidden_LD = outer.hidden_states(states[row : row + 1].to(device))[0, :-1]
            targets_L = tokens_SL[row, 1:].to(device)
            for part in torch.arange(targets_L.shape[0], device=device).split(chunk):
                logits = outer.logits(hidden_LD[part]).float()
                summed_S[row] += float(F.cross_entropy(logits, targets_L[part], reduction="sum"))
    checkpoint.release()
    return summed_S
