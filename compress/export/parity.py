"""Comparison of an exported model's logits with the engine's, on random and real prompts with a prefill and single steps.

The reference is one streaming pass over whole sequences, with one layer in memory at a time. A decoder's logits at a
position do not depend on later tokens, so the same pass serves every way of processing the sequence.

Shape suffixes: S sequences, B batch, L positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tokenizer import load_tokenizer
from engine.decoder.experts import MoeBlock
from engine.decoder.kv_cache import KeyValueCache
from engine.decoder.model import DecoderLayer, Outer
from engine.decoder.routing import Routing
from engine.errors import CheckpointError, ExportError
from engine.families.rotary_embedding import Rotary
from engine.kernels.linear import plain
from engine.kernels.stored.quantized_weight import Weight, quantise
from engine.onnx.quantize import Packing
from engine.onnx.runtime import OnnxDecoder
from engine.passes.activations import Activations
from engine.passes.streaming import stream_layers

STEPS = 8
"""Number of single tokens processed after each prompt."""
LENGTHS = (1, 9, 24, 56)
"""Lengths of the prompts in tokens."""
TEXTS = (
    "The first lighthouse on this coast was a fire of driftwood, kept by two brothers who took turns to sleep. When the "
    "harbour grew, the town paid for a tower of stone, and later for a lamp that could be seen from eleven miles away. "
    "Ships still found the rocks in fog, so a bell was hung below the lamp and rung by a clock.",
    "def moving_average(values, width):\n    if width < 1:\n        raise ValueError('width must be positive')\n"
    "    total = sum(values[:width])\n    yield total / width\n    for old, new in zip(values, values[width:]):\n"
    "        total += new - old\n        yield total / width\n",
)
"""Texts of the real prompts, for models with a tokenizer."""


@dataclass(frozen=True)
class Allowed:
    """Allowed differences between two runtimes."""

    single: float
    """Largest difference of any value of any step, relative to the step's largest value where that is above 1."""
    typical: float
    """Median over the steps of the root mean square of a step's differences relative to that of its values.

    Lower precision sometimes changes a close decision of a router, and the values of that step then differ much.
    """


@dataclass(frozen=True)
class StepDifference:
    """Difference of an output for one prompt at one step."""

    output: str
    where: str
    largest: float
    of_largest: float
    of_step: float


@dataclass(frozen=True)
class Prompt:
    """A sequence whose first `length` tokens are processed at once."""

    name: str
    row: int
    length: int


