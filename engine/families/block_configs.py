"""`block_configs` of config.json: the experts of each layer and their groups, in models whose layers differ in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import CheckpointError
from engine.files.json_file import shown

GROUPS_KEY = "expert_groups"
"""Key of this project in block_configs[i].ffn.moe. It holds the group of each expert, if groups have unequal sizes."""


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


def block_config(experts: int, groups: Sequence[int] | None) -> dict[str, Any]:
    """Return the entry of a layer. groups: the group of each expert, if the layer has groups."""
    if not experts:
        return {"ffn": {"moe": None}}
    return {"ffn": {"moe": {"num_local_experts": experts} | ({GROUPS_KEY: list(groups)} if groups else {})}}
