"""Where GGUF files have each tensor: names, and what was done to the tensors when they were converted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import UnsupportedError
from engine.families.config import DecoderConfig
from engine.families.experts import DOWN, GATE, GATE_BIAS
from engine.families.gguf.family import GgufFamily
from engine.families.gguf.forms import ONE_MORE, Form
from engine.families.layer_config import MoeConfig
from engine.families.tensor_names import (
    LATENT_UP,
    dense_tensor,
    expert_tensor,
    logit_bias_tensor,
    router_bias_tensor,
    router_tensor,
    shared_gate_tensor,
    shared_tensor,
    sinks_tensor,
)
from engine.families.tensor_shapes import expected_tensors, expert_shapes, layer_tensors

if TYPE_CHECKING:
    from torch import Tensor

_OUTER = {"model.embed_tokens": "token_embd", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_CENTERED = ("model.norm", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
"""Norms whose weights may be differences from 1, which files do not have."""
_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Place:
    """One tensor of the model in a GGUF file."""

    name: str
    """Name of the stored tensor."""
    expert: int | None = None
    """Index in a stack of experts."""
    experts: int | None = None
    """Number of experts in the stack."""
    part: slice | None = None
    """Rows of an expert in a stack whose gate and up projections are stored together."""
    heads: int | None = None
    """Number of heads whose rows are stored in pairs: row i and row i + half of each head after one another."""
    keys: str | None = None
    """Name of the stored keys of absorbed latent attention [heads, rank, inputs], if `name` has the values alone."""
    form: Form | None = None
    """The change that conversion made to the numbers; None for none."""
    others: tuple[str, ...] = ()
    """Names of the further stored tensors that the form has."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all stored tensors of a form."""
        return self.name, *self.others


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a GGUF file, as it is written."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """The family's names of the tensors that it is made of: one, or every expert of a stack."""
    place: Place
    """The place of the first source."""
    numbers: tuple[float, ...] | None = None
    """The numbers of a tensor that is made of no source; None for others."""

    @property
    def has_keys(self) -> bool:
        """Whether it has the keys of absorbed latent attention, whose source has values too."""
        return self.name == self.place.keys

    @property
    def part(self) -> int:
        """The number of the tensor among those that its form has."""
        return self.place.names.index(self.name)

    def by_column(self, numbers: Tensor) -> Tensor:
        """Return one number for each of a source's inputs in the order of the stored columns."""
        return numbers if self.place.form is None else self.place.form.by_column(numbers)


def stored_tensors(config: DecoderConfig, family: GgufFamily) -> list[StoredTensor]:
    """Return the tensors of a model's file, in order. Raises UnsupportedError naming a tensor that has no place there."""
    found = places(config, family, frozenset())
    stored: dict[str, StoredTensor] = {}
    for name, shape in expected_tensors(config).items():
        place = found.get(name)
        if place is None:
            raise UnsupportedError(f"tensor {name} has no place in a GGUF file of a {family.architecture}")
        if place.keys is not None:
            stored |= _absorbed(config, name, place)
        elif place.form is not None:
            shapes = zip(place.names, place.form.shapes(shape), strict=True)
            stored |= {own: StoredTensor(own, each, (name,), place) for own, each in shapes}
        elif place.expert is None:
            stored[place.name] = StoredTensor(place.name, shape, (name,), place)
        else:
            others = stored[place.name].sources if place.expert else ()
            stored[place.name] = StoredTensor(place.name, (place.expert + 1, *shape), (*others, name), place)
    constants = family.constants(config).items()
    return [*stored.values(), *(StoredTensor(name, (len(own),), (), Place(name), own) for name, own in constants)]


def _absorbed(config: DecoderConfig, name: str, place: Place) -> dict[str, StoredTensor]:
    latent, heads = config.latent, config.attention_heads
    assert latent is not None and place.keys is not None
    keys, values = (
        (heads, latent.key_value_rank, latent.plain_dimension),
        (heads, latent.value_dimension, latent.key_value_rank),
    )
    shapes = {place.keys: keys, place.name: values}
    return {stored: StoredTensor(stored, shape, (name,), place) for stored, shape in shapes.items()}


