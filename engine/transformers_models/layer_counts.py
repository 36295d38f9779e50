"""The entries of config.json of a model of transformers whose layers have different numbers of experts.

The entry of the family's own config has the largest number; `block_configs` has that of each decoder layer, and
`block_places` says where the blocks are, for the modeling file (engine/checkpoint/family_code.py). Nothing here names a
family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.family_code import PLACES_KEY, auto_map
from engine.errors import CheckpointError, UnsupportedError
from engine.families.block_configs import block_config, block_config_counts
from engine.files.json_file import shown
from engine.transformers_models.config_keys import CountKey
from engine.transformers_models.expert_layers import FoundLayers

BLOCKS_KEY = "block_configs"
OWN_KEYS = (BLOCKS_KEY, PLACES_KEY, "auto_map")
"""Keys of config.json that no family has."""


def plain_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the family's own model: all layers have the largest number of experts."""
    return {key: value for key, value in raw.items() if key not in OWN_KEYS}


def with_counts(
    raw: Mapping[str, Any], base: str, found: FoundLayers, key: CountKey, counts: Mapping[int, int]
) -> dict[str, Any]:
    """Return config.json of a model with other numbers of experts: a plain one of the family if all are equal.

    base: name of the family's class. found: the layers of the model of `raw`. counts: by decoder layer index.
    """
    changed = key.changed(plain_config(raw), max(counts.values()))
    if len(set(counts.values())) == 1:
        return changed
    blocks = [block_config(counts.get(layer, 0), None) for layer in range(found.count)]
    return changed | {BLOCKS_KEY: blocks, PLACES_KEY: places_of(found, key), "auto_map": auto_map(base)}


def places_of(found: FoundLayers, key: CountKey) -> dict[str, Any]:
    """Return where the blocks are, for `block_places`: the smallest module of a layer with all that depends on the count."""
    names = [name for layer in found.experts for name in (f"{layer.experts}.", f"{layer.router}.")]
    inside = [name.removeprefix(f"{found.layers}.").split(".")[1:-1] for name in (*names, *key.axes)]
    block: list[str] = []
    for parts in zip(*inside, strict=False):
        if len(set(parts)) > 1:
            break
        block.append(parts[0])
    return {"layers": found.layers, "block": ".".join(block), "experts": list(key.path)}


def counts_of(raw: Mapping[str, Any], plain: FoundLayers, key: CountKey) -> dict[int, int]:
    """Return the number of experts of each MoE layer by `block_configs`.

    plain: the layers of the family's own model. Raises CheckpointError for entries that do not fit that model.
    """
    own = {layer.index: layer.count for layer in plain.experts}
    counts = block_config_counts(raw[BLOCKS_KEY], [own.get(layer, 0) for layer in range(plain.count)])
    if raw.get(PLACES_KEY) != (places := places_of(plain, key)):
        found = shown(raw.get(PLACES_KEY))
        raise CheckpointError(f"config.json: {PLACES_KEY} is {found}, and the experts of this model are at {shown(places)}")
    return {layer: counts[layer] for layer in own}


def check_built(model: Any, plain: Any, found: FoundLayers, key: CountKey, counts: Mapping[int, int]) -> None:
    """Raise UnsupportedError unless a model without weights has so many experts in each layer.

    plain: the family's own model, with as many in all layers. found: the layers of the model.
    """
    shapes = {name: list(tensor.shape) for name, tensor in plain.state_dict().items()}
    for name, axis in key.axes.items():
        layer = int(name.removeprefix(f"{found.layers}.").split(".")[0])
        shapes[name][axis.axis] = counts[layer] + axis.further
    built = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = sorted(name for name in shapes.keys() | built.keys() if shapes.get(name) != built.get(name))
    wrong = [layer for layer in found.experts if layer.count != counts[layer.index]]
    if differing or wrong:
        raise UnsupportedError(
            f"{differing[0] if differing else wrong[0].experts} does not follow the number of experts of its layer"
        )
