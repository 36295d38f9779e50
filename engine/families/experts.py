"""Routed and shared experts as parts of a family: their number, their width, and the names of their tensors on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.errors import CheckpointError, UnsupportedError
from engine.families.layer_config import Activation, ClampedSwiglu, GatedGelu
from engine.families.values import above_zero, keys, natural, number, positive
from engine.files.json_file import shown

GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS = range(6)
"""Indices of the tensors of an expert, which are the same everywhere. Some families have no biases."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Stack:
    """One tensor on disk that holds some projections of all experts of a layer, [experts, outputs, inputs]."""

    name: str
    """Name within the block."""
    projections: tuple[int, ...]
    """Projections in the tensor, whose outputs follow each other."""
    transposed: bool = False
    """Whether the layout is [experts, inputs, outputs]."""
    interleaved: bool = False
    """Whether the outputs of several projections alternate."""


def plain_stacks() -> tuple[Stack, ...]:
    """Return `experts.gate_up_proj` and `experts.down_proj`, [experts, outputs, inputs]."""
    return Stack("experts.gate_up_proj", (GATE, UP)), Stack("experts.down_proj", (DOWN,))


def transposed_stacks(interleaved: bool = False, biases: bool = False) -> tuple[Stack, ...]:
    """Return `experts.gate_up_proj` and `experts.down_proj`, [experts, inputs, outputs], and their biases."""
    gate_up = Stack("experts.gate_up_proj", (GATE, UP), transposed=True, interleaved=interleaved)
    gate_up_bias = Stack("experts.gate_up_proj_bias", (GATE_BIAS, UP_BIAS), interleaved=interleaved)
    down = Stack("experts.down_proj", (DOWN,), transposed=True)
    return (gate_up, gate_up_bias, down, Stack("experts.down_proj_bias", (DOWN_BIAS,))) if biases else (gate_up, down)


@dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors of experts."""

    block: str = "mlp"
    """Name on disk of the MoE block within the layer; empty if its parts are modules of the layer itself."""
    projections: tuple[str, str, str] = PROJECTIONS
    """Names of the gate, up and down projections."""
    expert: str = "experts.{expert}.{projection}.weight"
    """Name of a projection's tensor within the block."""
    stacks: tuple[Stack, ...] = ()
    """Layout of experts on disk if it is not one by one. The names of `expert` are then used by this project only."""
    has_gate: bool = True
    """Whether an FFN has a gate: down(silu(gate(x)) · up(x)) with one, and down(relu(up(x))²) without (arXiv 2109.08668)."""
    modules: tuple[str, str] = ("mlp", "gate")
    """transformers' names for the block within a layer, and for the router within the block, in a loaded model."""

    @property
    def matrices(self) -> range:
        """Indices of the projections of an expert or of another FFN."""
        return range(GATE if self.has_gate else UP, DOWN + 1)

    @property
    def parts(self) -> range:
        """Indices of the tensors of an expert, with biases if a stack holds some."""
        has_biases = any(GATE_BIAS in stack.projections for stack in self.stacks)
        return range(DOWN_BIAS + 1) if has_biases else self.matrices


NAMES_OF_LAYER = ExpertNames("", stacks=plain_stacks(), modules=("", "router"))
"""Names where stacked experts and the router are modules of the layer itself."""
NAMES_OF_MIXER = ExpertNames("mixer", has_gate=False, modules=("mixer", "gate"))
"""Names where every layer is a single block, the mixer, and experts have no gate."""


def renamed(norms: tuple[str, str, str], head_norm: str, ffn: ExpertNames) -> dict[str, str]:
    """Return the names on disk of modules that a Llama names otherwise.

    norms: the norms before attention, before the feed-forward block and of the model. head_norm: last part of the names of
    the norms of queries and keys. ffn: names of experts, which the projections of dense FFNs share.
    """
    own = "input_layernorm", "post_attention_layernorm", "model.norm"
    names = dict(zip(own, (*norms[:2], f"model.{norms[2]}"), strict=True))
    names |= {f"self_attn.{part}_norm": f"self_attn.{part}_{head_norm}" for part in ("q", "k")}
    dense = zip(PROJECTIONS, ffn.projections, strict=True)
    return names | {f"mlp.{name}": f"{ffn.block}.{theirs}" for name, theirs in dense}


