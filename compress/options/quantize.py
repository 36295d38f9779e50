"""Options of `compress quantize`, and of quantizing the weights of any other result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.options import CalibrationOptions
from compress.options.job import OUTPUT, JobOptions
from engine.errors import OptionError
from engine.families.config import DecoderConfig
from engine.families.tensor_names import name_on_disk
from engine.families.tensor_shapes import attention_weights, expected_tensors, feed_forward_weights
from engine.kernels.stored.scheme import BITS, WHOLE_ROW, Scheme
from engine.options import changed, check, declared, declared_part, left_out, option, part, unlisted

ROUND = "Quantization"
OUTSIDE = EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The matrices outside of layers."""
HEAD_BITS = 8
NEAREST, AWQ, GPTQ = ROUNDINGS = ("nearest", "awq", "gptq")
_USUAL_SIZES = (32, 64, 128, 16, 8)


@dataclass(frozen=True)
class QuantiserOptions:
    """How a model's weights are rounded."""

    bits: int = field(metadata=declared(group=ROUND, choices=BITS, help="Bits per weight."))
    group_size: int = option(
        32, group=ROUND, help=f"Inputs of a matrix row that share a scale; {WHOLE_ROW} for the whole row."
    )
    experts_only: bool = option(False, group=ROUND, help="Leave attention and dense feed-forward networks in their dtype.")
    quantize_head: bool = option(
        False, group=ROUND, help="Also round the output head, to 8 bits: every token reads all of it."
    )
    embedding_bits: int | None = option(
        None,
        group=ROUND,
        choices=BITS,
        unset="its dtype",
        help="Bits of the embedding, which is the output head too where a model has one matrix for both.",
    )

    def __post_init__(self) -> None:
        check(self)

    def check(self, config: DecoderConfig, matrices: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Raise OptionError for a scheme that this model does not support.

        matrices: shapes [O, D] of the matrices that are rounded, by name; None for those of a family with a row.
        """
        if self.group_size != WHOLE_ROW and self.group_size < 1:
            raise OptionError(
                f"group size is {self.group_size}; it must be from 1, or {WHOLE_ROW} for a scale for each output"
            )
        if self.quantize_head and config.tied_embeddings:
            raise OptionError("the output head is the embedding matrix; give --embedding-bits in place of --quantize-head")
        if self.experts_only and not config.moe_layers:
            raise OptionError("the model is dense and has no experts; leave out --experts-only")
        if matrices is None:
            shapes = expected_tensors(config)
            matrices = {name: shapes[name] for name in self.names(config)}
        inputs = {(self.scheme_of(name).bits, matrices[name][1]): name for name in reversed([*matrices])}
        wrong = [key for key in inputs if not Scheme(key[0], self.group_size).fits(key[1])]
        if wrong:
            fitting = [size for size in _USUAL_SIZES if all(Scheme(bits, size).fits(each) for bits, each in inputs)]
            instead = f"--group-size {fitting[0]}" if fitting else "another model or other bits"
            _, size = wrong[-1]
            raise OptionError(
                f"{inputs[wrong[-1]]} has {size} inputs, which groups of {self.group_size} do not fill in whole words of 32 "
                f"bits; take {instead}"
            )

    @property
    def scheme(self) -> Scheme:
        """Return the storage scheme of quantized weights."""
        return Scheme(self.bits, self.group_size)

    def scheme_of(self, name: str) -> Scheme:
        """Return the storage scheme of one weight."""
        if name == EMBEDDING and self.embedding_bits is not None:
            return Scheme(self.embedding_bits, self.group_size)
        return Scheme(HEAD_BITS, self.group_size) if name == HEAD else self.scheme

    @property
    def outside(self) -> list[str]:
        """Return the names of the matrices outside of layers that are quantized."""
        return [EMBEDDING] * (self.embedding_bits is not None) + [HEAD] * self.quantize_head

    def names(self, config: DecoderConfig) -> list[str]:
        """Return the names of the weights that are quantized."""
        names = self.outside
        for index, layer in enumerate(config.layers):
            if not self.experts_only:
                names += attention_weights(config, index)
            if not self.experts_only or layer.moe is not None:
                names += feed_forward_weights(config, index)
        return names

    def config(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the quantization entry of config.json."""
        return quantization_entry(config, {name: self.scheme_of(name) for name in self.names(config)})

    @property
    def bits_text(self) -> str:
        """The width, as a model card says it."""
        return str(self.bits)


def quantization_entry(config: DecoderConfig, schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    """Return the quantization entry of config.json, given the storage scheme of each low-bit weight.

    The scheme of most weights is that of all linear layers, and others are named.
    """
    from engine.checkpoint.pack_quantized import CONFIG_KEY, config_of

    def on_disk(name: str) -> str:
        return name_on_disk(config.architecture, name)

    counts = Counter(scheme for name, scheme in schemes.items() if name not in OUTSIDE)
    usual = max(counts or Counter(schemes.values()), key=lambda scheme: (counts[scheme], scheme))
    matrices = [name for name, shape in expected_tensors(config).items() if len(shape) == 2]
    kept = [on_disk(name) for name in matrices if name not in schemes and name not in OUTSIDE]
    # The head is listed even where it is tied and has no tensor: readers build a linear layer for it.
    ignored = kept if HEAD in schemes else [HEAD, *kept]
    apart = [on_disk(EMBEDDING)] * (EMBEDDING in schemes)  # it is no linear layer
    return {CONFIG_KEY: config_of(usual, ignored, {on_disk(name): own for name, own in schemes.items()}, apart)}


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(JobOptions):
    """One run of `compress quantize`."""

    output: Path = field(
        metadata=declared(group=OUTPUT, short="-o", unset="MODEL-BITS-bit", help="Directory of the result.")
    )
    method: str = "quantize"
    quantiser: QuantiserOptions = field(metadata=declared_part(QuantiserOptions))
    rounding: str | None = option(
        None,
        group=ROUND,
        choices=ROUNDINGS,
        unset=NEAREST,
        help="nearest: to the nearest value. awq: with input channels scaled by their activations on --data. gptq: column "
        "by column, so that later columns make up for the errors of earlier ones on --data.",
    )
    activation_aware: bool = option(False, group=ROUND, help="The same as --rounding awq.")
    calibration: CalibrationOptions = part(
        CalibrationOptions,
        samples=changed(32),
        evaluation_samples=changed(
            help="Held-out sequences that perplexity is measured on, before and after; 0 for none, and then no text is "
            "read with --rounding nearest."
        ),
        windows=left_out(),
    )
    statistics: Path | None = unlisted(JobOptions, "statistics")
    plan_output: Path | None = unlisted(JobOptions, "plan_output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation_aware and self.rounding not in (None, AWQ):
            raise OptionError(f"--activation-aware is --rounding {AWQ}, and --rounding is {self.rounding}; give one of them")

    @property
    def way(self) -> str:
        """Return the way of rounding, one of ROUNDINGS."""
        return AWQ if self.activation_aware else self.rounding or NEAREST

    @property
    def reads_text(self) -> bool:
        """Whether the run needs text: for any rounding but to nearest, or to measure perplexity."""
        return self.way != NEAREST or self.calibration.evaluation_samples > 0
