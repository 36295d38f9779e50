"""The modelling file that travels with a checkpoint whose layers keep different numbers of experts.

transformers builds every layer with the one count in `config.json`. The file written here subclasses the family's own
class and shrinks each layer to its entry in `block_configs`, so the directory loads with `trust_remote_code=True`
where this package is not installed. The config stays of the family's own class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.architectures import ARCHITECTURES
from engine.errors import OptionError, UnsupportedError
from engine.json_file import load_json

FILE_NAME = "modeling_compressed.py"

_TEMPLATE = '''\
# SPDX-License-Identifier: Apache-2.0
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
# Distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""A pruned mixture-of-experts model whose layers keep different numbers of experts.

`block_configs[i].ffn.moe.num_local_experts` in config.json is the count of layer i; a layer without that entry has
no experts and is left as it is. Load with `AutoModelForCausalLM.from_pretrained(dir, trust_remote_code=True)`.
"""

import functools

from torch import nn
from transformers import {base}


def _resize(block, count, top_k):
    """Keep the first `count` rows: only shapes matter here, the checkpoint brings the values."""
    for module in (block.experts, block.gate):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if count > parameter.shape[0]:
                raise ValueError(f"block_configs asks for {{count}} experts, config.json has {{parameter.shape[0]}}")
            setattr(module, name, nn.Parameter(parameter.detach()[:count].clone(), parameter.requires_grad))
        module.num_experts = count
    block.gate.top_k = min(top_k, count)


class CompressedForCausalLM({base}):
    def __init__(self, config):
        super().__init__(config)
        config.output_router_logits = False
        for layer, block_config in zip(self.model.layers, config.block_configs, strict=True):
            moe = (block_config.get("ffn") or {{}}).get("moe")
            if moe:
                _resize(layer.mlp, moe["num_local_experts"], config.num_experts_per_tok)

    @functools.wraps({base}.forward)
    def forward(self, *args, **kwargs):
        if kwargs.get("output_router_logits"):
            raise ValueError("output_router_logits needs the same number of experts in every layer")
        return super().forward(*args, **kwargs)
'''


def render(causal_lm_class: str) -> str:
    """The source of `modeling_compressed.py` for a model whose transformers class has this name."""
    if not causal_lm_class.isidentifier():
        raise UnsupportedError(f"{causal_lm_class!r} in `architectures` is not the name of a transformers class")
    return _TEMPLATE.format(base=causal_lm_class)


def auto_map() -> dict[str, str]:
    """The `auto_map` entry of `config.json` that makes transformers load the file."""
    return {"AutoModelForCausalLM": "modeling_compressed.CompressedForCausalLM"}


def is_ours(directory: Path) -> bool:
    """Whether the directory's modelling file is, byte for byte, one that this module writes, and so may be run."""
    config, source = directory / "config.json", directory / FILE_NAME
    if not config.is_file() or not source.is_file():
        return False
    row = ARCHITECTURES.get(str(load_json(config, "model config").get("model_type")))
    return row is not None and source.read_bytes() == render(row.causal_lm_class).encode()


def is_needed(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether transformers loads the checkpoint only by code of its own. Raises OptionError unless that is all ours.

    Also for a family that transformers has no class of.
    """
    row = ARCHITECTURES.get(str(config.get("model_type")))
    if row is not None and not row.in_transformers:
        raise OptionError(f"{directory}: transformers has no {row.model_type}; use our own engine")
    if not config.get("auto_map"):
        return False
    tokenizer = directory / "tokenizer_config.json"
    brings_more = tokenizer.is_file() and load_json(tokenizer, "tokenizer config").get("auto_map")
    if config["auto_map"] != auto_map() or not is_ours(directory) or brings_more:
        raise OptionError(
            f"{directory}: transformers would run code from this directory that this version did not write "
            "(trust_remote_code); use our own engine, or write the artifact again"
        )
    return True
