"""`block_configs` of config.json: the experts of each layer, their groups and their widths, in models whose layers differ
in them. It also holds the widths of shared experts and of dense FFNs where those of some layers differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import CheckpointError
from engine.files.json_file import shown

GROUPS_KEY = "expert_groups"
"""Key of this project in block_configs[i].ffn.moe. It holds the group of each expert, if groups have unequal sizes."""

WIDTH_KEY, WIDTHS_KEY = "intermediate_size", "expert_widths"
"""Keys in block_configs[i].ffn.moe of the width of the layer's widest expert, and of the widths of all if they differ."""

SHARED_WIDTH_KEY, DENSE_WIDTH_KEY = "shared_expert_intermediate_size", "intermediate_size"
"""Keys of the width of the layer's shared expert in block_configs[i].ffn.moe, and of a dense FFN in block_configs[i].ffn."""


def block_config_counts(blocks: Any, counts: list[int]) -> list[int]:
    """Return the experts of each layer by `block_configs[i].ffn.moe.num_local_experts`, at most `counts`.

    Raises CheckpointError for a list that does not fit the model.
    """
    if not isinstance(blocks, list) or len(blocks) != len(counts):
        raise CheckpointError(f"config.json: block_configs must be a list of {len(counts)} layers")
    result = []
    for index, (block, count) in enumerate(zip(blocks, counts, strict=True)):
        try:
            moe = block["ffn"]["moe"]
            kept = 0 if moe is None else moe["num_local_experts"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"config.json: block_configs[{index}] lacks ffn.moe.num_local_experts") from error
        if type(kept) is not int or not 0 <= kept <= count or (kept == 0) != (count == 0):
            raise CheckpointError(
                f"config.json: block_configs[{index}].ffn.moe.num_local_experts is {kept!r}; layer {index} can hold "
                f"{'no experts' if count == 0 else f'1 to {count}'}"
            )
        result.append(kept)
    return result


def block_config_groups(blocks: Any, index: int, experts: int, count: int) -> tuple[int, ...] | None:
    """Return the group of each of a layer's experts, or None if `block_configs` does not list groups.

    Raises CheckpointError for a list that does not fit the number of experts and groups.
    """
    groups = None if blocks is None else blocks[index]["ffn"]["moe"].get(GROUPS_KEY)
    if groups is None:
        return None
    own = groups if isinstance(groups, list) else []
    if len(own) != experts or not all(type(group) is int and 0 <= group < count for group in own):
        raise CheckpointError(
            f"config.json: block_configs[{index}].ffn.moe.{GROUPS_KEY} is {shown(groups)}; it must be a list of "
            f"{experts} groups from 0 to {count - 1}"
        )
    return tuple(own)


def block_config_widths(blocks: Any, index: int, experts: int, width: int) -> tuple[int, tuple[int, ...]]:
    """Return the width of the layer's widest expert, and the widths of all experts, which are empty if they are equal.

    width: the experts' width by the family's own key, which is the largest that `block_configs` may give them.
    """
    moe = None if blocks is None else blocks[index]["ffn"]["moe"]
    if not isinstance(moe, dict) or (WIDTH_KEY not in moe and WIDTHS_KEY not in moe):
        return width, ()
    place, widest = f"config.json: block_configs[{index}].ffn.moe", moe.get(WIDTH_KEY)
    if type(widest) is not int or not 1 <= widest <= width:
        raise CheckpointError(
            f"{place}.{WIDTH_KEY} is {shown(widest)}; experts of this model have 1 to {width} hidden units"
        )
    widths = moe.get(WIDTHS_KEY, [widest])
    own = widths if isinstance(widths, list) and all(type(each) is int and each >= 1 for each in widths) else []
    if max(own, default=0) != widest or (WIDTHS_KEY in moe and len(own) != experts):
        raise CheckpointError(
            f"{place}.{WIDTHS_KEY} is {shown(widths)}; it must be a list of {experts} widths, the largest of them {widest}"
        )
    return widest, tuple(own) if len(set(own)) > 1 else ()


def block_config_shared_width(blocks: Any, index: int, width: int) -> int:
    """Return the width of a layer's shared expert. width: by the family's own key, and the largest that is allowed."""
    moe = None if blocks is None or not width else blocks[index]["ffn"]["moe"]
    place = f"block_configs[{index}].ffn.moe.{SHARED_WIDTH_KEY}"
    return width if moe is None else _narrower(moe, SHARED_WIDTH_KEY, place, "the shared expert of this model", width)


def block_config_dense_width(blocks: Any, index: int, width: int) -> int:
    """Return the width of a dense layer's FFN. width: by the family's own key, and the largest that is allowed."""
    place = f"block_configs[{index}].ffn.{DENSE_WIDTH_KEY}"
    return width if blocks is None else _narrower(blocks[index]["ffn"], DENSE_WIDTH_KEY, place, "a dense FFN", width)


def _narrower(values: Mapping[str, Any], key: str, place: str, network: str, width: int) -> int:
    found = values.get(key, width)
    if type(found) is not int or not 1 <= found <= width:
        raise CheckpointError(f"config.json: {place} is {shown(found)}; {network} has 1 to {width} hidden units")
    return found


def has_expert_widths(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json gives the experts of some layer different widths."""
    moes = [block["ffn"]["moe"] for block in config.get("block_configs") or ()]
    return any(isinstance(moe, dict) and WIDTHS_KEY in moe for moe in moes)


def block_config(
    experts: int, groups: Sequence[int] | None, widths: Sequence[int] = (), common_width: int | None = None
) -> dict[str, Any]:
    """Return the entry of a layer.

    groups: the group of each expert, if the layer has groups. widths: the width of each expert, if the family's own key
    does not say it. common_width: that of the shared expert, or of the FFN of a layer without experts, likewise.
    """
    if not experts:
        return {"ffn": {"moe": None} | ({} if common_width is None else {DENSE_WIDTH_KEY: common_width})}
    moe: dict[str, Any] = {"num_local_experts": experts}
    if groups:
        moe[GROUPS_KEY] = list(groups)
    if widths:
        moe[WIDTH_KEY] = max(widths)
    if len(set(widths)) > 1:
        moe[WIDTHS_KEY] = list(widths)
    if common_width is not None:
        moe[SHARED_WIDTH_KEY] = common_width
    return {"ffn": {"moe": moe}}