def places(config: DecoderConfig, family: GgufFamily, stored: frozenset[str]) -> dict[str, Place]:
    """Return the place of every tensor of a model's checkpoint. `stored`: the names in the files."""
    outer = _OUTER | {"model.norm": family.output_norm}
    found = {f"{ours}.{part}": Place(f"{theirs}.{part}") for ours, theirs in outer.items() for part in ("weight", "bias")}
    for layer in range(len(config.layers)):
        found |= _layer_places(config, family, layer, stored)
    if config.zero_centered:
        shifted = (name for name in found if name.endswith(tuple(f"{norm}.weight" for norm in _CENTERED)))
        found |= {name: replace(found[name], form=ONE_MORE) for name in shifted}
    return found


def _layer_places(config: DecoderConfig, family: GgufFamily, layer: int, stored: frozenset[str]) -> dict[str, Place]:
    prefix, block = f"model.layers.{layer}.", f"blk.{layer}."
    by_module = _LAYER | {"post_attention_layernorm": family.feed_forward_norm}
    heads = {"self_attn.q_proj": config.attention_heads, "self_attn.k_proj": config.key_value_heads}
    found = _feed_forward_places(config, layer, stored)
    for name in layer_tensors(config, layer):
        module, _, part = name.removeprefix(prefix).rpartition(".")
        if name not in found and module in by_module:
            count = heads.get(module) if family.permutes else None
            found[name] = Place(f"{block}{by_module[module]}.{part}", heads=count)
    for name, (names, form) in family.further(config, layer, lambda name: f"{block}{name}" in stored).items():
        first, *others = (f"{block}{own}" for own in names)
        found[f"{prefix}{name}"] = Place(first, form=form, others=tuple(others))
    found[sinks_tensor(layer)] = Place(f"{block}attn_sinks.weight")
    if f"{block}attn_kv_b.weight" not in stored:
        latent = Place(f"{block}attn_v_b.weight", keys=f"{block}attn_k_b.weight")
        found[f"{prefix}self_attn.{LATENT_UP}"] = latent
    return found


def _feed_forward_places(config: DecoderConfig, layer: int, stored: frozenset[str]) -> dict[str, Place]:
    row, block, moe = config.architecture, f"blk.{layer}.ffn_", config.layers[layer].moe
    if moe is None:
        return {dense_tensor(layer, part): Place(f"{block}{_PROJECTIONS[part]}.weight") for part in range(3)}
    found = {
        router_tensor(row, layer): Place(f"{block}gate_inp.weight"),
        logit_bias_tensor(row, layer): Place(f"{block}gate_inp.bias"),
        router_bias_tensor(row, layer): Place(f"blk.{layer}.exp_probs_b.bias"),
        shared_gate_tensor(row, layer): Place(f"{block}gate_inp_shexp.weight"),
    }
    if moe.shared_width:
        found |= {shared_tensor(row, layer, part): Place(f"{block}{_PROJECTIONS[part]}_shexp.weight") for part in range(3)}
    for part in expert_shapes(config, layer):
        for expert in range(moe.experts):
            found[expert_tensor(row, layer, expert, part)] = _expert_place(block, part, expert, moe, stored)
    return {name: place for name, place in found.items() if name is not None}


def _expert_place(block: str, part: int, expert: int, moe: MoeConfig, stored: frozenset[str]) -> Place:
    """Return the place of a projection or bias: in its own stack, beside another projection, or, in old files, alone."""
    projection, kind = part % GATE_BIAS, "bias" if part >= GATE_BIAS else "weight"
    own, width = f"{block}{_PROJECTIONS[projection]}", moe.expert_width
    if (alone := f"{own}.{expert}.{kind}") in stored:
        return Place(alone)
    joined = f"{block}gate_up_exps.{kind}"
    if projection == DOWN or joined not in stored:
        return Place(f"{own}_exps.{kind}", expert, moe.experts)
    return Place(joined, expert, moe.experts, slice(width) if projection == GATE else slice(width, 2 * width))
