"""The modeling file of a result of a family without a row, whose layers keep different numbers of experts.

transformers builds every layer with the one count in `config.json`. The class written here has the name of the family's own
class and subclasses it. It takes the block of each layer from a model of the family with that layer's count, so that
routers, groups and everything else that depends on the count are made by the family's own code. The file knows no family:
where the blocks are is in `config.json`, under `block_places`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

FILE_NAME = "modeling_compressed.py"
MODULES = "compressed_models"
"""Package name under which the generated modules are registered."""
_LOADERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
"""Classes of transformers by which users load a model that reads text."""
_CLASS_NAME = re.compile(r"[A-Z]\w*", re.ASCII)
PLACES_KEY = "block_places"
"""Key of config.json beside `block_configs`: where the layers, their blocks and the number of experts are."""

_TEMPLATE = '''\
# SPDX-License-Identifier: Apache-2.0
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
# Distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""A pruned mixture-of-experts model whose layers keep different numbers of experts.

`block_configs[i].ffn.moe.num_local_experts` in config.json is the count of layer i; a layer without that entry has no
experts and is left as it is. `block_places` says where things are: `layers` is the name of the list of decoder layers,
`block` the name of the module within a layer that has the router and the experts (empty for the whole layer), and `experts`
the entry of config.json with the number of experts of the largest layer.
Load with `{loader}.from_pretrained(dir, trust_remote_code=True)`.
"""

import copy
import functools

import transformers


def _entry(config):
    """Return the config that has the number of experts, and its key there."""
    *parts, key = config.block_places["experts"]
    for part in parts:
        config = getattr(config, part)
    return config, key


def _with_experts(config, count):
    """Return a copy of the config with another number of experts in every layer."""
    changed = copy.deepcopy(config)
    part, key = _entry(changed)
    setattr(part, key, count)
    return changed


def _take_block(model, other, name):
    """Put the block of another model into a model: only shapes matter here, the checkpoint brings the values."""
    before, block = model.get_submodule(name), other.get_submodule(name)
    for own, module in block.named_modules():
        if hasattr(module, "config"):  # choices such as the implementation of experts are made in the model's own config
            module.config = before.get_submodule(own).config
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, block)


class {base}(transformers.{base}):
    def __init__(self, config):
        super().__init__(config)
        for part in (config, config.get_text_config(decoder=True)):
            part.output_router_logits = False
        moes = [(block.get("ffn") or {{}}).get("moe") or {{}} for block in config.block_configs]
        counts = [moe.get("num_local_experts") for moe in moes]
        places = config.block_places
        for count in sorted({{count for count in counts if count}} - {{getattr(*_entry(config))}}):
            other = transformers.{base}(_with_experts(config, count))
            for layer in (index for index, own in enumerate(counts) if own == count):
                _take_block(self, other, ".".join(filter(None, (places["layers"], str(layer), places["block"]))))

    @classmethod
    def is_custom_code(cls):
        """Weights have the names and the form on disk that those of the family have."""
        return False

    @functools.wraps(transformers.{base}.forward)
    def forward(self, *args, **kwargs):
        if kwargs.get("output_router_logits"):
            raise ValueError("output_router_logits needs the same number of experts in every layer")
        return super().forward(*args, **kwargs)
'''


def render(base: str) -> str:
    """Return the source of the modeling file. base: name of the family's own class in transformers."""
    assert _CLASS_NAME.fullmatch(base)
    return _TEMPLATE.format(base=base, loader=_LOADERS[0])


def auto_map(base: str) -> dict[str, str]:
    """Return the `auto_map` entry of `config.json` that makes transformers load the file."""
    return dict.fromkeys(_LOADERS, f"{FILE_NAME.removesuffix('.py')}.{base}")


def base_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of the class by a config.json whose `auto_map` is written here, or a part of it; None for others.

    transformers saves the entry of the one class by which a model was loaded.
    """
    entries = config.get("auto_map")
    if not entries or not isinstance(entries, dict):
        return None
    base = str(next(iter(entries.values()))).rpartition(".")[2]
    return base if _CLASS_NAME.fullmatch(base) and entries.items() <= auto_map(base).items() else None


def own_class(base: str) -> Any:
    """Return the class of the modeling file, compiled from the template here and never from a file."""
    return getattr(compiled(f"of_{base}", lambda: render(base)), base)


def compiled(name: str, source: Callable[[], str]) -> ModuleType:
    """Return the module of a modeling file, which is compiled once. source: returns what this version writes."""
    full_name = f"{MODULES}.{name}"
    if full_name not in sys.modules:
        module = ModuleType(full_name)
        exec(compile(source(), f"<{FILE_NAME}, {name}>", "exec"), module.__dict__)
        sys.modules[full_name] = module  # transformers looks up the module of a class in sys.modules
    return sys.modules[full_name]