def check_parity(
    checkpoint: Checkpoint,
    exported: OnnxDecoder,
    routings: Sequence[Routing],
    allowed: Allowed,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> float:
    """Return the largest |difference of a logit| over all prompts and steps.

    Raises ExportError for the first beyond the limits.
    """
    limit = _positions(checkpoint)
    lengths = [max(1, min(length, limit - STEPS)) for length in LENGTHS]
    length = min(limit, max(lengths) + STEPS)
    tokens_SL, names = sequences(checkpoint.config.vocabulary_size, length, lambda: load_tokenizer(checkpoint))
    prompts = [Prompt(name, row, length) for row, (name, length) in enumerate(zip(names, lengths, strict=True))]
    reference = Reference(checkpoint, tokens_SL, routings, progress)
    with reference.states:
        batches = [*([prompt] for prompt in prompts), [prompts[1], prompts[3]]]  # the last batch is padded
        steps = [step for batch in batches for step in _steps(batch, tokens_SL, exported, reference)]
    check_steps(steps, allowed)
    return max(step.largest for step in steps)


def _positions(checkpoint: Checkpoint) -> int:
    """Return the number of positions for which whole sequences and single steps use equal rotation angles."""
    switch = Rotary(checkpoint.config).switch
    return min(checkpoint.config.max_positions, switch or checkpoint.config.max_positions)


def sequences(vocabulary: int, length: int, load: Callable[[], Any]) -> tuple[Tensor, list[str]]:
    """Return random and real sequences in turns, [S, L], and their names; `load` returns the tokenizer."""
    tokens_SL = torch.randint(vocabulary, (2 * len(TEXTS), length), generator=torch.Generator().manual_seed(0))
    names = ["random"] * len(tokens_SL)
    try:
        tokenizer = load()
    except CheckpointError:  # a model without a tokenizer can be exported too
        return tokens_SL, names
    for index, text in enumerate(TEXTS):
        ids = tokenizer(text, verbose=False)["input_ids"]
        tokens_SL[2 * index + 1] = torch.tensor((ids * length)[:length])
        names[2 * index + 1] = "real"
    return tokens_SL, names


class RoundedCheckpoint(Checkpoint):
    """A checkpoint with the values of its low-bit encodings as weights."""

    def __init__(self, directory: Path, packings: Mapping[str, Packing]) -> None:
        super().__init__(directory)
        self._packings = packings

    def stored(self, name: str, dtype: torch.dtype | None = None) -> Weight:
        """Return the weight after rounding."""
        stored, packing = super().stored(name, dtype), self._packings.get(name)
        return stored if packing is None else quantise(plain(stored, torch.float32), *packing)


class Reference:
    """The engine's logits, computed from hidden states on demand."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokens_SL: Tensor,
        routings: Sequence[Routing],
        progress: Callable[[Iterable[int]], Iterable[int]],
    ) -> None:
        by_layer = dict(zip(checkpoint.config.moe_layers, routings, strict=True))

        def route(index: int, layer: DecoderLayer) -> None:
            if isinstance(layer.feed_forward, MoeBlock):
                layer.feed_forward.routing = by_layer[index]

        self.states: Activations = stream_layers(checkpoint, tokens_SL, route, dtype=torch.float32, progress=progress)
        self._outer = Outer(checkpoint.config, checkpoint.source(torch.float32))

    def logits(self, row: int, begin: int, end: int) -> Tensor:
        """Return the logits of some positions of a sequence, [L, V]."""
        return self._outer.logits(self._outer.hidden_states(self.states[row : row + 1][0, begin:end]))


@torch.inference_mode()
def _steps(
    batch: Sequence[Prompt], tokens_SL: Tensor, exported: OnnxDecoder, reference: Reference
) -> Iterator[StepDifference]:
    """Yield the differences of a prefill of these prompts, padded on the left, and of the steps after it."""
    longest = max(prompt.length for prompt in batch)
    steps = min(STEPS, tokens_SL.shape[1] - longest)
    tokens_BL = torch.zeros(len(batch), longest + steps, dtype=torch.int64)
    real_BL = torch.zeros(len(batch), longest + steps, dtype=torch.bool)
    for index, prompt in enumerate(batch):
        begin = longest - prompt.length
        tokens_BL[index, begin:] = tokens_SL[prompt.row, : prompt.length + steps]
        real_BL[index, begin:] = True
    cache = KeyValueCache(exported.config, len(batch), longest + steps, exported.dtype)
    for step in range(steps + 1):
        begin, end = (0, longest) if step == 0 else (longest + step - 1, longest + step)
        logits_BLV = exported(tokens_BL[:, begin:end], real_BL[:, :end], cache).float()
        for index, prompt in enumerate(batch):
            first = longest - prompt.length
            expected_LV = reference.logits(prompt.row, max(0, begin - first), end - first)
            where = f"{when(step)} of a {prompt.name} prompt of {prompt.length} tokens" + in_batch(len(batch))
            yield compared("logits", where, logits_BLV[index, max(0, first - begin) :], expected_LV)


def when(step: int) -> str:
    """Return a step in words; 0 is the prefill."""
    return f"step {step}" if step else "prefill"


def in_batch(prompts: int) -> str:
    """Return the words that follow a prompt's name, for a batch of this many prompts."""
    return f", in a padded batch of {prompts}" * (prompts > 1)


def compared(output: str, where: str, found: Tensor, expected: Tensor) -> StepDifference:
    """Return the difference of an output at one step from its expected value."""
    difference = (found - expected).abs()
    largest = float(difference.max())
    return StepDifference(
        output,
        where,
        largest,
        largest / max(1.0, float(expected.abs().max())),
        float(difference.square().mean().sqrt() / expected.square().mean().sqrt()),
    )


def check_steps(steps: Sequence[StepDifference], allowed: Allowed) -> None:
    """Raise ExportError with the first step beyond the single limit, or the worst step where the median is too large."""
    for step in steps:
        if not step.of_largest <= allowed.single:  # also true for NaN
            raise ExportError(
                f"output {step.output} at {step.where} is off by {step.largest:.3g}, {step.of_largest:.2g} of its largest "
                f"value (allowed {allowed.single:g})"
            )
    for output in dict.fromkeys(step.output for step in steps):
        own = [step for step in steps if step.output == output]
        typical = statistics.median(step.of_step for step in own)
        if not typical <= allowed.typical:
            worst = max(own, key=lambda step: step.of_step)
            raise ExportError(
                f"output {output} is typically off by {typical:.2%} of its size (allowed {allowed.typical:.2%}), and at "
                f"{worst.where} by {worst.of_step:.2%}"
            )
