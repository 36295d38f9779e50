"""A vLLM plugin for models whose layers keep different numbers of experts, or of hidden units.

vLLM builds every layer of a family with the one expert count and the one width in config.json. vLLM calls `register` in
each of its processes (through the entry point in pyproject.toml); `register` replaces vLLM's class of each family by a
subclass. The subclass builds layer i with its count and its width in `block_configs`, and builds a model without
`block_configs` as vLLM does. Weights need no change: each layer of vLLM takes the names of its own experts from the
checkpoint.

Besides its registry, the plugin relies on two properties of vLLM: a model's file has `make_layers`, which receives a
function from a layer's prefix to the layer; and this function reads counts and widths from the model's config. No other
module of this project imports this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from engine.errors import OptionError, UnsupportedError
from engine.families.architecture import Architecture
from engine.families.block_configs import (
    GROUPS_KEY,
    block_config_dense_width,
    block_config_shared_width,
    block_config_widths,
)
from engine.families.resolve import experts_per_layer
from engine.families.results import declared_shared_width, declared_width, dense_width, width_entries
from engine.families.table import ARCHITECTURES

_theirs: dict[str, Any] = {}
"""vLLM's own registry entries, by class name."""


def register() -> None:
    """Register the subclasses with vLLM, each by name and created only on first use. May be called again."""
    from vllm import ModelRegistry

    for row in ARCHITECTURES.values():
        name = row.causal_lm_class
        if row.has_experts and name in ModelRegistry.models and name not in _theirs:
            _theirs[name] = ModelRegistry.models[name]
            ModelRegistry.register_model(name, f"{__name__}:{name}")


def __getattr__(name: str) -> Any:
    """Return a family's class by its name in `architectures` of config.json: vLLM imports it from here."""
    if name not in _theirs:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class(name)


@cache
def _class(name: str) -> Any:
    """Return a subclass of vLLM's class of this name that builds each layer with the layer's own count."""
    row = next(row for row in ARCHITECTURES.values() if row.causal_lm_class == name)
    base = _theirs[name].load_model_cls()

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        with _layers_with_own_counts(sys.modules[base.__module__], vllm_config, row):
            base.__init__(self, vllm_config=vllm_config, prefix=prefix)

    return type(name, (base,), {"__init__": __init__, "__module__": __name__})


@contextmanager
def _layers_with_own_counts(module: Any, vllm_config: Any, row: Architecture) -> Iterator[None]:
    """During the body, make `make_layers` of vLLM's module show each layer a config with its own counts.

    Raises OptionError or UnsupportedError for a setup in which this is impossible.
    """
    config = vllm_config.model_config.hf_config
    if getattr(config, "block_configs", None) is None:
        yield
        return
    counts = experts_per_layer(row, config.to_dict(), config)
    check_groups(config.to_dict())
    shown = [_shown(row, config, index, count) for index, count in enumerate(counts)]
    if vllm_config.parallel_config.enable_eplb:
        raise OptionError(
            "layers of this model keep different numbers of experts, which --enable-eplb cannot balance; leave it out"
        )
    make_layers = getattr(module, "make_layers", None)
    if make_layers is None:
        raise UnsupportedError(
            f"{module.__name__} of this vLLM has no make_layers, so layers cannot have their own expert counts; use the "
            "version in docs/vllm.md, or prune with --uniform"
        )

    def with_own_counts(number: int, layer_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def build(prefix: str) -> Any:
            with _config_with(config, shown[int(prefix.rpartition(".")[2])]):
                return layer_fn(prefix=prefix)

        return make_layers(number, build, *args, **kwargs)

    module.make_layers = with_own_counts
    try:
        yield
    finally:
        module.make_layers = make_layers


def check_groups(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if groups of experts have different sizes."""
    if any(GROUPS_KEY in ((block.get("ffn") or {}).get("moe") or {}) for block in config["block_configs"]):
        raise UnsupportedError(
            "groups of this model's experts have different sizes, and vLLM supports one group size only; serve it "
            "with our own engine, or prune with --uniform"
        )


def _shown(row: Architecture, config: Any, index: int, experts: int) -> dict[str, int]:
    """Return the values of the config that a layer is to see: its count, a top-k that is not above it, and its width.

    A dense layer, of 0 experts, sees the width of its FFN. Raises UnsupportedError for widths that vLLM cannot build.
    """
    blocks = config.block_configs
    if not experts:
        key, width = dense_width(row, config)
        return {key: block_config_dense_width(blocks, index, width)}
    top_k, declared = row.experts_per_token_key, declared_width(row, config)
    values = dict.fromkeys((key for key in row.count_keys if hasattr(config, key)), experts)
    values[top_k] = min(getattr(config, top_k), experts)
    width, widths = block_config_widths(blocks, index, experts, declared)
    declared_shared = declared_shared_width(row, config)
    shared = block_config_shared_width(blocks, index, declared_shared)
    if widths:
        raise UnsupportedError(
            "experts of one layer of this model differ in width, and vLLM builds layers of one width only; serve it with "
            "our own engine, or prune with --uniform"
        )
    if (width, shared) == (declared, declared_shared):
        return values
    if (entries := width_entries(row, config, width, shared)) is None:
        raise UnsupportedError(
            f"layer {index} has experts of {width} hidden units and a shared expert of {shared}, and vLLM takes both widths "
            "from one key of config.json; serve it with our own engine"
        )
    return values | entries


@contextmanager
def _config_with(config: Any, values: Mapping[str, int]) -> Iterator[None]:
    """Give the config these values during the body."""
    before = {key: getattr(config, key) for key in values}
    for key, value in values.items():
        setattr(config, key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(config, key, value)
