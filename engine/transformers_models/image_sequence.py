"""A sequence whose prompt has images, run step by step as transformers' own generation runs it.

The whole model reads the prompt: its vision part, the places of the images' features, and positions in several dimensions
where it has them. Masks, positions and kinds of tokens then go on from step to step through the functions of transformers
that its generation uses.

Shape suffixes: L new positions, P all positions so far, K positions with logits, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.transformers_models.image_reader import in_dtype
from engine.transformers_models.transformers_model import quiet_transformers

_SHARED = "rope_deltas"
"""Attribute in which modules of transformers keep how far the positions of the last prompt are from its number of tokens."""


class ImageSequence:
    """One sequence with images, and its cache."""

    def __init__(self, model: Any, inputs: Mapping[str, Tensor], past: Any) -> None:
        """model: of transformers. inputs: of the prompt, beside its tokens. past: an empty cache of transformers."""
        self._model, self.past = model, past
        self._options: dict[str, Any] = in_dtype(inputs, model.dtype)
        self._tokens_1P = torch.zeros(1, 0, dtype=torch.long)
        self._made: Any = None
        self._holders = [module for module in model.modules() if hasattr(module, _SHARED)]
        self._own = [None for _ in self._holders]

    @torch.no_grad()
    def read(self, tokens_1L: Tensor, **options: Any) -> Tensor:
        """Read the prompt, or further tokens, and return logits of the last positions, [1, K, V]. options: of forward."""
        self._tokens_1P = torch.cat([self._tokens_1P, tokens_1L], dim=1)
        with quiet_transformers(), self._positions():
            given = self._first() if self._made is None else self._next(tokens_1L.shape[1])
            made = self._model(**given | options, return_dict=True)
        self.past = made.past_key_values
        self._made = type(made)(past_key_values=self.past)
        logits_1KV: Tensor = made.logits
        return logits_1KV

    def _first(self) -> dict[str, Any]:
        """Return the arguments that transformers' generation calls the model with first."""
        options, model = self._options, self._model
        mask = options.setdefault("attention_mask", torch.ones_like(self._tokens_1P))
        if "position_ids" in inspect.signature(model.forward).parameters:
            options["position_ids"] = model._prepare_position_ids_for_generation(self._tokens_1P, options)
        if bool((mask == 1).all()):
            options["attention_mask"] = None
        options |= {"past_key_values": self.past, "use_cache": True}
        first: dict[str, Any] = model.prepare_inputs_for_generation(self._tokens_1P, is_first_iteration=True, **options)
        self._options = {name: value for name, value in options.items() if not _is_real(value)}  # pixels are needed once
        return first

    def _next(self, new: int) -> dict[str, Any]:
        """Return the arguments for further tokens."""
        model = self._model
        self._options = model._update_model_kwargs_for_generation(self._made, self._options, num_new_tokens=new)
        following: dict[str, Any] = model.prepare_inputs_for_generation(
            self._tokens_1P, next_sequence_length=new, **self._options
        )
        return following

    @contextmanager
    def _positions(self) -> Iterator[None]:
        """Give the model's modules the offsets of this sequence's positions during the body, and then their own ones back.

        A model keeps such offsets for its last prompt only, and here sequences take turns.
        """
        before = [getattr(module, _SHARED) for module in self._holders]
        for module, own in zip(self._holders, self._own, strict=True):
            setattr(module, _SHARED, own)
        try:
            yield
        finally:
            self._own = [getattr(module, _SHARED) for module in self._holders]
            for module, kept in zip(self._holders, before, strict=True):
                setattr(module, _SHARED, kept)


def _is_real(value: Any) -> bool:
    """Whether an input holds real numbers, as pixels are."""
    return isinstance(value, Tensor) and value.is_floating_point()
