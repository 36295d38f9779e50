"""Rotary embedding with the scalings that the families use. The frequencies come from transformers.

Shape suffixes: B batch, L new positions, R rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.families.config import DecoderConfig


class Rotary:
    """Rotary embedding (Su et al. 2021) with the scalings that the families use. The frequencies come from transformers.

    `dynamic` and `longrope` depend on the longest sequence of the call, so their frequencies are chosen per forward.
    """

    def __init__(self, config: DecoderConfig, kind: str | None = None) -> None:
        """kind: that of the layers, where each kind has parameters of its own; by default, the first one."""
        kinds = config.rotary_kinds
        self._of_kinds = {} if kind is not None else {own: Rotary(config, own) for own in kinds}
        self._layers = kind or next(iter(kinds), None)
        self._config = config.transformers_config
        self._dimension = config.rotary_dimension if self._layers is None else kinds[self._layers]
        parameters = self._config.rope_parameters if self._dimension else {}
        if self._layers is not None:
            self._config, parameters = self._config.per_layer_config[self._layers], parameters[self._layers]
        self.kind: str = parameters.get("rope_type", "default")
        self.varies = self.kind in ("dynamic", "longrope")
        """Whether frequencies depend on the length of the text."""
        self._theta: Any = parameters.get("rope_theta")
        self._original_max: int = parameters.get("original_max_position_embeddings", config.max_positions)
        self._max_positions = config.max_positions
        self._frequencies, self._scaling = self._checked(None)
        self._placed = self._frequencies
        """The frequencies on the device where they were last needed: a CUDA graph can copy nothing from the host."""
        self._long: tuple[Tensor, float] | None = None
        if self.kind == "longrope":
            # transformers switches the frequencies and keeps the attention factor of the short form.
            self._long = (self._checked(self._original_max + 1)[0], self._scaling)
            if config.rope_mscales:
                # transformers 5 keeps the short frequencies beyond the switch; older versions and the authors' code do not.
                self._scaling, self._long = parameters["short_mscale"], (self._long[0], parameters["long_mscale"])

    def _checked(self, length: int | None) -> tuple[Tensor, float]:
        """Return the initial frequencies and factor. Raises CheckpointError for parameters that give no frequencies."""
        try:
            frequencies, scaling = self._initialise(length)
            # The last dimensions are not rotated if a proportion of them is.
            turned = frequencies if self.kind != "proportional" else frequencies[:1]
            usable = frequencies.shape == (self._dimension // 2,) and bool((turned > 0).all())
            if not usable or not torch.isfinite(frequencies * scaling).all():
                raise ValueError("the frequencies are not positive numbers, one for each pair of dimensions")
        except Exception as error:  # transformers computes with any values that it finds there
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CheckpointError(f"config.json: rope_parameters cannot be used ({reason}); correct them") from error
        return frequencies, scaling

    def _initialise(self, length: int | None) -> tuple[Tensor, float]:
        if not self._dimension:
            return torch.empty(0), 1.0
        if self.kind == "default":
            exponents = torch.arange(0, self._dimension, 2, dtype=torch.float32) / self._dimension
            return 1.0 / (self._theta**exponents), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        initialise: Callable[..., Any] = ROPE_INIT_FUNCTIONS[self.kind]
        own = {} if self._layers is None else {"layer_type": self._layers}
        frequencies, scaling = initialise(self._config, torch.device("cpu"), seq_len=length, **own)
        return frequencies, scaling

    @property
    def switch(self) -> int | None:
        """Maximum number of positions for the short form's frequencies; None if there is one form."""
        return self._original_max if self._long is not None else None

    def scale_of(self, length: int) -> int:
        """Return a number that identifies the frequencies for a text of this length. Equal numbers: equal frequencies."""
        if self.kind == "dynamic" and length > self._max_positions:
            return length
        return int(self.kind == "longrope" and length > self._original_max)

    def __call__(self, positions_BL: Tensor, dtype: torch.dtype, lengths_BL: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, 1, L, R] for integer positions [B, L].

        lengths_BL: length of the text that each position is read as part of; None for the longest text of this call.
        """
        if not self.varies:
            return self._turns(positions_BL, dtype, 0)
        if lengths_BL is None:
            return self._turns(positions_BL, dtype, self.scale_of(int(positions_BL.max()) + 1))
        scales_BL = torch.tensor([[self.scale_of(length) for length in row] for row in lengths_BL.tolist()])
        first, *others = scales_BL.unique().tolist()
        cosine, sine = self._turns(positions_BL, dtype, first)
        for scale in others:
            here = (scales_BL == scale).to(cosine.device)[:, None, :, None]
            other_cosine, other_sine = self._turns(positions_BL, dtype, scale)
            cosine, sine = torch.where(here, other_cosine, cosine), torch.where(here, other_sine, sine)
        return cosine, sine

    def of_kind(self, kind: str | None) -> Rotary:
        """Return the embedding of a kind of layer; this one for None."""
        return self if kind is None else self._of_kinds[kind]

    def of_kinds(self, positions_BL: Tensor, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """Return cosines and sines by kind of layer; empty where all layers share them."""
        return {kind: rotary(positions_BL, dtype) for kind, rotary in self._of_kinds.items()}

    def _turns(self, positions_BL: Tensor, dtype: torch.dtype, scale: int) -> tuple[Tensor, Tensor]:
        frequencies, scaling = self._frequencies, self._scaling
        if scale:
            frequencies, scaling = self._long if self._long is not None else self._initialise(scale)
        elif self._placed.device != positions_BL.device:
            self._placed = frequencies.to(positions_BL.device)
        placed = frequencies.to(positions_BL.device) if scale else self._placed
        angles = positions_BL[:, None, :, None].float() * placed
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
