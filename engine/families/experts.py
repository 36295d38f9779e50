"""Routed and shared experts as parts of a family: how many, how wide, and what their tensors are called on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError, UnsupportedError
from engine.families.layer_config import ClampedSwiglu
from engine.families.values import above_zero, keys, natural, number, positive
from engine.files.json_file import shown

GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS = range(6)
"""The tensors of an expert, as they are numbered everywhere; some families have no biases."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Stack:
    """One tensor on disk that holds some projections of all experts of a layer, [experts, outputs, inputs]."""

    name: str
    """Within the block."""
    projections: tuple[int, ...]
    """Which: their outputs one after the other."""
    transposed: bool = False
    """[experts, inputs, outputs]."""
    interleaved: bool = False
    """The outputs of several projections in turns."""


def transposed_stacks(interleaved: bool = False, biases: bool = False) -> tuple[Stack, ...]:
    """`experts.gate_up_proj` and `experts.down_proj`, [experts, inputs, outputs], and their biases."""
    gate_up = Stack("experts.gate_up_proj", (GATE, UP), transposed=True, interleaved=interleaved)
    gate_up_bias = Stack("experts.gate_up_proj_bias", (GATE_BIAS, UP_BIAS), interleaved=interleaved)
    down = Stack("experts.down_proj", (DOWN,), transposed=True)
    return (gate_up, gate_up_bias, down, Stack("experts.down_proj_bias", (DOWN_BIAS,))) if biases else (gate_up, down)


@dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors of experts."""

    block: str = "mlp"
    """Name on disk of the MoE block within the layer."""
    projections: tuple[str, str, str] = PROJECTIONS
    """Gate, up and down."""
    expert: str = "experts.{expert}.{projection}.weight"
    """Name within the block."""
    stacks: tuple[Stack, ...] = ()
    """How experts lie on disk where not one by one; the names of `expert` are then this project's alone."""
    modules: tuple[str, str] = ("mlp", "gate")
    """What transformers calls the block within a layer, and the router within the block, once a model is loaded."""

    @property
    def parts(self) -> range:
        """The tensors of an expert, as they are numbered: with biases where a stack holds some."""
        has_biases = any(GATE_BIAS in stack.projections for stack in self.stacks)
        return range(DOWN_BIAS + 1 if has_biases else DOWN + 1)


@dataclass(frozen=True)
class Experts:
    """Routed experts, each down(silu(gate(x)) · up(x))."""

    count: tuple[str, ...] = ()
    """Config keys that hold the expert count, best first; all are written. A family without any is dense."""
    width: str = "intermediate_size"
    """Config key of an expert's hidden units."""
    names: ExpertNames = ExpertNames()

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that are read."""
        return (*self.count, self.width)

    def width_of(self, family: Any, index: int, experts: int) -> int:
        """Hidden units of each of a layer's experts."""
        return positive(family, self.width)

    def activation(self, family: Any) -> ClampedSwiglu | None:
        """What is between an expert's projections; None for silu(g) · u."""
        return None

    def with_counts(self, family: Any, counts: Sequence[int]) -> dict[str, Any]:
        """What a result's config.json says of experts where layers have so many."""
        return dict.fromkeys(self.count, max(counts))


@dataclass(frozen=True)
class ClampedExperts(Experts):
    """Experts with a clamped SwiGLU."""

    alpha: str = "swiglu_alpha"
    limit: str = "swiglu_limit"

    def activation(self, family: Any) -> ClampedSwiglu | None:
        """The config's α and limit. Raises CheckpointError where they are not numbers, or the limit is 0."""
        return ClampedSwiglu(number(self.alpha, getattr(family, self.alpha)), above_zero(family, self.limit))


@dataclass(frozen=True)
class PartitionedExperts(Experts):
    """`width` is what a layer's experts have together, shared out evenly unless a list says the width of each."""

    sizes: str = "size_experts"
    """Config key of the list of expert widths for each layer."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that are read."""
        return (*super().reads, self.sizes)

    def width_of(self, family: Any, index: int, experts: int) -> int:
        """Hidden units of each of a layer's experts. Raises UnsupportedError where they differ in width."""
        width, sizes = self._shared_out(family), getattr(family, self.sizes, None)
        if sizes is None:
            return width
        if not isinstance(sizes, list) or len(sizes) != positive(family, "num_hidden_layers"):
            raise CheckpointError(f"config.json: {self.sizes} must be a list for each layer, or null")
        if sizes[index] != [width] * experts:
            raise UnsupportedError(
                f"config.json: {self.sizes}[{index}] is {shown(sizes[index])}; the engine has experts of one width, "
                f"here {experts} of {width}"
            )
        return width

    def _shared_out(self, family: Any) -> int:
        width, count = positive(family, self.width), positive(family, self.count[0])
        if width % count:
            raise CheckpointError(f"config.json: {count} experts cannot share {self.width} {width} evenly")
        return width // count

    def with_counts(self, family: Any, counts: Sequence[int]) -> dict[str, Any]:
        """What a result's config.json says of experts: also their widths."""
        width = self._shared_out(family)
        widths = {self.width: max(counts) * width, self.sizes: [[width] * count for count in counts]}
        return super().with_counts(family, counts) | widths


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token uses, `width` wide."""

    name: str = "shared_expert"
    """Prefix within the block."""
    width: str = "shared_expert_intermediate_size"
    """Config key of its hidden units, 0 or missing for no such expert."""
    gate: str | None = None
    """Name within the block of what scales it by sigmoid(gate · x); None where nothing does."""
    stacks: tuple[Stack, ...] = ()
    """How it lies on disk where not one projection by one, by names within the layer: stacks of one expert,
    [outputs, inputs]."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that are read."""
        return keys(self.width)

    def width_of(self, family: Any, experts: Experts) -> int:
        """Its hidden units, 0 where there is none."""
        return natural(family, self.width)


@dataclass(frozen=True)
class SharedExperts(SharedExpert):
    """An expert that every token uses, as wide as several routed ones: `width` is the config key of how many."""

    name: str = "shared_experts"
    width: str = "n_shared_experts"

    def width_of(self, family: Any, experts: Experts) -> int:
        """Its hidden units, 0 where there is none."""
        return natural(family, self.width) * positive(family, experts.width)