@dataclass(frozen=True)
class Experts:
    """Routed experts, each down(silu(gate(x)) · up(x))."""

    count: tuple[str, ...] = ()
    """Config keys of the expert count, best first; all of them are written. A family without such keys is dense."""
    width: str = "intermediate_size"
    """Config key of an expert's number of hidden units."""
    names: ExpertNames = ExpertNames()
    even_widths: ClassVar[bool] = False
    """Whether all experts of a layer need one width."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*self.count, self.width)

    def declared_width(self, family: Any) -> int:
        """Return the number of hidden units of each expert by the family's own keys."""
        return positive(family, self.width)

    def width_of(self, family: Any, index: int, experts: int) -> int:
        """Return the number of hidden units of each of a layer's experts by the family's own keys."""
        return self.declared_width(family)

    def activation(self, family: Any) -> Activation | None:
        """Return the activation between an expert's projections, or None for silu(g) · u."""
        return None

    def with_counts(self, family: Any, counts: Sequence[int], width: int) -> dict[str, Any]:
        """Return the entries about experts in a result's config.json, for layers with so many experts of this width."""
        changed: dict[str, Any] = dict.fromkeys(self.count, max(counts))
        return changed if width == self.declared_width(family) else changed | {self.width: width}


@dataclass(frozen=True)
class ClampedExperts(Experts):
    """Experts with a clamped SwiGLU."""

    alpha: str = "swiglu_alpha"
    limit: str = "swiglu_limit"

    def activation(self, family: Any) -> ClampedSwiglu | None:
        """Return the config's α and limit. Raises CheckpointError if they are not numbers, or if the limit is 0."""
        return ClampedSwiglu(number(self.alpha, getattr(family, self.alpha)), above_zero(family, self.limit))


@dataclass(frozen=True)
class GeluExperts(Experts):
    """Experts with gelu in the place of silu, also the shared one."""

    def activation(self, family: Any) -> GatedGelu:
        """Return gelu(g) · u."""
        return GatedGelu()


@dataclass(frozen=True)
class PartitionedExperts(Experts):
    """Routed experts whose `width` is the sum over a layer, divided evenly unless a list has the width of each expert."""

    sizes: str = "size_experts"
    """Config key of the list of expert widths for each layer."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return (*super().reads, self.sizes)

    def width_of(self, family: Any, index: int, experts: int) -> int:
        """Return the hidden units of each of a layer's experts. Raises UnsupportedError if they differ in width."""
        width, sizes = self.declared_width(family), getattr(family, self.sizes, None)
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

    def declared_width(self, family: Any) -> int:
        """Return the number of hidden units of each expert: an even share of `width`."""
        width, count = positive(family, self.width), positive(family, self.count[0])
        if width % count:
            raise CheckpointError(f"config.json: {count} experts cannot share {self.width} {width} evenly")
        return width // count

    def with_counts(self, family: Any, counts: Sequence[int], width: int) -> dict[str, Any]:
        """Return the entries about experts in a result's config.json, including the widths of all."""
        widths = {self.width: max(counts) * width, self.sizes: [[width] * count for count in counts]}
        return super().with_counts(family, counts, width) | widths


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token uses. `width` is the config key of its width."""

    name: str = "shared_expert"
    """Prefix of its tensors within the block."""
    width: str = "shared_expert_intermediate_size"
    """Config key of its number of hidden units. The expert does not exist if the key is 0 or missing."""
    gate: str | None = None
    """Name within the block of the tensor of the gate, which scales the output by sigmoid(gate · x); None for no gate."""
    stacks: tuple[Stack, ...] = ()
    """Layout on disk if it is not one projection by one: stacks of one expert, [outputs, inputs], by names within the
    layer."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Config keys that the part reads."""
        return keys(self.width)

    def width_of(self, family: Any, experts: Experts) -> int:
        """Return the number of hidden units, 0 if there is no shared expert."""
        return natural(family, self.width)

    def with_width(self, family: Any, experts: Experts, width: int, shared: int) -> dict[str, Any] | None:
        """Return the config entries that give the shared expert `shared` hidden units, beside routed experts of `width`.

        None if config.json cannot say so, because one key is the width of both.
        """
        if self.width == experts.width and shared not in (0, width):
            return None
        return {} if shared == self.width_of(family, experts) else {self.width: shared}


@dataclass(frozen=True)
class SharedExperts(SharedExpert):
    """An expert that every token uses, as wide as several routed experts. `width` is the config key of their number."""

    name: str = "shared_experts"
    width: str = "n_shared_experts"

    def width_of(self, family: Any, experts: Experts) -> int:
        """Return the number of hidden units, 0 if there is no shared expert."""
        return natural(family, self.width) * positive(family, experts.width)

    def with_width(self, family: Any, experts: Experts, width: int, shared: int) -> dict[str, Any] | None:
        """Return the number of routed experts that the shared expert is as wide as; None if that is no whole number."""
        count, rest = divmod(shared, width)
        return None if rest else {} if count == natural(family, self.width) else {self.width: count}
