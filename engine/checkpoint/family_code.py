"""The modeling file of a result of a family without a row, whose layers keep different numbers of experts, or of their
hidden units.

transformers builds every layer with the one count and the one width in `config.json`. The class written here has the name
of the family's own class and subclasses it. It takes the block of each layer from a model of the family with that layer's
count, so that routers, groups and everything else that depends on the count are made by the family's own code. Where widths
differ, it takes the experts alone from a model with that layer's width, because shared experts and dense networks may have
the same entry of `config.json`. The file knows no family: where the blocks are is in `config.json`, under `block_places`.
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
WIDTH_PLACE = "width"
"""Key there of the entry of config.json with the number of hidden units of experts; only where layers have their own."""

_TEMPLATE = '''\
# SPDX-License-Identifier: Apache-2.0
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
# Distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""A pruned mixture-of-experts model whose layers keep different numbers of experts{both}.

`block_configs[i].ffn.moe.num_local_experts` in config.json is the count of layer i; a layer without that entry has no
experts and is left as it is. `block_places` says where things are: `layers` is the name of the list of decoder layers,
`block` the name of the module within a layer that has the router and the experts (empty for the whole layer), and `experts`
the entry of config.json with the number of experts of the largest layer.{said}
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


{functions}def _take_block(model, other, name):
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
{narrowing}
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


_SAID = """
`intermediate_size` beside `num_local_experts` is the number of hidden units of each expert of a layer, where config.json has
another one for all layers; `block_places.width` is its entry there, and `block_places.module` the name of the experts within
a layer."""
_FUNCTIONS = '''\
def _with_width(config, width):
    """Return a copy of the config with another number of hidden units in every routed expert."""
    changed = part = copy.deepcopy(config)
    *parts, key = config.block_places["width"]
    for name in parts:
        part = getattr(part, name)
    setattr(part, key, width)
    return changed


'''
_NARROWING = """\
        sizes = [(moe.get("num_local_experts"), moe.get("intermediate_size")) for moe in moes]
        for count, width in sorted({{size for size in sizes if size[1]}}):
            other = transformers.{base}(_with_width(_with_experts(config, count), width))
            for layer in (index for index, size in enumerate(sizes) if size == (count, width)):
                _take_block(self, other, ".".join((places["layers"], str(layer), places["module"])))
"""
"""Text of the file where widths differ. Others have the text that they have always had, because the file of an
earlier result must equal this one.
"""


def render(base: str, *, narrows: bool = False) -> str:
    """Return the source of the modeling file.

    base: name of the family's own class in transformers. narrows: whether layers have widths of their own.
    """
    assert _CLASS_NAME.fullmatch(base)
    further = {"both": "", "said": "", "functions": "", "narrowing": ""}
    if narrows:
        narrowing = _NARROWING.format(base=base)
        further = {"both": ", or of hidden units", "said": _SAID, "functions": _FUNCTIONS, "narrowing": narrowing}
    return _TEMPLATE.format(base=base, loader=_LOADERS[0], **further)


def source_of(config: Mapping[str, Any]) -> str | None:
    """Return the source of the modeling file beside a config.json; None if there is none."""
    base = base_of(config)
    return None if base is None else render(base, narrows=_narrows(config))


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


def own_class(base: str, config: Mapping[str, Any]) -> Any:
    """Return the class of the modeling file beside a config.json, compiled from the template here and never from a file."""
    narrows = _narrows(config)
    module = compiled(f"of_{base}{'_of_widths' if narrows else ''}", lambda: render(base, narrows=narrows))
    return getattr(module, base)


def _narrows(config: Mapping[str, Any]) -> bool:
    """Return whether layers of a model have widths of their own."""
    places = config.get(PLACES_KEY)
    return isinstance(places, dict) and WIDTH_PLACE in places


def compiled(name: str, source: Callable[[], str]) -> ModuleType:
    """Return the module of a modeling file, which is compiled once. source: returns what this version writes."""
    full_name = f"{MODULES}.{name}"
    if full_name not in sys.modules:
        module = ModuleType(full_name)
        exec(compile(source(), f"<{FILE_NAME}, {name}>", "exec"), module.__dict__)
        sys.modules[full_name] = module  # transformers looks up the module of a class in sys.modules
    return sys.modules[full_name]
