"""The entries of config.json of a model of transformers whose layers have different numbers of experts, or widths of them.

The entries of the family's own config have the largest number of experts and the width that the family's own model has;
`block_configs` has both of each decoder layer, and `block_places` says where the blocks are, for the modeling file
(engine/checkpoint/family_code.py). One width that the family's own entry can say is there alone. Nothing here names a
family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.adapted.config_keys import CountKey, WidthKey
from engine.adapted.expert_layers import FoundLayers, unit_axes
from engine.checkpoint.family_code import PLACES_KEY, WIDTH_PLACE, auto_map
from engine.errors import CheckpointError, UnsupportedError
from engine.families.block_configs import WIDTH_KEY, block_config, block_config_counts, block_config_widths
from engine.files.json_file import shown

BLOCKS_KEY = "block_configs"
OWN_KEYS = (BLOCKS_KEY, PLACES_KEY, "auto_map")
"""Keys of config.json that no family has."""


@dataclass(frozen=True)
class LayerSize:
    """The experts of one MoE layer."""

    count: int
    width: int
    """Number of hidden units of each."""


Sizes = Mapping[int, LayerSize]
"""By decoder layer index."""


@dataclass(frozen=True)
class SizeKeys:
    """The entries of config.json that decide the sizes of all layers."""

    count: CountKey
    width: Callable[[], WidthKey]
    """Is only called where widths change, because the entry is searched for. Raises UnsupportedError if there is none."""


def plain_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the family's own model: all layers have the largest number of experts."""
    return {key: value for key, value in raw.items() if key not in OWN_KEYS}


def sizes_of(found: FoundLayers) -> dict[int, LayerSize]:
    """Return the sizes of the MoE layers of a model."""
    return {layer.index: LayerSize(layer.count, layer.width) for layer in found.experts}


def with_sizes(raw: Mapping[str, Any], base: str, plain: FoundLayers, keys: SizeKeys, sizes: Sizes) -> dict[str, Any]:
    """Return config.json of a model with other sizes: a plain one of the family if its own entries can say them.

    base: name of the family's class. plain: the layers of the family's own model.
    """
    changed = keys.count.changed(plain_config(raw), max(size.count for size in sizes.values()))
    whole, widths = plain.sampled.width, {size.width for size in sizes.values()}
    narrows = widths != {whole}
    if narrows and len(widths) == 1 and (narrowed := _narrowed(changed, keys.width(), *widths)) is not None:
        changed, narrows = narrowed, False
    if len({size.count for size in sizes.values()}) == 1 and not narrows:
        return changed
    blocks = [
        block_config(size.count, None, [size.width] if narrows and size.width != whole else ())
        for size in (sizes.get(layer, LayerSize(0, 0)) for layer in range(plain.count))
    ]
    places = places_of(plain, keys.count, keys.width() if narrows else None)
    return changed | {BLOCKS_KEY: blocks, PLACES_KEY: places, "auto_map": auto_map(base)}


def _narrowed(raw: Mapping[str, Any], key: WidthKey, width: int) -> dict[str, Any] | None:
    """Return config.json with one width of all experts; None if the family's own entry cannot say it."""
    try:
        return key.changed(raw, width)
    except UnsupportedError:
        return None


def places_of(found: FoundLayers, key: CountKey, width: WidthKey | None) -> dict[str, Any]:
    """Return `block_places`: where in a layer the smallest module lies that holds everything that depends on the count.

    width: the entry for the width of experts where layers have their own; the place of the experts is then there too.
    """
    names = [name for layer in found.experts for name in (f"{layer.experts}.", f"{layer.router}.")]
    inside = [name.removeprefix(f"{found.layers}.").split(".")[1:-1] for name in (*names, *key.axes)]
    block: list[str] = []
    for parts in zip(*inside, strict=False):
        if len(set(parts)) > 1:
            break
        block.append(parts[0])
    places = {"layers": found.layers, "block": ".".join(block), "experts": list(key.path)}
    if width is None:
        return places
    modules = {layer.experts.removeprefix(f"{found.layers}.{layer.index}.") for layer in found.experts}
    if len(modules) > 1:
        raise UnsupportedError(f"experts are {' and '.join(sorted(modules))} in different layers, which need one name")
    return places | {WIDTH_PLACE: list(width.path), "module": modules.pop()}


def said_sizes(raw: Mapping[str, Any], plain: FoundLayers, keys: SizeKeys) -> dict[int, LayerSize]:
    """Return the size of each MoE layer by `block_configs`.

    plain: the layers of the family's own model. Raises CheckpointError for entries that do not fit that model.
    """
    own, blocks = {layer.index: layer for layer in plain.experts}, raw[BLOCKS_KEY]
    counts = block_config_counts(blocks, [own[layer].count if layer in own else 0 for layer in range(plain.count)])
    narrows = any(WIDTH_KEY in blocks[layer]["ffn"]["moe"] for layer in own)
    places = places_of(plain, keys.count, keys.width() if narrows else None)
    if raw.get(PLACES_KEY) != places:
        found = shown(raw.get(PLACES_KEY))
        raise CheckpointError(f"config.json: {PLACES_KEY} is {found}, and the experts of this model are at {shown(places)}")
    sizes = {}
    for layer, experts in own.items():
        width, several = block_config_widths(blocks, layer, counts[layer], experts.width)
        if several:
            raise CheckpointError(
                f"config.json: block_configs[{layer}].ffn.moe.expert_widths gives the experts of a layer different widths, "
                "and those of a layer have one width in a model that transformers runs"
            )
        sizes[layer] = LayerSize(counts[layer], width)
    return sizes


def check_built(model: Any, plain: Any, found: FoundLayers, key: CountKey, sizes: Sizes) -> None:
    """Raise UnsupportedError unless a model without weights has layers of these sizes.

    plain: the family's own model, whose layers have one size. found: the layers of the model.
    """
    shapes = {name: list(tensor.shape) for name, tensor in plain.state_dict().items()}
    for name, axis in key.axes.items():
        layer = int(name.removeprefix(f"{found.layers}.").split(".")[0])
        shapes[name][axis.axis] = sizes[layer].count + axis.further
    for experts in found.experts:
        for name, (place, each) in unit_axes(plain.get_submodule(experts.experts)).items():
            shapes[f"{experts.experts}.{name}"][place] = each * sizes[experts.index].width
    built = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = sorted(name for name in shapes.keys() | built.keys() if shapes.get(name) != built.get(name))
    wrong = [layer for layer in found.experts if LayerSize(layer.count, layer.width) != sizes[layer.index]]
    if differing or wrong:
        raise UnsupportedError(f"{differing[0] if differing else wrong[0].experts} does not follow the entry of its layer")
