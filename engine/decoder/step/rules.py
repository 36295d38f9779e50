"""How the compiled step chooses experts: the rules that it knows, and their numbers in the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.decoder.experts import MoeBlock
from engine.decoder.routing import (
    BiasedTopK,
    GroupedTopK,
    Routing,
    ScaledTopK,
    SigmoidTopK,
    Skipping,
    SparseMixer,
    TopK,
    UnweightedTopK,
    rule_of,
)
from engine.kernels.linear import kernel_form


def is_known(routing: Routing) -> bool:
    """Return whether the kernels choose experts by this routing."""
    rule = rule_of(routing)
    arrays = [routing.gamma1_K, routing.gamma2_NN] if isinstance(routing, Skipping) else []
    arrays += [rule.bias_N] if isinstance(rule, SigmoidTopK | BiasedTopK) else []
    plain = (array.dtype == torch.float32 and array.is_cpu and array.is_contiguous() for array in arrays)
    return type(rule) in (TopK, ScaledTopK, GroupedTopK, SigmoidTopK, BiasedTopK) and all(plain)


def fill_bias(row: Any, rule: Any) -> list[Any]:
    """Write a choice with a selection bias into the record of a layer. Returns arrays that must live as long as it."""
    row["by_sigmoid"], row["selection_bias"] = int(isinstance(rule, SigmoidTopK)), 0
    row["added_to_sum"] = row["least_sum"] = 0.0
    if isinstance(rule, SigmoidTopK):
        row["added_to_sum"] = rule.added_to_sum
    elif isinstance(rule, BiasedTopK):
        row["least_sum"] = rule.least_sum
    else:
        return []
    row["selection_bias"] = rule.bias_N.data_ptr()
    return [rule.bias_N]


def fill_groups(row: Any, rule: Any, experts: int) -> list[Any]:
    """Write the groups that experts are chosen from into the record of a layer. Returns arrays as above."""
    row["groups"] = 0
    if not isinstance(rule, GroupedTopK | SigmoidTopK):
        return []
    row["groups"], row["groups_per_token"] = len(rule.groups), rule.groups_per_token
    group_N = np.zeros(experts, np.int64)
    for number, group in enumerate(rule.groups):
        group_N[list(group)] = number
    row["group_of"] = int(group_N.ctypes.data)
    return [group_N]


def fill_factors(row: Any, rule: Any) -> list[Any]:
    """Write the factors of experts' weights, if there are any, into the record of a layer. Returns arrays as above."""
    if not isinstance(rule, ScaledTopK):
        row["expert_factors"] = 0
        return []
    factors_N = rule.factors_N.detach().float().contiguous()
    row["expert_factors"] = factors_N.data_ptr()
    return [factors_N]


def may_be_called(routing: Routing) -> bool:
    """Return whether the step can call a routing outside: it gives every token as many slots as its rule says."""
    return isinstance(rule_of(routing), TopK | GroupedTopK | SigmoidTopK | BiasedTopK | UnweightedTopK | SparseMixer)


def has_known_router(kernels: Any, block: MoeBlock) -> bool:
    """Return whether the kernels compute the logits of a block's router."""
    if block.gate_hidden_HD is not None or (block.router_in_float32 and block.own_norms is not None):
        return False
    norm_D = None if block.own_norms is None else block.own_norms.router_D
    parts = [part for part in (block.router_ND, block.logit_bias_N, norm_D) if part is not None]
    return bool(kernel_form(kernels, parts) == kernels.PLAIN)
