"""The entries of config.json that decide how many experts the MoE layers have, and how wide these are.

An entry is found by changing it: transformers builds the model without weights, and its tensors have other shapes. Nothing
here names a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.adapted.expert_layers import FoundLayers, projection_names
from engine.errors import UnsupportedError

Build = Callable[[Mapping[str, Any]], Any]
"""Function that returns the model of a config.json without weights."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a model, by name."""


def with_entry(config: Mapping[str, Any], path: tuple[str, ...], value: int) -> dict[str, Any]:
    """Return config.json with another value of an entry, which may lie in a config within it."""
    head, *rest = path
    return {**config, head: with_entry(config.get(head) or {}, tuple(rest), value) if rest else value}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in model.state_dict().items()}


def _integers(model: Any, raw: Mapping[str, Any], text_path: tuple[str, ...]) -> dict[str, int]:
    """Return the integers of the language model's own config: those of config.json first, then the family's defaults."""
    own: Any = raw
    for part in text_path:
        own = own.get(part) or {}
    values = model.config.get_text_config(decoder=True).to_dict() | own
    return {key: values[key] for key in dict.fromkeys([*own, *values]) if type(values[key]) is int}


@dataclass(frozen=True)
class ExpertAxis:
    """Where a parameter or a buffer has one entry for each expert."""

    axis: int
    further: int
    """Number of entries after those of the experts, such as that of an expert that does nothing."""


@dataclass(frozen=True)
class CountKey:
    """The entry of config.json with the number of experts, and all tensors of a model whose shape depends on it."""

    path: tuple[str, ...]
    axes: dict[str, ExpertAxis] = field(hash=False)

    def changed(self, config: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Return config.json with another number of experts."""
        return with_entry(config, self.path, count)


def find_count_key(raw: Mapping[str, Any], build: Build, found: FoundLayers, text_path: tuple[str, ...]) -> CountKey:
    """Return the entry of config.json that decides how many experts the MoE layers have, found by doubling it.

    raw: config.json. build: returns a model without weights for such a config. text_path: the place of the language
    model's own config. Raises UnsupportedError if no entry changes the number of all experts, or it changes more.
    """
    model_type, counts = raw["model_type"], {layer.count for layer in found.experts}
    if len(counts) > 1:
        raise UnsupportedError(f"a model of the family {model_type} whose layers have {sorted(counts)} experts is not read")
    (count,) = counts
    model = build(raw)
    before, entries = _shapes(model), _integers(model, raw, text_path)
    candidates = [key for key, value in entries.items() if value == count]
    for key in sorted(candidates, key=lambda key: "expert" not in key):
        entry = CountKey((*text_path, key), {})
        try:
            after = _shapes(build(entry.changed(raw, 2 * count)))
        except UnsupportedError:
            continue
        axes = _axes(before, after, count)
        if axes is not None and all(f"{layer.experts}.down_proj" in axes for layer in found.experts):
            _check_within(axes, found, model_type)
            return CountKey(entry.path, axes)
    raise UnsupportedError(
        f"the number of experts of a model of the family {model_type} ({count}) is in no entry of config.json that we find"
    )


def _axes(
    before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]], count: int
) -> dict[str, ExpertAxis] | None:
    """Return where each tensor has one entry for each expert; None unless only such entries have doubled."""
    if before.keys() != after.keys():
        return None
    axes = {}
    for name, shape in before.items():
        differing = [axis for axis, (size, other) in enumerate(zip(shape, after[name], strict=True)) if size != other]
        if not differing:
            continue
        axis, *more = differing
        if more or after[name][axis] - shape[axis] != count:
            return None
        axes[name] = ExpertAxis(axis, shape[axis] - count)
    return axes


def _check_within(axes: Mapping[str, ExpertAxis], found: FoundLayers, model_type: str) -> None:
    """Raise UnsupportedError if the number of experts also decides the shape of tensors outside of the MoE layers."""
    places = tuple(f"{found.layers}.{layer.index}." for layer in found.experts)
    outside = [name for name in axes if not name.startswith(places)]
    if outside:
        raise UnsupportedError(
            f"the number of experts of a model of the family {model_type} also decides the shape of {outside[0]}"
        )


@dataclass(frozen=True)
class WidthKey:
    """The entries of config.json that decide how wide experts are."""

    path: tuple[str, ...]
    width: int
    """Its value: the number of hidden units of an expert."""
    shared_path: tuple[str, ...] = ()
    """The entry of the number of shared experts, where their width is a multiple of that of routed ones; () elsewhere."""
    shared: int = 0
    """Its value."""
    beyond: str = ""
    """A tensor outside of the routed experts whose shape the entry decides too; empty if there is none."""

    def changed(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        """Return config.json with another width of the routed experts, and the same width of shared ones.

        Raises UnsupportedError if the entry also decides something else, or if the width of the shared experts is no
        multiple of that of the routed experts.
        """
        if self.beyond:
            raise UnsupportedError(f"{self.path[-1]} of config.json also decides the shape of {self.beyond}")
        raw = with_entry(config, self.path, width)
        if not self.shared_path or width == self.width:
            return raw
        units = self.shared * self.width
        if units % width:
            fitting = [each for each in range(1, self.width) if units % each == 0]
            nearest = sorted(fitting, key=lambda each: abs(each - width))[:3]
            raise UnsupportedError(
                f"the {units} hidden units of shared experts must be a multiple of those of an expert in config.json, and "
                f"{width} is none; take a --sparsity and a --unit-multiple that keep "
                f"{' or '.join(map(str, sorted(nearest)))} of {self.width}"
            )
        return with_entry(raw, self.shared_path, units // width)


def find_width_key(raw: Mapping[str, Any], build: Build, found: FoundLayers, text_path: tuple[str, ...]) -> WidthKey:
    """Return the entry of config.json that decides how wide the routed experts are, found by changing it.

    One that decides nothing else comes first. The arguments are those of `find_count_key`. Raises UnsupportedError if
    there is no such entry.
    """
    model_type, widths = raw["model_type"], {layer.width for layer in found.experts}
    if len(widths) > 1:
        raise UnsupportedError(f"the experts of a model of the family {model_type} are {sorted(widths)} hidden units wide")
    (width,) = widths
    model = build(raw)
    before, entries = _shapes(model), _integers(model, raw, text_path)
    inside, outside = set(projection_names(found)), list[WidthKey]()
    half = width // 2 if width % 2 == 0 else 2 * width
    shared = [key for key, value in entries.items() if "shared" in key and value >= 1]
    candidates = [key for key, value in entries.items() if value == width]
    for key in sorted(candidates, key=lambda key: "moe" not in key and "expert" not in key):
        own = (*text_path, key)
        entries_of_shared = [((*text_path, each), entries[each]) for each in shared] if width % 2 == 0 else []
        for entry in (WidthKey(own, width), *(WidthKey(own, width, *each) for each in entries_of_shared)):
            try:
                after = _shapes(build(entry.changed(raw, half)))
            except UnsupportedError:
                continue
            differing = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
            if not all(f"{layer.experts}.down_proj" in differing for layer in found.experts):
                continue
            beyond = sorted(name for name in differing if name not in inside)
            if not beyond:
                return entry
            outside.append(WidthKey(own, width, beyond=beyond[0]))
    if outside:
        return outside[0]
    raise UnsupportedError(
        f"hidden units cannot be removed from experts of the family {model_type}: their width ({width}) is in no entry of "
        "config.json that we find"
    )
