"""The modeling file written with a checkpoint whose layers keep different numbers of experts, or of hidden units.

transformers builds every layer with the one count and the one width in `config.json`. The file written here subclasses the
family's own class and shrinks each layer to its entry in `block_configs`, so the directory loads with
`trust_remote_code=True` where this package is not installed. This package itself never uses that flag, because the flag
would let transformers run any other code in the directory. Instead it passes transformers the class compiled from the
template in memory. The config stays an instance of the family's own class.
"""

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.checkpoint import family_code
from engine.checkpoint.pack_quantized import CONFIG_KEY
from engine.errors import OptionError
from engine.families.architecture import Architecture
from engine.families.resolve import is_left_to_transformers
from engine.families.results import otherwise_in_transformers, too_ragged_for_transformers
from engine.families.table import ARCHITECTURES
from engine.families.tensor_names import (
    dense_down_name,
    dense_module,
    down_name,
    has_gate,
    has_transposed_stacks,
    shared_module,
)
from engine.files.json_file import load_json, shown
from engine.files.model_files import code_in, named

FILE_NAME = family_code.FILE_NAME
_ADAPTER = "adapter_config.json"
_IMPLEMENTATIONS = frozenset(
    f"{what}_implementation{end}" for what in ("attn", "experts") for end in ("", "_internal", "_autoset")
)
"""Keys, without surrounding underscores, by which a config.json may name kernels to be downloaded from the hub."""
_HARMLESS = (None, False, True, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")

_TEMPLATE = '''\
# SPDX-License-Identifier: Apache-2.0
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
# Distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""A pruned mixture-of-experts model whose layers keep different numbers of experts, or of their hidden units.

`block_configs[i].ffn.moe.num_local_experts` in config.json is the count of layer i; a layer without that entry has
no experts and is left as it is. `expert_groups` beside it is the group of each expert, where a router has groups.
`intermediate_size` is the number of hidden units of the layer's experts, and `expert_widths` that of each expert, where
they differ: experts are stacked in memory, and all but the widest are followed there by hidden units that are zero.
`shared_expert_intermediate_size` is the number of hidden units of the layer's shared expert, and
`block_configs[i].ffn.intermediate_size` that of the FFN of a layer without experts.
Load with `AutoModelForCausalLM.from_pretrained(dir, trust_remote_code=True)`.
"""

{imports}import functools
import re

import torch
from torch import nn
from transformers import {base}
from transformers.core_model_loading import MergeModulelist, SplitModulelist

_UNITS = {units}
"""The dimension of hidden units in each parameter of the experts, and the numbers that a unit has along it."""


def _narrow(experts, width):
    """Keep the first `width` hidden units of each expert: only shapes matter here."""
    for name, (along, each) in _UNITS.items():
        tensor = getattr(experts, name, None)
        if tensor is not None:
            if each * width > tensor.shape[along]:
                raise ValueError(f"block_configs asks for {{width}} hidden units, and {{name}} is {{tuple(tensor.shape)}}")
            kept = tensor.detach().narrow(along, 0, each * width).clone()
            setattr(experts, name, nn.Parameter(kept, tensor.requires_grad))
    for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
        if hasattr(experts, name):
            setattr(experts, name, width)


def _narrow_ffn(network, width):
    """Keep the first `width` hidden units of a feed-forward network: only shapes matter here."""
    linears = dict(network.named_children())
    down = next(linear for name, linear in linears.items() if name.startswith(({downs})))
    whole = down.in_features
    if width > whole:
        raise ValueError(f"block_configs asks for {{width}} hidden units, and config.json has {{whole}}")
    for linear in (own for own in linears.values() if isinstance(own, nn.Linear)):
        along, kept = (1, width) if linear is down else (0, linear.out_features // whole * width)
        weight = linear.weight
        linear.weight = nn.Parameter(weight.detach().narrow(along, 0, kept).clone(), weight.requires_grad)
        linear.out_features, linear.in_features = linear.weight.shape


class _Stacked(MergeModulelist):
    """Stacks experts of different widths while they are loaded, each filled up with hidden units that are zero."""

    def convert(self, input_dict, *args, **kwargs):
        for pattern, tensors in input_dict.items():
            whole = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors))]
            input_dict[pattern] = [self._filled(tensor, whole) for tensor in tensors]
        return super().convert(input_dict, *args, **kwargs)

    @staticmethod
    def _filled(tensor, whole):
        filled = tensor.new_zeros(whole)
        filled[: tensor.shape[0], : tensor.shape[1]] = tensor
        return filled

    @property
    def reverse_op(self):
        return _Unstacked(self.dim)


class _Unstacked(SplitModulelist):
    """Gives each expert its own width again while a model is saved."""

    def convert(self, input_dict, *args, full_layer_name, model, **kwargs):
        single = super().convert(input_dict, *args, full_layer_name=full_layer_name, model=model, **kwargs)
        layer = int(re.search(r"layers\\.(\\d+)\\.", full_layer_name)[1])
        widths = model.config.block_configs[layer]["ffn"]["moe"].get("expert_widths")
        for name, tensor in single.items() if widths else ():
            width = widths[int(re.search(r"experts\\.(\\d+)\\.", name)[1])]
            single[name] = tensor.narrow(int(".{down}." in name), 0, width).contiguous()
        return single


{functions}class CompressedForCausalLM({base}):
    def __init__(self, config):
        super().__init__(config)
        config.output_router_logits = False
        for layer, block_config in zip(self.model.layers, config.block_configs, strict=True):
            ffn = block_config.get("ffn") or {{}}
            moe = ffn.get("moe")
            if not moe and "intermediate_size" in ffn:
                _narrow_ffn(layer.{dense}, ffn["intermediate_size"])
            if moe:
{call}                if "intermediate_size" in moe:
                    _narrow(layer.{experts}, moe["intermediate_size"])
                if "shared_expert_intermediate_size" in moe:
                    _narrow_ffn(layer.{shared}, moe["shared_expert_intermediate_size"])

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        for transform in load_config.weight_mapping or ():
            own = getattr(transform, "operations", None)
            if own:
                transform.operations = [_Stacked(each.dim) if type(each) is MergeModulelist else each for each in own]
        return {base}._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    @functools.wraps({base}.forward)
    def forward(self, *args, **kwargs):
        if kwargs.get("output_router_logits"):
            raise ValueError("output_router_logits needs the same number of experts in every layer")
        return super().forward(*args, **kwargs)
'''


_FUNCTIONS = '''\
def _resize(block, count, top_k, groups, grouped):
    """Keep the first `count` rows: only shapes matter here, the checkpoint brings the values."""
    for module in (block, *block.experts.modules(), *block.{router}.modules()):
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            along = int(tensor.dim() > 1 and tensor.shape[0] == 1)  # a bias may be [1, experts]
            if count > tensor.shape[along]:
                raise ValueError(f"block_configs asks for {{count}} experts, config.json has {{tensor.shape[along]}}")
            kept = tensor.detach().narrow(along, 0, count).clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(kept, tensor.requires_grad) if is_parameter else kept)
        module.num_experts = count
    block.{router}.top_k = min(top_k, count)
    if groups or (not grouped and hasattr(block.{router}, "e_score_correction_bias")):
        # The family's own rule has groups of equal size, of two experts or more.
        block.{router}.forward = functools.partial(_route, block.{router}, groups or [0] * count)


def _route(gate, groups, hidden_states):
    """The family's rule for groups of any size: one is judged by those of its experts that are left."""
    states = hidden_states.reshape(-1, hidden_states.shape[-1]).float()
    logits = nn.functional.linear(states, gate.weight.float())
    bias = getattr(gate, "e_score_correction_bias", None)
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if len(set(groups)) > 1:
        members = [[expert for expert, own in enumerate(groups) if own == group] for group in sorted(set(groups))]
        best = [choice[:, own].topk(min(1 if bias is None else 2, len(own)))[0].sum(-1) for own in members]
        best = torch.stack(best, dim=1)
        allowed = torch.zeros_like(best).scatter_(1, best.topk(min(gate.topk_group, len(members)))[1], 1.0).bool()
        place = {{expert: index for index, own in enumerate(members) for expert in own}}
        choice = choice.masked_fill(~allowed[:, [place[expert] for expert in range(len(groups))]], -torch.inf)
    found, experts = choice.topk(gate.top_k)
    weights = scores.gather(1, experts).masked_fill(found == -torch.inf, 0.0)
    if getattr(gate, "norm_topk_prob", False):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * gate.routed_scaling_factor, experts


'''
_CALL = """\
                grouped = getattr(config, "n_group", None) not in (None, 1)
                top_k = config.num_experts_per_tok
                _resize(layer.{block}, moe["num_local_experts"], top_k, moe.get("expert_groups"), grouped)
"""
"""Functions and their call for a family whose router and experts are in a module of the layer."""

_FUNCTIONS_OF_LAYER = '''\
def _resize(layer, count):
    """Keep the first `count` rows: only shapes matter here, the checkpoint brings the values."""
    router, experts = layer.{router}, layer.experts
    with_rows = (router.proj, "weight"), (router, "per_expert_scale"), (experts, "gate_up_proj"), (experts, "down_proj")
    for module, name in with_rows:
        tensor = getattr(module, name)
        if count > len(tensor):
            raise ValueError(f"block_configs asks for {{count}} experts, config.json has {{len(tensor)}}")
        setattr(module, name, nn.Parameter(tensor.detach()[:count].clone(), tensor.requires_grad))
    experts.num_experts = router.proj.out_features = count
    router.config = copy.copy(router.config)
    router.config.{top_k} = min(router.config.{top_k}, count)


'''
_CALL_OF_LAYER = """\
                _resize(layer, moe["num_local_experts"])
"""
"""Functions and their call for a family whose router and experts are modules of the layer itself."""


def render(row: Architecture) -> str:
    """Return the source of `modeling_compressed.py` for a family."""
    (block, router), down, is_transposed = row.modules, down_name(row), has_transposed_stacks(row)
    ins = {"gate_up_proj": (1 + is_transposed, 2), "gate_up_proj_bias": (1, 2)} if has_gate(row) else {"up_proj": (1, 1)}
    units = ins | {"down_proj": (2 - is_transposed, 1)}
    common = {"dense": dense_module(row), "shared": shared_module(row), "downs": _down_names(row)}
    functions, call = (_FUNCTIONS, _CALL) if block else (_FUNCTIONS_OF_LAYER, _CALL_OF_LAYER)
    names = {"block": block, "router": router, "top_k": row.experts_per_token_key}
    return _TEMPLATE.format(
        base=row.causal_lm_class,
        units=units,
        down=down,
        imports="" if block else "import copy\n",
        experts=f"{block}.experts".removeprefix("."),
        functions=functions.format(**names),
        call=call.format(**names),
        **common,
    )


def _down_names(row: Architecture) -> str:
    """Return, as source, how names of down projections begin. Families with usual names keep the text that they have had,
    because the file of an earlier result must equal this one.
    """
    usual, own = ("down", "output"), dense_down_name(row)
    names = usual if own.startswith(usual) else (*usual, own)
    return ", ".join(f'"{name}"' for name in names)


def auto_map() -> dict[str, str]:
    """Return the `auto_map` entry of `config.json` that makes transformers load the file."""
    return {"AutoModelForCausalLM": "modeling_compressed.CompressedForCausalLM"}


def _row_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the row of a family that our own decoder runs; None for models that run through transformers."""
    return None if is_left_to_transformers(config) else ARCHITECTURES.get(str(config.get("model_type")))


def source_of(config: Mapping[str, Any]) -> bytes | None:
    """Return the modeling file that this version writes beside a config.json; None if it writes none."""
    row = _row_of(config)
    if row is not None:
        return render(row).encode()
    source = family_code.source_of(config)
    return None if source is None else source.encode()


def is_ours(directory: Path) -> bool:
    """Return whether the directory's modeling file is, byte for byte, one that this version writes."""
    config, source = directory / "config.json", directory / FILE_NAME
    if not config.is_file() or not source.is_file():
        return False
    return source.read_bytes() == source_of(load_json(config, "model config"))


def check_loadable(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise OptionError unless transformers can load a decoder with its own classes and the class written here alone.

    The checks of `check_no_code` are included.
    """
    row = _row_of(config)
    if row is not None and not row.in_transformers:
        raise OptionError(f"{directory}: transformers has no {row.model_type}; use our own engine")
    if row is not None and (reason := otherwise_in_transformers(config)) is not None:
        raise OptionError(f"{directory}: {reason}; use our own engine")
    if row is not None and (reason := too_ragged_for_transformers(config, CONFIG_KEY in config)) is not None:
        raise OptionError(f"{directory}: {reason}; use our own engine, or prune with --uniform")
    if config.get(CONFIG_KEY) and find_spec("compressed_tensors") is None:
        raise OptionError(
            f"{directory}: transformers reads low-bit weights only if compressed-tensors is installed; use our own engine"
        )
    if config.get("auto_map"):
        tokenizer = directory / "tokenizer_config.json"
        brings_more = tokenizer.is_file() and load_json(tokenizer, "tokenizer config").get("auto_map")
        is_known = config["auto_map"] == auto_map() if row is not None else family_code.base_of(config) is not None
        if not is_known or not is_ours(directory) or brings_more:
            raise OptionError(
                f"{directory}: auto_map asks transformers to run code from this directory that this version did not write "
                "(trust_remote_code); use our own engine, or write the artifact again"
            )
    check_no_code(directory)


def check_no_code(directory: Path) -> None:
    """Raise OptionError for content of a directory by which transformers, or its libraries, may run or download code.

    Such content is code other than the file written here, and keys of config.json and files that name other places.
    """
    for path in code_in(directory):
        if str(path) != FILE_NAME or not is_ours(directory):
            raise OptionError(
                f"{named(directory, directory / path)}: is code that this version did not write, and transformers may run "
                "it (trust_remote_code); use our own engine, or remove it"
            )
    if os.path.lexists(directory / _ADAPTER):
        raise OptionError(f"{directory / _ADAPTER}: names another model for transformers to load; remove it, or merge it")
    for key, value in _nested(load_json(directory / "config.json", "model config")):
        if key.strip("_") in _IMPLEMENTATIONS and value not in _HARMLESS:
            raise OptionError(f"{directory}: config.json: {key} is {shown(value)}, which may be code on the hub; remove it")
        if key == "transformers_weights":
            raise OptionError(f"{directory}: config.json: {key} names other weights than those that were checked; remove it")


def _nested(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, at any depth."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, Mapping):
            yield from found.items()
            pending += found.values()
        elif isinstance(found, list):
            pending += found


def own_class(row: Architecture) -> Any:
    """Return the class of the modeling file, compiled from the template here and never from a file."""
    return family_code.compiled(row.model_type, lambda: render(row)).CompressedForCausalLM


def class_of(config: Mapping[str, Any]) -> Any:
    """Return the class of the modeling file beside a config.json that `check_loadable` has accepted."""
    row = _row_of(config)
    return family_code.own_class(str(family_code.base_of(config)), config) if row is None else own_class(row)
