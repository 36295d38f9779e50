"""Different bits for each matrix of each expert, in one model.

    options = mixed_widths(config, {(0, 3, UP): 2, (0, 3, DOWN): 4})    # layer 0, expert 3; all others keep their dtype

The options are those of any rounding: `apply` takes them in a quantizer, and `round_layers` (GPTQ) rounds such models too.
Activation-aware scales are chosen for one width. `write_mixed_widths` (compress/plans/mixed_model.py) does both steps for a
model that keeps its experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from compress.options.quantize import EMBEDDING, HEAD, QuantiserOptions
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.families.tensor_names import expert_tensor, ffn_parts
from engine.families.tensor_shapes import feed_forward_weights, routed_tensors
from engine.kernels.stored.scheme import BITS, PLAIN_BITS, Scheme

_LAYER = re.compile(r"model\.layers\.\d+\.")
Widths = Mapping[tuple[int, int, int], int]
"""Bits of matrices of routed experts, by decoder layer, expert and projection (engine.families.experts: GATE, UP, DOWN)."""


@dataclass(frozen=True)
class MixedWidths(QuantiserOptions):
    """How the matrices of one model are rounded, each to its own bits. `mixed_widths` makes it."""

    by_name: Mapping[str, int] = field(default_factory=dict)
    """Bits of each rounded matrix."""

    def scheme_of(self, name: str) -> Scheme:
        """Return the storage scheme of one weight."""
        return Scheme(self.by_name[name], self.group_size) if name in self.by_name else super().scheme_of(name)

    def names(self, config: DecoderConfig) -> list[str]:
        """Return the names of the weights that are quantized."""
        return [name for name in super().names(config) if name in self.by_name]

    @property
    def bits_text(self) -> str:
        """The widths, as a model card says them."""
        *first, last = sorted({*self.by_name.values()})
        return f"{', '.join(map(str, first))} or {last}" if first else str(last)


def other_matrices(config: DecoderConfig) -> list[str]:
    """Return the names of the matrices outside of the routed experts that can be rounded: attention, dense FFNs, shared
    experts.
    """
    routed = routed_tensors(config)
    return [name for name in QuantiserOptions(BITS[0]).names(config) if name not in routed]


def kinds_of_others(config: DecoderConfig) -> dict[str, list[str]]:
    """Return the names of all matrices outside of the routed experts that can be rounded, by kind: those with the same
    place in their layers, the embedding, and an output head with a matrix of its own.
    """
    kinds: dict[str, list[str]] = {}
    for name in other_matrices(config):
        kinds.setdefault(_LAYER.sub("", name), []).append(name)
    outside = [EMBEDDING, *([] if config.tied_embeddings else [HEAD])]
    return kinds | {name: [name] for name in outside}


def everything_rounded(config: DecoderConfig, bits: int, group_size: int) -> QuantiserOptions:
    """Return options that round every matrix that can be rounded: the routed experts, and all others."""
    return QuantiserOptions(bits, group_size, quantize_head=not config.tied_embeddings, embedding_bits=bits)


def mixed_widths(config: DecoderConfig, widths: Widths, *, group_size: int = 32, others: int = PLAIN_BITS) -> MixedWidths:
    """Return options that round each matrix to its own bits.

    config: of the result, whose experts `widths` counts. widths: 2, 3, 4 or 8, or 16 for a matrix that keeps its dtype, as
    matrices without an entry do. others: bits of attention, of shared experts and of dense layers. Raises OptionError for
    matrices that the model does not have, and for groups that do not fit.
    """
    row, by_name = config.architecture, dict[str, int]()
    for (layer, expert, projection), bits in widths.items():
        moe = config.layers[layer].moe if 0 <= layer < len(config.layers) else None
        if moe is None or not 0 <= expert < moe.experts or projection not in ffn_parts(row):
            raise OptionError(
                f"widths: layer {layer} has no projection {projection} of an expert {expert}; give matrices of the model"
            )
        by_name[expert_tensor(row, layer, expert, projection)] = bits
    by_name |= dict.fromkeys(other_matrices(config), others)
    wrong = next((bits for bits in by_name.values() if bits not in (*BITS, PLAIN_BITS)), None)
    if wrong is not None:
        raise OptionError(f"widths: {wrong} bits; weights have one of {', '.join(map(str, BITS))} or {PLAIN_BITS}")
    rounded = {name: bits for name, bits in by_name.items() if bits != PLAIN_BITS}
    if not rounded:
        raise OptionError(f"widths: every matrix has {PLAIN_BITS} bits, so nothing is rounded; copy the model instead")
    of_mixtures = {name for layer in config.moe_layers for name in feed_forward_weights(config, layer)}
    made = MixedWidths(min(rounded.values()), group_size, experts_only=rounded.keys() <= of_mixtures, by_name=rounded)
    made.check(config)
    return made
