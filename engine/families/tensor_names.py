"""Names on disk of a layer's tensors, by the family's row."""

from __future__ import annotations

from dataclasses import replace

from engine.families.architecture import Architecture
from engine.families.experts import DOWN, GATE, GATE_BIAS, PROJECTIONS, UP, SharedExpert, Stack

SINKS = "sinks"
LATENT_UP = "kv_b_proj.weight"
LIGHTNING = ("qkv_proj.weight", "output_gate.weight", "norm.weight", "out_proj.weight")
"""The tensors of lightning attention: queries, keys and values together, the gate, the norm, the output."""


def block_prefix(row: Architecture, layer: int) -> str:
    """Prefix of a layer's MoE block."""
    return f"model.layers.{layer}.{row.experts.names.block}"


def expert_tensor(row: Architecture, layer: int, expert: int, projection: int) -> str:
    """Name on disk of an expert's gate (0), up (1) or down (2) projection, or of its bias (3 more)."""
    names = row.experts.names
    name = names.expert.format(expert=expert, projection=names.projections[projection % GATE_BIAS])
    if projection >= GATE_BIAS:
        name = name.removesuffix("weight") + "bias"
    return f"{block_prefix(row, layer)}.{name}"


def expert_parts(row: Architecture) -> range:
    """The tensors of an expert, as they are numbered."""
    return row.experts.names.parts


def router_tensor(row: Architecture, layer: int) -> str:
    """Name on disk of a layer's router weight [experts, hidden], of a gate network [experts, hidden units]."""
    return f"{block_prefix(row, layer)}.{row.router.weight}"


def gate_hidden_tensor(row: Architecture, layer: int) -> str:
    """Name on disk of a gate network's first layer [hidden units, hidden]."""
    hidden = _in_block(row, layer, row.router.names.hidden)
    assert hidden is not None
    return hidden


def router_noise_tensor(row: Architecture, layer: int) -> str:
    """Name on disk of what noisy top-k is made of in training [experts, hidden]."""
    noise = _in_block(row, layer, row.router.names.noise)
    assert noise is not None
    return noise


def logit_bias_tensor(row: Architecture, layer: int) -> str | None:
    """Name on disk of what is added to a layer's router logits [experts]; None where nothing is."""
    return _in_block(row, layer, row.router.names.logit_bias)


def router_bias_tensor(row: Architecture, layer: int) -> str | None:
    """Name on disk of what is added to the scores of a layer's experts to choose them [experts]; None where nothing is."""
    return _in_block(row, layer, row.router.names.choice_bias)


def is_router_bias(row: Architecture, name: str) -> bool:
    """Whether a tensor is what is added to scores to choose experts."""
    own = row.router.names.choice_bias
    return own is not None and name.endswith(f".{own}")


def _in_block(row: Architecture, layer: int, name: str | None) -> str | None:
    return None if name is None else f"{block_prefix(row, layer)}.{name}"


def dense_tensor(layer: int, projection: int) -> str:
    """A dense FFN's gate (0), up (1) or down (2) projection, by the name that the engine has for it in every family."""
    return f"model.layers.{layer}.mlp.{PROJECTIONS[projection]}.weight"


def dense_tensor_on_disk(row: Architecture, layer: int, projection: int) -> str:
    """The same projection's name on disk."""
    return f"model.layers.{layer}.{row.layers.dense_block}.{PROJECTIONS[projection]}.weight"


def shared_tensor(row: Architecture, layer: int, projection: int) -> str:
    """Name on disk of the shared expert's gate (0), up (1) or down (2) projection."""
    return f"{block_prefix(row, layer)}.{_shared(row).name}.{PROJECTIONS[projection]}.weight"


def shared_gate_tensor(row: Architecture, layer: int) -> str | None:
    """Name on disk of the gate that scales the shared expert, [1, hidden]; None where nothing scales it."""
    return None if row.shared is None else _in_block(row, layer, row.shared.gate)


def _shared(row: Architecture) -> SharedExpert:
    assert row.shared is not None
    return row.shared


def stacks_on_disk(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """Where a checkpoint of the family has a layer's experts, under full names; nothing where they lie one by one."""
    return tuple(replace(stack, name=f"{block_prefix(row, layer)}.{stack.name}") for stack in row.experts.names.stacks)


def shared_stacks(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """Where it has the layer's shared expert; nothing where that lies one projection by one."""
    stacks = () if row.shared is None else row.shared.stacks
    return tuple(replace(stack, name=f"model.layers.{layer}.{stack.name}") for stack in stacks)


def stacks_in_memory(row: Architecture, layer: int) -> tuple[Stack, ...]:
    """Experts as transformers 5 holds them, and writes them if told to; some families have them so on disk too."""
    block = f"model.layers.{layer}.{row.modules[0]}.experts"
    stacks = Stack(f"{block}.gate_up_proj", (GATE, UP)), Stack(f"{block}.down_proj", (DOWN,))
    on_disk = stacks_on_disk(row, layer)
    return on_disk if {stack.name for stack in stacks} <= {stack.name for stack in on_disk} else stacks


def router_in_memory(row: Architecture, layer: int) -> str:
    """The router's name beside them."""
    return f"model.layers.{layer}.{'.'.join(row.modules)}.weight"


def sinks_tensor(layer: int) -> str:
    """Name on disk of a layer's attention sinks [heads]."""
    return f"model.layers.{layer}.self_attn.{SINKS}"


def is_prediction_tensor(row: Architecture, name: str) -> bool:
    """Whether a tensor is of multi-token prediction, where these have names of their own and not those of further layers."""
    prefix = None if row.prediction is None else row.prediction.prefix
    return prefix is not None and name.startswith(prefix)
