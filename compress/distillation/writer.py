"""A model that writes responses while it is trained: by the compiled kernels where they multiply its weights.

The kernels compute whole steps in bfloat16. A student whose weights have another dtype is copied into bfloat16, and the
copy is brought up to date before each batch of responses; that costs two bytes for each parameter. In float32 torch writes
in one batch: the kernels of float32 multiply matrices alone, and a batch whose attention torch computes sequence by sequence
is slower for dense students (benchmarks/response_writing.py).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from calibrate.instructions import Example
from compress.distillation.responses import limits_of, numbers_of, write_responses
from engine.batching.together import continue_together
from engine.checkpoint.checkpoint import computed_dtype
from engine.decoder.model import Decoder
from engine.decoder.parameters import parameters_on_disk
from engine.generation.options import SamplingOptions
from engine.kernels.kernel_choice import has_kernels, prepare_decoding
from engine.passes import processes


class Writer:
    """Writes responses with a model's current weights."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype | None = None) -> None:
        """dtype: that of the weights that write; None for the model's own."""
        self.decoder = decoder
        self.dtype = decoder.dtype if dtype is None else dtype
        """Dtype of the weights that write: the model's own where no kernels serve it."""
        if not _is_served(decoder, self.dtype):
            self.dtype = decoder.dtype
        self._copy: Decoder | None = None

    def __call__(
        self,
        prompts: Sequence[list[int]],
        max_length: int,
        end_tokens: Collection[int],
        sampling: SamplingOptions,
        generator: torch.Generator,
    ) -> list[Example]:
        """Return every prompt with its response; see `write_responses`."""
        if not _is_served(self.decoder, self.dtype):
            return write_responses(self.decoder, prompts, max_length, end_tokens, sampling, generator)
        return write_together(self._current(), prompts, max_length, end_tokens, sampling, generator)

    def _current(self) -> Decoder:
        """Return the model that writes, with the weights as they are now."""
        writing = self.decoder
        if self.dtype != self.decoder.dtype:
            if self._copy is None:
                self._copy = copy_in(self.dtype, self.decoder)
            for old, new in zip(_narrowed(self._copy), _narrowed(self.decoder), strict=True):
                old.data.copy_(new.data)
            writing = self._copy
        return writing


def write_together(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    max_length: int,
    end_tokens: Collection[int],
    sampling: SamplingOptions,
    generator: torch.Generator,
) -> list[Example]:
    """Return every prompt with its response as `write_responses` does, by the kernels and the paged cache."""
    decoder.weights_changed()
    prepare_decoding(decoder.dtype, decoder.device, decoder.kernels_needed)
    limits = limits_of(prompts, max_length)
    written = continue_together(decoder, prompts, limits, end_tokens, sampling, numbers_of(generator, limits))
    return [Example(list(prompt), response) for prompt, response in zip(prompts, written, strict=True)]


def copy_in(dtype: torch.dtype, decoder: Decoder) -> Decoder:
    """Return a frozen copy of a decoder whose weights have another dtype.

    Low-bit weights, other buffers and the routings are shared.
    """
    routings = [own for block in decoder.moe_blocks for own in (block.routing, block.own_routing)]
    known: dict[int, object] = {id(own): own for own in (decoder.config, decoder.rotary, *decoder.buffers(), *routings)}
    names = {id(weight): name for name, weight in parameters_on_disk(decoder).items()}
    for weight in _narrowed(decoder):
        own = computed_dtype(decoder.config.architecture, names.get(id(weight), ""), dtype)
        new = weight.detach().to(own)
        known[id(weight)] = nn.Parameter(new, requires_grad=False) if isinstance(weight, nn.Parameter) else new
    made: Decoder = copy.deepcopy(decoder, known)
    return made


def _narrowed(decoder: Decoder) -> Iterator[Tensor]:
    """Yield what has the compute dtype: the weights, and the factors of layers' outputs, which are buffers."""
    yield from decoder.parameters()
    yield from (layer.scalar_1 for layer in decoder.layers if isinstance(layer.scalar_1, Tensor))


def _is_served(decoder: Decoder, dtype: torch.dtype) -> bool:
    """Return whether the kernels write for the model: on a CPU, in one process, in the dtype of their whole steps."""
    return has_kernels(dtype, decoder.device) and not processes.is_spread(decoder)
